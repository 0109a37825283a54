"""Checks whether files have the labels that their schema names: predictions need none."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from skirl.data.files.find import kind_of
from skirl.data.files.schema import FileSchema
from skirl.data.files.text import TextFile


def as_labelled(schema: FileSchema, path: str) -> FileSchema:
    """Return the schema unchanged if the file has one of its labels, else without labels.

    A text file without a header has no labels if its first line is shorter by exactly that many columns.
    """
    names, bare = {label.name for label in schema.labels}, replace(schema, labels=())
    kind = kind_of(path)
    if kind == "parquet":
        try:
            found = pq.read_schema(path).names
        except (pa.ArrowException, OSError, ValueError):
            return schema  # reported when the file is opened for reading
        return schema if names & set(found) else bare
    file = TextFile(path, bare, kind == "gzip")
    try:
        columns, first = file.named()
    finally:
        file.close()
    if not names & set(columns):
        return bare
    others = tuple(name for name in schema.text.columns if name not in names)
    if tuple(columns) == schema.text.columns and first == len(others) < len(columns):
        return replace(bare, text=replace(schema.text, columns=others))
    return schema
