"""Votes of the trainers that save or load a model together, and the errors that they agree on."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from skirl.core.placement import Placement
from skirl.nn.collection import collections_of
from skirl.peers.base import PeerError, Peers, failed, said_of
from skirl.tools.sealed_json import CheckpointError, OtherVersion

T = TypeVar("T")


class Mismatch(CheckpointError):
    """The checkpoint is undamaged, but of another run, and older ones in the folder would be too."""


_WORSE: tuple[type[Exception], ...] = (CheckpointError, OtherVersion, Mismatch)
"""Errors of a checkpoint, from least to worst. Any other error is worse than all of them."""


class Votes:
    """Votes of all trainers, which must make the same calls in the same order. A single trainer only hears itself.

    >>> from skirl.peers.base import Alone
    >>> Votes(Alone()).told({"number": 3}, "begin")
    [{'number': 3}]
    """

    def __init__(self, peers: Peers) -> None:
        self.rank, self.size = peers.rank, peers.size
        self._channel = peers.channel("votes")

    def told(self, value: Any, tag: str, step: int | None = None) -> list[Any]:
        """Exchange a JSON value with all ranks. `step`: the step that errors name."""
        if self.size == 1:
            return [value]
        self._channel.step = step
        return self._channel.told(value, tag)

    def agreed(self, work: Callable[[], T], tag: str) -> T:
        """Do something on all ranks. If it fails on any, raise the worst error on all; among equals, the lowest rank's."""
        error: Exception | None = None
        done: list[T] = []
        try:
            done.append(work())
        except Exception as found:
            error = found
        verdicts = self.told(None if error is None else [_badness(error), said_of(error)], tag)
        wrong = [(-verdict[0], rank, verdict[1]) for rank, verdict in enumerate(verdicts) if verdict is not None]
        if not wrong:
            return done[0]
        badness, rank, text = min(wrong)
        if rank == self.rank and error is not None:
            raise error
        if -badness < len(_WORSE):
            raise _WORSE[-badness](f"rank {rank}: {text}")
        raise PeerError(failed(rank, text))


def _badness(error: Exception) -> int:
    return next((n for n in reversed(range(len(_WORSE))) if isinstance(error, _WORSE[n])), len(_WORSE))


def trainers_of(model: nn.Module, peers: Peers | None, placement: Placement | None) -> tuple[Peers, Placement]:
    """Return the trainers that save or load a model together, and the placement: as given, or those of its embeddings."""
    peers = peers or next(iter(collections_of(model).values())).engine.rows.peers
    placement = placement or Placement.even(peers.size)
    if placement.sites != peers.size:
        raise ValueError(
            f"placement is for {placement.sites} trainers, but there are {peers.size}: make it for that many"
        )
    return peers, placement
