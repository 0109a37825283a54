"""What a batch asks: ids by table, checked and resolved once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from skirl.core.batch import Sparse
from skirl.core.inverse import INTS, array_of, fill_bags, inverse_of
from skirl.core.inverse import BadIds as BadIds
from skirl.core.keys import ROW_BITS
from skirl.core.tables import Schema
from skirl.tools.jit import kernel

_NONE = np.empty(0, np.int32)
_STEP = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_LENGTHS = 0x94D049BB133111EB  # so that the ends of bags do not hash like ids


@dataclass(slots=True)
class Ids:
    """What a micro-batch asks, in arrays that nothing else writes to: read once, resolved by bank in each collection."""

    keys: tuple[str, ...]
    values: np.ndarray
    offsets: np.ndarray
    samples: int
    first: np.ndarray
    """int64 [features + 1]: each feature's first bag."""
    inverse: tuple[np.ndarray | None, ...]
    """By feature: int32 [samples], the bag of each sample, the same array for features that share it; None if each sample
    has its own bag."""
    weights: np.ndarray | None = None
    hashes: Any = None
    batch: Any = None
    """The batch that the loop gets."""
    nbytes: int = 0
    loader_state: Any = None

    # What one collection knows of them.
    banks: list["BankIds"] = field(default_factory=list)
    """The ids of each bank: checked, and with their bags once the step is planned."""
    returned: bool = False
    """True once its backward has run."""

    @property
    def shares(self) -> bool:
        return any(each is not None for each in self.inverse)

    def bags(self, place: int) -> slice:
        """Return the range of the feature at index `place` among all bags of the batch."""
        return slice(int(self.first[place]), int(self.first[place + 1]))

    def starts(self, place: int) -> np.ndarray:
        bags = self.bags(place)
        return self.offsets[bags.start : bags.stop + 1]


@dataclass(slots=True)
class BankIds:
    """The ids of one bank: those of a micro-batch with their bags, or all of a step, as a planner takes them. Positions are
    numbered part after part: by feature, sample, and place in the bag."""

    values: np.ndarray
    """int64 or int32: rows or keys; values outside all parts belong to other banks."""
    parts: np.ndarray
    """int64 [parts, 4]: table, begin and end in `values`, and the number to subtract from a value to get its row."""
    count: int = field(init=False)

    # The bags of a micro-batch, from when its step is planned.
    batch: int = 0
    pooled: bool = True
    one_each: bool = False
    """True if every row of the output comes from exactly one id, so that nothing has to be summed."""
    inverse: Sequence[np.ndarray | None] = ()
    """By feature: int32 [batch], the bag of each sample among the feature's; None if each has its own."""
    first: np.ndarray = field(init=False)
    """int64 [features + 1]: each feature's first bag."""
    offsets: np.ndarray = field(init=False)
    """int32 [bags + 1], feature after feature: where each bag starts."""
    bag_of: np.ndarray = field(init=False)
    """int32 [n]: each position's row in the output seen as [batch * features, dim], followed by the shared bags."""
    scale: np.ndarray = field(init=False)
    """[n] in the rows' dtype: weight, or weight / count for a mean; empty if every factor is 1."""

    # Features with an inverse, if bags are pooled: once for several samples.
    columns: np.ndarray = field(init=False)
    """int32 [shared]: these features, ascending."""
    bag: np.ndarray = field(init=False)
    """int32 [batch, shared]: the bag of each sample, as an index into all shared bags of the bank."""
    begins: np.ndarray = field(init=False)
    """int32 [shared + 1]: each shared feature's first bag among all shared bags."""
    of_rows: np.ndarray = field(init=False)
    """int32 [2, bags]: where the positions of each row of the output begin and end; none for a sample of a shared bag."""

    def __post_init__(self) -> None:
        self.count = int((self.parts[:, 2] - self.parts[:, 1]).sum())

    @classmethod
    def of(cls, batch: "BankIds | np.ndarray") -> "BankIds":
        """Build from an array of keys; a new part begins wherever the table changes."""
        if isinstance(batch, BankIds):
            return batch
        keys = np.asarray(batch, np.int64)
        tables = keys >> ROW_BITS
        begin = np.flatnonzero(np.diff(tables, prepend=-1))
        end = np.append(begin[1:], len(keys))[: len(begin)]
        table = tables[begin]
        return cls(keys, np.stack([table, begin, end, table << ROW_BITS], axis=1))

    @classmethod
    def joined(cls, batches: "Sequence[BankIds]") -> "BankIds":
        if len(batches) == 1:
            return batches[0]
        parts, shift = [], 0
        for batch in batches:
            parts.append(batch.parts + np.array([0, shift, shift, 0]))
            shift += len(batch.values)
        return cls(np.concatenate([batch.values for batch in batches]), np.concatenate(parts))

    def keys(self) -> np.ndarray:
        keys = np.empty(self.count, np.int64)
        _keys(self.values, self.parts, keys)
        return keys

    @property
    def shares(self) -> bool:
        return len(self.columns) > 0

    @property
    def features(self) -> int:
        return len(self.first) - 1

    @property
    def samples(self) -> int:
        """Number of output rows before those of shared bags."""
        return self.batch * self.features

    @property
    def bags(self) -> int:
        """Number of output rows: one per bag, or one per id if nothing is pooled. Those of shared bags come last."""
        return self.samples + int(self.begins[-1]) if self.pooled else self.count

    def by_bag(self, mask: np.ndarray) -> np.ndarray:
        """Spread a value per feature over its rows in the output. Rows that are copies of a shared bag get False."""
        if not self.pooled:
            return np.repeat(mask, np.diff(self.offsets[self.first]))
        plain = mask & np.array([each is None for each in self.inverse], np.bool_)
        return np.concatenate([np.tile(plain, self.batch), np.repeat(mask[self.columns], np.diff(self.begins))])

    def rows_of_bags(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, by feature: the output row of its first bag, the distance from one bag's row to the next, its bags."""
        row, step = np.arange(self.features), np.full(self.features, self.features)
        if self.shares:
            row[self.columns], step[self.columns] = self.samples + self.begins[:-1], 1
        return row, step, np.diff(self.first)

    def share(self) -> None:
        columns = [f for f, each in enumerate(self.inverse) if each is not None and self.pooled]
        self.columns, self.bag = np.array(columns, np.int32), np.empty((self.batch, len(columns)), np.int32)
        self.begins = np.zeros(len(columns) + 1, np.int32)
        np.cumsum(np.diff(self.first)[columns], out=self.begins[1:])
        for i, f in enumerate(columns):
            self.bag[:, i] = self.inverse[f] + self.begins[i]

    def divide(self) -> None:
        self.of_rows = np.zeros((2, self.bags), np.int32)
        for first, row, step, bags in zip(self.first, *self.rows_of_bags()):
            at = slice(row, row + step * bags, step)
            self.of_rows[0, at] = self.offsets[first : first + bags]
            self.of_rows[1, at] = self.offsets[first + 1 : first + bags + 1]


def check_form(sparse: Sparse) -> None:
    for method in ("keys", "values", "offsets", "weights_or_none"):
        if not callable(getattr(sparse, method, None)):
            given = "its .sparse" if hasattr(sparse, "sparse") else "a KeyedJagged or a KeyedJaggedTensor"
            raise TypeError(
                f"ids are a {type(sparse).__name__}, which has no {method}(): pass {given}, or tell lookahead where it "
                "is with sparse=lambda batch: ..."
            )


def capture(sparse: Sparse, features: Sequence[str], *, copy: bool = True) -> Ids:
    """Copy a batch's ids into arrays and check their form."""
    check_form(sparse)
    keys = tuple(sparse.keys())
    values, offsets = array_of(sparse.values(), "ids", INTS, copy), array_of(sparse.offsets(), "offsets", INTS, copy)
    weights = sparse.weights_or_none()
    if len(set(keys)) != len(keys):
        raise BadIds(
            f"the batch names feature {next(k for k in keys if keys.count(k) > 1)!r} twice: give each its own name"
        )
    missing = [name for name in features if name not in keys]
    if missing:
        raise BadIds(
            f"the batch has no feature {missing[0]!r}: it has {', '.join(map(repr, keys)) or 'none'}; give it one of that "
            "name, or set the table's features to names that it has"
        )
    if not keys:
        raise BadIds("the batch has no features: pass ids of at least one")
    found = inverse_of(sparse, keys, len(offsets) - 1)
    if found is None and ((len(offsets) - 1) % len(keys) or not len(offsets)):
        raise BadIds(
            f"offsets has {len(offsets)} entries, but {len(keys)} features need a multiple of {len(keys)} plus 1: pass a "
            "start for each feature and sample, and the end"
        )
    samples = (len(offsets) - 1) // len(keys)
    shape = found or (samples, samples * np.arange(len(keys) + 1), (None,) * len(keys))
    array = None
    if weights is not None:
        floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
        array = array_of(weights.detach(), "weights", floats, copy)
        if len(array) != len(values):
            raise BadIds(f"{len(array)} weights for {len(values)} ids: pass one for each id")
    if offsets[0] != 0 or offsets[-1] != len(values) or (offsets[1:] < offsets[:-1]).any():
        raise BadIds(
            f"offsets must rise from 0 to the number of ids ({len(values)}); they run from {offsets[0]} to {offsets[-1]}: "
            "pass offsets that never fall, or lengths of 0 or more whose sum is the number of ids"
        )
    return Ids(keys, values, offsets, *shape, array)


def positions_of(ids: Ids, schema: Schema, bank: int, *, checked: bool = False) -> BankIds:
    """Check every id of a bank's features, unless all are `checked`, and return their positions."""
    starts, features = ids.offsets, schema.banks[bank].features
    bags = [ids.bags(ids.keys.index(f.name)) for f in features]
    parts = [(f.table, starts[b.start], starts[b.stop], 0) for f, b in zip(features, bags)]
    positions = BankIds(ids.values, np.array(parts, np.int64).reshape(-1, 4))
    if max(positions.count, ids.samples * len(features) + sum(b.stop - b.start for b in bags)) >= 1 << 31:
        raise BadIds(f"a batch of {positions.count} ids is too large: split it below 2**31")
    rows = np.array([schema.tables[f.table].rows for f in features], np.int64)
    bad = -1 if checked else _check(positions.values, positions.parts, rows)
    if bad >= 0:
        raise BadIds(_complaint(ids, schema, int(bad)))
    return positions


@dataclass(frozen=True)
class Resolver:
    """Turns a batch's ids into those of each bank, for the reader, the window and the module."""

    schema: Schema
    dtype: np.dtype
    """The dtype that bags are computed in."""
    pooled: bool

    def capture(self, sparse: Sparse, *, copy: bool = True) -> Ids:
        """Return a batch's ids as arrays. Ids of other collections' features stay in them, unchecked."""
        return capture(sparse, self.schema.features, copy=copy)

    def capture_part(self, sparse: Sparse) -> Ids:
        """Do the same for a batch that has only some of the features; give the others no ids."""
        ids = capture(sparse, (), copy=False)
        missing = tuple(name for name in self.schema.features if name not in ids.keys)
        none = np.full(len(missing) * ids.samples, ids.offsets[-1], ids.offsets.dtype)
        offsets = np.concatenate([ids.offsets, none])
        first = np.concatenate([ids.first, ids.first[-1] + ids.samples * np.arange(1, len(missing) + 1)])
        inverse = ids.inverse + (None,) * len(missing)
        return Ids(ids.keys + missing, ids.values, offsets, ids.samples, first, inverse, ids.weights)

    def check(self, ids: Ids) -> Ids:
        """Check every id. Return the ids as this collection has them, with the positions of each bank."""
        return replace(ids, banks=[positions_of(ids, self.schema, bank) for bank in range(len(self.schema.banks))])

    def resolve(self, ids: Ids) -> Ids:
        """Add bags and scales to the positions of each bank."""
        for bank in range(len(ids.banks)):
            self.resolve_bank(ids, bank)
        return ids

    def resolve_bank(self, ids: Ids, bank: int, here: bool = True) -> None:
        """`here`: whether this trainer looks them up, which takes a bag and a scale for each."""
        of, features = ids.banks[bank], self.schema.banks[bank].features
        place = [ids.keys.index(f.name) for f in features]
        bags = [ids.bags(p) for p in place]
        of.batch, of.pooled = ids.samples, self.pooled
        of.first = np.array([0, *accumulate(each.stop - each.start for each in bags)])
        of.inverse = [ids.inverse[p] for p in place]
        of.share()
        mean = np.array([self.schema.tables[f.table].pooling == "mean" for f in features], np.bool_)
        of.offsets, of.bag_of = np.empty(of.first[-1] + 1, np.int32), np.empty(of.count if here else 0, np.int32)
        weighted = ids.weights is not None
        scale = np.empty(len(of.bag_of) if weighted or mean.any() else 0, self.dtype)
        begins = np.array([each.start for each in bags])
        weights = (_NONE if ids.weights is None else ids.weights).astype(self.dtype, copy=False)
        one_each = fill_bags(ids.offsets, weights, begins, *of.rows_of_bags(), mean, of.offsets, of.bag_of, scale)
        # If each bag has one id, also a mean has no factors.
        of.scale = scale[:0] if not self.pooled or (one_each and not weighted) else scale
        of.one_each = not self.pooled or (one_each and not of.shares)
        if not self.pooled:
            of.bag_of = np.arange(of.count, dtype=np.int32)
        elif of.shares:
            of.divide()


def _complaint(ids: Ids, schema: Schema, position: int) -> str:
    bag = int(np.searchsorted(ids.offsets, position, side="right")) - 1
    place = next(p for p in range(len(ids.keys)) if bag < ids.bags(p).stop)
    name, sample = ids.keys[place], bag - ids.bags(place).start
    inverse = ids.inverse[place]
    if inverse is not None and (inverse == sample).any():
        sample = int(np.argmax(inverse == sample))
    table = next(t for t in schema.tables if name in t.features)
    return (
        f"feature {name!r}, sample {sample}: id {ids.values[position]} is outside table {table.name!r}, "
        f"which has rows 0 to {table.rows - 1}: map ids to these, or make the table as large"
    )


Hashes = dict[str, tuple[int, int]]
"""By feature: a hash of its ids and bags, and one of its weights and bags, 0 without weights."""


def hashes_of(captured: Ids) -> Hashes:
    hashes = np.zeros((2, len(captured.keys)), np.uint64)
    numbers = [captured.values]
    if captured.weights is not None:
        numbers.append(captured.weights.view(np.int32 if captured.weights.itemsize == 4 else np.int64))
    for of, out in zip(numbers, hashes):
        _hash(of, captured.offsets, captured.first, out)
    for f, inverse in enumerate(captured.inverse):
        if inverse is not None:
            # Hashed like the ends of bags; the product keeps it apart from those and from ids.
            of_inverse = np.uint64(mixed(inverse, np.uint64(_LENGTHS)))
            hashes[: len(numbers), f] = hashes[: len(numbers), f] * np.uint64(_STEP) + of_inverse
    return {name: (ids, weights) for name, ids, weights in zip(captured.keys, *hashes.tolist(), strict=True)}


@kernel
def mixed(numbers, place):
    """Return the sum of all numbers, each mixed with its position, counted from `place`. Without the shift the hash would
    be linear, and a 2 in one position could hash like a 1 in another."""
    step, mix, half = np.uint64(_STEP), np.uint64(_MIX), np.uint64(32)
    total = np.uint64(0)
    for i in range(len(numbers)):
        place += step  # faster than i * step, a 64-bit product
        z = (np.uint64(numbers[i]) + place) * mix
        total += z ^ (z >> half)
    return total


@kernel
def _hash(values, offsets, first, out):
    """Fill out, uint64 [features], from all numbers and where bags end, counted from the feature's first number."""
    for f in range(len(out)):
        ends = offsets[first[f] : first[f + 1] + 1]
        out[f] = mixed(values[ends[0] : ends[-1]], np.uint64(0)) + mixed(ends, np.uint64(_LENGTHS) - np.uint64(ends[0]))


@kernel
def _keys(values, parts, keys):
    n = 0
    for i in range(len(parts)):
        shift = (parts[i, 0] << ROW_BITS) - parts[i, 3]
        for v in range(parts[i, 1], parts[i, 2]):
            keys[n] = values[v] + shift
            n += 1


@kernel
def _check(values, parts, rows):
    """Return the index of the first id that is outside its table, or -1."""
    for f in range(len(parts)):
        wrong = 0  # counted without a branch, so that the loop vectorizes: a tenth of the time
        for p in range(parts[f, 1], parts[f, 2]):
            wrong += (values[p] < 0) | (values[p] >= rows[f])
        if wrong:
            for p in range(parts[f, 1], parts[f, 2]):
                if values[p] < 0 or values[p] >= rows[f]:
                    return p
    return -1
