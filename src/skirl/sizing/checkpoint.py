"""Facts about a checkpoint or a disk store."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from skirl.checkpoint import folder
from skirl.core.keys import table_of
from skirl.store.disk.frozen import check_files, check_rows, keys_of
from skirl.store.disk.manifest import NAME, Manifest, check_sizes
from skirl.store.disk.os_files import NAME as LOCK
from skirl.store.disk.os_files import Unusable
from skirl.store.disk.segment import FORMAT_VERSION, read_keys
from skirl.store.sharded import MARK
from skirl.tools.sealed_json import CheckpointError
from skirl.train.resume import run_of


def describe(path: Path, *, check: bool) -> dict[str, Any]:
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
        for name, size in entry.least().items():
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
