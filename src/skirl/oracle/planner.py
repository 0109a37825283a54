"""The planner of a collection: all banks, and how far to read ahead.

`depth` is knowledge: the window holds min(depth, 2 t + 8) batches when step t is planned, so training starts after 8 batches
and not after 200. "auto" reads until the window's distinct rows are four times the cache. Once is not enough: most rows of a
window are used once in it and not worth keeping, and on traces MIN was missed by 2 to 8 times; with four times it was met
within 4%. Whatever the depth, what the window holds is a function of the data alone.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from skirl.core.positions import Positions
from skirl.core.tables import Schema
from skirl.oracle.bank import BankPlanner, Resident
from skirl.oracle.policies.base import check_policy
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step

Depth = int | Literal["auto", "epoch"]
Batch = Positions | np.ndarray
"""One bank's part of a batch: its ids, or its keys."""

AUTO_ROWS = 4
"""The automatic window ends when it holds this many times the cache in distinct rows."""
AUTO_BYTES = 1 << 30
"""Or when it takes this much memory, unless `window_bytes` says otherwise."""
LONGEST_AUTO = 4096
"""The automatic window never holds more batches than this."""


@dataclass(frozen=True)
class Plan:
    """How to plan; every field but `prefetch` changes what is fetched, none changes a result."""

    depth: Depth = "auto"
    """Batches the oracle reads ahead: a number, "auto" (until the window has four times the cache in rows), or "epoch"."""
    prefetch: int = 2
    """Steps ahead that rows travel."""
    policy: str = "min"
    """Which rows leave: "min", or "lru", "lfu", "ttl" for comparison."""
    ramp: bool = True
    """Start with a window of 8 batches that grows by 2 a step; False waits for the whole window first."""
    window_bytes: int | None = None
    """The window stops growing when its batches take this much memory; None: 1 GiB, or no limit where depth is a number."""
    threads: int = 1
    """Threads that plan; the Steps do not depend on their number."""

    def __post_init__(self) -> None:
        if isinstance(self.depth, bool) or not (self.depth in ("auto", "epoch") or isinstance(self.depth, int)):
            raise ValueError(f"depth is {self.depth!r}: set it to a number of batches, 'auto' or 'epoch'")
        if isinstance(self.depth, int) and self.depth < 1:
            raise ValueError(f"depth is {self.depth}: set it to 1 or more")
        if isinstance(self.depth, int) and self.depth >= 1 << 24:
            raise ValueError(f"depth is {self.depth}: set it between 1 and {(1 << 24) - 1}, or to 'epoch'")
        if self.policy == "ttl" and self.depth == "epoch":  # the window of an epoch is one batch with its next uses
            raise ValueError("policy 'ttl' reads times to live off the window: set depth to a number of batches")
        if not isinstance(self.prefetch, int) or not 0 <= self.prefetch <= 1024:
            raise ValueError(f"prefetch is {self.prefetch}: set it between 0 and 1024 steps")
        if self.window_bytes is not None and self.window_bytes < 1:
            raise ValueError(f"window_bytes is {self.window_bytes}: set it to 1 or more")
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}: set it to 1 or more")
        check_policy(self.policy)

    @property
    def most_bytes(self) -> float:
        """Memory after which the window stops growing: a number given as depth is a limit of its own."""
        if self.window_bytes is not None:
            return self.window_bytes
        return float("inf") if isinstance(self.depth, int) else AUTO_BYTES

    @property
    def hold(self) -> int:
        """Steps for which evicted rows can be forwarded: two more than rows travel ahead, so that a write-back has time."""
        return self.prefetch + 2


class Planner:
    """Plans all banks of a collection together.

    >>> from skirl import Table
    >>> schema = Schema.of([Table("a", 100, 4)])
    >>> planner = Planner(schema, [4], Plan(depth=2), Seen(schema))
    >>> planner.add([np.array([1, 2])], 0)
    >>> planner.next() is None  # the window is not full: batch 1 may still come
    True
    >>> planner.end()
    >>> planner.next()[0].new_keys.tolist()
    [1, 2]
    """

    def __init__(
        self,
        schema: Schema,
        capacities: Sequence[int],
        plan: Plan,
        seen: Seen,
        *,
        hold_rows: Sequence[int] | None = None,
        residents: Sequence[Resident] | None = None,
        resident_next: Sequence[np.ndarray] | None = None,
    ) -> None:
        # Each batch of an epoch brings its next uses along: the window needs the batch itself only.
        self._depth = 1 if plan.depth == "epoch" else plan.depth
        self._plan = plan
        self.banks = [
            BankPlanner(
                schema,
                bank,
                capacity,
                depth=64 if isinstance(self._depth, str) else self._depth,
                seen=seen,
                policy=plan.policy,
                hold=plan.hold,
                hold_rows=None if hold_rows is None else hold_rows[bank],
                threads=plan.threads,
                resident=None if residents is None else residents[bank],
                resident_next=None if resident_next is None else resident_next[bank],
            )
            for bank, capacity in enumerate(capacities)
        ]
        self._inbox: deque[tuple[Sequence[Batch], list[np.ndarray] | None, int]] = deque()
        self._ended = False
        self._entered = 0
        self._planned = 0
        self._sizes: deque[int] = deque()
        self._bytes = 0

    @property
    def window(self) -> int:
        """Batches entered and not yet planned."""
        return self._entered - self._planned

    @property
    def waiting(self) -> int:
        """Batches given and not yet entered."""
        return len(self._inbox)

    def add(self, banks: Sequence[Batch], nbytes: int, next_uses: list[np.ndarray] | None = None) -> None:
        """One more batch: ids or keys for every bank, and what its owner holds in memory for it."""
        self._inbox.append((banks, next_uses, nbytes))

    def end(self) -> None:
        """No more batches will come."""
        self._ended = True

    def next(self) -> list[Step] | None:
        """The next batch's Steps, one a bank; None until the window is full, or when all is planned."""
        while self._inbox and not self._full():
            batch, next_uses, nbytes = self._inbox.popleft()
            for i, bank in enumerate(self.banks):
                bank.enter(batch[i], None if next_uses is None else next_uses[i])
            self._entered += 1
            self._sizes.append(nbytes)
            self._bytes += nbytes
        if not self.window or not (self._full() or self._ended):
            return None
        steps = [bank.plan() for bank in self.banks]
        self._planned += 1
        self._bytes -= self._sizes.popleft()
        return steps

    def executed(self, number: int) -> None:
        """Steps before `number` are done."""
        for bank in self.banks:
            bank.executed(number)

    def rollback(self, number: int) -> None:
        """Steps from `number` on will not be executed. The planner is done with."""
        for bank in self.banks:
            bank.rollback(number)

    def _full(self) -> bool:
        if not self.window:
            return False
        if self._bytes >= self._plan.most_bytes:
            return True
        if self._plan.ramp and self.window >= 2 * self._planned + 8:
            return True
        if isinstance(self._depth, int):
            return self.window >= self._depth
        return self.window >= LONGEST_AUTO or all(b.window_rows >= AUTO_ROWS * b.capacity for b in self.banks)
