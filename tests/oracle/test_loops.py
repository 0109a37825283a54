"""The planner's loops, each compared with dicts: a window is entered, then planned with randomly chosen victims."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.keys import key_of, table_of
from skirl.core.positions import Positions
from skirl.core.tables import Schema
from skirl.oracle import loops
from skirl.oracle.distinct import Finder
from skirl.oracle.loops import NEVER
from skirl.oracle.row_states import EVICTED, RowStates
from skirl.oracle.seen import Seen
from skirl.oracle.uses import Uses
from tests.cases import cases

SCHEMA = Schema.of([Table("in the array", 40, 4), Table("hashed", 5000, 4), Table("in a set", 1 << 40, 4)])
TABLES = np.arange(3)
BORDERS = np.array([0, 1, 3])

rows = st.tuples(st.integers(0, 2), st.integers(0, 9)).map(lambda row: key_of(row[0], row[1]))
batches = st.lists(st.lists(rows, min_size=1, max_size=9), min_size=1, max_size=7)


class Planned:
    """The loops, called as `BankPlanner` calls them, and a dict that tracks every row."""

    def __init__(self, window: list[list[int]], capacity: int, residents: list[int]) -> None:
        self.rows, self.uses, self.seen = RowStates(SCHEMA, (0, 1, 2), room=50), Uses(len(window)), Seen(SCHEMA)
        assert (self.rows.base >= 0).tolist() == [True, False, False]
        self.free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self.cache = loops.Slots(np.empty(capacity, np.int64), np.full(capacity, -1, np.int32), self.free)
        self.slot_of = {key: slot for slot, key in enumerate(residents)}
        self.left: list[tuple[int, int, np.ndarray]] = []
        """For each step: its number, the number of its first eviction, and the keys."""
        self.evictions = EVICTED - 3  # numbers wrap around soon
        self.exist = set(residents)
        self.finder, self.window = Finder(SCHEMA, 0), window
        self.planned = 0
        self.first: list[np.ndarray] = []
        self.keys: list[np.ndarray] = []
        self.place: list[int] = []
        self._adopt(residents)

    def _adopt(self, residents: list[int]) -> None:
        keys, slots = np.array(residents, np.int64), np.arange(len(residents), dtype=np.int32)
        handles = self.rows.handles(keys)
        loops.adopt(keys, handles, slots, self.rows.arrays, self.cache)
        self.n_free = len(self.free) - len(residents)
        self.seen.add(keys)

    def enter(self, number: int) -> None:
        """Enter a batch, and check `link`: the resident rows that nobody wanted before, and the number of fresh rows in
        the window."""
        batch = Positions.of(np.array(self.window[number], np.int64))
        found = self.finder.find(batch)
        first, total = found.first, int(found.first[-1])
        place = self.uses.take(total, number)
        handles = self.uses.handle[place : place + total]
        self.rows.name(TABLES, found.found, found.low, first, handles)
        called, state, told = np.empty(total, np.int32), np.empty(total, np.int32), np.zeros((3, 2), np.int64)
        loops.link(
            BORDERS, TABLES, self.rows.arrays, found.found, found.low, first, place, self.uses.arrays, state, self.cache,
            called, told, 0, 2,
        )  # fmt: skip
        low = [found.found[found.low[t] : found.low[t] + n] for t, n in enumerate(np.diff(first))]
        keys = np.concatenate([key_of(t, part) for t, part in enumerate(low)])
        assert sorted(keys.tolist()) == sorted(set(self.window[number]))
        before = {key for batch in self.keys[self.planned :] for key in batch.tolist()}
        for t in range(3):
            mine = [key for key in keys[first[t] : first[t + 1]].tolist() if key not in before]
            assert told[t, 1] == len(mine)
            wanted = called[first[t] : first[t] + told[t, 0]].tolist()
            assert wanted == [self.slot_of[key] for key in mine if key in self.slot_of]
        fresh = [key for key in keys.tolist() if key not in before]
        n_called, n_fresh = loops.close_up(first, told, called)
        assert called[:n_called].tolist() == [self.slot_of[key] for key in fresh if key in self.slot_of]
        assert n_fresh == len(fresh)
        self.first.append(first)
        self.keys.append(keys)
        self.place.append(place)

    def chained(self) -> None:
        """Check that every use in the window knows the next use of its row."""
        for number, keys in list(enumerate(self.keys))[self.planned :]:
            for i, key in enumerate(keys.tolist()):
                later = [(n, k.tolist().index(key)) for n, k in enumerate(self.keys) if n > number and key in k]
                expected = self.place[later[0][0]] + later[0][1] if later else -1
                assert self.uses.next[self.place[number] + i] == expected

    def scan(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first, keys = self.first[number], np.empty(len(self.keys[number]), np.int64)
        missing, counts = np.empty(len(keys), np.int32), np.zeros(3, np.int64)
        loops.scan(
            BORDERS, TABLES, self.rows.arrays, first, self.place[number], self.uses.arrays, keys, missing, counts, 0, 2
        )  # fmt: skip
        assert (keys == self.keys[number]).all()
        for t in range(3):
            absent = [i for i in range(first[t], first[t + 1]) if int(keys[i]) not in self.slot_of]
            assert missing[first[t] : first[t] + counts[t]].tolist() == absent
        return keys, missing, counts

    def leave(self, number: int, victims: list[int]) -> None:
        slots, out = np.array([self.slot_of[key] for key in victims], np.int32), np.empty(len(victims), np.int64)
        loops.leave(slots, self.evictions, self.rows.arrays, self.uses.arrays, self.cache, self.n_free, out)
        assert out.tolist() == victims
        self.n_free += len(victims)
        assert self.free[self.n_free - len(victims) : self.n_free].tolist() == slots.tolist()
        self.left.append((number, self.evictions, out))
        self.evictions = (self.evictions + len(victims)) & (EVICTED - 1)
        for key in victims:
            del self.slot_of[key]

    def arrive(self, number: int, keys: np.ndarray, missing: np.ndarray, counts: np.ndarray, hold_from: int) -> None:
        first, n = self.first[number], int(counts.sum())
        ways, moves = ("fetched", "forwarded", "new"), loops.Moves.of(n)
        come, into = dict(zip(ways, moves[:6:2])), dict(zip(ways, moves[1:6:2]))
        step, index = moves.from_step, moves.from_index
        lines, begin = [], 0
        for of, start, left in self.left:
            lines.append((of, start, begin))
            begin += len(left)
        steps = np.array([*lines, (number + 1, self.evictions, begin)], np.int64)
        absent = [int(i) for t in range(3) for i in missing[first[t] : first[t] + counts[t]]]
        existed = np.array([key in self.exist for key in keys.tolist()])
        told: Any = (
            TABLES, self.rows.arrays, first, counts, missing, self.place[number], self.uses.arrays, keys, self.cache,
            self.n_free, self.seen.bits, self.seen.base, existed,
            loops.Held(steps, np.concatenate([left for _, _, left in self.left])), hold_from, -7, moves,
        )  # fmt: skip
        f, w, m, after = loops.arrive(*told)
        latest = {int(key): (of, i) for of, _, left in self.left for i, key in enumerate(left)}
        sources: dict[str, list[int]] = {way: [] for way in ways}
        waits = -1
        for i in absent:
            key = int(keys[i])
            of = latest.get(key)
            kind = "new" if key not in self.exist else "forwarded" if of and of[0] >= hold_from else "fetched"
            sources[kind].append(key)
            if kind == "fetched":
                waits = max(waits, of[0] if of else -7)
            self.n_free -= 1
            self.slot_of[key] = int(self.free[self.n_free])
            assert self.uses.slot[self.place[number] + i] == self.slot_of[key]
        for way, count in zip(ways, (f, w, m), strict=True):
            assert come[way][:count].tolist() == sources[way]
            assert into[way][:count].tolist() == [self.slot_of[key] for key in sources[way]]
        assert after == waits
        assert [*zip(step[:w].tolist(), index[:w].tolist())] == [latest[key] for key in sources["forwarded"]]
        assert self.seen.has(keys[self.seen.base[table_of(keys)] >= 0]).all()
        self.exist |= set(keys.tolist())

    def use(self, number: int) -> None:
        keys, first = self.keys[number], self.first[number]
        last = np.empty(len(keys), np.int32)
        loops.last_uses(TABLES, self.rows.arrays, first, self.place[number], self.uses.arrays, last)
        entered = {n: set(batch.tolist()) for n, batch in enumerate(self.keys)}
        assert last.tolist() == [max(n for n in entered if key in entered[n]) for key in keys.tolist()]
        slots, next_uses, lasts = (np.empty(len(keys), np.int32) for _ in range(3))
        counts = np.zeros(3, np.int64)
        loops.use(
            BORDERS, TABLES, self.rows.arrays, first, self.place[number], self.uses.arrays, self.cache, slots, next_uses,
            lasts, counts, 0, 2,
        )  # fmt: skip
        assert slots.tolist() == [self.slot_of[key] for key in keys.tolist()]
        later = [[n for n in entered if n > number and key in entered[n]] for key in keys.tolist()]
        assert next_uses.tolist() == [min(numbers) if numbers else NEVER for numbers in later]
        assert counts.tolist() == [sum(not of for of in later[first[t] : first[t + 1]]) for t in range(3)]
        self.planned = number + 1


@cases(150)
@given(
    window=batches, residents=st.lists(rows, max_size=8, unique=True), ahead=st.integers(1, 7), seed=st.integers(0, 99)
)
def test_a_window_against_dicts(window, residents, ahead, seed):
    rng, capacity = np.random.default_rng(seed), max(len(residents), max(len(set(batch)) for batch in window)) + 2
    planned = Planned(window, capacity, residents)
    for number, batch in enumerate(window):
        while len(planned.keys) < min(len(window), number + ahead):
            planned.enter(len(planned.keys))
            planned.chained()
        keys, missing, counts = planned.scan(number)
        others = [key for key in planned.slot_of if key not in batch]
        need = max(0, len(planned.slot_of) + int(counts.sum()) - capacity)
        victims = rng.permutation(others)[: int(rng.integers(need, len(others) + 1))].tolist()
        planned.leave(number, victims)
        planned.arrive(number, keys, missing, counts, hold_from=max(0, number - int(rng.integers(3))))
        planned.use(number)


@cases(150)
@given(batch=st.lists(rows, min_size=1, max_size=40), seed=st.integers(0, 99))
def test_positions_are_grouped_by_row(batch, seed):
    finder, keys = Finder(SCHEMA, 0), np.array(batch, np.int64)
    found = finder.find(Positions.of(keys))
    first, total = found.first, int(found.first[-1])
    rows = np.random.default_rng(seed).permutation(100)[:total].astype(np.int32)
    slots, pos, start = np.empty(len(keys), np.int32), np.empty(len(keys), np.int32), np.empty(total + 1, np.int32)
    start[-1] = len(keys)
    loops.group(
        BORDERS, found.parts, found.part_at, found.at, first, found.row_of, rows, slots, start, pos, 0, 2
    )  # fmt: skip
    low = [found.found[found.low[t] : found.low[t] + n] for t, n in enumerate(np.diff(first))]
    distinct = np.concatenate([key_of(t, part) for t, part in enumerate(low)])
    for i, key in enumerate(distinct):
        at = np.flatnonzero(keys == key)
        assert pos[start[i] : start[i + 1]].tolist() == at.tolist(), "ascending in each group"
        assert (slots[at] == rows[i]).all()
