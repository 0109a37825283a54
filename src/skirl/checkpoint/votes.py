"""Votes of the trainers that save or load a model together: on errors, and on the checkpoint that they take."""

import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from skirl.checkpoint import folder
from skirl.nn.collection import collections_of
from skirl.peers.base import PeerError, Peers, failed, said_of
from skirl.tools.os_errors import NotWritten
from skirl.tools.sealed_json import CheckpointError, OtherVersion

log = logging.getLogger("skirl")
T = TypeVar("T")


class Mismatch(CheckpointError):
    """The checkpoint is undamaged, but of another run, and older ones in the folder would be too."""


_KINDS = {kind.__name__: kind for kind in (Mismatch, OtherVersion, folder.Superseded, CheckpointError, NotWritten)}


def told(peers: Peers, value: Any, tag: str, step: int | None = None) -> list[Any]:
    """Exchange a JSON value with all ranks, which must make the same calls in the same order. `step`: as errors name it."""
    if peers.size == 1:
        return [value]
    channel = peers.channel("votes")
    channel.step = step
    return channel.told(value, tag)


def agreed(peers: Peers, work: Callable[[], T], tag: str, step: int | None = None) -> T:
    """Do something on all ranks. If it fails on any, raise the lowest rank's error on all."""
    error: Exception | None = None
    done: list[T] = []
    try:
        done.append(work())
    except Exception as found:
        error = found
    like = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")
    verdicts = told(peers, None if error is None else [like, said_of(error)], tag, step)
    wrong = [(rank, *verdict) for rank, verdict in enumerate(verdicts) if verdict is not None]
    if not wrong:
        return done[0]
    rank, kind, text = wrong[0]
    if rank == peers.rank and error is not None:
        raise error
    if kind in _KINDS:
        raise _KINDS[kind](f"rank {rank}: {text}")
    raise PeerError(failed(rank, text))


def trainers_of(model: nn.Module) -> Peers:
    """Return the trainers that save or load a model together: those that share its rows."""
    return next(iter(collections_of(model).values())).engine.rows.peers


def digest_of(header: Path) -> str:
    try:
        return sha256(header.read_bytes()).hexdigest()
    except OSError:
        return ""


def take_newest(path: Path, peers: Peers, take: Callable[[Path, str], T]) -> tuple[Path, T]:
    """Return the newest header in a folder that all trainers can `take`, and what that returned. `take` gets a header, as
    the first trainer sees it, and its SHA-256 there. If it raises on one, it must raise on all."""

    def offered() -> list[tuple[str, str]]:
        return [] if peers.rank else [(header.name, digest_of(header)) for header in folder.headers(path)]

    names = told(peers, agreed(peers, offered, "checkpoints looked for"), "checkpoints there")[0]
    first: CheckpointError | None = None
    for name, digest in names:
        header = (path.parent if folder.is_header(path) else path) / name
        try:
            return header, take(header, digest)
        except OtherVersion:
            raise
        except CheckpointError as wrong:
            named = str(header.parent) in str(wrong)
            error = wrong if named else type(wrong)(f"{header}: {wrong}")
            if isinstance(error, Mismatch):
                raise error from None
            first = first or error
            if name != names[-1][0] and not peers.rank:
                log.warning(
                    "%s. Going on from the checkpoint before it", str(error).removesuffix(": use another checkpoint")
                )
    assert first is not None
    if len(names) == 1:
        raise first
    why = str(first).removesuffix(": use another checkpoint")  # there is no other one
    raise CheckpointError(
        f"none of {len(names)} checkpoints in {path} is whole; the newest: {why}: get the folder from a copy, or begin anew "
        "in a new one"
    )
