"""A folder of checkpoints: which there are, what belongs to them, and what may go. README.md beside this file draws it."""

import logging
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skirl.checkpoint import parts, starts
from skirl.tools.os_errors import why
from skirl.tools.sealed_json import CheckpointError, read_sealed

log = logging.getLogger("skirl")

FORMAT = "skirl-checkpoint"
FORMAT_VERSION = 4
OF_PARTS = 5
"""The version of a header that several trainers have written, with a part of each."""
ROWS = "rows"
_HEADER = re.compile(r"checkpoint-([0-9]{6,18})\.json")
_OURS = re.compile(
    r"(dense|site)-[0-9a-f]{16}|(checkpoint-[0-9]{6,18}|begun-from)\.json-[0-9a-f]{16}\.tmp|"
    rf"{parts.NAME.pattern}(-[0-9a-f]{{16}}\.tmp)?"
)
_OUR_ROWS = re.compile(
    r"(store|cache)-[0-9a-f]{16}\.safetensors(-[0-9a-f]{16}\.tmp)?|[0-9a-f]{16}\.(rows|keys)(\.tmp)?"
)

_EXPORTS = re.compile(r"export-[a-z0-9_]{8}")
LEFT = 24 * 3600.0
"""Seconds after which a folder that an export has worked in is one that a kill has left."""


def header(folder: Path, number: int) -> Path:
    """The header of a checkpoint.

    >>> header(Path("runs"), 12).as_posix()
    'runs/checkpoint-000012.json'
    """
    return folder / f"checkpoint-{number:06}.json"


def number_of(header: Path) -> int:
    """The number of a checkpoint, by its header's name."""
    match = _HEADER.fullmatch(header.name)
    assert match is not None
    return int(match[1])


def is_header(path: Path) -> bool:
    """Whether a path has the name of a header."""
    return _HEADER.fullmatch(path.name) is not None


def numbers(folder: str | Path) -> list[int]:
    """The checkpoints in a folder, whole or not, from the oldest."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _HEADER.fullmatch(path.name)))


def holds_some(folder: Path) -> bool:
    """Whether a folder holds checkpoints, of whatever version."""
    return any(folder.glob("checkpoint*.json"))


def headers(path: Path) -> list[Path]:
    """The headers to try, from the newest; of one checkpoint alone where `path` is its header."""
    if _HEADER.fullmatch(path.name):
        return [path]
    found = [header(path, number) for number in reversed(numbers(path))]
    if not found and (old := path / "checkpoint.json").is_file():  # says itself which version wrote it
        return [old]
    if not found:
        raise CheckpointError(
            f"{path} holds no checkpoint: give a folder that skirl.save or `skirl train --save` has written"
        )
    return found


def read(path: Path) -> dict[str, Any]:
    """A header, undamaged; that of several trainers with their `parts`."""
    body = read_sealed(path, format=FORMAT, version=(FORMAT_VERSION, OF_PARTS), what="checkpoint")
    of_parts = body["format_version"] == OF_PARTS
    if of_parts != ("trainers" in body):
        raise CheckpointError(
            f"{path} is of format {body['format_version']} and not as that is: use another checkpoint"
        )
    return body | {"parts": parts.read(path, body)} if of_parts else body


def naming(header: Path, error: CheckpointError) -> CheckpointError:
    """The same error, in a text that says which checkpoint it is about."""
    if str(header.parent) in str(error):
        return error
    named = type(error)(f"{header}: {error}")
    named.__cause__ = error.__cause__
    return named


def retain(folder: Path, number: int, keep: int, after: int | None, start: int | None = None) -> None:
    """Remove older checkpoints than those to keep.

    **Arguments**

    - `folder`: the folder.
    - `number`: the new checkpoint, which stays.
    - `keep`: how many stay in all, the newest ones.
    - `after`: the checkpoint that this run went on from. Later ones are damaged, or of a run that was given up: they go.
    - `start`: this start of the run; nothing goes where there is a newer one.
    """
    others = [n for n in numbers(folder) if n != number]
    usable = [n for n in others if after is None or n <= after]
    kept = set(usable[-(keep - 1) :]) if keep > 1 else set()
    if not starts.is_newest(folder, start):
        return
    for n in set(others) - kept:
        _remove(header(folder, n))
    sweep(folder, start)


def drop_newer(folder: Path, number: int, start: int | None) -> None:
    """Remove the headers of checkpoints newer than the one that a start goes on from: it found them damaged.

    Else the next start might find one of them whole, and go on from steps that this one has trained, and written down, anew.

    **Arguments**

    - `folder`: the folder.
    - `number`: the checkpoint that the run goes on from.
    - `start`: this start of the run; nothing goes where there is a newer one.
    """
    newer = [n for n in numbers(folder) if n > number]
    if starts.is_newest(folder, start):
        for n in newer:
            _remove(header(folder, n))


def sweep(folder: Path, start: int | None = None) -> None:
    """Remove files of ours that no header names: of an older checkpoint, of one that failed on its way, of a killed export.

    What there is, is listed first, and that this start is the newest is seen last: so nothing goes that a newer one makes.

    **Arguments**

    - `folder`: the folder.
    - `start`: this start of the run.
    """
    rows = folder / ROWS
    ours = [(path, path.name) for path in folder.iterdir() if _OURS.fullmatch(path.name)]
    if rows.is_dir():
        ours += [(path, f"{ROWS}/{path.name}") for path in rows.iterdir() if _OUR_ROWS.fullmatch(path.name)]
    ours += [(path, path.name) for path in folder.iterdir() if _EXPORTS.fullmatch(path.name) and _age(path) > LEFT]
    named: set[str] = set()
    for n in numbers(folder):
        try:
            named |= files(read(header(folder, n)))
        except CheckpointError:  # damaged: what it names is of no use
            continue
    if not starts.is_newest(folder, start):
        return
    for path, name in ours:
        if name not in named:
            _remove(path)


def files(body: dict[str, Any]) -> set[str]:
    """What a header names, relative to its folder."""
    named = {str(Path(body["dense"]["file"]).parent)} | parts.files(body)
    return named.union(*(files_of_rows(part["rows"]) for part in parts.of(body)))


def files_of_rows(rows: Mapping[str, Any]) -> set[str]:
    """The files that a header names for the rows of its collections, relative to its folder."""
    named = set[str]()
    for of in rows.values():
        for part in ("store", "cache"):
            named |= {f"{ROWS}/{entry['file']}" for entry in of[part].get("files", [])}
        for text in of["store"].get("segments", []):
            name = text.split(" ")[0]
            named |= {f"{ROWS}/{name}.rows", f"{ROWS}/{name}.keys"}
    return named


def _age(path: Path) -> float:
    """Seconds; none where it has gone meanwhile."""
    with suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:  # the checkpoint is whole without this
        log.warning("could not remove %s, which is not needed any more: %s", path, why(error))
