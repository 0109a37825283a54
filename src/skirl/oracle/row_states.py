"""What the planner knows of rows: the state of each, one int32, and their uses in the window, one for each distinct row of
each batch. Each use of a row is linked to the next."""

import mmap
from typing import Any, NamedTuple

import numpy as np

from skirl.core.keys import MAX_ROWS, ROW_BITS
from skirl.core.tables import Schema
from skirl.tools.hash_index import HashIndex, ask, find, insert, remove
from skirl.tools.jit import AHEAD, kernel

EVICTED = 1 << 30
"""States below -EVICTED mean evicted recently. Also the count after which evictions are numbered from 0 again."""

MOST_IN_ARRAY = 1 << 26
"""Most rows whose states are in the array: 256 MB."""


class RowArrays(NamedTuple):
    base: np.ndarray
    key: np.ndarray
    dense: np.ndarray
    hashed: np.ndarray


class RowStates:
    """The states of all rows of a bank.

        0                   nothing: not in the window, not resident, and no eviction is remembered
        place + 1           in the window: the place of its last use there (see `Uses`)
        -1 - slot           resident, and not used in the window
        -2**30 - 1 - number evicted: the number of that eviction, modulo 2**30

    Those of small tables are in one array, row after row; a hash index finds all others. A handle is the index of a state,
    in the array or among the hashed ones.
    """

    def __init__(self, schema: Schema, tables: tuple[int, ...], room: int) -> None:
        self.base = np.full(len(schema.tables), -1, np.int64)
        """[all tables]: the handle of the table's row 0; -1: its rows are hashed, and whatever refers to one of them has its
        handle instead of its key."""
        used = 0
        for table in sorted(tables, key=lambda i: (schema.tables[i].rows, i)):
            if used + schema.tables[table].rows <= min(room, MOST_IN_ARRAY):
                self.base[table] = used
                used += schema.tables[table].rows
        self.dense = zeros(used)
        self.hashed = np.zeros(0, np.int32)
        self.key = np.empty(0, np.int64)
        self.index = HashIndex()
        self.free = np.empty(0, np.int32)
        self.n_free = 0
        self.any_hashed = any(self.base[table] < 0 for table in tables)

    @property
    def arrays(self) -> RowArrays:
        """The arrays, as long as no more rows come."""
        return RowArrays(self.base, self.key, self.dense, self.hashed)

    def reserve(self, count: int) -> None:
        self.index.reserve(count)
        used = len(self.key) - self.n_free
        if count <= self.n_free:
            return
        size = max(1024, len(self.key))
        while size < used + count:
            size *= 2
        hashed, key = np.zeros(size, np.int32), np.empty(size, np.int64)
        hashed[: len(self.key)], key[: len(self.key)] = self.hashed, self.key
        free = np.empty(size, np.int32)
        fresh = np.arange(size - 1, len(self.key) - 1, -1, dtype=np.int32)
        free[: len(fresh)] = fresh
        free[len(fresh) : len(fresh) + self.n_free] = self.free[: self.n_free]
        self.n_free += len(fresh)
        self.hashed, self.key, self.free = hashed, key, free

    def handles(self, keys: np.ndarray) -> np.ndarray:
        """Return the handle of each row, int32. Make those that do not exist."""
        out = np.empty(len(keys), np.int32)
        if self.any_hashed:
            self.reserve(len(keys))
        args: Any = (keys, self.base, self.key, self.index.keys, self.index.values, self.free, self.n_free, out)
        added = _handles(*args)
        self.n_free -= added
        self.index.count += added
        return out

    def name(self, tables: np.ndarray, found: np.ndarray, low: np.ndarray, first: np.ndarray, out: np.ndarray) -> None:
        """Write the handles of a batch's distinct rows that are outside of small tables; make those that are missing.
        Table t's rows are found[low[t]:], and their handles go to out[first[t]:first[t + 1]]."""
        for t in np.flatnonzero(self.base[tables] < 0):
            of = out[first[t] : first[t + 1]]
            of[:] = self.handles(tables[t] << ROW_BITS | found[low[t] : low[t] + len(of)])

    def release(self, keys: np.ndarray, first: int) -> None:
        """Forget hashed rows that are as their eviction left them. The first one's eviction has the number `first`."""
        if self.any_hashed:
            removed = _release(
                keys, first, self.base, self.hashed, self.index.keys, self.index.values, self.free, self.n_free
            )
            self.n_free += removed
            self.index.count -= removed

    @property
    def hashed_rows(self) -> int:
        return len(self.key) - self.n_free


def zeros(count: int) -> np.ndarray:
    """Return int32 zeros in large pages, backed when first written. With small pages, accesses wait for page tables too."""
    nbytes = 4 * count
    if nbytes < 1 << 22 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(count, np.int32)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no large pages
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.int32)


@kernel
def _handles(keys, base, entry_key, index_keys, index_values, free, n_free, out):
    before = n_free
    mask, last = len(index_keys) - 1, len(keys) - 1
    for i in range(len(keys)):
        if base[keys[min(i + AHEAD, last)] >> ROW_BITS] < 0:
            ask(index_keys, index_values, mask, keys[min(i + AHEAD, last)])
        key = keys[i]
        table, row = key >> ROW_BITS, key & (MAX_ROWS - 1)
        if base[table] >= 0:
            out[i] = base[table] + row
            continue
        handle = find(index_keys, index_values, mask, key)
        if handle < 0:
            n_free -= 1
            handle = free[n_free]
            insert(index_keys, index_values, mask, key, handle)
            entry_key[handle] = key
        out[i] = handle
    return before - n_free


@kernel
def _release(keys, first, base, hashed, index_keys, index_values, free, n_free):
    mask = len(index_keys) - 1
    removed, last = 0, len(keys) - 1
    for i in range(len(keys)):
        ask(index_keys, index_values, mask, keys[min(i + AHEAD, last)])
        if base[keys[i] >> ROW_BITS] >= 0:
            continue
        handle = find(index_keys, index_values, mask, keys[i])
        if handle >= 0 and hashed[handle] == -EVICTED - 1 - ((first + i) & (EVICTED - 1)):
            hashed[handle] = 0
            remove(index_keys, index_values, mask, keys[i])
            free[n_free + removed] = handle
            removed += 1
    return removed


MOST = 1 << 30
"""Most places: an int32 has to hold them and other states as well."""
AT_ONCE = 1 << 26
"""Most places whose memory is allocated at the first batch. Pages are backed when first written."""


class UseArrays(NamedTuple):
    handle: np.ndarray
    next: np.ndarray
    slot: np.ndarray
    batch: np.ndarray
    bits: int


class Uses:
    """The uses of all batches of the window. Those of one batch are adjacent, in blocks whose size is a power of two.
    The slot of a use that is not planned: 0 or more, the row is there; -1, not known: an earlier use comes first, or
    the row is nowhere; < -EVICTED, it was evicted: the number of the eviction, as in the row's state."""

    def __init__(self, depth: int) -> None:
        self.bits = 0
        """Size of a block, as a power of two. The first batch that has any uses fixes it."""
        self.handle = self.next = self.slot = np.empty(0, np.int32)
        self.batch = np.empty(0, np.int32)
        """By block: the number of the batch that has it; -1: none."""
        self._depth = depth
        self._next = 0
        """The block after those that were taken last."""

    @property
    def arrays(self) -> UseArrays:
        """The arrays, as long as no more batches come."""
        return UseArrays(self.handle, self.next, self.slot, self.batch, self.bits)

    def take(self, count: int, number: int) -> int:
        blocks = self._blocks(count)
        if count and not self.bits:
            self.bits = max(4, (count // 64).bit_length())
            blocks = self._blocks(count)
            self._grow(max(blocks, min(blocks * (self._depth + 1), self._blocks(AT_ONCE))))
        first = self._next if self._next + blocks <= len(self.batch) else 0
        if blocks > len(self.batch) or (self.batch[first : first + blocks] >= 0).any():
            first = len(self.batch)
            self._grow(max(blocks, first // 8))
        self._next = first + blocks
        self.batch[first : first + blocks] = number
        return first << self.bits

    def give(self, place: int, count: int) -> None:
        """Free the uses that begin there: their batch is planned. Batches are planned in the order in which they came."""
        first = place >> self.bits
        self.batch[first : first + self._blocks(count)] = -1

    def _blocks(self, count: int) -> int:
        return -(-count >> self.bits)

    def _grow(self, more: int) -> None:
        """Add blocks. Places stay what they are."""
        blocks = len(self.batch)
        if (blocks + more) << self.bits > MOST:
            raise MemoryError(
                f"a window of more than {MOST:,} distinct rows is too large to plan: set depth to a smaller number of "
                "batches, or to 'epoch'"
            )
        for name in ("handle", "next", "slot"):
            grown = np.empty((blocks + more) << self.bits, np.int32)
            grown[: blocks << self.bits] = getattr(self, name)
            setattr(self, name, grown)
        self.batch = np.concatenate([self.batch, np.full(more, -1, np.int32)])
