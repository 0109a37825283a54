"""The planner of one bank. A use is one distinct row of a batch in the window, its place the index of the use."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from skirl.core.ids import BankIds
from skirl.core.keys import key_of, table_of
from skirl.core.tables import Schema
from skirl.oracle import loops, policies
from skirl.oracle.distinct import BatchRows, Finder
from skirl.oracle.row_states import EVICTED, RowStates, Uses
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step


@dataclass(slots=True)
class Resident:
    """Rows in the cache at some moment, the least recently used first."""

    keys: np.ndarray
    slots: np.ndarray
    next_uses: np.ndarray | None = None
    """The next batch that uses each, if the whole future is known."""


_NONE, _NO_ROWS = np.empty(0, np.bool_), np.empty(0, np.int64)


class BatchTooLarge(ValueError): ...


class BankPlanner:
    """Plans one bank. Its window is the batches that entered and are not planned yet."""

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
        first: int = 0,
    ) -> None:
        """Evicted rows can be forwarded for `hold` steps (4 is right for a `prefetch` of 2), `hold_rows` of them at a
        time. `depth` sizes arrays and changes no Step. `first`: number of the first batch."""
        self.capacity = capacity
        self.entered = self.planned = first
        self.window_rows = 0
        self._schema = schema
        self._seen = seen
        self._depth = depth
        self._finder = Finder(schema, bank)
        self._tables = self._finder.tables
        self._in_set = np.flatnonzero(seen.base[self._tables] < 0)
        """Tables whose rows `Seen` keeps in its set."""
        self._rows: RowStates
        """Made with the first batch, which says how large the window will be."""
        self._uses = Uses(depth)
        self._all_fit = policy == "min" and capacity >= int(self._finder.rows.sum())
        """True if no row ever leaves: a batch is planned when it enters, since later ones change nothing."""
        self._policy = policies.POLICIES[policy](capacity, depth)
        self._window: deque[BatchRows] = deque()
        self._steps: deque[Step] = deque()
        """Those of batches that were planned when they entered."""
        self._cache = loops.Slots(
            np.empty(capacity, np.int64),
            np.full(capacity, -1, np.int32),
            np.arange(capacity - 1, -1, -1, dtype=np.int32),
        )
        self._n_free = capacity
        # Steps whose evicted rows still have a state, and the oldest of them whose rows can be forwarded.
        self._hold = hold
        self._hold_rows = capacity if hold_rows is None else hold_rows
        self._left: deque[tuple[int, int, np.ndarray]] = deque()
        """(step, number of its first eviction, keys)."""
        self._evictions = 0
        self._held_rows = 0
        self._hold_from = first
        self._first_uses: deque[tuple[int, np.ndarray]] = deque()
        """New rows of each step that is planned and not known to be executed, for a rollback."""
        self._resident: Resident | None = resident or Resident(_NO_ROWS, _NO_ROWS)
        """What is in the cache before the first batch, until that enters."""

    def enter(self, batch: BankIds | np.ndarray, next_uses: np.ndarray | None = None) -> int:
        """Let the next batch enter the window, and return the bytes of its Step if that is planned now. After an error only
        `rollback` may be called. `next_uses`, if the whole future is known: for each distinct row, in the order of
        `Step.keys`, the next batch that uses it (`NEVER` for none)."""
        batch = BankIds.of(batch)
        distinct = self._finder.find(batch)
        first, total = distinct.first, distinct.total
        if total > self.capacity:
            raise BatchTooLarge(
                f"batch {self.entered} needs {total} rows together, the cache holds {self.capacity}: set cache to {total} "
                "rows or more, or use smaller batches"
            )
        if self._resident is not None:
            self._begin(distinct.positions, self._resident)
        rows, uses = self._rows, self._uses
        place = uses.take(total, self.entered)
        rows.name(self._tables, distinct.found, distinct.low, first, uses.handle[place : place + total])
        called, state = np.empty(total, np.int32), np.empty(total, np.int32)
        n_called, fresh = loops.link(
            self._tables, rows.arrays, distinct.found, distinct.low, first, place, uses.arrays, state, self._cache, called,
            self._all_fit,
        )  # fmt: skip
        if next_uses is None and not self._all_fit:
            self._policy.entered(called[:n_called], self.entered)
        self.window_rows += fresh
        distinct.place, distinct.next_uses = place, next_uses
        distinct.found = _NO_ROWS  # the next batch overwrites them
        self._window.append(distinct)
        self.entered += 1
        if not self._all_fit:
            return 0
        self._steps.append(self._plan())
        return self._steps[-1].nbytes

    def plan(self) -> Step:
        return self._steps.popleft() if self._all_fit else self._plan()

    def _plan(self) -> Step:
        number = self.planned
        batch = self._window.popleft()
        rows, uses, total = self._rows, self._uses, batch.total
        place, first = batch.place, batch.first
        keys, missing = np.empty(total, np.int64), np.empty(total, np.int32)
        counts = np.zeros(len(self._tables), np.int64)
        row_arrays, use_arrays = rows.arrays, uses.arrays
        loops.scan(self._tables, row_arrays, first, place, use_arrays, keys, missing, counts)
        n_missing = int(counts.sum())

        # Make room.
        residents = self.capacity - self._n_free
        need = max(0, residents + n_missing - self.capacity)
        here = uses.slot[place : place + total]
        victims = here[:0] if self._all_fit else self._policy.evict(need, here, number)
        evict_keys = np.empty(len(victims), np.int64)
        loops.leave(victims, self._evictions, row_arrays, use_arrays, self._cache, self._n_free, evict_keys)
        self._n_free += len(victims)
        self._hold_on(number, evict_keys)

        # Bring rows in.
        moves = loops.Moves(*(np.empty(n_missing, kind) for kind in [np.int64, np.int32] * 4))
        f, w, n, fetch_after = loops.arrive(
            self._tables, row_arrays, first, counts, missing, place, use_arrays, keys, self._cache, self._n_free,
            self._seen.bits, self._seen.base, self._existed(batch, missing, counts, keys), self._held(), self._hold_from,
            number - self._hold - 1, moves,
        )  # fmt: skip
        self._n_free -= n_missing
        new_keys = moves.new_keys[:n]
        self._first_uses.append((number, new_keys))  # now, so that a rollback takes them back if something fails below

        # Use them.
        slots, lasts, ends = here.copy(), missing, counts
        if not self._all_fit:
            last = None
            if self._policy.wants_last:
                last = np.empty(total, np.int32)
                loops.last_uses(self._tables, row_arrays, first, place, use_arrays, last)
            next_uses, lasts, ends = np.empty(total, np.int32), np.empty(total, np.int32), np.empty_like(counts)
            loops.use(first, place, use_arrays, self._cache, slots, next_uses, lasts, ends)
            known = next_uses if batch.next_uses is None else batch.next_uses
            self._policy.used(slots, known, number, last)
        loops.rest(self._tables, row_arrays, first, ends, lasts, place, use_arrays, slots)
        self.window_rows -= total if self._all_fit else int(ends.sum())
        uses.give(place, total)
        position_slots, group_pos = np.empty(batch.positions, np.int32), np.empty(batch.positions, np.int32)
        group_start = np.empty(total + 1, np.int32)
        loops.group(
            batch.parts, batch.part_at, batch.at, first, batch.row_of, slots, position_slots, group_start, group_pos
        )
        step = Step(
            number=number,
            slots=position_slots,
            keys=keys,
            rows=slots,
            group_start=group_start,
            group_pos=group_pos,
            evict_keys=evict_keys,
            evict_slots=victims,
            fetch_keys=moves.fetch_keys[:f],
            fetch_slots=moves.fetch_slots[:f],
            fetch_after=int(fetch_after),
            forward_step=moves.from_step[:w],
            forward_index=moves.from_index[:w],
            forward_slots=moves.forward_slots[:w],
            forward_keys=moves.forward_keys[:w],
            new_keys=new_keys,
            new_slots=moves.new_slots[:n],
            hold_from=self._hold_from,
        )
        self.planned += 1
        self._forget(number)
        return step

    def rows_ahead(self) -> Iterator[int]:
        """Yield the distinct rows of the window: now, and after each of its steps but the last, if no batch entered."""
        left = self.window_rows
        for batch in self._window:
            yield left
            left -= int(np.count_nonzero(self._uses.next[batch.place : batch.place + batch.total] < 0))

    def executed(self, number: int) -> None:
        """Mark steps before `number` as done: their first uses stay."""
        while self._first_uses and self._first_uses[0][0] < number:
            self._first_uses.popleft()

    def rollback(self, number: int) -> None:
        """Take back the first uses of steps from `number` on, which will not be executed. Nothing may be planned after."""
        self.executed(number)
        while self._first_uses:
            self._seen.discard(self._first_uses.pop()[1])

    def _begin(self, positions: int, resident: Resident) -> None:
        """Make the row states, and adopt what is resident. The array of states may take as much as the window will."""
        room = max(1 << 22, 4 * self.capacity, min(self._depth, 256) * positions)
        self._rows = RowStates(self._schema, tuple(self._tables.tolist()), room)
        self._resident = None
        self._adopt(resident)

    def _existed(self, batch: BatchRows, missing: np.ndarray, counts: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return whether missing rows exist, for those that `Seen` keeps in its set and that have no known eviction."""
        if not len(self._in_set):
            return _NONE
        existed = np.zeros(batch.total, np.bool_)
        parts = [missing[batch.first[t] : batch.first[t] + counts[t]] for t in self._in_set]
        which = np.concatenate(parts)
        which = which[self._uses.slot[batch.place + which] == -1]
        existed[which] = self._seen.claim(keys[which])
        return existed

    def _adopt(self, resident: Resident) -> None:
        rows, keys, slots = self._rows, resident.keys, resident.slots.astype(np.int32)
        tables, handles = table_of(keys), rows.handles(keys)
        small = rows.base[tables] >= 0
        self._cache.next[slots] = -1
        self._cache.row[slots] = np.where(small, keys, key_of(tables, handles))
        rows.dense[handles[small]], rows.hashed[handles[~small]] = -1 - slots[small], -1 - slots[~small]
        taken = np.zeros(self.capacity, np.bool_)
        taken[slots] = True
        free = np.flatnonzero(~taken)[::-1].astype(np.int32)
        self._cache.free[: len(free)] = free
        self._n_free = len(free)
        next_uses = np.full(len(keys), loops.NEVER, np.int32) if resident.next_uses is None else resident.next_uses
        # As if one batch before the first had used them all.
        self._policy.used(slots, next_uses, self.planned - 1, np.full(len(keys), -1, np.int32))

    def _held(self) -> loops.Held:
        lines, begin = [], 0
        for step, first, keys in self._left:
            lines.append((step, first, begin))
            begin += len(keys)
        lines.append((self.planned + 1, self._evictions, begin))
        return loops.Held(np.array(lines, np.int64), np.concatenate([keys for _, _, keys in self._left]))

    def _hold_on(self, number: int, keys: np.ndarray) -> None:
        """Keep this step's evicted rows for forwarding. Drop the oldest that are too old or too many."""
        self._left.append((number, self._evictions & (EVICTED - 1), keys))
        self._evictions = (self._evictions + len(keys)) & (EVICTED - 1)
        self._held_rows += len(keys)
        first = self._left[0][0]
        while self._hold_from < number and (self._hold_from < number - self._hold or self._held_rows > self._hold_rows):
            self._held_rows -= len(self._left[self._hold_from - first][2])
            self._hold_from += 1

    def _forget(self, number: int) -> None:
        """Forget rows that left more than `hold` steps ago and that the window does not use. If such a row comes again,
        its write-back is known to be older, without any record of it."""
        while self._left and self._left[0][0] < number - self._hold:
            _, begin, keys = self._left.popleft()
            self._rows.release(keys, begin)
