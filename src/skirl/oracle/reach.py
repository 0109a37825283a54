"""The reach of the window: when it is full. Several owners decide it together, so that all plan the same batches. What
each says is sent with the ids of the next batch, and steps planned until then change it: so an owner says for how many
steps its window stays full."""

from collections.abc import Sequence
from typing import NamedTuple

from skirl.oracle.options import Plan

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


def agreed(votes: Sequence[Vote]) -> Vote:
    """Return the vote on all owners' windows together: full if all have enough rows, or one has no memory left.

    >>> agreed([Vote(rows=3, memory=0), Vote(rows=1, memory=2)])
    Vote(rows=1, memory=2)
    """
    return Vote(min(vote.rows for vote in votes), max(vote.memory for vote in votes))


def is_full(plan: Plan, window: int, planned: int, vote: Vote) -> bool:
    """Return whether a window of `window` batches is full, after `planned` steps."""
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
    """Return how many steps are planned before the next batch enters.

    >>> due(Plan(ramp=False), 9, 0, [Vote(3, 0), Vote(2, 0)]), due(Plan(ramp=False), 9, 0, [Vote(3, 0), Vote(0, 1)])
    (2, 1)
    """
    rows, memory = agreed(votes)
    steps = 0
    while is_full(plan, window - steps, planned + steps, Vote(rows - steps, memory - steps)):
        steps += 1
    return steps
