"""Saving and loading by several trainers: what each writes, and votes on what is whole."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn

from skirl.checkpoint import dense, folder, parts, starts
from skirl.checkpoint.saving import AllFrozen, Saving, not_written
from skirl.core.placement import Placement
from skirl.nn.collection import collections_of
from skirl.peers.base import PeerError, Peers, failed, said_of
from skirl.tools.os_errors import of_system, why
from skirl.tools.sealed_json import CheckpointError, OtherVersion, write_sealed

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
        self.told = peers.channel("votes").told
        """Exchanges a value with all ranks: see `Channel.told`."""

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


log = logging.getLogger("skirl")


@dataclass(frozen=True)
class JointSave:
    """One trainer's share in a checkpoint of several. Its thread runs `write`."""

    saving: Saving
    peers: Peers
    placement: Placement
    steps: Mapping[str, int]
    since: Mapping[str, Any]
    keep: int

    def write(
        self,
        frozen: AllFrozen | Exception,
        state: Mapping[str, Any],
        head: tuple[dict[str, Any], dict[str, Any]],
    ) -> None:
        """Write this trainer's part, vote, and have the first one commit. After an error, the checkpoint before stays."""
        began, votes, saving = time.perf_counter(), Votes(self.peers), self.saving
        self.peers.channel("votes").step = max(self.steps.values(), default=None)
        try:
            mine = {"number": saving.number, "mark": secrets.token_hex(8), "steps": dict(self.steps)}
            told = votes.told(mine | {"digest": self.placement.digest}, "a checkpoint begins")
            saving.number, mark = told[0]["number"], told[0]["mark"]
            self._check_same(told)
            wrong, rows, entry = None, {}, {}
            try:
                if isinstance(frozen, Exception):
                    raise frozen
                rows = frozen.write()
                named = {name: {"store": part["store"], "cache": part["cache"]} for name, part in rows.items()}
                entry = parts.write(saving.folder, self._facts() | dict(state) | {"rows": named}, mark)
            except Exception as error:
                wrong = error
        finally:
            if isinstance(frozen, AllFrozen):
                frozen.release()
        votes_of_all = votes.told(self._verdict(wrong) | {"part": entry}, "parts of a checkpoint are written")
        # No rank writes here, and none begins the next checkpoint before the last call below, so rank 0 may sweep.
        all_written = all(vote["failed"] is None for vote in votes_of_all)
        if self.peers.rank == 0:
            if all_written:
                wrong = self._commit(head, [vote["part"] for vote in votes_of_all], mark)
            else:
                self._sweep()
        last = votes.told(self._verdict(wrong), "a checkpoint is committed")
        self._raise_failed(last if all_written else votes_of_all, wrong)
        saving.bytes, saving.files = self._bytes(entry, rows), rows
        saving.seconds = time.perf_counter() - began

    def _facts(self) -> dict[str, Any]:
        rank, size = self.peers.rank, self.peers.size
        return {"number": self.saving.number, "rank": rank, "trainers": size, "digest": self.placement.digest}

    def _check_same(self, told: list[dict[str, Any]]) -> None:
        for rank, their in enumerate(told):
            if their["digest"] != told[0]["digest"]:
                raise ValueError(f"ranks 0 and {rank} place rows differently: make placement the same on all trainers")
            if their["steps"] != told[0]["steps"]:
                raise ValueError(
                    f"rank 0 saves after {told[0]['steps']} steps and rank {rank} after {their['steps']}: call skirl.save "
                    "on all trainers after the same step"
                )

    def _verdict(self, error: Exception | None) -> dict[str, Any]:
        """Describe an error for the others: its text, its errno, and whether it came from the system."""
        found = None if error is None else of_system(error)
        words = None if error is None else said_of(error) if found is None else why(error, self.saving.folder)
        return {"failed": words, "errno": None if found is None else found.errno, "system": found is not None}

    def _raise_failed(self, verdicts: list[dict[str, Any]], own: Exception | None) -> None:
        """Raise the same error on all trainers, which names the first one that failed."""
        for rank, verdict in enumerate(verdicts):
            if verdict["failed"] is None:
                continue
            if verdict["system"]:
                reason = f"rank {rank} could not write, {verdict['failed']}"
                raise not_written(self.saving.folder, reason, verdict["errno"]) from own
            if rank == self.peers.rank and own is not None:
                raise own
            raise PeerError(failed(rank, verdict["failed"]))

    def _commit(
        self, head: tuple[dict[str, Any], dict[str, Any]], entries: list[dict[str, str]], mark: str
    ) -> Exception | None:
        """Write the dense part and the header, whose rename makes the checkpoint. Then remove what is no longer needed."""
        saving, (body, tensors) = self.saving, head
        count, place = self.peers.size, {"placement": self.placement.facts, "digest": self.placement.digest}
        try:
            trainers = {"count": count, "shards": _shards(body, count)} | place | {"parts": entries}
            entry = dense.write(saving.folder, mark, tensors)
            more = {"number": saving.number, "start": saving.start, "dense": entry, "trainers": trainers}
            newest = partial(starts.check, saving.folder, saving.start)
            write_sealed(saving.path, body | more | {"format_version": folder.OF_PARTS}, mark, newest)
        except Exception as error:
            self._sweep()
            return error
        try:
            folder.retain(saving.folder, saving.number, self.keep, saving.after, saving.start)
        except OSError as error:  # the checkpoint is complete without this
            log.warning("could not look for what is not needed any more in %s: %s", saving.folder, why(error))
        return None

    def _sweep(self) -> None:
        with suppress(OSError):  # the next save sweeps again
            folder.sweep(self.saving.folder, self.saving.start)

    def _bytes(self, entry: Mapping[str, str], rows: Mapping[str, Any]) -> int:
        """Return the bytes that this trainer wrote. A hard link to a store's file counts as none."""
        where, written = self.saving.folder, 0
        with suppress(OSError):
            written = (where / entry["file"]).stat().st_size
            for name in folder.files_of_rows(rows) - folder.files_of_rows(self.since):
                stat = (where / name).stat()
                written += stat.st_size if stat.st_nlink == 1 else 0
        return written


def _shards(body: Mapping[str, Any], count: int) -> int:
    """Return how many shards a step has: as a lookahead says, else one per trainer."""
    data = body["run"]["data"]
    shards = data.get("shards") if isinstance(data, dict) else None
    return shards if type(shards) is int else count
