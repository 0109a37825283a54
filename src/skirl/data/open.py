"""Opens files as a source: finds the files, their schema, and the rows to hold out."""

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skirl.data.files.columnar import embedded_schema, stored_schema
from skirl.data.files.columns import PER_SECOND, Span, second_of
from skirl.data.files.dataset import Dataset, RowPosition
from skirl.data.files.encode import ByHash, Encoder, Fingerprints, RowsOf
from skirl.data.files.find import BadSchema, find, kind_of
from skirl.data.files.schema import BUILT_IN, FileSchema
from skirl.data.files.stream import Files
from skirl.data.files.text import PART, TextFile
from skirl.data.flags import share_of
from skirl.data.vocabulary.vocabulary import Vocabulary, load

if TYPE_CHECKING:
    from skirl.data.flags import DataFlags

INF = float("inf")


def open_files(flags: "DataFlags", part_bytes: int | None = None) -> Files:
    paths = find(flags.path)
    schema = schema_of(flags.kind, flags.schema, paths[0])
    if not flags.labelled:
        schema = as_labelled(schema, paths[0])
    rows, rows_of = encoding_of(schema, flags.rows, flags.vocab)
    session = None
    if flags.session_order == "shuffle":
        if (session := schema.session) is None:
            raise ValueError(
                "session_order is 'shuffle', and the schema names no session: write session = \"COLUMN\" at its top, write "
                "the files again with `skirl convert --by session`, or set session_order to keep"
            )
        schema = replace(schema, also=(session,))
    files = Files(
        Dataset(paths, schema, PART if part_bytes is None else part_bytes),
        Encoder(schema, rows_of, rows, skip=flags.bad_rows == "skip", all_there=session is not None),
        flags.batch,
        epochs=flags.epochs,
        batches=flags.steps,
        shuffle=flags.shuffle,
        by_session=session is not None,
        seed=flags.stream_seed,
        workers=flags.workers,
        find_repeats=flags.repeats == "find",
    )
    return files if flags.valid is None else _split(files, flags.valid)


def as_labelled(schema: FileSchema, path: str) -> FileSchema:
    """The schema unchanged if the file has one of its labels, else without labels: predictions need none.

    A text file without a header has no labels if its first line is shorter by exactly that many columns.
    """
    names, bare = {label.name for label in schema.labels}, replace(schema, labels=())
    kind = kind_of(path)
    if kind == "parquet":
        stored = stored_schema(path)
        return schema if stored is None or names & set(stored.names) else bare
    with closing(TextFile(path, bare, kind == "gzip")) as file:
        columns, first = file.names, file.first_width()
    if not names & set(columns):
        return bare
    others = tuple(name for name in schema.text.columns if name not in names)
    if tuple(columns) == schema.text.columns and first == len(others) < len(columns):
        return replace(bare, text=replace(schema.text, columns=others))
    return schema


def schema_of(kind: str, schema: str | None, path: str) -> FileSchema:
    """The given schema, else the one stored in the first file, else the built-in one."""
    if schema is not None:
        read = FileSchema.load(schema)
        return replace(read, text=BUILT_IN[kind].text) if kind == "mind" else read
    found = embedded_schema(path) if kind_of(path) == "parquet" else None
    if found is not None:
        try:
            return FileSchema.parse(found)
        except BadSchema as error:
            raise BadSchema(f"{path}: the schema in it {error}") from None
    if kind in BUILT_IN:
        return BUILT_IN[kind]
    raise BadSchema(
        f"{path}: nothing says what its columns mean: `skirl schema {kind}:{path} --out schema.toml` drafts a file that "
        "does, read it over and set schema to it"
    )


def encoding_of(schema: FileSchema, rows: str | None, vocab: str | None) -> tuple[Mapping[str, int], RowsOf]:
    if vocab is not None and not schema.kinds:
        found = 'every id column holds rows already, not ids (encode = "row" in the schema)'
        raise ValueError(f"{found}: there is nothing to make a vocabulary of, train without one")
    if vocab == "open":
        return schema.rows_of(rows), Fingerprints()
    if vocab is not None:
        if rows is not None:
            raise ValueError("rows and vocab are both set: a vocabulary says how many rows there are, leave rows out")
        vocabulary = load_vocabulary(vocab)
        vocabulary.check(schema)
        of_tables = schema.rows_of(None) | {table: vocabulary.rows[table] for table in schema.kinds}
        return of_tables, vocabulary
    of_tables = schema.rows_of(rows)
    return of_tables, ByHash(of_tables)


def _split(files: Files, valid: str) -> Files:
    """Return the source without the held-out rows, which become its `held_out`."""
    data, encoder = files.dataset, files.encoder
    if (share := share_of(valid)) is not None:
        stats = [Path(path).stat() for path in data.paths]
        stamps = tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
        total, first, place = _last(tuple(data.paths), data.schema, stamps, share, data.part_bytes)
        held = replace(files, begin=place, rows_of_epoch=total - first)
        files = replace(files, end=place, rows_of_epoch=first)
    else:
        name, limit, dated = _moment(valid)
        if (time := encoder.schema.time) is None or name not in ("time", time):
            named = 'the schema names no time column: write time = "COLUMN" at its top'
            if time:
                since = valid.partition(">=")[2].strip()
                named = f"the time column of the schema is {time!r}: set valid to time>={since}"
            raise ValueError(f"valid is {valid!r}: {named}, or set valid to a share such as 20%")
        if dated and (unit := encoder.schema.time_unit):
            if unit not in PER_SECOND:
                raise ValueError(f"valid is {valid!r}, a date, and {time} holds {unit}: set valid to a number of these")
            limit, dated = limit * PER_SECOND[unit], False
        held = replace(files, encoder=replace(encoder, keep=Span(time, limit, INF, dated)))
        files = replace(files, encoder=replace(encoder, keep=Span(time, -INF, limit, dated)))
    return replace(files, held_out=replace(held, epochs=1, batches=None, shuffle=0, by_session=False))


def _moment(valid: str) -> tuple[str, float, bool]:
    """The column that --valid names, the time to hold out from, and whether it is a date (in seconds since 1970)."""
    name, found, since = (part.strip() for part in valid.partition(">="))
    if found and name and not re.search(r"[\s<>=]", name):
        if re.fullmatch(r"-?\d+(?:\.\d+)?", since):
            return name, float(since), False
        if (second := second_of(since)) is not None:
            return name, second, True
    raise ValueError(
        f"valid is {valid!r}: set it to a share such as 20%, or to a time such as time>=14102900 or time>=2026-03-01"
    )


def load_vocabulary(path: str) -> Vocabulary:
    """The last one is cached, since a command opens its data several times."""
    stat = Path(path).stat() if Path(path).is_file() else None
    return _loaded(path, stat and (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=1)
def _loaded(path: str, stamp: Any) -> Vocabulary:
    return load(path)


@lru_cache(maxsize=8)
def _last(
    paths: tuple[str, ...], schema: FileSchema, stamps: Any, share: float, part_bytes: int
) -> tuple[int, int, RowPosition]:
    """Rows in all files, how many are before the last share, and the place where it begins. Cached: `stamps` change with
    the files."""
    dataset = Dataset(list(paths), schema, part_bytes)
    total = dataset.rows()
    if total < 2:
        raise ValueError(f"{paths[0]}: there are {total} rows: too few to hold some out, set valid to none")
    first = total - max(1, round(total * share))
    return total, first, dataset.place(first)
