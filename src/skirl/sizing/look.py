"""Recognises a path by its contents and collects facts about it: a checkpoint, a store, a vocabulary, Parquet files."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from skirl.checkpoint import folder
from skirl.core.keys import table_of
from skirl.data.files.columnar import DAMAGED, KEY, KEY_OF_PREDICTIONS, short
from skirl.data.files.schema import FileSchema
from skirl.data.vocabulary.vocabulary import VERSION, load
from skirl.store.disk.frozen import check_files, check_rows, keys_of
from skirl.store.disk.manifest import FORMAT_VERSION, NAME, Manifest, check_sizes, read_keys
from skirl.store.disk.os_files import Unusable
from skirl.store.sharded import MARK
from skirl.tools.sealed_json import CheckpointError
from skirl.train.resume import run_of

KINDS = "a checkpoint, a disk store, a vocabulary, Parquet files or predictions; `skirl report` shows runs and sweeps"


def look(path: Path, *, check: bool) -> dict[str, Any]:
    """Return facts about a path: `kind` says what it is, `failed` what is damaged, if anything. check: compare checksums."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: name {KINDS}")
    return {"failed": None, **_facts_of(path, check)}


def _facts_of(path: Path, check: bool) -> dict[str, Any]:
    if folder.is_header(path) or folder.numbers(path):
        return describe_checkpoint(path, check=check)
    if (path / NAME).is_file():
        return describe_store(path)
    if path.is_dir() and (files := sorted(path.glob("*.parquet"))):
        each = [_parquet(file) for file in files]
        facts = each[0] | {name: sum(one[name] for one in each) for name in ("rows", "row_groups", "bytes")}
        return facts | {"kind": f"folder of {len(each)} files, the first a {each[0]['kind']}"}
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(10)
        if head.startswith(b"PAR1"):
            return _parquet(path)
        if head.endswith(b'{"'):
            return _vocabulary(path)
    raise ValueError(f"{path} is not what skirl recognises: name {KINDS}")


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
        return facts | {"kind": "predictions", "of": json.loads(about[KEY_OF_PREDICTIONS])}
    if KEY not in about:
        return facts
    inside = FileSchema.parse(about[KEY].decode("utf-8", "replace"))
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


def _vocabulary(path: Path) -> dict[str, Any]:
    vocabulary = load(str(path))
    return {
        "kind": "vocabulary",
        "format_version": VERSION,
        "min_count": vocabulary.min_count,
        "samples": vocabulary.samples,
        "tables": [
            {"name": table, "rows": vocabulary.rows[table], "of": kind} for table, kind in vocabulary.types.items()
        ],
        "bytes": path.stat().st_size,
    }


def describe_checkpoint(path: Path, *, check: bool) -> dict[str, Any]:
    """Describe a checkpoint: that of a header, or the newest in a folder."""
    header, failed = folder.headers(path)[0], None
    body = folder.read(header)
    try:
        _whole(header, body, check)
    except CheckpointError as error:
        failed = str(error)
    facts = {"whole": failed is None, "checked": "checksums" if check else "sizes", "failed": failed}
    return _facts(header, body) | facts


def _facts(header: Path, body: dict[str, Any]) -> dict[str, Any]:
    rows = header.parent / folder.ROWS
    tables = []
    for name, definition in body["definition"].items():
        of_parts = [part["rows"][name] for part in body["parts"]]
        held = _held([keys for of in of_parts for part in ("store", "cache") for keys in keys_of(rows, of[part])])
        tables += [
            {"name": table["name"], "rows": table["rows"], "dim": table["dim"], "held": held.get(number, 0)}
            for number, table in enumerate(definition["tables"])
        ]
    kinds = {table["optimizer"]["type"] for part in body["definition"].values() for table in part["tables"]}
    first, counters = next(iter(body["definition"].values())), next(iter(body["parts"][0]["counters"].values()))
    flags = (run_of(body) or {}).get("flags", {})
    named = folder.files(body)
    paths = [header, *(header.parent / name for name in named)]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    return {
        "kind": "checkpoint",
        "format_version": body["format_version"],
        "skirl": body["skirl"],
        "torch": body["torch"],
        "header": str(header),
        "made": datetime.fromtimestamp(header.stat().st_mtime, UTC).isoformat(timespec="seconds"),
        "step": counters["steps"],
        "optimizer": ", ".join(sorted(kinds)),
        "dtype": first["dtype"],
        "trainers": len(body["parts"]),
        "tables": tables,
        "model": flags.get("model"),
        "data": flags.get("data"),
        "checkpoints": folder.numbers(header.parent),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _whole(header: Path, body: dict[str, Any], check: bool) -> None:
    """Raise CheckpointError if a file is missing or not as it was written. Without `check`, compare sizes only."""
    dense = body["dense"]
    check_sizes(header.parent, {dense["file"]: dense["bytes"]})
    where = header.parent / folder.ROWS
    for facts in [rows[of] for part in body["parts"] for rows in part["rows"].values() for of in ("store", "cache")]:
        (check_rows if check else check_files)(where, facts)
    if check:
        with (header.parent / dense["file"]).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != dense["sha256"]:
                raise CheckpointError(f"{header.parent / dense['file']} is damaged: use another checkpoint")


def _held(parts: list[np.ndarray]) -> dict[int, int]:
    keys = np.unique(np.concatenate([np.empty(0, np.int64), *parts]))
    numbers, counts = np.unique(table_of(keys), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist()))


def describe_store(path: Path) -> dict[str, Any]:
    try:
        manifest = Manifest.read(path / NAME)
    except Unusable as error:
        raise ValueError(f"{error}: resume from a checkpoint, with a new folder for the rows") from None
    least = [of for entry in manifest.segments for of in entry.files().items()]
    torn = [path / name for name, size in least if not (path / name).is_file() or (path / name).stat().st_size < size]
    then = "resume from a checkpoint, with a new folder for the rows"
    wrong = f"{torn[0]} is missing or too short: {then}" if torn else None
    held = {} if wrong else _held([read_keys(path, entry) for entry in manifest.segments])
    names = [name for name in manifest.about if name != MARK]
    named = names if len(names) == len(manifest.layout.records) else []
    return {
        "kind": "disk store",
        "format_version": FORMAT_VERSION,
        "made": datetime.fromtimestamp((path / NAME).stat().st_mtime, UTC).isoformat(timespec="seconds"),
        "generation": manifest.generation,
        "tables": [
            {
                "name": named[n] if named else str(number),
                "width": record.width,
                "dtype": record.dtype,
                "held": held.get(number, 0),
            }
            for n, (number, record) in enumerate(manifest.layout.records.items())
        ],
        "bytes": sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        "whole": wrong is None,
        "checked": "sizes",
        "failed": wrong,
    }
