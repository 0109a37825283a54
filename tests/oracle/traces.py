"""Traces for the oracle's tests: ids of kinds that tell good eviction from bad."""

from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from skirl import Table
from skirl.core.tables import ROW_BITS, Schema
from skirl.oracle.bank import BankPlanner
from skirl.oracle.step import Step

# The bank of dim 4 has tables 0, 2 and 3: two whose states are in an array, and one that is too large for it.
SCHEMA = Schema.of([Table("a", 40, 4), Table("other", 50, 8), Table("b", 100_000_000, 4), Table("c", 7, 4)])
BANK = 0


def keys_of(ids: Sequence[int]) -> np.ndarray:
    """Return small numbers as keys of three tables."""
    ids = np.asarray(ids, np.int64)
    table = np.array([0, 2, 3])[ids % 3]
    row = ids // 3
    return table << ROW_BITS | np.where(table == 2, row * 87_654_321 % 100_000_000, row)


def two_banks(trace: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
    """Return all ids for the bank of three tables, and every second one for the bank of one."""
    return [[keys_of(batch), np.int64(1) << 48 | np.array(batch[::2], np.int64)] for batch in trace]


def random_trace(rng: np.random.Generator, most_rows: int = 20) -> list[list[int]]:
    """Draw a short trace: uniform, skewed, a loop longer than most caches, or drifting; with batches of uneven size."""
    rows = int(rng.integers(3, most_rows + 1))
    batch = int(rng.integers(1, 7))
    count = int(rng.integers(4, 24))
    sizes = np.full(count, batch) if rng.random() < 0.5 else rng.integers(0, batch + 1, count)
    total = int(sizes.sum())
    kind = rng.integers(4)
    if kind == 0:
        ids = rng.integers(0, rows, total)
    elif kind == 1:
        ids = (rng.random(total) ** 3 * rows).astype(np.int64)
    elif kind == 2:
        ids = (np.arange(total) + (rng.random(total) < 0.1) * rng.integers(0, rows, total)) % rows
    else:
        ids = (np.arange(total) // 4 + rng.integers(0, max(1, rows // 2), total)) % rows
    return [part.tolist() for part in np.split(ids, np.cumsum(sizes)[:-1])]


def largest(trace: Sequence[Sequence[int]]) -> int:
    """Return the size of the smallest cache that holds each batch."""
    return max(1, *(len(set(batch)) for batch in trace))


def drive(planner: BankPlanner, batches: Sequence[np.ndarray], ends: Sequence[int]) -> Iterator[Step]:
    """Plan all batches from the next one on, each once those before `ends[number]` have entered."""
    for number in range(planner.planned, len(batches)):
        while planner.entered < ends[number]:
            planner.enter(batches[planner.entered])
        yield planner.plan()


def traces(rows: int = 20) -> st.SearchStrategy[list[list[int]]]:
    """Traces that Hypothesis can shrink."""
    return st.lists(st.lists(st.integers(0, rows - 1), max_size=6), min_size=1, max_size=25)


@st.composite
def windows(draw: st.DrawFn, batches: int) -> list[int]:
    """Draw window ends that never move back."""
    ends, end = [], 0
    for number in range(batches):
        end = min(batches, max(end, number + 1) + draw(st.sampled_from([0, 0, 1, 1, 2, 5])))
        ends.append(end)
    return ends
