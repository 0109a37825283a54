"""The two halves of a step of several trainers: what a trainer reads, and what it is asked for as an owner of rows. An
owner joins the requests of all, in rank order, into a batch to plan, whose positions are requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from skirl.core.keys import ROW_BITS, Positions
from skirl.core.placement import Placement, site_in
from skirl.core.tables import Schema
from skirl.oracle.distinct import Finder
from skirl.tools.jit import kernel

NARROW = 1 << 31
"""Tables of at most this many rows have 32-bit row numbers."""


@dataclass(slots=True)
class Reads:
    """The rows that one trainer reads of one bank in one step, from a buffer ordered by owner, then table, then last
    position."""

    place: np.ndarray
    """int32 [ids]: the index in the buffer of every id's row."""
    group_start: np.ndarray
    """int32 [rows + 1]: where each row's positions begin in `group_pos`."""
    group_pos: np.ndarray
    """int32 [ids]: positions grouped by row, ascending in each group."""
    ask: np.ndarray
    """int32 [owners + 1]: where the rows of each owner begin. Ids and gradients go to the owner, and values come back."""


@dataclass(slots=True)
class Requests:
    rows: np.ndarray
    """int32 or int64: row numbers, table after table."""
    counts: np.ndarray
    """int32 [tables of the bank]: number of rows of each table."""


def row_type(schema: Schema, bank: int) -> type[np.int32] | type[np.int64]:
    return np.int32 if all(schema.tables[t].rows <= NARROW for t in schema.banks[bank].tables) else np.int64


class Asking:
    def __init__(self, schema: Schema, bank: int, placement: Placement) -> None:
        self._finder = Finder(schema, bank)
        self._placement = placement
        self._type = row_type(schema, bank)

    def of(self, batch: Positions) -> tuple[Reads, list[Requests]]:
        """Return what the ids of one batch read, and what is asked of each owner."""
        tables, sites = self._finder.tables, self._placement.sites
        distinct = self._finder.find(batch)
        total = distinct.total
        whose: Any = self._placement.arrays
        counts, ask = np.zeros((sites, len(tables)), np.int32), np.empty(sites + 1, np.int32)
        rows, moved = np.empty(total, self._type), np.empty(total, np.int32)
        args: Any = (tables, distinct.found, distinct.low, distinct.first, *whose, counts, ask, rows, moved)
        _by_owner(*args)
        place, pos = np.empty(distinct.positions, np.int32), np.empty(distinct.positions, np.int32)
        start = np.zeros(total + 1, np.int32)
        _group(distinct.parts, distinct.part_at, distinct.first, distinct.row_of, moved, place, start, pos)
        asked = [Requests(rows[begin:end], of) for (begin, end), of in zip(pairwise(ask.tolist()), counts, strict=True)]
        return Reads(place, start, pos, ask), asked


def joined(tables: np.ndarray, asked: Sequence[Requests]) -> tuple[Positions, np.ndarray]:
    """Join what all trainers ask an owner for, in rank order, into a batch to plan. Also return where each one's
    begins, int32 [trainers + 1]. `Step.slots` has one slot for each request."""
    parts, serve = np.empty((len(asked) * len(tables), 4), np.int64), np.empty(len(asked) + 1, np.int32)
    count = _parts(tables, np.concatenate([part.counts for part in asked]), parts, serve)
    return Positions(np.concatenate([part.rows for part in asked]), parts[:count]), serve


@kernel
def _by_owner(tables, found, low, first, salt, guess, lasts, counts, ask, rows, moved):
    """Order distinct rows by owner. `counts` comes as zeros. `moved` gets the new index of each row, in the order of
    tables. Owners and places are unsigned. Otherwise each would be checked for wrapping around from the end."""
    owner, owners = np.empty(len(moved), np.uint32), len(counts)
    of_table = np.empty(owners, np.int32)
    for t in range(len(tables)):
        high = np.int64(tables[t]) << ROW_BITS
        mine, of = found[low[t] : low[t] + first[t + 1] - first[t]], owner[first[t] : first[t + 1]]
        for i in range(len(of)):
            of[i] = site_in(high | mine[i], salt, guess, lasts)
        of_table[:] = 0
        for o in of:
            of_table[o] += 1
        counts[:, t] = of_table
    at, n = np.empty((len(tables), owners), np.uint32), 0
    ask[0] = 0
    for o in range(owners):
        for t in range(len(tables)):
            at[t, o] = n
            n += counts[o, t]
        ask[o + 1] = n
    for t in range(len(tables)):
        mine, of = found[low[t] : low[t] + first[t + 1] - first[t]], owner[first[t] : first[t + 1]]
        to, place = at[t], moved[first[t] : first[t + 1]]
        for i in range(len(of)):
            n = to[of[i]]
            to[of[i]] = n + 1
            rows[n] = mine[i]
            place[i] = n


@kernel
def _parts(tables, counts, parts, serve):
    """Write a part for each table of each trainer that asks for its rows, and each trainer's begin. Return how many."""
    used = n = i = 0
    serve[0] = 0
    for trainer in range(len(serve) - 1):
        for table in tables:
            if counts[i] > 0:
                parts[used, 0], parts[used, 1], parts[used, 2], parts[used, 3] = table, n, n + counts[i], 0
                used += 1
            n += counts[i]
            i += 1
        serve[trainer + 1] = n
    return used


@kernel
def _group(parts, first_part, first, row_of, moved, place, start, pos):
    """Write the place of every position, and the positions of every row. `start` comes as zeros."""
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
    # From the end: each row's positions fill its range downwards, which leaves `start` at its beginning.
    for p in range(len(place) - 1, -1, -1):
        n = start[place[p]] - 1
        start[place[p]] = n
        pos[n] = p
