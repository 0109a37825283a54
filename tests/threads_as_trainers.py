"""Trainers that are threads of one process, for tests of many trainers with delays and failures on purpose."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skirl.peers.base import CHANNELS, OF_STEP, Channel, PeerError, Peers, Wait, failed, missing, said_of

if TYPE_CHECKING:
    from torch import Tensor

PeersHook = Callable[[int, str], None]
"""Called before each call, with the rank and what it is doing. It may sleep or raise."""


@dataclass
class _Call:
    """One call of all ranks: what each of them brought, and how many have taken the result."""

    brought: "dict[int, tuple[str, list[Tensor]]]" = field(default_factory=dict)
    taken: int = 0


class _Job:
    """State that the ranks share."""

    def __init__(self, size: int, timeout: float, hook: PeersHook | None) -> None:
        self.size, self.timeout, self.hook = size, timeout, hook
        self.changed = threading.Condition()
        self.calls: dict[tuple[str, int], _Call] = {}
        self.failed: str | None = None
        self.left: set[int] = set()
        self.ending: set[int] = set()
        """Ranks that ended the job themselves."""

    def told(self, rank: int) -> str | None:
        return self.failed

    def fail(self, why: str) -> None:
        with self.changed:
            self.failed = self.failed or why
            self.changed.notify_all()


class InProcess(Peers):
    """One of several trainers that are threads of this process. Made by `InProcess.job`."""

    def __init__(self, job: _Job, rank: int) -> None:
        super().__init__(rank, job.size, job.timeout)
        self._job = job
        self.channels.update((name, _BetweenThreads(name, self)) for name in CHANNELS)

    @classmethod
    def job(cls, size: int, *, timeout: float = 20.0, hook: PeersHook | None = None) -> "list[InProcess]":
        """Return all trainers of a job, one for each thread."""
        shared = _Job(size, timeout, hook)
        return [cls(shared, rank) for rank in range(size)]

    @classmethod
    def run(cls, size: int, work: Callable[["InProcess"], Any], **more: Any) -> list[Any]:
        """Return what `work(peers)` returns on each rank. Raise the first error, preferring one that is not a PeerError.

        >>> import numpy as np
        >>> def work(peers):
        ...     come = peers.channel("ids").exchange([np.full(peers.rank, to, np.uint8) for to in range(peers.size)])
        ...     return [part.tolist() for part in come]
        >>> InProcess.run(3, work)
        [[[], [0], [0, 0]], [[], [1], [1, 1]], [[], [2], [2, 2]]]
        """
        results: list[Any] = [None] * size
        errors: list[BaseException] = []

        def body(peers: InProcess) -> None:
            try:
                with peers:
                    results[peers.rank] = work(peers)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=body, args=(peers,), daemon=True) for peers in cls.job(size, **more)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
        return results

    @property
    def over(self) -> str | None:
        return self._job.told(self.rank)

    def fail(self, error: BaseException | str) -> None:
        self._job.ending.add(self.rank)
        self._job.fail(failed(self.rank, said_of(error)))

    def close(self) -> None:
        with self._job.changed:
            self._job.left.add(self.rank)
            self._job.changed.notify_all()


class _BetweenThreads(Channel):
    """A channel whose ranks are threads. Unlike a process group, it sees and compares what all ranks do."""

    def __init__(self, name: str, peers: InProcess) -> None:
        super().__init__(name, peers)
        self._job = peers._job
        self._moves = 0

    def _move(self, outs: "list[Tensor]", parts: "list[Tensor]", doing: str) -> Wait:
        take = self._bring(doing, [part.clone() for part in parts])

        def wait() -> None:
            for rank, (their, come) in take().items():
                if rank == self.rank:
                    continue
                if their.partition(OF_STEP)[0] != doing.partition(OF_STEP)[0]:
                    self._fail(
                        f"rank {rank} is in {their} where rank {self.rank} is in {doing}: all ranks have to make the same "
                        "calls in the same order"
                    )
                if come[self.rank].shape != outs[rank].shape:
                    self._fail(
                        f"rank {rank} sends {len(come[self.rank])} to rank {self.rank} in {doing}, which expects "
                        f"{len(outs[rank])}"
                    )
                outs[rank].copy_(come[self.rank])

        return wait

    def _bring(self, doing: str, parts: "list[Tensor]") -> "Callable[[], dict[int, tuple[str, list[Tensor]]]]":
        """Bring this rank's parts of the next move. Return a function that waits for those of all ranks."""
        job, key, began = self._job, (self.name, self._moves), time.monotonic()
        self._moves += 1
        if self.rank in job.ending and (why := job.told(self.rank)) is not None:
            raise PeerError(why)
        if job.hook is not None:
            job.hook(self.rank, doing)
        with job.changed:
            call = job.calls.setdefault(key, _Call())
            call.brought[self.rank] = (doing, parts)
            job.changed.notify_all()

        def take() -> dict[int, Any]:
            with job.changed:
                while len(call.brought) < job.size:
                    absent = set(range(job.size)) - set(call.brought)
                    waited = time.monotonic() - began
                    if job.failed is None and (waited >= job.timeout or absent & job.left):
                        gone = absent & job.left or absent
                        job.failed = missing(self.rank, gone, doing, waited, job.timeout)
                    if job.failed is not None:
                        job.changed.notify_all()
                        raise PeerError(job.failed)
                    job.changed.wait(min(1.0, job.timeout - waited))
                call.taken += 1
                if call.taken == job.size:
                    del job.calls[key]
                return call.brought

        return take
