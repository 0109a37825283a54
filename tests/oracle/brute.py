"""The behaviour of a batch-level cache in plain Python: slow, obvious, and without any skirl code."""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from itertools import combinations
from math import inf

Trace = Sequence[Sequence[int]]


def distinct(batch: Sequence[int]) -> list[int]:
    """Return the distinct ids of a batch, by table (the bits from 48 on) and then by their last position."""
    last = {key: position for position, key in enumerate(batch)}
    return sorted(last, key=lambda key: (key >> 48, last[key]))


def lru(trace: Trace, capacity: int) -> list[list[int]]:
    """Return the arrivals under least recently used."""
    cache: OrderedDict[int, None] = OrderedDict()
    out = []
    for batch in trace:
        keys = distinct(batch)
        out.append([key for key in keys if key not in cache])
        for key in keys:
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return out


def belady(trace: Trace, capacity: int) -> list[list[int]]:
    """Return the arrivals under the farthest next batch, using a heap. Ties are arbitrary: they cannot change a count."""
    uses: dict[int, list[int]] = {}
    for number in reversed(range(len(trace))):
        for key in set(trace[number]):
            uses.setdefault(key, []).append(number)
    resident: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    out = []
    for batch in trace:
        keys = distinct(batch)
        out.append([key for key in keys if key not in resident])
        for key in keys:
            uses[key].pop()
            resident[key] = uses[key][-1] if uses[key] else len(trace)
        spared = [(-resident[key], key) for key in keys]
        while len(resident) > capacity:
            next_use, key = heapq.heappop(heap)
            if key not in keys and resident.get(key) == -next_use:
                del resident[key]
        for entry in spared:
            heapq.heappush(heap, entry)
    return out


def least_arrivals(trace: Trace, capacity: int) -> int:
    """Return the fewest arrivals over all choices of victims, all of which are tried."""
    states = {frozenset[int](): 0}
    for batch in trace:
        need = frozenset(batch)
        following: dict[frozenset[int], int] = {}
        for resident, cost in states.items():
            others = resident - need
            cost += len(need - resident)
            for kept in range(min(len(others), capacity - len(need)) + 1):
                for some in combinations(sorted(others), kept):
                    state = need | frozenset(some)
                    following[state] = min(cost, following.get(state, cost))
        states = following
    return min(states.values())


class Residents:
    """One bank of a cache, by the promise: its rows, and when each was last used. Searches the whole window for each. The
    rows in `cached` count as used by one batch before the first. `depth`: that of "ttl"."""

    def __init__(self, capacity: int, policy: str = "min", cached: Sequence[int] = (), depth: int = 1) -> None:
        self.capacity, self.policy = capacity, policy
        self._last_use = {key: place for place, key in enumerate(cached)}
        self._clock = len(cached)
        self._number = 0
        self._interval = max(1, depth // 4)
        self._count = dict.fromkeys(cached, 1)
        """Batches that used each row since it came."""
        self._until = dict.fromkeys(cached, -1)
        """The last batch that was known to use each row when it was last used."""

    def run(self, batches: Trace, ends: Sequence[int]) -> list[list[int]]:
        """Return the rows that leave, in order, for each of the first batches; batch t knows those before `ends[t]`."""
        return [self._step(batches[t:end]) for t, end in enumerate(ends)]

    def _step(self, window: Trace) -> list[int]:
        batch = dict.fromkeys(distinct(window[0]))
        others = [key for key in self._last_use if key not in batch]
        leaving = max(0, len(others) + len(batch) - self.capacity)
        assert leaving <= len(others), "the batch does not fit"
        if self.policy == "ttl" and self._number % self._interval == 0:
            leaving = max(leaving, sum(self._until[key] < self._number for key in others))
        leave = sorted(others, key=lambda key: self._rank(key, window))[:leaving] if leaving else []
        for key in leave:
            del self._last_use[key], self._count[key], self._until[key]
        for key in batch:
            self._last_use[key] = self._clock
            self._clock += 1
            self._count[key] = self._count.get(key, 0) + 1
            in_window = [i for i, later in enumerate(window) if key in later] if self.policy == "ttl" else [0]
            self._until[key] = self._number + in_window[-1]
        self._number += 1
        return leave

    def _rank(self, key: int, window: Trace) -> tuple[float, ...]:
        last, until = self._last_use[key], self._until[key]
        if self.policy == "lfu":
            return self._count[key], last
        if self.policy == "ttl":
            return (0, until, last) if until < self._number else (1, -until, last)
        upcoming = inf
        if self.policy == "min":
            upcoming = next((i for i, batch in enumerate(window) if key in batch), inf)
        return -upcoming, last


def victims(trace: Trace, capacity: int, ends: Sequence[int], cached: Sequence[int] = ()) -> list[list[int]]:
    """Return the victims, in order, if the choice for batch t knows the batches before `ends[t]`."""
    return Residents(capacity, cached=cached).run(trace, ends)


def window_ends(
    sides: Sequence[tuple[Trace, int]],
    sizes: Sequence[Sequence[int]] = (),
    *,
    depth: int | str,
    ramp: bool = True,
    window_bytes: float = inf,
) -> list[int]:
    """Return where the window ends when each batch is planned, by the rules of `Plan`. `sides`: batches and capacity of each
    bank, which must all have rows enough; `sizes`: bytes of batches, by owner, of which one is enough."""

    def is_full(window: range) -> bool:
        if any(sum(of[b] for b in window) >= window_bytes for of in sizes) or (
            ramp and len(window) >= 2 * window.start + 8
        ):
            return True
        if depth != "auto":
            return len(window) >= (1 if depth == "epoch" else int(depth))
        return all(len({key for b in window for key in trace[b]}) >= 4 * capacity for trace, capacity in sides)

    ends, end, count = [], 0, len(sides[0][0])
    for number in range(count):
        while end < count and (end == number or not is_full(range(number, end))):
            end += 1
        ends.append(end)
    return ends


def refetches(arrivals: list[list[int]]) -> int:
    """Count the arrivals that are not first uses."""
    return sum(map(len, arrivals)) - len({key for batch in arrivals for key in batch})


def longest_reuse(trace: Trace) -> int:
    """Return the most batches between two uses of one id, including the later one."""
    last: dict[int, int] = {}
    longest = 1
    for number, batch in enumerate(trace):
        for key in set(batch):
            longest = max(longest, number - last.get(key, number))
            last[key] = number
    return longest
