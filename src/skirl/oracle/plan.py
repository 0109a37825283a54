"""The planner of one bank: batches of keys in, Steps out. Pure: no I/O, no torch, no clock.

It simulates the cache on the coming batches, so it can hand out slots, group positions and name every hazard before a row
moves. The same batches give the same Steps on any machine and at any speed. Deciding at run time which rows to keep, as a
cache does, would need a hash lookup an id on the device and could not know the future.

A batch is touched twice. `enter` turns its keys into entries (numbers of rows, see `entries`) and tells the past what comes:
one access a distinct row, whatever the depth. `plan`, up to `depth` batches later, makes room for it, brings its rows in and
writes the Step: at batch 16,384 x 26 and depth 200, entering takes half of the 80 ns that an id costs on one core.

Words used below. The window: batches entered and not yet planned. A use: one distinct row of one batch. The ring: the uses
of the window in order, each with the number of the next batch that uses its row. A place: the number of a use, counted from
the first ever; the ring keeps it at `place & (len(ring) - 1)`.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numba import njit

from skirl.oracle.entries import NEVER, Entries
from skirl.oracle.policy import make_policy
from skirl.oracle.seen import Seen, test_and_set
from skirl.oracle.step import Step
from skirl.tables import Schema


@dataclass(slots=True)
class Resident:
    """Rows in the cache at some moment, from the least recently used."""

    keys: np.ndarray
    slots: np.ndarray


@dataclass(slots=True)
class _Entered:
    """A batch of the window."""

    begin: int
    """The place of its first use;"""
    rows: int
    """the others follow: one for each distinct row, in order of last position."""
    row_of: np.ndarray
    """int32 [ids]: which of these rows each position has."""


class BatchTooLarge(ValueError):
    """A batch needs more rows together than the cache holds."""

    def __init__(self, number: int, needs: int, has: int, dim: int) -> None:
        super().__init__(
            f"batch {number} needs {needs} rows of dim {dim} together, the cache holds {has}: "
            f"set cache to {needs} rows or more for this dim, or use smaller batches"
        )


class BankPlanner:
    """Plans one bank.

    >>> from skirl import Table
    >>> schema = Schema.of([Table("a", 100, 4)])
    >>> planner = BankPlanner(schema, 0, capacity=2, depth=2, seen=Seen(schema))
    >>> for ids in ([1, 2], [3, 3], [1, 1]):
    ...     planner.enter(np.array(ids))
    >>> steps = [planner.plan() for _ in range(3)]
    >>> [(s.new_keys.tolist(), s.evict_keys.tolist(), s.fetches) for s in steps]
    [([1, 2], [], 0), ([3], [2], 0), ([], [], 0)]
    """

    def __init__(
        self,
        schema: Schema,
        bank: int,
        capacity: int,
        *,
        depth: int,
        seen: Seen,
        policy: str = "min",
        hold: int = 4,
        hold_rows: int | None = None,
        resident: Resident | None = None,
        resident_next: np.ndarray | None = None,
    ) -> None:
        """`hold`: steps for which evicted rows can be forwarded, as long as they are at most `hold_rows`.

        `resident`: rows in the cache at the start; `resident_next`: the first batch that uses each, if it is known.
        """
        self.capacity = capacity
        self.entered = 0
        self.planned = 0
        self.window_rows = 0
        """Distinct rows of the window."""
        self._schema = schema
        self._bank = bank
        self._seen = seen
        self._entries = Entries(schema, schema.banks[bank].tables, capacity)
        self._policy = make_policy(policy, self._entries, depth)
        self._window: deque[_Entered] = deque()
        # The ring holds the uses at places _ring_begin .. _ring_end.
        self._ring = np.empty(1024, np.int32)
        self._ring_next = np.empty(1024, np.int32)
        self._ring_begin = 0
        self._ring_end = 0
        # The simulated cache: entries know their slots, a stack has the free ones.
        self._clock = 0
        self._resident_rows = 0
        self._free_slots = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._n_free_slots = capacity
        # Steps whose evicted rows have entries still, and the oldest of them whose rows can be forwarded.
        self._hold = hold
        self._hold_rows = capacity if hold_rows is None else hold_rows
        self._left: deque[tuple[int, np.ndarray]] = deque()
        self._held_rows = 0
        self._hold_from = 0
        self._first_uses: deque[tuple[int, np.ndarray]] = deque()
        """Of each step planned and not known to be executed, for a rollback."""
        if resident is not None and len(resident.keys):
            self._adopt(resident, resident_next)

    @property
    def rows_known(self) -> int:
        """Rows that memory is spent on: resident, in the window, or evicted in the last `hold` steps."""
        return self._entries.used

    def enter(self, keys: np.ndarray, next_uses: np.ndarray | None = None) -> None:
        """The next batch enters the window. After `BatchTooLarge` the planner is done with, save for `rollback`.

        `next_uses`, if the whole future is known, gives for each distinct row in order of its last position the number of
        the next batch that uses it, `NEVER` for none; otherwise the window links uses as batches enter.
        """
        number = self.entered
        entries, row_of = self._entries.enter(keys, number)
        if len(entries) > self.capacity:
            raise BatchTooLarge(number, len(entries), self.capacity, self._schema.banks[self._bank].dim)
        self._fit_ring(len(entries))
        self._window.append(_Entered(self._ring_end, len(entries), row_of))
        columns = self._entries.columns
        if next_uses is None:
            called, fresh = _link(
                entries, self._ring, self._ring_next, self._ring_begin, self._ring_end, number, columns
            )
            self._policy.entered(called, number)
        else:
            fresh = _append(
                entries, next_uses, self._ring, self._ring_next, self._ring_begin, self._ring_end, number, columns
            )
        self._ring_end += len(entries)
        self.window_rows += fresh
        self.entered += 1

    def plan(self) -> Step:
        """The Step of the next batch of the window."""
        number = self.planned
        batch = self._window.popleft()
        columns = self._entries.columns
        entries, next_uses, missing = _unroll(self._ring, self._ring_next, batch.begin, batch.rows, columns.slot)

        # Make room.
        need = max(0, self._resident_rows + len(missing) - self.capacity)
        victims = self._policy.evict(need, entries, number)
        evict_keys, evict_slots = columns.key[victims], columns.slot[victims]
        self._n_free_slots = _leave(victims, columns, number, self._free_slots, self._n_free_slots)
        self._hold_on(number, victims)

        # Bring rows in.
        fetched, forwarded, new, fetch_after, self._n_free_slots = _arrive(
            missing,
            columns,
            self._free_slots,
            self._n_free_slots,
            self._seen.bits,
            self._seen.base,
            self._hold_from,
            number - self._hold - 1,
        )
        new_keys = columns.key[new]
        self._first_uses.append((number, new_keys))  # now, so that a failure further down takes them back
        self._resident_rows += len(missing) - len(victims)

        # Use them.
        self.window_rows -= _use(entries, columns, self._clock, batch.begin)
        self._clock += batch.rows
        self._policy.used(entries, next_uses, number)
        rows = columns.slot[entries]
        slots, group_start, group_pos = _group(batch.row_of, rows)
        step = Step(
            number=number,
            slots=slots,
            keys=columns.key[entries],
            rows=rows,
            group_start=group_start,
            group_pos=group_pos,
            evict_keys=evict_keys,
            evict_slots=evict_slots,
            fetch_keys=columns.key[fetched],
            fetch_slots=columns.slot[fetched],
            fetch_after=int(fetch_after),
            forward_step=columns.left_step[forwarded].astype(np.int64),
            forward_index=columns.left_index[forwarded],
            forward_slots=columns.slot[forwarded],
            forward_keys=columns.key[forwarded],
            new_keys=new_keys,
            new_slots=columns.slot[new],
            hold_from=self._hold_from,
        )
        self._ring_begin = batch.begin + batch.rows
        self.planned += 1
        self._forget(number)
        return step

    def executed(self, number: int) -> None:
        """Steps before `number` are done: their first uses stay."""
        while self._first_uses and self._first_uses[0][0] < number:
            self._first_uses.popleft()

    def rollback(self, number: int) -> None:
        """Steps from `number` on will not be executed: their first uses did not happen. The planner is done with."""
        self.executed(number)
        while self._first_uses:
            self._seen.discard(self._first_uses.pop()[1])

    def _adopt(self, resident: Resident, next_uses: np.ndarray | None) -> None:
        """Start with rows already in the cache."""
        before = -1  # as if one batch before the first had used them all
        entries, _ = self._entries.enter(resident.keys, before)
        columns = self._entries.columns
        columns.slot[entries] = resident.slots
        columns.clock[entries] = np.arange(-len(entries), 0)
        if next_uses is None:
            next_uses = np.full(len(entries), NEVER, np.int32)
        taken = np.zeros(self.capacity, np.bool_)
        taken[resident.slots] = True
        free = np.flatnonzero(~taken)[::-1].astype(np.int32)
        self._free_slots[: len(free)] = free
        self._n_free_slots = len(free)
        self._resident_rows = len(entries)
        self._policy.used(entries, next_uses, before)

    def _fit_ring(self, more: int) -> None:
        """Make room for `more` uses."""
        size = grown = len(self._ring)
        while self._ring_end - self._ring_begin + more > grown:
            grown *= 2
        if grown == size:
            return
        places = np.arange(self._ring_begin, self._ring_end)
        for name in ("_ring", "_ring_next"):
            ring = np.empty(grown, np.int32)
            ring[places & (grown - 1)] = getattr(self, name)[places & (size - 1)]
            setattr(self, name, ring)

    def _hold_on(self, number: int, victims: np.ndarray) -> None:
        """Keep this step's evicted rows for forwarding; let go of the oldest that are too old or too many."""
        self._left.append((number, victims))
        self._held_rows += len(victims)
        first = self._left[0][0]
        while self._hold_from < number and (self._hold_from < number - self._hold or self._held_rows > self._hold_rows):
            self._held_rows -= len(self._left[self._hold_from - first][1])
            self._hold_from += 1

    def _forget(self, number: int) -> None:
        """Free the entries of rows that left more than `hold` steps ago and that the window does not use.

        If such a row comes again, its write-back is known to be one of those before the last `hold`: that is remembered
        of every row at no cost.
        """
        while self._left and self._left[0][0] < number - self._hold:
            step, victims = self._left.popleft()
            self._entries.release(_gone(victims, self._entries.columns, step, self._ring_begin))


@njit(nogil=True, cache=True)
def _link(entries, ring, ring_next, begin, end, number, columns):
    """Append a batch's uses to the ring, and write its number into the use before of each row.

    Returns the resident rows that nobody in the window wanted, and how many rows are fresh in the window.
    """
    mask = len(ring) - 1
    called = np.empty(len(entries), np.int32)
    n_called = fresh = 0
    for i in range(len(entries)):
        entry = entries[i]
        before = columns.last_pos[entry]
        if before >= begin:
            ring_next[before & mask] = number
        else:
            fresh += 1
            if columns.slot[entry] >= 0:
                called[n_called] = entry
                n_called += 1
        ring[(end + i) & mask] = entry
        ring_next[(end + i) & mask] = NEVER
        columns.last_pos[entry] = end + i
        columns.last_batch[entry] = number
    return called[:n_called], fresh


@njit(nogil=True, cache=True)
def _append(entries, next_uses, ring, ring_next, begin, end, number, columns):
    """Append a batch's uses, whose next ones are known, to the ring; how many rows are fresh in the window."""
    mask = len(ring) - 1
    fresh = 0
    for i in range(len(entries)):
        entry = entries[i]
        fresh += columns.last_pos[entry] < begin
        ring[(end + i) & mask] = entry
        ring_next[(end + i) & mask] = next_uses[i]
        columns.last_pos[entry] = end + i
        columns.last_batch[entry] = number
    return fresh


@njit(nogil=True, cache=True)
def _unroll(ring, ring_next, begin, rows, slot):
    """A batch's uses out of the ring: entries, their next uses, and the entries that are not resident."""
    mask = len(ring) - 1
    entries = np.empty(rows, np.int32)
    next_uses = np.empty(rows, np.int32)
    missing = np.empty(rows, np.int32)
    n = 0
    for i in range(rows):
        entry = ring[(begin + i) & mask]
        entries[i] = entry
        next_uses[i] = ring_next[(begin + i) & mask]
        if slot[entry] < 0:
            missing[n] = entry
            n += 1
    return entries, next_uses, missing[:n].copy()


@njit(nogil=True, cache=True)
def _leave(victims, columns, number, free_slots, n_free):
    """Take rows out of the cache; the number of free slots after it."""
    for i in range(len(victims)):
        entry = victims[i]
        free_slots[n_free] = columns.slot[entry]
        n_free += 1
        columns.slot[entry] = -1
        columns.left_step[entry] = number
        columns.left_index[entry] = i
    return n_free


@njit(nogil=True, cache=True)
def _arrive(missing, columns, free_slots, n_free, bits, base, hold_from, long_ago):
    """Give each missing row a slot and a source; return them by source, and the write-back that fetches wait for."""
    fetched = np.empty(len(missing), np.int32)
    forwarded = np.empty(len(missing), np.int32)
    new = np.empty(len(missing), np.int32)
    f = w = n = 0
    after = np.int64(-1)
    for entry in missing:
        n_free -= 1
        columns.slot[entry] = free_slots[n_free]
        left = columns.left_step[entry]
        if not test_and_set(bits, base, columns.key[entry]):
            new[n] = entry
            n += 1
        elif left >= hold_from:
            forwarded[w] = entry
            w += 1
        else:
            fetched[f] = entry
            f += 1
            # An entry that remembers no eviction: it was at step `long_ago` at the latest, see `_forget`.
            after = max(after, np.int64(left) if left >= 0 else np.int64(long_ago))
    return fetched[:f], forwarded[:w], new[:n], after, n_free


@njit(nogil=True, cache=True)
def _use(entries, columns, clock, begin):
    """Record a batch's uses; return how many of its rows the window does not use again."""
    done = 0
    for i in range(len(entries)):
        entry = entries[i]
        columns.clock[entry] = clock + i
        done += columns.last_pos[entry] == begin + i
    return done


@njit(nogil=True, cache=True)
def _gone(victims, columns, step, ring_begin):
    """Those of a step's victims that have not come back, and that no batch of the window uses."""
    gone = np.empty(len(victims), np.int32)
    n = 0
    for entry in victims:
        if columns.slot[entry] < 0 and columns.left_step[entry] == step and columns.last_pos[entry] < ring_begin:
            gone[n] = entry
            n += 1
    return gone[:n]


@njit(nogil=True, cache=True)
def _group(row_of, slot_of):
    """Slots by position, and positions by row: a counting sort."""
    slots = np.empty(len(row_of), np.int32)
    start = np.zeros(len(slot_of) + 1, np.int32)
    for p in range(len(row_of)):
        slots[p] = slot_of[row_of[p]]
        start[row_of[p] + 1] += 1
    for i in range(len(slot_of)):
        start[i + 1] += start[i]
    cursor = start[:-1].copy()
    pos = np.empty(len(row_of), np.int32)
    for p in range(len(row_of)):
        pos[cursor[row_of[p]]] = p
        cursor[row_of[p]] += 1
    return slots, start, pos
