"""How far the window reaches: when it is full. Several owners decide it together, so that all plan the same batches.

What each says travels with the ids of the next batch. Steps that are planned until then change it, so an owner says for how
many steps the window stays full, and not only that it is.
"""

from collections.abc import Sequence
from typing import NamedTuple

from skirl.oracle.options import Plan

AUTO_ROWS = 4
"""The automatic window ends when it holds this many times the cache in distinct rows."""
LONGEST_AUTO = 4096
"""The automatic window never holds more batches than this."""


class Vote(NamedTuple):
    """What one owner says of its window."""

    rows: int
    """For so many steps, one planned after the other, its distinct rows are at least 4 times its cache."""
    memory: int
    """For so many steps it takes as much memory as it may, or cannot take the next batch."""


def agreed(votes: Sequence[Vote]) -> Vote:
    """What holds of all owners' windows together: full when all have rows enough, or one has no memory left.

    >>> agreed([Vote(rows=3, memory=0), Vote(rows=1, memory=2)])
    Vote(rows=1, memory=2)
    """
    return Vote(min(vote.rows for vote in votes), max(vote.memory for vote in votes))


def is_full(plan: Plan, window: int, planned: int, vote: Vote) -> bool:
    """Whether a window of so many batches is full, after so many planned steps."""
    if not window:
        return False
    if vote.memory > 0:
        return True
    if plan.ramp and window >= 2 * planned + 8:
        return True
    if plan.depth == "auto":
        return window >= LONGEST_AUTO or vote.rows > 0
    # Each batch of an epoch brings its next uses along: the window needs the batch itself only.
    return window >= (1 if plan.depth == "epoch" else plan.depth)


def due(plan: Plan, window: int, planned: int, votes: Sequence[Vote]) -> int:
    """How many steps are planned before the next batch enters.

    **Arguments**

    - `plan`: how far to read.
    - `window`, `planned`: batches of the window, and steps planned before them.
    - `votes`: of all owners, of this window.

    >>> due(Plan(ramp=False), 9, 0, [Vote(3, 0), Vote(2, 0)]), due(Plan(ramp=False), 9, 0, [Vote(3, 0), Vote(0, 1)])
    (2, 1)
    """
    rows, memory = agreed(votes)
    steps = 0
    while is_full(plan, window - steps, planned + steps, Vote(rows - steps, memory - steps)):
        steps += 1
    return steps
