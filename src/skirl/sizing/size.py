"""One pass over a run's ids, the rows it moves by cache size, as the planner of training counts them, and advice."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from skirl.core.batch import Sparse
from skirl.core.ids import BankIds, capture, positions_of
from skirl.core.keys import MAX_ROWS, ROW_BITS
from skirl.core.optim import RowOptimizer
from skirl.core.tables import Schema, Table
from skirl.engine.capacity import CacheSplit, Capacity
from skirl.engine.window import FIRST_WINDOW
from skirl.oracle.distinct import Finder
from skirl.oracle.epoch import planned
from skirl.oracle.planner import Depth, Plan
from skirl.oracle.row_states import RowStates
from skirl.tools.progress import progress_of
from skirl.tools.units import Link, size


class Survey:
    """The rows that a run uses, numbered by first use, batch by batch in a file, 4 bytes each. For use in a with-block: add
    every batch, then iterate."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.ids = 0
        self._banks = [_Bank(schema, bank) for bank in range(len(schema.banks))]

    @property
    def steps(self) -> int:
        return len(self._banks[0].starts) - 1

    @property
    def touched(self) -> list[int]:
        return [bank.rows.hashed_rows for bank in self._banks]

    @property
    def used(self) -> np.ndarray:
        """[banks, batches]: number of distinct rows in each batch."""
        return np.array([np.diff(bank.starts) for bank in self._banks])

    def add(self, sparse: Sparse) -> None:
        ids = capture(sparse, self.schema.features, copy=False)
        for number, bank in enumerate(self._banks):
            positions = positions_of(ids, self.schema, number)
            self.ids += positions.count
            bank.add(positions)

    def narrowed(self) -> Schema:
        """Return a schema whose tables are the banks with only their touched rows, as iteration numbers them."""
        banks = zip(self.schema.banks, self.touched)
        return Schema.of([Table(f"dim {bank.dim}", max(1, touched), bank.dim) for bank, touched in banks])

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        """Yield every batch's distinct rows as keys for the planner, bank after bank."""
        for number in range(self.steps):
            # Each bank is one table here. A key is the row's number with the table's number in the high bits.
            yield [bank.read(number).astype(np.int64) | i << ROW_BITS for i, bank in enumerate(self._banks)]

    def __enter__(self) -> "Survey":
        return self

    def __exit__(self, *_: object) -> None:
        for bank in self._banks:
            bank.file.close()  # which deletes it


class _Bank:
    def __init__(self, schema: Schema, bank: int) -> None:
        # Nothing is released: handles are 0, 1, 2, ...
        self.rows = RowStates(schema, schema.banks[bank].tables, room=0)
        self.starts = [0]
        self.file = tempfile.TemporaryFile(prefix="skirl-survey-")  # noqa: SIM115 closed with the survey
        self._finder = Finder(schema, bank)

    def add(self, ids: BankIds) -> None:
        distinct = self._finder.find(ids)
        numbers = np.empty(distinct.total, np.int32)
        self.rows.name(self._finder.tables, distinct.found, distinct.low, distinct.first, numbers)
        self.file.seek(0, 2)
        self.file.write(numbers.data)
        self.starts.append(self.starts[-1] + len(numbers))

    def read(self, number: int) -> np.ndarray:
        part = np.empty(self.starts[number + 1] - self.starts[number], np.int32)
        self.file.seek(self.starts[number] * 4)
        if self.file.readinto(part.data) != part.nbytes:
            raise OSError(f"the survey's file is truncated at batch {number}: is the temporary folder full?")
        return part


KINDS: dict[str, tuple[Depth, str]] = {
    "least (whole run known)": ("epoch", "min"),
    "depth 200": (200, "min"),
    "depth 50": (50, "min"),
    "depth 10": (10, "min"),
    "depth 1": (1, "min"),
    "LRU": (1, "lru"),
}
"""Depth and policy of each curve, by the name that is shown."""
LEAST = "least (whole run known)"
CACHES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Cache sizes to try, as shares of the touched rows."""


@dataclass(frozen=True)
class Point:
    """The rows that a run moves with one cache. The arrays have a number for each step."""

    cache: int
    moved: int
    """Rows refetched in total, from the store or from a pending write-back."""
    read: np.ndarray
    """Those of them that come from the store."""
    written: np.ndarray


def cache_sizes(survey: Survey, shares: Sequence[float] = CACHES) -> list[int]:
    """Return cache sizes to try: shares of the touched rows, none smaller than what the largest batch needs."""
    touched, least = sum(survey.touched), least_cache(survey)
    return sorted({min(touched, max(least, round(share * touched))) for share in shares})


def least_cache(survey: Survey) -> int:
    """Return the smallest cache that may be advised: the largest batch and a little more, or all touched rows."""
    least = int(survey.used.sum(axis=0).max(initial=1))
    return min(sum(survey.touched), least + least // 20 + len(survey.touched))


def capacities(survey: Survey, cache: int, prefetch: int) -> CacheSplit:
    """Return the slots and staging rows of each bank, split as a run would do it."""
    first = survey.used[:, :FIRST_WINDOW]
    capacity = Capacity(cache, [max(1, n) for n in survey.touched], [1] * len(survey.touched))
    largest = [int(bank.max(initial=1)) for bank in survey.used]
    return capacity.divide([int(bank.sum()) for bank in first], largest, 2 * Plan(prefetch=prefetch).hold)


def point(survey: Survey, cache: int, plan: Plan) -> Point:
    """Run the planner over the survey with one cache and count what moves."""
    slots, staging = capacities(survey, cache, plan.prefetch)
    hold_rows = [rows // 2 for rows in staging]
    steps = planned(survey.narrowed(), survey, slots, plan, hold_rows=hold_rows)
    counts = [
        (
            sum(step.fetches for step in banks),
            sum(len(step.fetch_keys) for step in banks),
            sum(len(step.evict_keys) for step in banks),
        )
        for banks in steps
    ]
    fetched, read, written = np.array(counts, np.int64).reshape(-1, 3).T
    return Point(cache, int(fetched.sum()), read, written)


def curves(survey: Survey, sizes: Sequence[int], prefetch: int) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {name: [] for name in KINDS}
    with progress_of("plan", len(sizes) * len(KINDS)) as progress:
        for done, (cache, name) in enumerate(product(sizes, KINDS), start=1):
            progress(done, lambda name=name, cache=cache: {"cache": f"{cache:,}", "policy": name})
            depth, policy = KINDS[name]
            lines[name].append(point(survey, cache, Plan(depth, prefetch, policy)))
    return lines


FEW = 0.05
"""A cache refetches few rows if they are at most this share of the rows used."""
NEAR = 1.05
"""A depth is near enough if it refetches at most this many times the least possible."""
DEPTHS = ("depth 1", "depth 10", "depth 50", "depth 200")


def step_that_hides(point: Point, record_bytes: float, link: Link) -> float:
    """Return the seconds that a step must take for the link to keep up with this cache."""
    half = len(point.read) // 2  # on average over the run's second half
    parts = (part[half:] * record_bytes for part in (point.read, point.written))
    return max((link.seconds(int(part.mean())) for part in parts if len(part)), default=0.0)


@dataclass(frozen=True)
class Advice:
    """A recommended cache and depth."""

    cache: int
    depth: int
    share_of_touched: float
    moved: float
    """Rows refetched, as a share of the rows that batches use."""

    def sentence(self, cache_bytes: float) -> str:
        """Return the recommendation as a sentence, with the flags to set."""
        return (
            f"Use --cache {self.cache} --depth {self.depth}: {size(cache_bytes)} of cache on the device, "
            f"{self.share_of_touched:.0%} of the rows that are touched; "
            f"{self.moved:.1%} of the rows that batches use are refetched."
        )


def advise(
    curves: Mapping[str, Sequence[Point]], used: int, touched: int, record_bytes: float, link: Link | None = None,
    step: float | None = None,
) -> Advice:  # fmt: skip
    """Choose the smallest cache on the curves that is good enough, and the least depth that is near the least possible.

    `used`: rows that batches use, in total. `record_bytes`: of a row with its optimizer state, on average over the touched
    ones. `step`: seconds that a step computes.
    """

    def fits(point: Point) -> bool:
        """Return whether the link keeps up with the step or, if one is unknown, few rows are refetched."""
        if link is None or step is None:
            return point.moved <= FEW * used
        return step_that_hides(point, record_bytes, link) <= step

    deepest = curves["depth 200"]
    chosen = next((i for i, point in enumerate(deepest) if fits(point)), len(deepest) - 1)
    enough_cache = fits(deepest[chosen])
    least = curves[LEAST][chosen].moved
    enough = max(NEAR * least, least + 0.01 * used)
    near = (name for name in DEPTHS if curves[name][chosen].moved <= enough)
    name = next((name for name in near if fits(curves[name][chosen]) or not enough_cache), DEPTHS[-1])
    ours = curves[name][chosen]
    return Advice(
        cache=ours.cache,
        depth=int(name.split()[1]),
        share_of_touched=ours.cache / max(1, touched),
        moved=ours.moved / max(1, used),
    )


ON_DISK = 1.5
"""Maximum bytes in a disk store per byte of touched rows."""
INDEX_BYTES = 8
"""Bytes of memory that a disk store takes per touched row."""
WINDOW_BYTES = 28
"""Bytes of memory that the planner takes per id, and per distinct row of a batch, in the window."""


def sized(
    batches: Iterable[Sparse], tables: Sequence[Table], rule: RowOptimizer, prefetch: int, link: str | None,
    step_ms: float | None, total: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Read the ids once, then plan over them with every cache."""
    rate, step = link and Link.parse(link), step_ms and step_ms / 1e3
    with Survey(Schema.of(tables)) as survey:
        with progress_of("read ids", total) as progress:
            for number, sparse in enumerate(batches, start=1):
                survey.add(sparse)
                progress(number, lambda: {"ids": f"{survey.ids:,}", "touched": f"{sum(survey.touched):,}"})
        if not survey.steps:
            raise ValueError("the data has no whole batch: set batch smaller, or pass a loader that yields some")
        return _measured(survey, rule, prefetch, rate or None, step)


def _measured(
    survey: Survey, rule: RowOptimizer, prefetch: int, link: Link | None, step: float | None
) -> dict[str, Any]:
    found = curves(survey, cache_sizes(survey), prefetch)
    records = [4 * rule.width(bank.dim) for bank in survey.schema.banks]
    touched, used = sum(survey.touched), int(survey.used.sum())
    average = float(np.dot(records, survey.touched)) / max(1, touched)
    advice = advise(found, used, touched, average, link, step)
    chosen = next(p for p in found[f"depth {advice.depth}"] if p.cache == advice.cache)
    tiers = _tiers(survey, advice, records, prefetch)
    least, least_bytes = _holding_every_batch(survey, records)
    return {
        "ids": survey.ids,
        "steps": survey.steps,
        "rows": sum(table.rows for table in survey.schema.tables),
        "touched": touched,
        "used": used,
        "largest": int(survey.used.sum(axis=0).max()),
        "least_cache": least,
        "least_cache_bytes": least_bytes,
        "curves": {
            name: [{"cache": point.cache, "moved": point.moved} for point in points] for name, points in found.items()
        },
        "bytes": tiers,
        "advice": asdict(advice),
        "step_ms_that_hides": None if link is None else float(f"{1e3 * step_that_hides(chosen, average, link):.3g}"),
        "sentence": advice.sentence(tiers["cache"]),
    }


def _tiers(survey: Survey, advice: Advice, records: list[int], prefetch: int) -> dict[str, float]:
    """Return the bytes on the device, in memory and on disk with the advised cache."""
    slots, staging = capacities(survey, advice.cache, prefetch)
    rows = [sum(survey.schema.tables[t].rows for t in bank.tables) for bank in survey.schema.banks]
    touched = float(np.dot(records, survey.touched))
    share = min(advice.depth, survey.steps) / survey.steps
    return {
        "cache": float(np.dot(slots, records)),
        "staging": float(np.dot(staging, records)),
        "planner": WINDOW_BYTES * share * (survey.ids + int(survey.used.sum())),
        "touched": touched,
        "all": float(np.dot(rows, records)),
        "disk": ON_DISK * touched,
        "index": float(INDEX_BYTES * sum(survey.touched)),
    }


def _holding_every_batch(survey: Survey, records: list[int]) -> tuple[int, int]:
    """Return the least cache that surely runs, in rows and in bytes. Bytes include the half that staging may take."""
    in_rows, in_bytes = (Capacity(size, [MAX_ROWS] * len(records), records) for size in (1, "1B"))
    least, least_bytes = (room.enough(int(room.needs(survey.used.T).max())) for room in (in_rows, in_bytes))
    return least, least_bytes
