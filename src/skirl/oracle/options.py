"""How a planner is set, and how far it looks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from skirl.oracle import policies

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
        if isinstance(self.depth, int) and self.depth < 1:
            raise ValueError(f"depth is {self.depth}: set it to 1 or more")
        if isinstance(self.depth, int) and self.depth >= 1 << 24:
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
