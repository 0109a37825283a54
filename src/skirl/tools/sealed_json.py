"""A JSON file that is replaced whole and read back only as it was written: its last entry is the SHA-256 of the rest.

Renaming such a header into place makes all files that it names the current state in one atomic step.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from skirl.tools.shape_of import ANY, TEXT, misfit

_SEAL = "~sha256"
_MOST = 64 << 20  # bytes of a header


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or not for this reader; the text names the file."""


class OtherVersion(CheckpointError):
    """A checkpoint that another version of skirl wrote; it may well be whole."""


def seal(body: Mapping[str, Any]) -> bytes:
    """The bytes of a header; equal bodies have equal bytes.

    >>> seal({"step": 7}).decode().splitlines()[1]
    ' "step": 7,'
    """
    body = dict(body)
    text = json.dumps(body, indent=1, allow_nan=False)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    # As `json.dumps(body | {_SEAL: checksum}, indent=1)`, which would format the body again: half the time of a header.
    return f'{text.removesuffix("}").rstrip()}{"," if body else ""}\n "{_SEAL}": "{checksum}"\n}}\n'.encode()


def _is_sealed(raw: bytes) -> bool:
    """Whether bytes are what `seal` made of something. To make them again would take most of the time of reading them."""
    head, found, tail = raw.rpartition(f'\n "{_SEAL}": "'.encode())
    text = b"{}" if head == b"{" else head.removesuffix(b",") + b"\n}"
    return bool(found) and tail == f'{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()


def write_sealed(path: Path, body: Mapping[str, Any], mark: str, check: Callable[[], None] = lambda: None) -> None:
    """Put a header in place; everything that it names must be on disk already. The draft is called `PATH-MARK.tmp`.

    check: called when the draft is on disk; where it raises, the header is not put in place.
    """
    draft = path.with_name(f"{path.name}-{mark}.tmp")
    with draft.open("wb") as file:
        file.write(seal(body))
        to_disk(file)
    sync_folder(path.parent)
    check()
    os.replace(draft, path)
    sync_folder(path.parent)


def read_sealed(
    path: Path,
    *,
    format: str,
    version: int | tuple[int, ...],
    what: str,
    error: type[CheckpointError] = CheckpointError,
) -> dict[str, Any]:
    """Read a header; anything but an undamaged one of this format and version is refused. `what`: what errors call it."""
    versions = version if isinstance(version, tuple) else (version,)
    if not path.is_file():
        raise error(f"{path} is missing: give a folder that holds a finished {what}")
    if path.stat().st_size > _MOST:
        raise error(f"{path} is damaged: use another {what}")
    raw = path.read_bytes()
    try:
        body = json.loads(raw)
        del body[_SEAL]
        if not _is_sealed(raw) or body["format"] != format or misfit(body, {"format_version": ANY, "skirl": TEXT}):
            raise error(f"{path} is damaged, or no {what} of skirl: use another {what}")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise error(f"{path} is damaged, or no {what} of skirl: use another {what}") from None
    if body["format_version"] not in versions:
        raise (OtherVersion if error is CheckpointError else error)(
            f"{path} was written by skirl {body['skirl']} in format {body['format_version']}, "
            f"skirl {skirl_version()} reads format {' and '.join(map(str, versions))}: use the version that wrote it"
        )
    return body


@cache  # reading it takes 0.5 ms, and every durable point of a store writes it
def skirl_version() -> str:
    """The version of skirl that is installed."""
    try:
        return importlib.metadata.version("skirl")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def to_disk(file: BinaryIO) -> None:
    """Return once a file's content would survive a crash of the machine."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return once new names in a folder would survive a crash; Windows has no such call and needs none."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
