"""Synthetic click logs of any length, with the sizes and the skew of public data sets, and sessions that repeat their lists.

Batch i is a pure function of (seed, i): any number of streams, resumed anywhere, agree bit for bit."""

import difflib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.initial import _MIX1, _MIX2, mix
from skirl.core.once import find
from skirl.core.tables import Table
from skirl.data.files.hashing import GOLDEN, fold, named, unit
from skirl.data.share import WHOLE, Cut, Share, Turn, of_batch
from skirl.data.source import Source
from skirl.tools.jit import kernel

EXPONENT = 0.992
"""Rank x of a table (0 = hottest) is looked up with density proportional to (x + OFFSET) ** -EXPONENT."""
OFFSET = 1.0
CLICK_RATE = 0.25
SPARSE_SIGNAL, DENSE_SIGNAL = 1.3, 0.6
"""Standard deviations, over samples, of what ids and dense features add to the logit."""

_ONE = np.uint64(1)

# Purposes of random streams: each is a word folded into the stream's name.
_LENGTHS, _IDS, _DENSE, _LABELS, _HEAT, _ROWS, _COLUMNS, _HELD_OUT = range(1, 9)


Drawn = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Shape:
    rows: dict[str, int]
    """Of each table, by the name of its one feature."""
    dense: int


def _criteo(*rows: int) -> Shape:
    return Shape({f"C{i}": n for i, n in enumerate(rows, start=1)}, dense=13)


# fmt: off
SHAPES = {
    "tiny": Shape({"user": 50_000, "item": 20_000, "shop": 2_000, "city": 300, "device": 20, "weekday": 7}, dense=4),
    "avazu": Shape({
        "C1": 7, "banner_pos": 7, "site_id": 4737, "site_domain": 7745, "site_category": 26, "app_id": 8552,
        "app_domain": 559, "app_category": 36, "device_id": 2686408, "device_ip": 6729486, "device_model": 8251,
        "device_type": 5, "device_conn_type": 4, "C14": 2626, "C15": 8, "C16": 9, "C17": 435, "C18": 4, "C19": 68,
        "C20": 172, "C21": 60,
    }, dense=1),
    "criteo-kaggle": _criteo(
        1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
        2173, 4, 7046547, 18, 15, 286181, 105, 142572),
    "criteo-terabyte": _criteo(
        227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10, 2209, 11938, 155, 4,
        976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36),
}
# fmt: on
"""The data sets by name, with 72 thousand, 9.45, 33.76 and 882.8 million rows. `tiny` is invented; the others have the
cardinalities of the published data, with all values kept."""


@dataclass
class Synthetic(Source):
    """An iterable of batches that look like a public data set's: a `Source` without a file.

    **Arguments**

    - `name`: the data set whose columns and cardinalities to use: `tiny`, `avazu`, `criteo-kaggle` or `criteo-terabyte`.
    - `batches`: number of batches; None for an endless stream.
    - `seed`: seed of the samples. Which rows are hot, and what a row says about the click, do not depend on it.
    - `rows_scale`: multiplies the rows of each table of more than 10.
    - `pooling_factor`: average ids per bag. 1 means exactly one; more means bags of 0 to twice as many, equally likely.
    - `held_out_batches`: number of batches in `held_out`; 0 holds nothing out.

    >>> data = Synthetic("tiny", batch_size=4, batches=2)
    >>> [batch.sparse for batch in data]
    [KeyedJagged(6 features, 4 samples, 24 ids), KeyedJagged(6 features, 4 samples, 24 ids)]
    >>> [(table.name, table.rows, table.dim) for table in data.tables(dim=16)][:2]
    [('user', 50000, 16), ('item', 20000, 16)]
    """

    name: str
    batch_size: int = 1024
    batches: int | None = None
    seed: int = 0
    rows_scale: float = 1.0
    pooling_factor: int = 1
    held_out_batches: int = 0

    yields_fresh: ClassVar[bool] = True
    shapes: ClassVar[dict[str, Shape]] = SHAPES
    _identity: ClassVar[tuple[str, ...]] = ("name", "batch_size", "seed", "rows_scale", "pooling_factor")

    share: Share = field(default=WHOLE, repr=False, kw_only=True)
    _next: int = field(default=0, init=False, repr=False)
    _resume: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.name not in self.shapes:
            near = difflib.get_close_matches(self.name, self.shapes, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            names = ", ".join((*self.shapes, "sessions"))
            raise ValueError(f"there is no synthetic data set {self.name!r}{hint}: name one of {names}")
        for what, least in (("batch_size", 1), ("pooling_factor", 1), ("held_out_batches", 0)):
            if getattr(self, what) < least:
                raise ValueError(f"{what} is {getattr(self, what)}, set it to {least} or more")
        if self.batches is not None and self.batches < 0:
            raise ValueError(f"batches is {self.batches}, set it to 0 or more")
        if not 0 < self.rows_scale <= 1000:
            raise ValueError(f"rows_scale is {self.rows_scale}, set it above 0 and to at most 1000")

    @property
    def dense_features(self) -> int:
        return self.shapes[self.name].dense

    @property
    def labels(self) -> tuple[str, ...]:
        return ("click",)

    @property
    def lists(self) -> tuple[str, ...]:
        return tuple(self.rows) if self.pooling_factor > 1 else ()

    @property
    def steps(self) -> int | None:
        return None if self.batches is None else -(-self.batches // self.share.batches)

    @property
    def samples(self) -> int | None:
        return None if self.batches is None else self.batches * self.batch_size

    @property
    def held_out(self) -> "Synthetic | None":
        """Other samples with the same hot rows and weights, to evaluate on; None without `held_out_batches`."""
        if not self.held_out_batches:
            return None
        seed = int(named(self.seed, _HELD_OUT)) >> 1
        return replace(self, batches=self.held_out_batches, seed=seed, held_out_batches=0, share=WHOLE)

    @cached_property
    def rows(self) -> dict[str, int]:
        scale = self.rows_scale
        return {name: n if n <= 10 else max(10, round(n * scale)) for name, n in self.shapes[self.name].rows.items()}

    def sharded(self, first: int, last: int, of: int) -> "Synthetic":
        return replace(self, share=of_batch(first, last, of, self.batch_size))

    def dealt(self, rank: int, ranks: int) -> "Synthetic":
        return replace(self, share=Turn(rank, ranks))

    def tables(self, dim: int) -> list[Table]:
        return [Table(name, rows=rows, dim=dim) for name, rows in self.rows.items()]

    def __iter__(self) -> Iterator[Batch]:
        i, self._resume = self._resume, 0
        while self.batches is None or i < self.batches:
            *cuts, last = self._cuts(i)
            for cut in cuts:
                yield self._part(i, *cut)
            self._next = i + self.share.batches
            yield self._part(i, *last)
            i += self.share.batches
        self._next = 0

    def _cuts(self, i: int) -> list[Cut]:
        """The cuts to draw in the step that begins with batch i, counted from that batch's first sample."""
        batches = self.share.batches if self.batches is None else min(self.share.batches, self.batches - i)
        [cuts] = self.share.cuts(batches * self.batch_size, self.batch_size)
        return cuts

    def _part(self, i: int, low: int, high: int) -> Batch:
        """Samples low .. high - 1, counted from the first of batch i, which all lie in one batch."""
        before, low = divmod(low, self.batch_size)
        return self._samples_of(i + before, low, high - before * self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next} | {name: getattr(self, name) for name in self._identity}

    def check_state(self, state: dict[str, Any]) -> None:
        if "name" not in state:
            raise ValueError("the state is not of a synthetic stream: set data to what it was when the state was saved")
        for name in self._identity:
            if state[name] != getattr(self, name):
                raise ValueError(f"the state is of a stream with {name}={state[name]!r}: set {name} to that")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        self._resume = self._next = int(state["next"])

    def batch(self, i: int) -> Batch:
        return self._samples_of(i, 0, self.batch_size)

    def _samples_of(self, i: int, low: int, high: int) -> Batch:
        stream = named(self.seed, i)
        dense, lengths, values, logits = self._draw(stream, self.batch_size, low, high)
        labels = _draw_labels(named(stream, _LABELS), low, logits + self._bias)
        sparse = KeyedJagged(list(self.rows), torch.from_numpy(values), lengths=torch.from_numpy(lengths))
        return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels))

    @cached_property
    def _world(self) -> int:
        """Names random streams that depend on the data set and not on the seed."""
        return zlib.crc32(self.name.encode())

    @cached_property
    def _bias(self) -> float:
        """The constant of the logit that makes CLICK_RATE the mean click rate of 2,048 samples drawn for this purpose.

        It has no closed form: the hottest rows take several percent of a table, so their hidden weights shift the mean.
        """
        *_, logits = self._draw(named(self._world, _LABELS), 2048, 0, 2048)
        low, high = -20.0, 20.0
        for _ in range(50):  # bisection: the click rate rises with the bias
            middle = (low + high) / 2
            rate = float(np.mean(1 / (1 + np.exp(-(logits + middle)))))
            low, high = (middle, high) if rate < CLICK_RATE else (low, middle)
        return low

    def _draw(self, stream: np.uint64, samples: int, low: int, high: int) -> Drawn:
        """Return dense features, bag lengths, ids and the resulting logits of samples low .. high - 1 of `samples`.

        Every draw has its own index in its stream. An id's index is the number of the feature's ids before it, so the
        lengths of all samples are drawn, but nothing else of the other samples.
        """
        rows = np.fromiter(self.rows.values(), np.int64)
        lengths = np.ones((rows.size, samples), np.int64)
        if self.pooling_factor > 1:
            _draw_lengths(named(stream, _LENGTHS), 2 * self.pooling_factor, lengths.reshape(-1))
        before, lengths = lengths[:, :low].sum(axis=1), lengths[:, low:high].reshape(-1)
        values = np.empty(lengths.sum(), np.int64)
        dense = np.empty((high - low, self.dense_features), np.float32)
        logits = np.zeros(high - low)
        signal = DENSE_SIGNAL / self.dense_features**0.5
        _draw_dense(named(stream, _DENSE), named(self._world, _COLUMNS), signal, low, dense, logits)
        signal = SPARSE_SIGNAL / (rows.size * self.pooling_factor) ** 0.5
        heat, hidden = named(self._world, _HEAT), named(self._world, _ROWS)
        _draw_ids(named(stream, _IDS), heat, hidden, rows, before, lengths, signal, values, logits)
        return dense, lengths, values, logits


@kernel
def _draw_lengths(stream, longest, lengths):
    for bag in range(lengths.size):
        lengths[bag] = int(unit(stream, np.uint64(bag)) * (longest + 1))


@kernel
def _draw_dense(stream, signs, signal, low, dense, logits):
    """Draw sums of four 16-bit uniforms from one hash: normal enough (kurtosis 2.7), and cheaper than a logarithm."""
    samples, columns = dense.shape
    centre, spread = 2.0 * 65535, (65536.0**2 / 3) ** 0.5
    for b in range(samples):
        for k in range(columns):
            bits = mix(stream + np.uint64((low + b) * columns + k) * GOLDEN)
            total = np.uint64(0)
            for shift in range(0, 64, 16):
                total += (bits >> np.uint64(shift)) & np.uint64(0xFFFF)
            x = (np.float64(total) - centre) / spread
            dense[b, k] = x
            logits[b] += signal * x if fold(signs, np.uint64(k)) & np.uint64(1) else -signal * x


@kernel
def _draw_ids(stream, heat, hidden, rows, before, lengths, signal, values, logits):
    """Draw ids in order of (feature, sample, position in the bag). Each adds its hidden weight to the sample's logit."""
    samples = logits.size
    spread = 12.0**0.5  # scales a uniform weight to variance 1
    at = 0
    for f in range(rows.size):
        word = np.uint64(f)
        draws, place, weights = fold(stream, word), fold(heat, word), fold(hidden, word)
        mass, bits = mass_of(rows[f]), bits_for(rows[f])
        first = at - before[f]
        for b in range(samples):
            for _ in range(lengths[f * samples + b]):
                rank = rank_at(unit(draws, np.uint64(at - first)), rows[f], mass)
                row = scatter(rank, rows[f], bits, place)
                values[at] = row
                logits[b] += signal * spread * (unit(weights, np.uint64(row)) - 0.5)
                at += 1


@kernel
def _draw_labels(stream, low, logits):
    labels = np.empty(logits.size, np.float32)
    for b in range(logits.size):
        labels[b] = unit(stream, np.uint64(low + b)) < 1 / (1 + np.exp(-logits[b]))
    return labels


@kernel
def mass_of(rows):
    """The density's integral over a table. Separate from `rank_at`, which would take twice as long with it."""
    return (1.0 + rows / OFFSET) ** (1.0 - EXPONENT) - 1.0


@kernel
def rank_at(u, rows, mass):
    """The rank at quantile u of a table; 0 is the hottest."""
    return min(int(OFFSET * ((1.0 + u * mass) ** (1.0 / (1.0 - EXPONENT)) - 1.0)), rows - 1)


@kernel
def bits_for(rows):
    bits = np.uint64(0)
    while (_ONE << bits) < np.uint64(rows):
        bits += _ONE
    return bits


@kernel
def scatter(rank, rows, bits, table_key):
    """Return the row of a rank: a bijection of [0, rows) that depends on `table_key`.

    Multiply and xor-shift are bijections of `bits` bits; a result outside the table is mapped again, less than once on
    average. An affine map modulo `rows` is as cheap, but sends the hottest rows to an arithmetic progression.
    """
    mask = (_ONE << bits) - _ONE
    half = (bits + _ONE) >> _ONE
    x = np.uint64(rank)
    while True:
        x = (x * (table_key | _ONE) + (table_key >> np.uint64(7))) & mask
        x ^= x >> half
        x = (x * _MIX2 + table_key) & mask
        x ^= x >> half
        x = (x * _MIX1) & mask
        x ^= x >> half
        if x < np.uint64(rows):
            return np.int64(x)


# Sessions: sample n of the stream is a pure function of (seed, n), computed by going back to where its session began.

LENGTH = 75
"""Average ids of a list if `pooling_factor` is not set; each list has from two thirds to four thirds of the average."""
_STARTS, _CHANGES = 21, 22
ITEMS = 20_000  # rows of the tables of items, before `rows_scale`
_BASE = {"user": 50_000, "item": ITEMS}


@dataclass
class Sessions(Synthetic):
    """Batches from consecutive sessions: one user per session, an item per sample, and lists that change now and then.

    The first list looks up rows in the items' table. Batches hold repeated lists once, with an inverse, where that pays.
    """

    name: str = "sessions"
    per_session: float = 16.5
    """Average samples of a session."""
    change: float = 0.05
    """Probability that a list differs from the previous sample's."""
    histories: int = 3
    once: bool = True

    shapes: ClassVar[dict[str, Shape]] = {"sessions": Shape(_BASE, dense=4)}
    _identity: ClassVar[tuple[str, ...]] = (*Synthetic._identity, "per_session", "change", "histories")

    @property
    def lists(self) -> tuple[str, ...]:
        return tuple(f"seen_{i}" for i in range(1, self.histories + 1))

    @cached_property
    def rows(self) -> dict[str, int]:
        sizes = _BASE | dict.fromkeys(self.lists[1:], ITEMS)
        return {name: max(10, round(rows * self.rows_scale)) for name, rows in sizes.items()}

    def tables(self, dim: int) -> list[Table]:
        features = {"item": ("item", self.lists[0])}
        return [Table(name, rows=rows, dim=dim, features=features.get(name, ())) for name, rows in self.rows.items()]

    def _samples_of(self, i: int, low: int, high: int) -> Batch:
        stream, first = named(self.seed, _IDS), i * self.batch_size + low
        dense, lengths, values, logits = self._draw(stream, 0, first, first + high - low)
        labels = _draw_labels(named(stream, _LABELS), first, logits + self._bias)
        ids = KeyedJagged(["user", "item", *self.lists], torch.from_numpy(values), lengths=torch.from_numpy(lengths))
        return Batch(torch.from_numpy(dense), find(ids) if self.once else ids, torch.from_numpy(labels))

    def _draw(self, stream: np.uint64, samples: int, low: int, high: int) -> Drawn:
        """Samples low .. high - 1 of all, however many these are."""
        first, samples = low, high - low
        mean = self.pooling_factor if self.pooling_factor > 1 else LENGTH
        lengths = np.ones((2 + self.histories, samples), np.int64)
        begin = np.empty((2 + self.histories, samples), np.int64)  # the sample at which each current list was drawn
        _follow(
            named(stream, _STARTS), named(stream, _CHANGES), named(stream, _LENGTHS), first, 1 / self.per_session,
            self.change, max(1, round(mean * 2 / 3)), max(1, round(mean * 4 / 3)), lengths, begin,
        )  # fmt: skip
        rows = np.array([self.rows[name] for name in ("user", "item", "item", *self.lists[1:])], np.int64)
        values = np.empty(lengths.sum(), np.int64)
        logits, dense = np.zeros(samples), np.empty((samples, self.dense_features), np.float32)
        signal = DENSE_SIGNAL / self.dense_features**0.5
        _draw_dense(named(stream, _DENSE), named(self._world, _DENSE), signal, first, dense, logits)
        signal, heat, hidden = SPARSE_SIGNAL / len(rows) ** 0.5, named(self._world, _HEAT), named(self._world, _ROWS)
        _fill(named(stream, _ROWS), heat, hidden, rows, lengths, begin, signal, values, logits)
        return dense, lengths.reshape(-1), values, logits


@kernel
def _follow(starts, changes, sizes, first, start, change, shortest, longest, lengths, begin):
    """Fill `lengths` and `begin` for each sample, starting where the first sample's session began."""
    features, samples = lengths.shape
    n = first
    while n > 0 and unit(starts, np.uint64(n)) >= start:
        n -= 1
    since = np.zeros(features, np.int64)
    opened = n
    while n < first + samples:
        new = n == opened or unit(starts, np.uint64(n)) < start
        for f in range(features):
            changed = unit(fold(changes, np.uint64(f)), np.uint64(n)) < change
            if new or f == 1 or (f > 1 and changed):
                since[f] = n
            if n >= first:
                begin[f, n - first] = since[f]
                if f > 1:
                    share = unit(fold(sizes, np.uint64(f)), np.uint64(since[f]))
                    lengths[f, n - first] = shortest + int(share * (longest - shortest + 1))
        n += 1


@kernel
def _fill(stream, heat, hidden, rows, lengths, begin, signal, values, logits):
    """Fill ids in order of (feature, sample, position in the list). A whole list adds to the logit as much as one id."""
    spread = 12.0**0.5  # scales a uniform weight to variance 1
    at = 0
    for f in range(len(rows)):
        word = np.uint64(f)
        table = np.uint64(max(1, f - 1) if f else 0)  # the first list shares the items' table
        draws, place, weights = fold(stream, word), fold(heat, table), fold(hidden, table)
        mass, bits = mass_of(rows[f]), bits_for(rows[f])
        for b in range(lengths.shape[1]):
            line = fold(draws, np.uint64(begin[f, b]))
            total, count = 0.0, lengths[f, b]
            for k in range(count):
                rank = rank_at(unit(line, np.uint64(k)), rows[f], mass)
                row = scatter(rank, rows[f], bits, place)
                values[at] = row
                total += unit(weights, np.uint64(row)) - 0.5
                at += 1
            logits[b] += signal * spread * total / max(1, count) ** 0.5
