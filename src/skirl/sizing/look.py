"""Recognises a path by its contents and collects facts about it."""

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skirl.checkpoint import folder as checkpoints
from skirl.checkpoint.folder import OF_SWEEP
from skirl.data.files.find import ENDINGS, BadFile, kind_of
from skirl.sizing import checkpoint, files
from skirl.store.disk.manifest import NAME as MANIFEST

KINDS = "a checkpoint, a disk store, a vocabulary, a run, a plan, data files, predictions or exported rows"
SWEEP = "sweep.json"
"""What a sweep leaves in the folder of its runs."""
PLANS = {
    "skirl-tables": "list of tables",
    "skirl-placement": "plan of a placement",
    "skirl-table-plan": "plan of tables",
    "skirl-costs": "costs of tables",
}


def look(path: Path, *, check: bool) -> dict[str, Any]:
    """Return facts about a path: `kind` says what it is, `failed` what is damaged, if anything. check: compare checksums."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: name {KINDS}")
    if path.name in (OF_SWEEP, SWEEP):
        path = path.parent
    found = _of_folder(path, check) if path.is_dir() else _of_file(path, check)
    return {"failed": None, "made": made(path), **found}


def _of_folder(path: Path, check: bool) -> dict[str, Any]:
    if (path / OF_SWEEP).is_file():
        variants = sorted(of.name for of in path.iterdir() if checkpoints.numbers(of))
        return {"kind": "checkpoints of a sweep", "variants": variants, "bytes": _bytes(path)}
    if (path / SWEEP).is_file():
        return _run(path, "folder of a sweep")
    if checkpoints.numbers(path):
        return checkpoint.describe(path, check=check)
    if (path / MANIFEST).is_file():
        return checkpoint.describe_store(path)
    if (path / "config.json").is_file() or (path / "metrics.jsonl").is_file():
        return _run(path, "run folder")
    data = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in ENDINGS and p.name[0] not in "._")
    if not data or _kind(data[0]) is None:
        raise ValueError(f"{path} is a folder that skirl does not recognise: name {KINDS}")
    each = [files.describe(file, kind_of(str(file))) for file in data]
    facts = each[0] | {"kind": f"folder of {len(each)} files, the first a {each[0]['kind']}", "files": len(each)}
    return facts | {name: sum(one.get(name, 0) for one in each) for name in ("rows", "bytes") if name in facts}


def _of_file(path: Path, check: bool) -> dict[str, Any]:
    if path.name == MANIFEST:
        return _of_folder(path.parent, check)
    if checkpoints.is_header(path):
        return checkpoint.describe(path, check=check)
    with path.open("rb") as file:
        head = file.read(4096)
    if path.suffix == ".json":
        if path.name in ("config.json", "result.json"):
            return _run(path.parent, "run folder")
        if (found := _plan(path)) is None:
            raise ValueError(f"{path} is a JSON file that skirl does not recognise: name {KINDS}")
        return found
    if len(head) >= 16 and head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return files.describe_safetensors(path)
    kind = _kind(path)
    if kind is None:
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


def _run(path: Path, kind: str) -> dict[str, Any]:
    """Describe the folder of a run or a sweep, which `skirl report` reads."""
    return {"kind": kind, "shown_by": f"skirl report {path}", "bytes": _bytes(path)}


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _plan(path: Path) -> dict[str, Any] | None:
    """Describe a plan, costs or a list of tables, or return None if a JSON file is none."""
    try:
        body = json.loads(path.read_bytes())
        facts = {name: body.get(name) for name in ("ranks", "backend", "tables")}
        return {"kind": PLANS[body["format"]], **facts, "bytes": path.stat().st_size}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def made(path: Path) -> str:
    """Return when a file or folder was last modified. In a folder, files come and go, or are rewritten in place."""
    times = [path.stat().st_mtime]
    for inside in path.iterdir() if path.is_dir() else ():
        with suppress(FileNotFoundError):  # removed meanwhile, or a link to nowhere
            times.append(inside.stat().st_mtime)
    return datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds")
