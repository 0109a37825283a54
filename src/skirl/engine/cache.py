"""The cache: row records on the device, by slot; and how large it is.

It knows slots, not keys. Beside it stands the mirror of what is resident after the last executed step, for what must see
the executed state: evaluation, checkpoints, and the next planner. The mirror costs 17 bytes a slot on the host.

`cache` is split between record widths once, by the demand of the first window: 20 lines and deterministic. Splitting anew
as demand drifts would move rows for no gain that the traces show, and make plans depend on history.
"""

import re
from collections.abc import Callable, Sequence
from numbers import Integral

import numpy as np

from skirl.oracle.bank import Resident
from skirl.store.changes import Changes, Records
from skirl.tools.jit import kernel
from skirl.tools.machine import free_bytes
from skirl.tools.sizes import parse_bytes

CacheSize = int | str
AUTO = 0.5
"""Of the memory that is free when training begins: the rest is the model's, for activations and what comes later."""


def parse_cache(cache: CacheSize) -> tuple[str, float]:
    """What a cache size means: ("rows", n), ("share", of all rows), ("bytes", n) or ("auto", share of the free memory).

    >>> parse_cache(1000), parse_cache("10%"), parse_cache("1MiB"), parse_cache("auto")
    (('rows', 1000), ('share', 0.1), ('bytes', 1048576), ('auto', 0.5))
    """
    if cache == "auto":
        return "auto", AUTO
    if isinstance(cache, Integral) and not isinstance(cache, bool):
        cache = int(cache)  # numpy's too
    if isinstance(cache, bool) or not isinstance(cache, int | str):
        raise TypeError(
            f"cache is a {type(cache).__name__}: set it to a number of rows, a share like '10%', a size like '4GiB' or "
            "'auto'"
        )
    if isinstance(cache, int):
        if cache < 1:
            raise ValueError(f"cache is {cache} rows: set it to 1 or more")
        return "rows", cache
    share = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", cache)
    if share:
        if not 0 < float(share[1]) <= 100:
            raise ValueError(f"cache is {cache!r}: set a share above 0% and up to 100%")
        return "share", float(share[1]) / 100
    try:
        size = parse_bytes(cache)
    except ValueError:
        raise ValueError(
            f"cache is {cache!r}: set it to a number of rows, a share like '10%', a size like '4GiB' or 'auto'"
        ) from None
    if size < 1:
        raise ValueError(f"cache is {cache!r}: set it to 1 byte or more")
    return "bytes", size


def split_cache(
    cache: CacheSize,
    *,
    rows: Sequence[int],
    record_bytes: Sequence[int],
    dims: Sequence[int],
    distinct: Sequence[int],
    largest: Sequence[int],
    in_flight: int,
    free: Callable[[], int] = free_bytes,
) -> tuple[list[int], list[int]]:
    """Slots for each bank, and rows in flight that its staging holds beside them.

    `rows` are the banks' table rows, `distinct` and `largest` their distinct rows in the first window and in its largest
    batch, `in_flight` the steps whose rows may be on their way, `free` gives the bytes that are free where the cache will
    be. Every bank gets what a batch needs, the rest goes by demand.

    >>> split_cache(100, rows=[900, 90], record_bytes=[64, 32], dims=[16, 8],
    ...             distinct=[60, 20], largest=[10, 5], in_flight=3)
    ([73, 26], [30, 15])
    """
    kind, amount = parse_cache(cache)
    if kind == "auto":
        kind, amount = "bytes", int(amount * free())
    banks = range(len(rows))
    floors = [min(rows[i], max(1, largest[i])) for i in banks]
    staging = [max(1, in_flight * largest[i]) for i in banks]
    weights = list(record_bytes) if kind == "bytes" else [1] * len(rows)
    if kind == "bytes":
        # Staging is counted in the bytes: at most half of them, so that a small cache stays a cache.
        wish = sum(staging[i] * weights[i] for i in banks)
        if 2 * wish > amount:
            staging = [max(1, int(staging[i] * amount / 2 / wish)) for i in banks]
        budget = int(amount) - sum(staging[i] * weights[i] for i in banks)
    else:
        budget = int(amount) if kind == "rows" else max(1, int(amount * sum(rows)))
    need = sum(floors[i] * weights[i] for i in banks)
    if need > budget and (len(rows) > 1 or kind == "bytes"):  # one bank: the planner names the batch that does not fit
        if kind == "bytes":
            raise ValueError(
                f"cache {cache!r} leaves {max(0, budget)} bytes for rows, one batch of the first window needs {need}: "
                f"set cache to {2 * (need + sum(weights))} bytes or more ('{2 * (need + sum(weights))}B'), or use "
                "smaller batches"
            )
        worst = max(banks, key=lambda i: floors[i])
        raise ValueError(
            f"cache {cache!r} is {budget} rows, one batch of the first window needs {need} "
            f"({floors[worst]} of dim {dims[worst]}): set cache to {need} or more, or use smaller batches"
        )
    if len(rows) == 1:
        floors = [1]
    # A bank that the first window does not use at all will be used later: it counts as one row, lest it stay at one slot.
    demand = [max(1, n) for n in distinct]
    return _share(budget, weights, floors, rows, demand), staging


def _share(
    budget: int, weights: Sequence[int], floors: Sequence[int], rows: Sequence[int], demand: Sequence[int]
) -> list[int]:
    """Slots for each bank: its floor, and of the rest in proportion to its demand; what a bank cannot use goes to others."""
    slots = list(floors)
    growing = [i for i in range(len(slots)) if slots[i] < rows[i]]
    spare = budget - sum(slot * weight for slot, weight in zip(slots, weights, strict=True))
    while growing and spare > 0:
        total = sum(demand[i] * weights[i] for i in growing)
        more = {i: spare * demand[i] // total for i in growing}
        full = [i for i in growing if slots[i] + more[i] >= rows[i]]
        for i in full:
            spare -= (rows[i] - slots[i]) * weights[i]
            slots[i] = rows[i]
            growing.remove(i)
        if not full:
            for i in growing:
                slots[i] += more[i]
            break
    return slots


class Cache:
    """The slots of one bank, and which rows they held after the last executed step."""

    def __init__(self, records: Records) -> None:
        self.records = records
        slots = records.shape[0]
        self.key_of = np.full(slots, -1, np.int64)
        self.used = np.zeros(slots, np.int64)
        self.flags = np.zeros(slots, np.uint8)
        self.changes = Changes()
        """Of the next checkpoint."""
        self._clock = 1
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.key_of)

    @property
    def filled(self) -> int:
        """Slots that hold a row."""
        return int((self.key_of >= 0).sum())

    def changing(self, slots: np.ndarray) -> None:
        """Rows of these slots are about to change, or to be replaced."""
        self.changes.wait_for_room()
        self.changes.changing(self.flags, slots, self.key_of, self.records)

    def record(self, left: np.ndarray, came: Sequence[tuple[np.ndarray, np.ndarray]], rows: np.ndarray) -> None:
        """A step was executed: `left` slots were emptied, `came` (keys, slots) filled, `rows` used in this order."""
        _empty(self.key_of, left)
        for keys, slots in came:
            _fill(self.key_of, keys, slots)
            self.changing(slots)  # a row that comes back is not what an earlier checkpoint had of it in the cache
        _use(self.used, rows, self._clock)
        self._clock += len(rows)
        self._sorted = None

    def resident(self) -> Resident:
        """What is resident, from the least recently used."""
        slots = np.flatnonzero(self.key_of >= 0)
        slots = slots[np.argsort(self.used[slots], kind="stable")].astype(np.int32)
        return Resident(self.key_of[slots], slots)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The slot of each key, -1 where it is not resident."""
        if self._sorted is None:
            slots = np.flatnonzero(self.key_of >= 0)
            order = np.argsort(self.key_of[slots])
            self._sorted = self.key_of[slots][order], slots[order]
        held, slots = self._sorted
        if not len(held):
            return np.full(len(keys), -1, np.int64)
        place = np.minimum(np.searchsorted(held, keys), len(held) - 1)
        return np.where(held[place] == keys, slots[place], -1)


# Kernels, because numpy indexes while it holds the interpreter: 0.26 ms a step of 18,000 rows, in which no stage moved.


@kernel
def _empty(key_of, slots):
    for slot in slots:
        key_of[slot] = -1


@kernel
def _fill(key_of, keys, slots):
    for i in range(slots.size):
        key_of[slots[i]] = keys[i]


@kernel
def _use(used, slots, clock):
    for i in range(slots.size):
        used[slots[i]] = clock + i
