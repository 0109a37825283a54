"""What the planner knows of a row: one entry for every row that is resident, in the window, or recently evicted.

Memory is O(cache + window): an entry costs 48 bytes in columns of fixed width, reused as rows come and go. Columns rather
than one record per row, because most passes over a batch read two or three of them: a 48-byte record would bring 64 bytes
from memory to use 8.

The index from key to entry is a plain array for small tables (one access) and a hash for large ones (4 bytes a row of an
882.8M-row table would be 3.5 GB).
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from skirl.index import HashIndex, find, insert, remove
from skirl.tables import MAX_ROWS, ROW_BITS, Schema

NEVER = np.int32(2**31 - 1)
"""A next use that the window does not know of."""

NOBODY = np.int64(-(2**62))
"""No batch has met this entry."""

LONG_AGO = np.int32(-(2**30))
"""The step that evicted a row, where nothing is remembered of it."""


class Columns(NamedTuple):
    """The columns of all entries, as kernels take them."""

    key: np.ndarray  # int64
    slot: np.ndarray  # int32; -1: not resident
    last_batch: np.ndarray  # int32; the last batch of the window, or before it, that uses the row
    last_pos: np.ndarray  # int64; that use's place in the planner's ring, -1 if there is none
    clock: np.ndarray  # int64; grows with every planned use: order of recency
    met: np.ndarray  # int64; the batch that entered last with this row << 32 | the row's rank in it
    left_step: np.ndarray  # int32; the step that evicted the row last
    left_index: np.ndarray  # int32; its place among that step's evicted rows


_WIDE = {"key", "last_pos", "clock", "met"}


class Index(NamedTuple):
    """Arrays of the index from key to entry."""

    dense: np.ndarray  # int32; entry + 1, 0: none
    base: np.ndarray  # int64 [tables]; where a table begins in dense, -1: it is in the hash
    keys: np.ndarray
    values: np.ndarray


class Entries:
    """Entries with their index and the list of free ones."""

    def __init__(self, schema: Schema, tables: tuple[int, ...], capacity: int) -> None:
        self.size = 0
        self.n_free = 0
        self.free = np.empty(0, np.int32)
        self.columns = Columns(*(np.empty(0, np.int64 if name in _WIDE else np.int32) for name in Columns._fields))
        self.hash = HashIndex()
        self._base = np.full(len(schema.tables), -1, np.int64)
        room, used = max(1 << 22, 4 * capacity), 0  # stays O(cache), and 16 MB at most for a small cache
        for table in sorted(tables, key=lambda i: (schema.tables[i].rows, i)):
            if used + schema.tables[table].rows <= room:
                self._base[table] = used
                used += schema.tables[table].rows
        self._dense = np.zeros(used, np.int32)  # zero pages are not backed until written
        self._grow(1024)

    @property
    def used(self) -> int:
        """Entries in use."""
        return self.size - self.n_free

    @property
    def index(self) -> Index:
        """The index as kernels take it; taken anew after `enter`."""
        return Index(self._dense, self._base, self.hash.keys, self.hash.values)

    def enter(self, keys: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Find or make the entry of every key of a batch; no two batches have the same `number`.

        Returns the distinct entries in order of their last position, and for every position its place among them. The
        columns may be replaced: take them anew afterwards.
        """
        ranks = np.empty(len(keys), np.int32)
        found = np.empty(len(keys), np.int32)
        todo, rows = len(keys), 0
        while True:
            room = len(self.hash.keys) // 2 - self.hash.count
            todo, rows, self.n_free, added = _enter(
                keys, todo, number, self.columns, self.index, self.free, self.n_free, room, ranks, found, rows
            )
            self.hash.count += added
            if not todo:
                break
            # How many rows are new is known only now: making room for every id first took up to five times the memory.
            if not self.n_free:
                self._grow(2 * self.size)
            self.hash.reserve(1)
        _turn(ranks, rows)
        return found[:rows][::-1].copy(), ranks

    def release(self, entries: np.ndarray) -> None:
        """Forget rows that are neither resident nor in the window."""
        self.n_free, removed = _release(entries, self.columns, self.index, self.free, self.n_free)
        self.hash.count -= removed

    def _grow(self, size: int) -> None:
        old = self.columns._asdict()
        del self.columns  # each column is let go as soon as it is copied
        grown = {}
        for name in Columns._fields:
            column = old.pop(name)
            grown[name] = np.empty(size, column.dtype)  # pages are backed when first written
            grown[name][: self.size] = column
        grown["slot"][self.size :] = -1  # policies look at all slots; `_enter` fills the other columns
        self.columns = Columns(**grown)
        added = np.arange(size - 1, self.size - 1, -1, dtype=np.int32)
        self.free = np.concatenate([added, self.free[: self.n_free], np.empty(self.used, np.int32)])
        self.n_free += len(added)
        self.size = size


@njit(nogil=True, cache=True)
def _enter(keys, todo, number, columns, index, free, n_free, room, ranks, found, rows):
    """Rank the first `todo` keys, from the last one; stop at a key that needs an entry or a place that is not there."""
    mask = len(index.keys) - 1
    added = 0
    # From the last position to the first: a row is met first at its last position, which is the order wanted.
    for p in range(todo - 1, -1, -1):
        key = keys[p]
        base = index.base[key >> ROW_BITS]
        if base >= 0:
            place = base + (key & (MAX_ROWS - 1))
            entry = np.int64(index.dense[place]) - 1
        else:
            place = np.int64(-1)
            entry = np.int64(find(index.keys, index.values, mask, key))
        if entry < 0:
            if n_free == 0 or (place < 0 and added == room):
                return p + 1, rows, n_free, added
            n_free -= 1
            entry = np.int64(free[n_free])
            if place >= 0:
                index.dense[place] = entry + 1
            else:
                insert(index.keys, index.values, mask, key, entry)  # pyright: ignore[reportArgumentType]
                added += 1
            columns.key[entry] = key
            columns.slot[entry] = -1
            columns.last_batch[entry] = -1
            columns.last_pos[entry] = -1
            columns.clock[entry] = 0
            columns.met[entry] = NOBODY
            columns.left_step[entry] = LONG_AGO
            columns.left_index[entry] = 0
        met = columns.met[entry]
        if met >> 32 == number:
            ranks[p] = met & 0xFFFFFFFF
        else:
            columns.met[entry] = (np.int64(number) << 32) | rows
            ranks[p] = rows
            found[rows] = entry
            rows += 1
    return 0, rows, n_free, added


@njit(nogil=True, cache=True)
def _turn(ranks, rows):
    """Count ranks from the other end."""
    for p in range(len(ranks)):
        ranks[p] = rows - 1 - ranks[p]


@njit(nogil=True, cache=True)
def _release(entries, columns, index, free, n_free):
    mask = len(index.keys) - 1
    removed = 0
    for entry in entries:
        key = columns.key[entry]
        base = index.base[key >> ROW_BITS]
        if base >= 0:
            index.dense[base + (key & (MAX_ROWS - 1))] = 0
        else:
            remove(index.keys, index.values, mask, key)
            removed += 1
        columns.slot[entry] = -1
        free[n_free] = entry
        n_free += 1
    return n_free, removed
