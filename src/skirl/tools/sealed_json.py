"""JSON files that are replaced whole, with a checksum, and whose contents have to have a form."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from skirl.tools import __version__


class Kind(NamedTuple):
    """A requirement for a value: in words, and as a test."""

    words: str
    fits: Callable[[Any], bool]


COUNT = Kind("a whole number from 0 on", lambda v: type(v) is int and 0 <= v < 1 << 63)
AMOUNT = Kind("a finite number", lambda v: type(v) in (int, float) and abs(v) < 1e18)
TEXT = Kind("a text", lambda v: isinstance(v, str))
ANY = Kind("anything", lambda v: True)


def misfit(value: Any, form: Any, where: str = "") -> str | None:
    """Return in words the first place where a value does not have the form, or None."""
    if isinstance(form, Kind):
        return None if form.fits(value) else f"{where or 'it'} is {_shown(value)}, not {form.words}"
    inner = f"{where}." if where else ""
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{where or 'it'} is {_shown(value)}, not a list"
        return next(filter(None, (misfit(item, form[0], f"{inner}{i}") for i, item in enumerate(value))), None)
    if not isinstance(value, Mapping):
        return f"{where or 'it'} is {_shown(value)}, not a table of names"
    if ... in form:
        return next(filter(None, (misfit(item, form[...], f"{inner}{name}") for name, item in value.items())), None)
    for name, one in form.items():
        if name not in value:
            return f"{inner}{name} is missing"
        if (found := misfit(value[name], one, f"{inner}{name}")) is not None:
            return found
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + " ..."


_SEAL = "~sha256"
_MOST = 64 << 20  # bytes of a header


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or not for this reader; the text names the file."""


class OtherVersion(CheckpointError):
    """A checkpoint that another version of skirl wrote; it may well be intact."""


def seal(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a header; equal bodies have equal bytes."""
    checksum = hashlib.sha256(json.dumps(body, indent=1, allow_nan=False).encode()).hexdigest()
    return (json.dumps({**body, _SEAL: checksum}, indent=1) + "\n").encode()


def put_whole(path: Path, content: bytes, mark: str, check: Callable[[], None] = lambda: None) -> None:
    """Put a file in place, after those that it names. Whatever fails, the old one or the new one is there, whole.

    The draft is called `PATH-MARK.tmp`. `check` is called when it is on disk; if it raises, it is not put in place.
    """
    draft = path.with_name(f"{path.name}-{mark}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(content)
            to_disk(file)
        sync_folder(path.parent)
        check()
        os.replace(draft, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def read_sealed(path: Path, *, format: str, version: int, what: str) -> dict[str, Any]:
    """Read a header. Refuse anything but an undamaged one of this format and version. `what`: what errors call it."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: give a folder that holds a finished {what}")
    try:
        if path.stat().st_size > _MOST:
            raise ValueError
        body = json.loads(raw := path.read_bytes())
        del body[_SEAL]
        if seal(body) != raw or body["format"] != format:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path} is damaged, or not a {what} of skirl: use another {what}") from None
    if body["format_version"] != version:
        raise OtherVersion(
            f"{path} was written by skirl {body['skirl']} in format {body['format_version']}, "
            f"skirl {__version__} reads format {version}: use the version that wrote it"
        )
    return body


def to_disk(file: BinaryIO) -> None:
    """Return once a file's content would survive a crash of the machine."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return once new names in a folder would survive a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
