"""A folder of checkpoints: which there are, what belongs to them, and what may go.

    checkpoint/
      checkpoint-000012.json           one sealed header for each checkpoint that is kept; all else is named in them
      dense-MARK/model.safetensors     dense parameters and buffers, states of optimizers, random generators
      rows/store-MARK.safetensors      rows of a store in memory: all of them, or those changed since the file before
      rows/cache-MARK.safetensors      rows that were in the cache
      rows/MARK.rows, rows/MARK.keys   segments of a store on disk, which the store has under the same names

Files are written once and shared: what several checkpoints name exists once. A header appears by a rename, when all that it
names is on disk, and is the checkpoint from then on; what no header names is swept away afterwards. A folder for each
checkpoint would be plainer, and hold unchanged rows as many times as there are checkpoints.
"""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

from skirl.tools.sealed_json import CheckpointError, read_sealed

log = logging.getLogger("skirl")

FORMAT = "skirl-checkpoint"
FORMAT_VERSION = 3
ROWS = "rows"
_HEADER = re.compile(r"checkpoint-([0-9]{6,18})\.json")
_OURS = re.compile(r"dense-[0-9a-f]{16}|checkpoint-[0-9]{6,18}\.json-[0-9a-f]{16}\.tmp")
_OUR_ROWS = re.compile(
    r"(store|cache)-[0-9a-f]{16}\.safetensors(-[0-9a-f]{16}\.tmp)?|[0-9a-f]{16}\.(rows|keys)(\.tmp)?"
)


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


def numbers(folder: str | Path) -> list[int]:
    """The checkpoints in a folder, whole or not, from the oldest."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _HEADER.fullmatch(path.name)))


def headers(path: Path) -> list[Path]:
    """The headers to try, from the newest; of one checkpoint alone where `path` is its header."""
    if _HEADER.fullmatch(path.name):
        return [path]
    found = [header(path, number) for number in reversed(numbers(path))]
    if not found and (old := path / "checkpoint.json").is_file():  # says itself which version wrote it
        return [old]
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint: give a folder that skirl.save has saved to")
    return found


def read(path: Path) -> dict[str, Any]:
    """A header, undamaged."""
    return read_sealed(path, format=FORMAT, version=FORMAT_VERSION, what="checkpoint")


def naming(header: Path, error: CheckpointError) -> CheckpointError:
    """The same error, in a text that says which checkpoint it is about."""
    if str(header.parent) in str(error):
        return error
    named = type(error)(f"{header}: {error}")
    named.__cause__ = error.__cause__
    return named


def retain(folder: Path, number: int, keep: int, after: int | None) -> None:
    """Keep a new checkpoint and the newest before it, `keep` in all.

    after: the one that this run went on from. Later ones are of a run that came further and was given up, or damaged.
    """
    others = [n for n in numbers(folder) if n != number]
    usable = [n for n in others if after is None or n <= after]
    kept = set(usable[-(keep - 1) :]) if keep > 1 else set()
    for n in set(others) - kept:
        _remove(header(folder, n))
    sweep(folder)


def sweep(folder: Path) -> None:
    """Remove what is ours and no header names: of an older checkpoint, of one cut short, or of the one that just failed."""
    named: set[str] = set()
    for n in numbers(folder):
        try:
            named |= files(read(header(folder, n)))
        except CheckpointError:  # damaged: what it names is of no use without it
            continue
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in named:
            _remove(path)
    rows = folder / ROWS
    if rows.is_dir():
        for path in rows.iterdir():
            if _OUR_ROWS.fullmatch(path.name) and f"{ROWS}/{path.name}" not in named:
                _remove(path)


def files(body: dict[str, Any]) -> set[str]:
    """What a header names, relative to its folder."""
    named = {str(Path(body["dense"]["file"]).parent)}
    for rows in body["rows"].values():
        for part in ("store", "cache"):
            named |= {f"{ROWS}/{entry['file']}" for entry in rows[part].get("files", [])}
        for text in rows["store"].get("segments", []):
            name = text.split(" ")[0]
            named |= {f"{ROWS}/{name}.rows", f"{ROWS}/{name}.keys"}
    return named


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:  # the checkpoint is whole without this
        log.warning("could not remove %s, which is not needed any more: %s", path, error)
