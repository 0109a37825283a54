"""Trainers that are processes, with a process group of torch for each channel, and one message when one is lost."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from skirl.peers.base import CHANNELS, ON_DEVICE, Channel, PeerError, Peers, Wait, failed, missing, said_of
from skirl.peers.processes import Connections, is_gone, this_process

T = TypeVar("T")
ENDED, LOST = "skirl/ended", "skirl/lost"
"""Keys: why the job ends, and, with a rank, that this rank is alive and lost another one."""
LIMIT = 1.0
"""Seconds within which the store answers if its process runs."""


class Notes:
    """Messages between ranks about the end of the job. torch has no time limit for a call to a store whose process is
    stopped or cut off. So each call has a thread here, which is abandoned when the time is over."""

    def __init__(self, store: Any, there: Callable[[], bool]) -> None:
        self.answers = True
        self._store, self._there = store, there

    def why(self) -> str | None:
        """Return why the job ends, as a rank has said. None if none has, or the store does not answer."""
        return self._asked(lambda: self._store.get(ENDED).decode() if self._store.check([ENDED]) else None)

    def end(self, why: str) -> str:
        """Say why the job ends, unless another rank has. Return the sentence of the first."""
        return self._asked(lambda: self._store.compare_set(ENDED, "", why).decode()) or why

    def here(self, rank: int) -> None:
        self._asked(lambda: self._store.set(f"{LOST}/{rank}", "here"))

    def is_here(self, rank: int) -> bool:
        return bool(self._asked(lambda: self._store.check([f"{LOST}/{rank}"])))

    def _asked(self, ask: Callable[[], T]) -> T | None:
        if not (self.answers and self._there()):
            self.answers = False
            return None
        found: list[T] = []

        def work() -> None:
            try:
                found.append(ask())
            except Exception:
                self.answers = False

        thread = threading.Thread(target=work, name="skirl word", daemon=True)
        thread.start()
        thread.join(LIMIT)
        if thread.is_alive():
            self.answers = False
            return None
        return found[0] if found else None


log = logging.getLogger("skirl")
ROLL_CALL = 2.0
"""Seconds within which the others say that they are alive, when one of them is not."""
A_MOMENT = timedelta(milliseconds=1)
"""Time limit to see whether a message has come."""


class ProcessGroups(Peers):
    """One of several trainers that are processes. Made by `skirl.peers.job.join`."""

    def __init__(
        self,
        store: dist.Store,
        *,
        device: torch.device,
        timeout: float,
        port: int = 0,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), timeout)
        self._port, self._leave = port, leave
        self._notes = Notes(store, lambda: not is_gone(self._processes[0]))
        self._ended: str | None = None
        on_device = "nccl" if device.type == "cuda" else "gloo"
        longer = timedelta(seconds=min(timeout, 1e8))
        self._processes: list[Any] = [[]] * self.size
        with Connections() as self._connections:
            groups = {
                name: dist.new_group(backend=on_device if name in ON_DEVICE else "gloo", timeout=longer)
                for name in CHANNELS
            }
        self._groups = {name: _Group(name, self, group, on_device) for name, group in groups.items()}
        self.channels.update(self._groups)
        self._processes = self.channel("start").told(this_process(), "who is there")
        self.near = sum(process[:1] == self._processes[self.rank][:1] for process in self._processes)

    def fail(self, error: BaseException | str) -> None:
        why = failed(self.rank, said_of(error))
        if self._ended is None:
            self._ended = why
            self._notes.end(why)
        self._connections.cut([self._port])
        self._destroy()

    def close(self) -> None:
        try:
            if self._ended is None:
                self.channel("start").told(None, "the end")
        finally:
            self._destroy()

    def _destroy(self) -> None:
        for group in self._groups.values():
            group.destroy()
        self._leave()

    @property
    def over(self) -> str | None:
        return self._ended

    def _told(self) -> str | None:
        """Return why the job ends, if that is known here or another rank has said it."""
        if self._ended is None:
            self._ended = self._notes.why()
        return self._ended

    def lost(self, doing: str, waited: float, silent: Collection[int]) -> NoReturn:
        """Find out which rank is missing after a call failed or took too long, tell the others, and raise. silent: ranks
        that this one waited for in vain. Some of them may be waiting for others themselves."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        absent = [rank for rank in others if is_gone(self._processes[rank])]
        why = self._told()
        self._notes.here(self.rank)
        self._connections.cut([self._port])  # wakes ranks and threads that wait on them
        if why is None and not absent:
            absent = self._roll_call(sorted(silent) or others)
            why = self._told()
        if why is None:
            why = self._ended = self._notes.end(missing(self.rank, absent, doing, waited, self.timeout))
        raise PeerError(why)

    def _roll_call(self, silent: list[int]) -> list[int]:
        """Return which of these do not say that they are alive. If the store is silent and rank 0 is one of them, only 0."""
        absent, until = silent, time.monotonic() + ROLL_CALL
        while absent and time.monotonic() < until and self._told() is None and self._notes.answers:
            time.sleep(0.02)
            absent = [rank for rank in absent if not self._notes.is_here(rank)]
        return absent if self._notes.answers or 0 not in silent else [0]


class _Group(Channel):
    """A channel over a process group. Parts are sent as messages between pairs of ranks: gloo's collectives give the same
    bits in nearly twice the time; NCCL's consist of such messages, begun together."""

    peers: ProcessGroups

    def __init__(self, name: str, peers: ProcessGroups, group: Any, backend: str) -> None:
        super().__init__(name, peers)
        self._group, self._destroyed = group, False
        self._on_stream = backend == "nccl" and name in ON_DEVICE

    def _move(self, outs: list[Tensor], parts: list[Tensor], doing: str) -> Wait:
        if (why := self.peers.over) is not None:
            raise PeerError(why)
        try:
            if self._on_stream:
                outs[self.rank] = parts[self.rank] = parts[self.rank].new_empty(0)
                work = dist.all_to_all(outs, parts, group=self._group, async_op=True)
                return _waiting(self.peers, [(None, work)], doing, on_stream=True)
            return self._messages(outs, parts, doing)
        except RuntimeError as error:
            log.debug("%s: %r", doing, error)
            self.peers.lost(doing, 0.0, [])

    def _messages(self, outs: list[Tensor], parts: list[Tensor], doing: str) -> Wait:
        """Begin a message to and from each other rank. Nothing is sent for an empty part."""
        works, late = [], []
        for distance in range(1, self.size):
            of, to = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if outs[of].numel():
                on_host = outs[of].cpu() if outs[of].is_cuda else outs[of]
                late += [(outs[of], on_host)] if outs[of].is_cuda else []
                works.append((of, self._group.recv([on_host], of, 0)))
            if parts[to].numel():
                works.append((to, self._group.send([parts[to].cpu()], to, 0)))
        return _waiting(self.peers, works, doing, late)

    def destroy(self) -> None:
        if not self._destroyed and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._destroyed = True


def _waiting(
    peers: ProcessGroups,
    works: list[tuple[int | None, Any]],
    doing: str,
    late: Sequence[tuple[Tensor, Tensor]] = (),
    *,
    on_stream: bool = False,
) -> Wait:
    """Return what waits for all messages, no longer than the timeout. On a stream, that is only enqueued."""

    def wait() -> None:
        since = time.monotonic()
        for done, (_, work) in enumerate(works):
            try:
                left = max(0.001, peers.timeout - (time.monotonic() - since))
                work.wait() if on_stream else work.wait(timedelta(seconds=min(left, 1e8)))
            except RuntimeError as error:
                waited = time.monotonic() - since
                log.debug("%s: %r", doing, error)
                silent = {rank for rank, work in works[done:] if rank is not None and not _has_come(work)}
                peers.lost(doing, waited, silent)
        for out, on_host in late:
            out.copy_(on_host)

    return wait


def _has_come(work: Any) -> bool:
    try:
        return bool(work.wait(A_MOMENT))
    except RuntimeError:
        return False
