"""Recognises a path by its contents and collects facts about it: a checkpoint, a store, data, a vocabulary, rows."""

import hashlib
import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from skirl.checkpoint import folder
from skirl.checkpoint.folder import OF_SWEEP
from skirl.core.keys import table_of
from skirl.data.files.columnar import DAMAGED, KEY, KEY_OF_PREDICTIONS, short
from skirl.data.files.find import ENDINGS, BadFile, BadSchema, kind_of
from skirl.data.files.schema import FileSchema
from skirl.data.flags import FILE_KINDS
from skirl.data.vocabulary.vocabulary import FIRST, facts_of
from skirl.store.disk.frozen import check_files, check_rows, keys_of
from skirl.store.disk.manifest import FORMAT_VERSION, NAME, Manifest, check_sizes, read_keys
from skirl.store.disk.os_files import NAME as LOCK
from skirl.store.disk.os_files import Unusable
from skirl.store.sharded import MARK
from skirl.tools.sealed_json import CheckpointError
from skirl.train.resume import run_of

KINDS = "a checkpoint, a disk store, a vocabulary, a run, data files, predictions or exported rows"
SWEEP = "sweep.json"
"""What a sweep leaves in the folder of its runs."""


def look(path: Path, *, check: bool) -> dict[str, Any]:
    """Return facts about a path: `kind` says what it is, `failed` what is damaged, if anything. check: compare checksums."""
    kind, colon, named = str(path).partition(":")
    if colon and kind in (*FILE_KINDS, "disk") and not path.exists():
        path = Path(named)  # as `skirl train` names it
    if not path.exists():
        raise ValueError(f"{path} does not exist: name {KINDS}")
    if path.name in (OF_SWEEP, SWEEP):
        path = path.parent
    found = _of_folder(path, check) if path.is_dir() else _of_file(path, check)
    return {"failed": None, **found}


def _of_folder(path: Path, check: bool) -> dict[str, Any]:
    if (path / OF_SWEEP).is_file():
        variants = sorted(of.name for of in path.iterdir() if folder.numbers(of))
        return {"kind": "checkpoints of a sweep", "variants": variants, "bytes": _bytes(path)}
    if folder.numbers(path):
        return describe_checkpoint(path, check=check)
    if (path / NAME).is_file():
        return describe_store(path)
    if any((path / name).is_file() for name in (SWEEP, "config.json", "metrics.jsonl")):
        kind = "sweep" if (path / SWEEP).is_file() else "run"
        return {"kind": f"folder of a {kind}", "shown_by": f"skirl report {path}", "bytes": _bytes(path)}
    if stores := [one.parent for name in ("rank-*", "rank-*/rows-*", "rows-*") for one in path.glob(f"{name}/{NAME}")]:
        return {"kind": "rows of trainers", **_of_stores(stores), "bytes": _bytes(path)}
    data = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in ENDINGS and p.name[0] not in "._")
    if not data or _kind(data[0]) is None:
        raise ValueError(f"{path} is a folder that skirl does not recognise: name {KINDS}")
    each = [describe_file(file, kind_of(str(file))) for file in data]
    count = f"{len(each)} files" if len(each) > 1 else "1 file"
    facts = each[0] | {"kind": f"folder of {count}, the first a {each[0]['kind']}", "files": len(each)}
    return facts | {name: sum(one.get(name, 0) for one in each) for name in ("rows", "bytes") if name in facts}


def _of_stores(paths: list[Path]) -> dict[str, Any]:
    """Return the facts of stores that hold parts of the same tables."""
    each = [describe_store(path) for path in sorted(paths)]
    held = Counter[str]()
    for table in (table for of in each for table in of["tables"]):
        held[table["name"]] += table["held"]
    tables = {table["name"]: {**table, "held": held[table["name"]]} for of in each for table in of["tables"]}
    failed = next((of["failed"] for of in each if of["failed"]), None)
    return {"stores": len(each), "tables": [*tables.values()], "failed": failed}


def _of_file(path: Path, check: bool) -> dict[str, Any]:
    if path.name in (NAME, "config.json", "result.json"):
        return _of_folder(path.parent, check)
    if folder.is_header(path):
        return describe_checkpoint(path, check=check)
    with path.open("rb") as file:
        head = file.read(4096)
    if len(head) >= 16 and head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return describe_safetensors(path)
    kind = _kind(path)
    if kind is None or path.suffix == ".json":
        raise ValueError(f"{path} is not a file that skirl recognises: name {KINDS}")
    return describe_file(path, kind)


def _kind(path: Path) -> str | None:
    try:
        kind = kind_of(str(path))
    except BadFile as error:
        if error.found == "is empty":
            raise
        return None
    return kind if kind in ("parquet", "text") else None


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def describe_file(path: Path, kind: str) -> dict[str, Any]:
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


def describe_checkpoint(path: Path, *, check: bool) -> dict[str, Any]:
    """Describe a checkpoint: that of a header, or the newest in a folder whose header can be read."""
    wrong: list[str] = []
    for header in folder.headers(path):
        try:
            facts = _facts(header, body := folder.read(header))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            wrong.append(
                str(error) if isinstance(error, CheckpointError) else f"{header} is incomplete or damaged ({error!r})"
            )
            continue
        try:
            _whole(header, body, check)
        except CheckpointError as error:
            wrong.append(str(error))
        failed = wrong[0] if wrong else None
        return facts | {"whole": not wrong, "checked": "checksums" if check else "sizes", "failed": failed}
    raise CheckpointError(wrong[0])


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
    """Return the number of distinct rows of each table."""
    keys = np.unique(np.concatenate([np.empty(0, np.int64), *parts]))
    numbers, counts = np.unique(table_of(keys), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist()))


def describe_store(path: Path) -> dict[str, Any]:
    """Describe a disk store at its last durable point."""
    try:
        manifest = Manifest.read(path / NAME)
    except Unusable as error:
        raise ValueError(f"{error}: resume from a checkpoint, with a new folder for the rows") from None
    wrong = None
    for entry in manifest.segments:
        for name, size in entry.files().items():
            if not (path / name).is_file() or (path / name).stat().st_size < size:
                wrong = (
                    f"{path / name} is missing or too short: resume from a checkpoint, with a new folder for the rows"
                )
    held = {} if wrong else _held([read_keys(path, entry) for entry in manifest.segments])
    lock = path / LOCK
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
        "opened_last_by": lock.read_text(errors="replace")[:200] if lock.is_file() else None,
        "bytes": sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        "whole": wrong is None,
        "checked": "sizes",
        "failed": wrong,
    }
