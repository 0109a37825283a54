"""JSON files that are replaced whole, with a checksum, and whose contents have to have a form."""

import hashlib
import importlib.metadata
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from skirl.tools.os_errors import writing


class Kind(NamedTuple):
    """A requirement for a value: in words, and as a test."""

    words: str
    fits: Callable[[Any], bool]


COUNT = Kind("a whole number from 0 on", lambda v: type(v) is int and 0 <= v < 1 << 63)
AMOUNT = Kind("a finite number", lambda v: type(v) in (int, float) and abs(v) < 1e18)
NUMBER = Kind("a number", lambda v: type(v) is float or (type(v) is int and abs(v) < 1 << 63))
TEXT = Kind("a text", lambda v: isinstance(v, str))
ANY = Kind("anything", lambda v: True)


def misfit(value: Any, form: Any, where: str = "") -> str | None:
    """Return in words the first place where a value does not have the form, or None.

    >>> misfit({"step": -1}, {"step": COUNT})
    'step is -1, not a whole number from 0 on'
    >>> misfit({"busy": {"plan": 0.5}}, {"busy": {...: NUMBER}, "lr": NUMBER})
    'lr is missing'
    """
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


def finite(value: float | None) -> bool:
    """Return whether a score is a number that can be plotted.

    >>> finite(None), finite(float("nan")), finite(0.5)
    (False, False, True)
    """
    return value is not None and math.isfinite(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + " ..."


T = TypeVar("T")
_SEAL = "~sha256"
_MOST = 64 << 20  # bytes of a header


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or not for this reader; the text names the file."""


class OtherVersion(CheckpointError):
    """A checkpoint that another version of skirl wrote; it may well be intact."""


def seal(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a header; equal bodies have equal bytes.

    >>> seal({"step": 7}).decode().splitlines()[1]
    ' "step": 7,'
    """
    body = dict(body)
    text = json.dumps(body, indent=1, allow_nan=False)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    # Like `json.dumps(body | {_SEAL: checksum}, indent=1)`, but without formatting the body again: half of the time.
    return f'{text.removesuffix("}").rstrip()}{"," if body else ""}\n "{_SEAL}": "{checksum}"\n}}\n'.encode()


def _is_sealed(raw: bytes) -> bool:
    """Return whether `seal` made these bytes. Making them again would take most of the time of reading them."""
    head, found, tail = raw.rpartition(f'\n "{_SEAL}": "'.encode())
    text = b"{}" if head == b"{" else head.removesuffix(b",") + b"\n}"
    return bool(found) and tail == f'{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()


def write_sealed(path: Path, body: Mapping[str, Any], mark: str, check: Callable[[], None] = lambda: None) -> None:
    """Put a header in place. Everything that it names must be on disk already. The draft is called `PATH-MARK.tmp`.

    `check` is called when the draft is on disk; if it raises, the header is not put in place.
    """
    put_whole(path, seal(body), mark, check)


def put_whole(path: Path, content: bytes, mark: str, check: Callable[[], None] = lambda: None) -> None:
    """Put a file in place. Whatever fails, either the old one or the new one is there, whole. See `write_sealed`."""
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
    if path.stat().st_size > _MOST:
        raise CheckpointError(f"{path} is damaged: use another {what}")
    raw = path.read_bytes()
    try:
        body = json.loads(raw)
        del body[_SEAL]
        if not _is_sealed(raw) or body["format"] != format or misfit(body, {"format_version": ANY, "skirl": TEXT}):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path} is damaged, or not a {what} of skirl: use another {what}") from None
    if body["format_version"] != version:
        raise OtherVersion(
            f"{path} was written by skirl {body['skirl']} in format {body['format_version']}, "
            f"skirl {skirl_version()} reads format {version}: use the version that wrote it"
        )
    return body


@cache  # reading it takes 0.5 ms, and every durable point of a store writes it
def skirl_version() -> str:
    """Return the version of skirl that is installed."""
    try:
        return importlib.metadata.version("skirl")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


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


@dataclass(frozen=True)
class Readable:
    """A kind of JSON file that people read and may write by hand. Its digest shows whether it was changed by accident."""

    format: str
    version: int
    noun: str
    writer: str
    form: Any
    most: int = _MOST

    def text(self, body: Mapping[str, Any]) -> str:
        """Return the file's text."""
        body = {"format": self.format, "format_version": self.version, **body}
        return json.dumps(body | {"digest": _digest(body)}, indent=1) + "\n"

    def write(self, path: Path, body: Mapping[str, Any]) -> None:
        """Write a file. An existing one is replaced whole, or stays."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            put_whole(path, self.text(body).encode(), secrets.token_hex(8))

    def load(self, path: Path, parsed: Callable[[str], T]) -> T:
        """Read a file, whose text `parsed` turns into what it describes. Raise a ValueError that names it if it is wrong."""
        named = f"name a plan that `{self.writer}` wrote"
        if not path.is_file():
            raise ValueError(f"{path} is not a file: {named}")
        if path.stat().st_size > self.most:
            raise ValueError(f"{path} is too large for a plan: {named}")
        try:
            return parsed(path.read_bytes().decode())
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not text: {named}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def body(self, text: str) -> dict[str, Any]:
        """Return the entries of a text. Raise a ValueError if they have the wrong form or were changed."""
        try:
            body = json.loads(text, parse_constant=_refused)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is cut short, or is not JSON ({error}): make the plan again") from None
        if not isinstance(body, dict) or body.get("format") != self.format:
            raise ValueError(f"it is not a {self.noun}: name a file that `{self.writer}` wrote")
        if body.get("format_version") != self.version:
            found = body.get("format_version")
            raise ValueError(f"its format is {found!r:.40}, skirl reads {self.version}: make the plan again")
        if "digest" in body and body.pop("digest") != _digest(body):
            raise ValueError(
                "it was changed since it was written: make the plan again, or leave its digest out if you meant to"
            )
        if (wrong := misfit(body, self.form)) is not None:
            raise ValueError(f"{wrong}: make the plan again")
        return body


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def _refused(text: str) -> float:
    raise ValueError(f"it has {text}, which is not a number")
