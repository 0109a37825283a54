"""The two halves of a step of several trainers: what a trainer reads, and what the owner of rows is asked for.

A trainer asks the owner of each of its distinct rows for it. An owner joins what all trainers ask, in rank order, to a batch
that `BankPlanner` plans like any other: its positions are requests, a request is one distinct row of one trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skirl.core.keys import ROW_BITS
from skirl.core.placement import Placement, site_in
from skirl.core.positions import Positions
from skirl.core.tables import Schema
from skirl.oracle.distinct import Finder
from skirl.oracle.step import Step
from skirl.tools.jit import kernel

NARROW = 1 << 31
"""Tables of at most so many rows have row numbers of 32 bits."""


@dataclass(slots=True)
class Reads:
    """What one trainer reads of one bank in one step.

    It reads from a buffer of its distinct rows: by owner, of one owner by table, of one table by their last position.
    """

    place: np.ndarray
    """int32 [ids]: the row of the buffer that every id position has."""
    group_start: np.ndarray
    """int32 [rows + 1]: where each row's positions begin in `group_pos`."""
    group_pos: np.ndarray
    """int32 [ids]: positions grouped by row, ascending in each group."""
    ask: np.ndarray
    """int32 [owners + 1]: where the rows of each owner begin: so many ids and gradients go to it, and values come."""
    counts: np.ndarray
    """int32 [owners, tables of the bank]: how many they are."""


@dataclass(slots=True)
class Requests:
    """Rows of one bank that one trainer asks one owner for."""

    rows: np.ndarray
    """int32 or int64: row numbers, table after table."""
    counts: np.ndarray
    """int32 [tables of the bank]: how many of each."""


def row_type(schema: Schema, bank: int) -> type[np.int32] | type[np.int64]:
    """What holds row numbers of a bank."""
    return np.int32 if all(schema.tables[t].rows <= NARROW for t in schema.banks[bank].tables) else np.int64


class Asking:
    """The trainer's half, of one bank.

    **Arguments**

    - `schema`, `bank`: the tables, and which of their banks.
    - `placement`: who owns which rows.

    >>> from skirl import Table
    >>> schema = Schema.of([Table("a", 10, 4), Table("b", 10, 4)])
    >>> reads, asked = Asking(schema, 0, Placement.even(2)).of(Positions.of(np.array([1, 3, 1, 1 << 48 | 5])))
    >>> reads.place.tolist(), reads.ask.tolist()
    ([1, 0, 1, 2], [0, 1, 3])
    >>> [(part.rows.tolist(), part.counts.tolist()) for part in asked]
    [([3], [1, 0]), ([1, 5], [1, 1])]
    """

    def __init__(self, schema: Schema, bank: int, placement: Placement) -> None:
        self._finder = Finder(schema, bank)
        self._placement = placement
        self._type = row_type(schema, bank)

    def of(self, batch: Positions) -> tuple[Reads, list[Requests]]:
        """What the ids of one batch read, and what is asked of each owner."""
        tables, sites = self._finder.tables, self._placement.sites
        layout, distinct, first = self._finder.find_all(batch)
        total = int(first[-1])
        owner, counts = np.empty(total, np.int32), np.zeros((sites, len(tables)), np.int32)
        whose: Any = self._placement.arrays
        _owners(tables, distinct.found, distinct.low, first, *whose, owner, counts)  # pyright: ignore[reportCallIssue]
        ends = np.cumsum(counts)
        rows, moved = np.empty(total, self._type), np.empty(total, np.int32)
        _by_owner(
            distinct.found, distinct.low, first, owner, (ends - counts.ravel()).reshape(counts.shape), rows, moved
        )
        place, pos = np.empty(layout.positions, np.int32), np.empty(layout.positions, np.int32)
        start = np.zeros(total + 1, np.int32)
        _group(layout.parts, layout.first, first, distinct.row_of, moved, place, start, pos)
        ask = np.concatenate([[0], ends[len(tables) - 1 :: len(tables)]]).astype(np.int32)
        asked = [Requests(rows[ask[o] : ask[o + 1]], counts[o]) for o in range(sites)]
        return Reads(place, start, pos, ask, counts), asked


def joined(tables: Sequence[int], asked: Sequence[Requests]) -> tuple[Positions, np.ndarray]:
    """The owner's half: what all trainers ask for, in rank order, as a batch to plan; and which of it is whose.

    The second is int32 [trainers + 1]: where each trainer's requests begin. `Step.slots` has one for each request.

    >>> two = [Requests(np.array([7, 2]), np.array([1, 1])), Requests(np.array([7]), np.array([1, 0]))]
    >>> batch, serve = joined((0, 1), two)
    >>> batch.keys().tolist() == [7, 1 << 48 | 2, 7], serve.tolist()
    (True, [0, 2, 3])
    """
    serve = np.cumsum([0, *(len(part.rows) for part in asked)]).astype(np.int32)
    counts = np.concatenate([part.counts for part in asked]).astype(np.int64)
    ends = np.cumsum(counts)
    parts = np.stack([np.tile(np.array(tables, np.int64), len(asked)), ends - counts, ends, 0 * counts], axis=1)
    return Positions(np.concatenate([part.rows for part in asked]), parts[counts > 0]), serve


def fused(reads: Reads, step: Step) -> Step:
    """Both halves of a step of one trainer, as one Step over its ids."""
    return replace(step, slots=step.slots[reads.place], group_start=reads.group_start, group_pos=reads.group_pos)


def critical_values(before: Step, step: Step, capacity: int) -> np.ndarray:
    """Of each request of `step` whether `before`, the step before it, changes its row: its value is known only then.

    **Arguments**

    - `before`, `step`: planned one after the other over the same `capacity` slots.
    """
    changed = np.zeros(capacity, np.bool_)
    changed[before.rows] = True
    changed[_arrivals(step)] = False  # another row was there
    return changed[step.slots]


def critical_gradients(step: Step, after: Step, capacity: int) -> np.ndarray:
    """Of each request of `step` whether `after`, the step after it, uses or evicts its row: its gradient comes before.

    **Arguments**

    - `step`, `after`: planned one after the other over the same `capacity` slots.
    """
    wanted = np.zeros(capacity, np.bool_)
    wanted[after.rows] = True  # a slot that another row takes is one that this one leaves
    wanted[after.evict_slots] = True
    return wanted[step.slots]


def _arrivals(step: Step) -> np.ndarray:
    return np.concatenate([step.fetch_slots, step.forward_slots, step.new_slots])


@kernel
def _owners(tables, found, low, first, cut_of, salt, guess, last, starts, sites, owner, counts):
    """The owner of each distinct row, and how many of each table each owner has."""
    for t in range(len(tables)):
        high = np.int64(tables[t]) << ROW_BITS
        cut = cut_of[min(tables[t], len(cut_of) - 1)]
        rows, of = found[low[t] : low[t] + first[t + 1] - first[t]], owner[first[t] : first[t + 1]]
        for i in range(len(of)):
            of[i] = site_in(cut, high | rows[i], salt, guess, last, starts, sites)
        for o in of:
            counts[o, t] += 1


@kernel
def _by_owner(found, low, first, owner, at, rows, moved):
    """Order rows by owner; at [owners, tables]: where those of each table go, counted up."""
    for t in range(len(first) - 1):
        for i in range(first[t], first[t + 1]):
            to = at[owner[i], t]
            at[owner[i], t] = to + 1
            rows[to] = found[low[t] + i - first[t]]
            moved[i] = to


@kernel
def _group(parts, first_part, first, row_of, moved, place, start, pos):
    """The place of every position, and the positions of every row; start comes as zeros."""
    rows = len(start) - 1
    for t in range(len(first) - 1):
        mine = moved[first[t] : first[t + 1]]
        for part in range(first_part[t], first_part[t + 1]):
            begin = parts[part, 3]
            of = row_of[begin : begin + parts[part, 1] - parts[part, 0]]
            out = place[begin : begin + len(of)]
            for p in range(len(of)):
                i = mine[of[p]]
                out[p] = i
                start[i] += 1
    n = 0
    for i in range(rows):
        n += start[i]
        start[i] = n
    start[rows] = n
    # From the end: each row's positions fill its place downwards, which leaves `start` at its beginning.
    for p in range(len(place) - 1, -1, -1):
        n = start[place[p]] - 1
        start[place[p]] = n
        pos[n] = p
