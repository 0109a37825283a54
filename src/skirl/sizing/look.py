"""Recognises a path by its contents and collects facts about it."""

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from skirl.checkpoint import folder as checkpoints
from skirl.checkpoint.folder import OF_SWEEP
from skirl.data.files.find import ENDINGS, BadFile, kind_of
from skirl.data.flags import FILE_KINDS
from skirl.sizing import checkpoint, files
from skirl.store.disk.manifest import NAME as MANIFEST

KINDS = "a checkpoint, a disk store, a vocabulary, a run, a plan, data files, predictions or exported rows"
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
        variants = sorted(of.name for of in path.iterdir() if checkpoints.numbers(of))
        return {"kind": "checkpoints of a sweep", "variants": variants, "bytes": _bytes(path)}
    if checkpoints.numbers(path):
        return checkpoint.describe(path, check=check)
    if (path / MANIFEST).is_file():
        return checkpoint.describe_store(path)
    if any((path / name).is_file() for name in (SWEEP, "config.json", "metrics.jsonl")):
        return {**_of_run(path), "shown_by": f"skirl report {path}", "bytes": _bytes(path)}
    if stores := [
        one.parent for name in ("rank-*", "rank-*/rows-*", "rows-*") for one in path.glob(f"{name}/{MANIFEST}")
    ]:
        return {"kind": "rows of trainers", **_of_stores(stores), "bytes": _bytes(path)}
    data = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in ENDINGS and p.name[0] not in "._")
    if not data or _kind(data[0]) is None:
        raise ValueError(f"{path} is a folder that skirl does not recognise: name {KINDS}")
    each = [files.describe(file, kind_of(str(file))) for file in data]
    count = f"{len(each)} files" if len(each) > 1 else "1 file"
    facts = each[0] | {"kind": f"folder of {count}, the first a {each[0]['kind']}", "files": len(each)}
    return facts | {name: sum(one.get(name, 0) for one in each) for name in ("rows", "bytes") if name in facts}


def _of_stores(paths: list[Path]) -> dict[str, Any]:
    """Return the facts of stores that hold parts of the same tables."""
    each = [checkpoint.describe_store(path) for path in sorted(paths)]
    held = Counter[str]()
    for table in (table for of in each for table in of["tables"]):
        held[table["name"]] += table["held"]
    tables = {table["name"]: {**table, "held": held[table["name"]]} for of in each for table in of["tables"]}
    failed = next((of["failed"] for of in each if of["failed"]), None)
    return {"stores": len(each), "tables": [*tables.values()], "failed": failed}


def _of_run(path: Path) -> dict[str, Any]:
    kind = "sweep" if (path / SWEEP).is_file() else "run"
    found: dict[str, Any] = {}
    for name in (SWEEP if kind == "sweep" else "config.json", "result.json"):
        with suppress(OSError, ValueError):
            found |= json.loads((path / name).read_bytes())
    stopped = found.get("stopped_by") or found.get("checkpoints", {}).get("stopped_by")
    state = "failed" if found.get("failed") else f"stopped by {stopped}" if stopped else "ended"
    state = state if "steps" in found else "going on, killed or failed"
    facts = {name: found.get(name) for name in ("steps", "samples", "test_auc", "test_logloss", "winner")}
    flags = {name: found.get("flags", {}).get(name) for name in ("model", "data", "save")}
    if any(str(axis).startswith("model=") for axis in found.get("flags", {}).get("vary") or ()):
        flags["model"] = None  # that which --model names may be none of the variants'
    return {"kind": f"folder of a {kind}", "state": state, **flags, **facts}


def _of_file(path: Path, check: bool) -> dict[str, Any]:
    if path.name in (MANIFEST, "config.json", "result.json"):
        return _of_folder(path.parent, check)
    if checkpoints.is_header(path):
        return checkpoint.describe(path, check=check)
    with path.open("rb") as file:
        head = file.read(4096)
    if len(head) >= 16 and head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return files.describe_safetensors(path)
    if path.suffix == ".pt" and is_zipfile(path):
        return {"kind": "state dict of torch.save, for skirl import", "bytes": path.stat().st_size}
    if b'"skirl-table-plan"' in head:
        plan = json.loads(path.read_bytes())
        return {"kind": "plan of skirl place", "ranks": plan["ranks"], "tables": len(plan["tables"])}
    if b'"skirl-placement"' in head:
        plan = json.loads(path.read_bytes())
        return {"kind": "plan for --placement", "trainers": plan["trainers"], "tables": len(plan["tables"])}
    if b'"skirl-tables"' in head:
        return {"kind": "list of tables for skirl place", "tables": len(json.loads(path.read_bytes())["tables"])}
    if b'"skirl-costs"' in head:
        return {"kind": "costs measured for skirl place", "kernel": json.loads(path.read_bytes())["backend"]}
    kind = _kind(path)
    if kind is None or path.suffix == ".json":
        raise ValueError(f"{path} is not a file that skirl recognises: name {KINDS}")
    return files.describe(path, kind)


def _kind(path: Path) -> str | None:
    try:
        kind = kind_of(str(path))
    except BadFile as error:
        if error.found == "is empty":
            raise
        return None
    return kind if kind in ("parquet", "text") else None


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
