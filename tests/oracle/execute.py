"""Execute Steps on dicts, as slowly and as early as the Steps allow, and check every promise that they make."""

from collections import defaultdict

import numpy as np

from skirl.core.tables import ROW_BITS
from skirl.oracle.step import Step


class Cache:
    """A simulated cache and store."""

    def __init__(self, capacity: int, *, hold: int, hold_rows: int) -> None:
        self.capacity = capacity
        self.slots: dict[int, tuple[int, int]] = {}
        """By slot: the key in it, and the row's value."""
        self.store: dict[int, tuple[int, int]] = {}
        """By key: the step of its last write-back, and the value written."""
        self.left: dict[int, list[tuple[int, int]]] = {}
        """By step: rows that left, with their values."""
        self.uses: dict[int, int] = defaultdict(int)
        self.order: dict[int, int] = {}
        """By key: when it was last used."""
        self.steps = 0
        self.new = self.fetched = self.forwarded = 0
        self._hold, self._hold_rows, self._hold_from = hold, hold_rows, 0

    def run(self, step: Step, batch: np.ndarray) -> None:
        """Execute one Step for the keys of its batch."""
        assert step.number == self.steps
        self._evict(step, set(batch.tolist()))
        self._forward(step)
        self._fetch(step)
        self._make(step)
        self._use(step, batch.tolist())
        self.steps += 1

    def _evict(self, step: Step, batch: set[int]) -> None:
        leaving = []
        for key, slot in zip(step.evict_keys.tolist(), step.evict_slots.tolist(), strict=True):
            held, value = self.slots.pop(slot)
            assert held == key, "another row was to leave"
            assert key not in batch, "a row of the batch leaves"
            leaving.append((key, value))
            self.store[key] = step.number, value
        self.left[step.number] = leaving
        assert self._hold_from <= step.hold_from <= step.number
        assert step.hold_from >= step.number - self._hold
        self._hold_from = step.hold_from
        held = sum(len(rows) for number, rows in self.left.items() if number >= step.hold_from)
        assert held <= max(self._hold_rows, len(leaving)), "too many rows are held for forwarding"

    def _forward(self, step: Step) -> None:
        columns = (step.forward_keys, step.forward_slots, step.forward_step, step.forward_index)
        for key, slot, number, index in zip(*(column.tolist() for column in columns), strict=True):
            assert step.hold_from <= number < step.number, "forwarded from a step that is not held"
            assert self.left[number][index][0] == key
            assert self.store[key] == (number, self.left[number][index][1]), "forwarded from an old eviction"
            self._put(slot, key, self.left[number][index][1])
            self.forwarded += 1

    def _fetch(self, step: Step) -> None:
        assert -1 <= step.fetch_after < max(step.hold_from, 0) if len(step.fetch_keys) else step.fetch_after == -1
        for key, slot in zip(step.fetch_keys.tolist(), step.fetch_slots.tolist(), strict=True):
            number, value = self.store[key]
            assert number <= step.fetch_after, "fetched before it was written back"
            self._put(slot, key, value)
            self.fetched += 1

    def _make(self, step: Step) -> None:
        for key, slot in zip(step.new_keys.tolist(), step.new_slots.tolist(), strict=True):
            assert key not in self.uses, "a row is new twice"
            self._put(slot, key, 0)
            self.new += 1

    def _put(self, slot: int, key: int, value: int) -> None:
        assert 0 <= slot < self.capacity
        assert slot not in self.slots, "two rows in one slot"
        self.slots[slot] = key, value

    def _use(self, step: Step, batch: list[int]) -> None:
        assert len({key for key, _ in self.slots.values()}) == len(self.slots) <= self.capacity
        for key, slot in zip(batch, step.slots.tolist(), strict=True):
            assert self.slots[slot][0] == key, "an id is given another row's slot"
        places: dict[int, list[int]] = defaultdict(list)
        for place, key in enumerate(batch):
            places[key].append(place)
        assert step.keys.tolist() == sorted(places, key=lambda key: (key >> ROW_BITS, places[key][-1]))
        assert [self.slots[slot][0] for slot in step.rows.tolist()] == step.keys.tolist()
        assert step.group_start[0] == 0 and step.group_start[-1] == len(batch) == len(step.group_pos)
        for i, (key, slot) in enumerate(zip(step.keys.tolist(), step.rows.tolist(), strict=True)):
            group = step.group_pos[step.group_start[i] : step.group_start[i + 1]].tolist()
            assert group == places[key]
            value = self.slots[slot][1]
            assert value == self.uses[key], "the row is not as its last use left it"
            self.slots[slot] = key, value + 1
            self.uses[key] += 1
            self.order[key] = (step.number + 1) * 1_000_000 + i
        for name in ("slots", "rows", "group_start", "group_pos", "evict_slots", "fetch_slots", "new_slots"):
            assert getattr(step, name).dtype == np.int32, name

    def next_pass(self) -> None:
        """Begin the next pass: all write-backs reach the store, and steps are counted from 0 again."""
        self.steps = self._hold_from = 0
        self.left.clear()
        self.order = {key: place for place, (key, _) in enumerate(self.resident)}
        self.store = {key: (-1, value) for key, (_, value) in self.store.items()}

    @property
    def resident(self) -> list[tuple[int, int]]:
        """Return keys and slots, least recently used first."""
        held = [(key, slot) for slot, (key, _) in self.slots.items()]
        return sorted(held, key=lambda row: self.order[row[0]])
