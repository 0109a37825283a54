"""How a planner is set and how far it reads ahead, and the planner of a model: all banks of all its collections.

"auto" reads until the window has four times as many distinct rows as the cache, so it depends only on the data.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np

from skirl.core.ids import BankIds
from skirl.core.tables import Schema
from skirl.oracle import policies
from skirl.oracle.bank import BankPlanner, BatchTooLarge, Resident
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step

Depth = int | Literal["auto", "epoch"]

AUTO_BYTES = 1 << 30
"""The automatic window ends when it takes this much memory, unless `window_bytes` says otherwise."""


@dataclass(frozen=True)
class Plan:
    """Options of planning. Every field but `prefetch` changes what is fetched; none changes a result."""

    depth: Depth = "auto"
    """Batches the oracle reads ahead: a number, "auto" (until the window has four times the cache in rows), or "epoch"."""
    prefetch: int = 2
    policy: str = "min"
    ramp: bool = True
    window_bytes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.depth, bool) or not (self.depth in ("auto", "epoch") or isinstance(self.depth, int)):
            raise ValueError(f"depth is {self.depth!r}: set it to a number of batches, 'auto' or 'epoch'")
        if isinstance(self.depth, int) and not 1 <= self.depth < 1 << 24:
            raise ValueError(f"depth is {self.depth}: set it between 1 and {(1 << 24) - 1}, or to 'epoch'")
        if self.policy == "ttl" and self.depth == "epoch":  # the window of an epoch is one batch with its next uses
            raise ValueError(
                "policy 'ttl' needs a window, which depth 'epoch' does not have: set depth to a number of batches"
            )
        if not isinstance(self.prefetch, int) or not 0 <= self.prefetch <= 1024:
            raise ValueError(f"prefetch is {self.prefetch}: set it between 0 and 1024 steps")
        if self.window_bytes is not None and self.window_bytes < 1:
            raise ValueError(f"window_bytes is {self.window_bytes}: set it to 1 or more")
        if self.policy not in policies.POLICIES:
            raise ValueError(f"policy is {self.policy!r}: set it to one of {', '.join(policies.POLICIES)}")

    @property
    def most_bytes(self) -> float:
        """Memory after which the window stops growing. By default there is no limit if `depth` is a number."""
        if self.window_bytes is not None:
            return self.window_bytes
        return float("inf") if isinstance(self.depth, int) else AUTO_BYTES

    @property
    def hold(self) -> int:
        """Steps for which evicted rows can be forwarded: two more than rows travel ahead, to give a write-back time."""
        return self.prefetch + 2


AUTO_ROWS = 4
"""The automatic window ends when it holds this many times the cache in distinct rows."""
LONGEST_AUTO = 4096
"""The automatic window never holds more batches than this."""


class Vote(NamedTuple):
    """One owner's statement about its window."""

    rows: int
    """Number of steps, planned one after the other, for which it has at least 4 times its cache in distinct rows."""
    memory: int
    """Number of steps for which it takes as much memory as it may, or cannot take the next batch."""


def is_full(plan: Plan, window: int, planned: int, vote: Vote) -> bool:
    if not window:
        return False
    if vote.memory > 0:
        return True
    if plan.ramp and window >= 2 * planned + 8:
        return True
    if plan.depth == "auto":
        return window >= LONGEST_AUTO or vote.rows > 0
    # Each batch of an epoch brings its next uses along, so the window needs only the batch itself.
    return window >= (1 if plan.depth == "epoch" else plan.depth)


def due(plan: Plan, window: int, planned: int, votes: Sequence[Vote]) -> int:
    """Return how many steps are planned before the next batch enters: while all windows have enough rows, or one is
    full."""
    rows, memory = min(vote.rows for vote in votes), max(vote.memory for vote in votes)
    steps = 0
    while is_full(plan, window - steps, planned + steps, Vote(rows - steps, memory - steps)):
        steps += 1
    return steps


Batch = BankIds | np.ndarray


def bank_planners(
    schema: Schema,
    capacities: Sequence[int],
    plan: Plan,
    seen: Seen,
    *,
    hold_rows: Sequence[int] | None = None,
    residents: Sequence[Resident] | None = None,
    first: int = 0,
) -> list[BankPlanner]:
    return [
        BankPlanner(
            schema,
            bank,
            capacity,
            depth=plan.depth if isinstance(plan.depth, int) else 64 if plan.depth == "auto" else 1,
            seen=seen,
            policy=plan.policy,
            hold=plan.hold,
            hold_rows=None if hold_rows is None else hold_rows[bank],
            resident=None if residents is None else residents[bank],
            first=first,
        )
        for bank, capacity in enumerate(capacities)
    ]


Item = TypeVar("Item")
"""The owner's own name for a batch. It is returned with the batch's Steps."""


class Planner(Generic[Item]):
    def __init__(
        self,
        banks: Sequence[BankPlanner],
        plan: Plan,
        *,
        next_uses: Callable[[int], list[np.ndarray]] | None = None,
        check_fits: Callable[[int, int], None] | None = None,
    ) -> None:
        """Without `banks`, batches wait until `begin`. `next_uses`: for a batch's number, its next uses by bank, if the
        whole future is known. `check_fits` gets a bank and the number of a batch that it cannot hold: it raises, or the
        planner stops at this batch."""
        self.banks = list(banks)
        self.stopped = False
        self.due: int | None = None
        """Steps to plan before the next batch enters, if several owners decide that; None: this planner decides."""
        self._plan = plan
        self._next_uses, self._check_fits = next_uses, check_fits
        self._elsewhere: Collection[int] = ()
        self._inbox: deque[tuple[Item, Sequence[Batch], int]] = deque()
        self._ended = False
        self._entered: deque[tuple[Item, int]] = deque()
        self._planned = 0
        self._bytes = 0

    def begin(self, banks: Sequence[BankPlanner], elsewhere: Collection[int]) -> None:
        """`elsewhere`: banks without rows here, since others look all of their tables up."""
        self.banks, self._elsewhere = list(banks), elsewhere

    @property
    def window(self) -> int:
        return len(self._entered)

    @property
    def rest(self) -> list[Item]:
        """The batches that have not entered the window."""
        return [item for item, *_ in self._inbox]

    @property
    def unplanned(self) -> list[Item]:
        return [item for item, _ in self._entered] + self.rest

    def add(self, item: Item, banks: Sequence[Batch], nbytes: int) -> None:
        self._inbox.append((item, banks, nbytes))

    def end(self) -> None:
        self._ended = True

    def next(self) -> tuple[Item, list[Step]] | None:
        """Return the next batch and its Steps, one a bank. Return None until the window is full, or if all is planned."""
        while self.banks and self._inbox and not self.stopped and not self._full():
            self._enter()
        if not self.window or not (self._full() or self._ended or (self.stopped and self.due is None)):
            return None
        steps = [bank.plan() for bank in self.banks]
        self._planned += 1
        if self.due:
            self.due -= 1
        item, nbytes = self._entered.popleft()
        self._bytes -= nbytes
        return item, steps

    def executed(self, number: int) -> None:
        for bank in self.banks:
            bank.executed(number)

    def rollback(self, number: int) -> None:
        """Take back the steps from `number` on, which will not be executed. The planner cannot be used after this."""
        for bank in self.banks:
            bank.rollback(number)

    def _enter(self) -> None:
        item, batch, nbytes = self._inbox[0]
        known = None if self._next_uses is None else self._next_uses(self.banks[0].entered)
        for i, bank in enumerate(self.banks):
            try:
                nbytes += bank.enter(batch[i], None if known is None else known[i])
            except BatchTooLarge:
                if self._check_fits is None:
                    raise
                self._check_fits(i, bank.entered)
                self.stopped = True
                return
        self._inbox.popleft()
        self._entered.append((item, nbytes))
        self._bytes += nbytes

    def vote(self) -> Vote:
        """Return this planner's vote, for several owners that decide together when to plan."""
        rows = 0
        if self._plan.depth == "auto" and self.banks:
            voting = [bank for i, bank in enumerate(self.banks) if i not in self._elsewhere]
            rows = min((_at_least(b.rows_ahead(), AUTO_ROWS * b.capacity) for b in voting), default=LONGEST_AUTO)
        if self.stopped:
            return Vote(rows, self.window)
        return Vote(rows, _at_least(self._bytes_ahead(), self._plan.most_bytes))

    def _bytes_ahead(self) -> Iterator[int]:
        """Yield the memory of the window's batches: now, and after each of its steps but the last."""
        left = self._bytes
        for _, nbytes in self._entered:
            yield left
            left -= nbytes

    def _full(self) -> bool:
        if self.due is not None:
            return self.due > 0
        enough = all(bank.window_rows >= AUTO_ROWS * bank.capacity for bank in self.banks)
        vote = Vote(int(enough), int(self._bytes >= self._plan.most_bytes))
        return is_full(self._plan, self.window, self._planned, vote)


def _at_least(values: Iterator[int], least: float) -> int:
    """Return how many values come before the first that is below `least`."""
    return sum(1 for _ in takewhile(lambda value: value >= least, values))
