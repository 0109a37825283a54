"""A folder of checkpoints, as README.md shows it: list them and their files, and remove what is not needed. It belongs to
the newest start of the run. One that is older but alive must not change it."""

import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skirl.store.disk.os_files import OsFiles
from skirl.tools.os_errors import why
from skirl.tools.sealed_json import CheckpointError, put_whole, read_sealed, sync_folder

log = logging.getLogger("skirl")

BEST = "best"
"""The folder of the best checkpoint, inside that of the run."""
OF_SWEEP = "sweep-checkpoint.json"
"""The header of a sweep, in the folder that has a folder of checkpoints for each of its variants."""
FORMAT = "skirl-checkpoint"
FORMAT_VERSION = 15
ROWS = "rows"
_HEADER = re.compile(r"checkpoint-([0-9]{6,18})\.json")
_DRAFT = re.compile(r"checkpoint-[0-9]{6,18}\.json-[0-9a-f]{16}\.tmp")
_OURS = re.compile(rf"dense-[0-9a-f]{{16}}|{_DRAFT.pattern}")
_OUR_ROWS = re.compile(r"[0-9a-f]{16}\.(rows|keys)(\.tmp)?")

_START = re.compile(r"start-([0-9]{6,18})")
_READING = re.compile(r"reading-[a-z0-9_]{8}")
LEFT = 24 * 3600.0
"""Seconds after which the folder of a reader counts as left behind by a kill."""


def header(folder: Path, number: int) -> Path:
    return folder / f"checkpoint-{number:06}.json"


def number_of(header: Path) -> int:
    match = _HEADER.fullmatch(header.name)
    assert match is not None
    return int(match[1])


def is_header(path: Path) -> bool:
    return _HEADER.fullmatch(path.name) is not None


def numbers(folder: str | Path) -> list[int]:
    """Return the numbers of the checkpoints in a folder, damaged or not, oldest first."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _HEADER.fullmatch(path.name)))


def headers(path: Path) -> list[Path]:
    """Return the headers to try, newest first. If `path` is a header, return only that."""
    if is_header(path):
        return [path]
    found = [header(path, number) for number in reversed(numbers(path))]
    if not found and (path / OF_SWEEP).is_file():
        raise CheckpointError(f"{path} holds a sweep: name a variant, {path / 'NAME'}")
    if not found:
        raise CheckpointError(
            f"{path} holds no checkpoint: give a folder that skirl.save or `skirl train --save` has written"
        )
    return found


def read(path: Path) -> dict[str, Any]:
    return read_sealed(path, format=FORMAT, version=FORMAT_VERSION, what="checkpoint")


def readable(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the headers that can be read, newest first, with what they say. If `path` is a header, only that."""
    for found in [path] if is_header(path) else [header(path, number) for number in reversed(numbers(path))]:
        with suppress(CheckpointError):
            yield found, read(found)


def headers_with_steps(path: Path) -> list[tuple[int, Path]]:
    """Return the readable headers in a folder, newest first, each as (step, header)."""
    each = ((body["run"]["data"], of) for of, body in readable(path))
    return [(data["step"], of) for data, of in each if isinstance(data, dict) and "step" in data]


class Superseded(CheckpointError):
    """The folder belongs to a newer start of the run, so this one must end."""


def _starts(folder: Path) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(match[1]) for name in os.listdir(folder) if (match := _START.fullmatch(name))]
    return []


def _start_file(folder: Path, number: int) -> Path:
    return folder / f"start-{number:06}"


def claim(folder: Path) -> int:
    """Begin a new start by creating its file, and return its number, another one for each of two processes at once. Remove
    drafts of headers, so that an older start that has just found itself the newest cannot rename its own."""
    while True:
        number = max([0, *_starts(folder)]) + 1
        try:
            os.close(os.open(_start_file(folder, number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            break
        except FileExistsError:
            continue
    sync_folder(folder)
    for name in os.listdir(folder):
        older = _START.fullmatch(name)
        if _DRAFT.fullmatch(name) or (older and int(older[1]) < number):
            with suppress(FileNotFoundError):
                os.unlink(folder / name)
    return number


def is_newest(folder: Path, start: int | None) -> bool:
    """Return whether a start may still change the folder. A network file system may list names as they were some seconds
    ago, but does not open a file that is gone. So this opens the start's own file, which a newer start removes."""
    if start is None:
        return True
    there = _starts(folder)
    if max([0, *there]) > start:
        return False
    try:
        os.close(os.open(_start_file(folder, start), os.O_RDONLY))
    except FileNotFoundError:
        return start not in there  # no start is there: someone has cleared the folder
    return True


def check_start(folder: Path, start: int | None) -> None:
    if not is_newest(folder, start):
        raise Superseded(
            f"{folder} belongs to a newer start of the run, and this is start {start}: end this one, nothing of it is saved "
            "any more"
        )


def retain(folder: Path, number: int, keep: int, after: int | None, start: int | None = None) -> None:
    """Remove all checkpoints but those to keep and the one from which a sweep goes on, and files that no header names."""
    try:
        others = [n for n in numbers(folder) if n != number]
        usable = [n for n in others if after is None or n <= after]
        kept = set(usable[-(keep - 1) :]) if keep > 1 else set()
        if is_newest(folder, start):
            _remove_headers(folder, set(others) - kept)
            sweep(folder, start)
    except OSError as error:  # the checkpoint is complete without this
        log.warning("could not look for what is not needed any more in %s: %s", folder, why(error))


def drop_newer(folder: Path, number: int, start: int | None) -> None:
    """Remove the headers of checkpoints newer than the one from which a start continues: it found them damaged. Otherwise
    the next start might find one undamaged, and continue from steps that this one has trained and logged again."""
    newer = [n for n in numbers(folder) if n > number]
    if is_newest(folder, start):
        _remove_headers(folder, newer)


def sweep(folder: Path, start: int | None = None) -> None:
    """Remove files of ours that no header names: those of older checkpoints, of failed ones, and of killed readers. They are
    listed first, and whether this start is the newest is checked last, so no file of a newer start is removed."""
    rows = folder / ROWS
    ours = [(path, path.name) for path in folder.iterdir() if _OURS.fullmatch(path.name)]
    if rows.is_dir():
        ours += [(path, f"{ROWS}/{path.name}") for path in rows.iterdir() if _OUR_ROWS.fullmatch(path.name)]
    ours += [(path, path.name) for path in folder.iterdir() if _READING.fullmatch(path.name) and _age(path) > LEFT]
    named: set[str] = set()
    for n in numbers(folder):
        try:
            named |= files(read(header(folder, n)))
        except CheckpointError:  # damaged, so what it names is useless
            continue
    if not is_newest(folder, start):
        return
    for path, name in ours:
        if name not in named:
            _remove(path)


def _age(path: Path) -> float:
    """Return the seconds since a path was modified, or 0 if it is gone."""
    with suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


def files(body: dict[str, Any]) -> set[str]:
    named = {str(Path(body["dense"]["file"]).parent)}
    return named.union(*(files_of_rows(part["rows"]) for part in body["parts"]))


def files_of_rows(rows: Mapping[str, Any]) -> set[str]:
    """Return the files that a header names for the rows of its collections, relative to its folder."""
    frozen = [of[part] for of in rows.values() for part in ("store", "cache")]
    names = [text.split(" ")[0] for facts in frozen for of in ("segments", "resident") for text in facts.get(of, [])]
    return {f"{ROWS}/{name}.{suffix}" for name in names for suffix in ("rows", "keys")}


def keep_best(header: Path) -> Path:
    """Keep a checkpoint as the best, and return its folder. At every moment, the previous best or this one is complete."""
    own = header.parent / BEST
    try:
        _share(files(read(header)), header.parent, own)
        put_whole(own / header.name, header.read_bytes(), secrets.token_hex(8))
    except BaseException:
        with suppress(OSError):  # the next one sweeps again
            sweep(own)
        raise
    retain(own, number_of(header), 1, None)
    return own


def _share(named: set[str], source: Path, own: Path) -> None:
    disk = OsFiles()
    paths = [p for n in sorted(named) for p in ((source / n).iterdir() if (source / n).is_dir() else [source / n])]
    for path in paths:
        target = own / path.relative_to(source)
        disk.make_folder(target.parent)
        if not (target.is_file() and target.samefile(path)):
            disk.share(path, target)
    for parent in {own / path.relative_to(source).parent for path in paths}:
        sync_folder(parent)


def refuse_sweep(folder: Path) -> None:
    if (folder / OF_SWEEP).is_file():
        raise ValueError(
            f"save is {folder}, which holds a sweep: set it to another folder, or go on with all by `skirl sweep --resume`, "
            f"or with a variant, {folder / 'NAME'}"
        )


def refuse_checkpoints(folder: Path) -> None:
    """Raise if the folder holds another run's checkpoints: ours would push them out, and until then they pass for ours."""
    refuse_sweep(folder)
    if numbers(folder):
        raise ValueError(
            f"{folder} holds the checkpoints of a run: add --resume to go on from them, or set save to another folder"
        )


def _named_by_sweep(folder: Path) -> str | None:
    """Return the name of the header in this folder from which a sweep goes on with this variant; None if there is none."""
    own = Path(os.path.abspath(folder))
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return json.loads((own.parent / OF_SWEEP).read_bytes())["variants"].get(own.name)
    return None


def _remove_headers(folder: Path, which: Iterable[int]) -> None:
    """Remove headers, but for the one from which a sweep goes on."""
    named = _named_by_sweep(folder)
    for path in (header(folder, n) for n in which):
        if path.name != named:
            _remove(path)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:  # the checkpoint is complete without this
        log.warning("could not remove %s, which is not needed any more: %s", path, why(error))
