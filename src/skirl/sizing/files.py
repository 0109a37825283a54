"""Facts about data files, vocabularies, predictions and exported rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from skirl.data.files.columnar import DAMAGED, KEY, KEY_OF_PREDICTIONS, short
from skirl.data.files.find import BadSchema
from skirl.data.files.schema import FileSchema
from skirl.data.vocabulary.vocabulary import FIRST, facts_of


def describe(path: Path, kind: str) -> dict[str, Any]:
    """Describe a data file. kind: as its first bytes say."""
    if kind == "parquet":
        return _parquet(path)
    with path.open("rb") as file:
        begins = file.readline(200).decode("utf-8", "replace").strip()
    return {"kind": "text file", "begins": begins, "bytes": path.stat().st_size}


def _parquet(path: Path) -> dict[str, Any]:
    try:
        with pq.ParquetFile(path) as file:
            meta, schema = file.metadata, file.schema_arrow
            packed = {meta.row_group(0).column(0).compression.lower()} if meta.num_row_groups else set()
            groups, rows = meta.num_row_groups, meta.num_rows
            columns = {field.name: str(field.type) for field in schema}
    except DAMAGED as error:
        raise ValueError(f"{path} is a Parquet file, damaged or cut off ({short(error)}): write it again") from None
    facts: dict[str, Any] = {
        "kind": "Parquet file",
        "rows": rows,
        "row_groups": groups,
        "compression": next(iter(packed), "none").replace("uncompressed", "none"),
        "columns": columns,
        "bytes": path.stat().st_size,
    }
    about = schema.metadata or {}
    if KEY_OF_PREDICTIONS in about:
        try:
            return facts | {"kind": "predictions", "of": dict(json.loads(about[KEY_OF_PREDICTIONS]))}
        except (ValueError, TypeError):
            raise ValueError(f"{path} has predictions, but does not say what they are of: write it again") from None
    if KEY not in about:
        return facts
    try:
        inside = FileSchema.parse(about[KEY].decode("utf-8", "replace"))
    except BadSchema as error:
        raise ValueError(f"{path} is a converted file whose schema {error}") from None
    return facts | {
        "kind": "converted file",
        "labels": [label.name for label in inside.labels],
        "dense": [column.name for column in inside.dense],
        "ids": {
            column.name: "fingerprints" if column.type == "fingerprint" else f"rows of {column.rows:,}"
            for column in inside.ids
        },
        "layout": "once" if any(c.run for c in inside.ids) else "rows",
        "session": inside.session,
        "time": inside.time,
    }


def describe_safetensors(path: Path) -> dict[str, Any]:
    """Describe a vocabulary, exported rows, or another file of tensors."""
    try:
        with safe_open(path, "numpy") as file:
            about = file.metadata() or {}
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 it is no dict
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is a safetensors file that is damaged or cut off ({short(error)})") from None
    size = path.stat().st_size
    if "skirl" in about and any(name.endswith(".counts") for name in shapes):
        facts = facts_of(str(path), about["skirl"])
        return {
            "kind": "vocabulary",
            "format_version": facts.version,
            "min_count": facts.min_count,
            "samples": facts.samples,
            "tables": [
                {"name": table, "rows": shapes[f"{table}.keys"][0] + FIRST, "of": kind}
                for table, kind in facts.types.items()
            ],
            "bytes": size,
        }
    if about.get("format") == "skirl-rows" and "tables" in about:
        tables = json.loads(about["tables"])
        held = {name.removesuffix(".ids"): shape[0] for name, shape in shapes.items() if name.endswith("ids")}
        return {
            "kind": "exported rows",
            "skirl": about.get("skirl"),
            "optimizer": ", ".join(sorted({facts.pop("optimizer") for facts in tables.values()})),
            "tables": [
                {"name": name, **facts, "held": held.get(name, held.get("ids", facts["rows"]))}
                for name, facts in tables.items()
            ],
            "bytes": size,
        }
    return {"kind": "safetensors file", "tensors": shapes, "bytes": size}
