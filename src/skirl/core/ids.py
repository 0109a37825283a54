"""What a batch asks: ids by table, checked and resolved once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from skirl.core.batch import Sparse
from skirl.core.inverse import INTS, Inverse, Shared, array_of, fill_bags, inverse_of
from skirl.core.inverse import BadIds as BadIds
from skirl.core.keys import Positions
from skirl.core.tables import Schema
from skirl.tools.jit import kernel

NO_SCALE = np.empty(0, np.float32)


@dataclass(slots=True)
class Ids:
    """What a micro-batch asks, in arrays that nothing else writes to: read once, and resolved by bank in each
    collection."""

    keys: tuple[str, ...]
    values: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None = None
    inverse: Inverse | None = None
    left: np.ndarray | None = None
    """int64 [n]: the index of each id among those given, if some were dropped; None if all are here."""
    hashes: Any = None
    batch: Any = None
    """The batch that the loop gets."""
    nbytes: int = 0
    loader_state: Any = None

    # What one collection knows of them.
    positions: list[Positions] = field(default_factory=list)
    """The ids of each bank, checked."""
    banks: list["BankIds"] = field(default_factory=list)
    """The same with their bags, once the step is planned."""
    returned: bool = False
    """True once its backward has run."""
    learned: torch.Tensor | None = None
    """Weights of the ids as forward got them, if they need a gradient."""
    weighted: "Ids | None" = None
    """The ids with these weights. Features may be in another order."""

    @property
    def samples(self) -> int:
        return (len(self.offsets) - 1) // len(self.keys) if self.inverse is None else self.inverse.batch

    def bags(self, place: int) -> slice:
        """Return the range of the feature at index `place` among all bags of the batch."""
        if self.inverse is None:
            return slice(place * self.samples, (place + 1) * self.samples)
        return slice(int(self.inverse.first[place]), int(self.inverse.first[place + 1]))

    def starts(self, place: int) -> np.ndarray:
        bags = self.bags(place)
        return self.offsets[bags.start : bags.stop + 1]


@dataclass(slots=True)
class BankIds:
    """The ids of one micro-batch that belong to one bank."""

    positions: Positions
    """Ordered by (feature, sample, place in the bag)."""
    offsets: np.ndarray
    """int32 [bags + 1], feature after feature: where each bag starts. A plain batch has features * batch bags."""
    bag_of: np.ndarray
    """int32 [n]: each position's row in the output seen as [batch * features, dim], followed by the shared bags."""
    scale: np.ndarray
    """[n] in the rows' dtype: weight, or weight / count for a mean; empty if every factor is 1."""
    batch: int
    pooled: bool = True
    one_each: bool = False
    """True if every row of the output comes from exactly one id, so that nothing has to be summed."""
    shared: Shared | None = None

    @property
    def count(self) -> int:
        return len(self.bag_of)

    @property
    def bags(self) -> int:
        """Number of output rows: one per bag, or one per id if nothing is pooled. Those of shared bags come last."""
        if not self.pooled:
            return self.count
        return len(self.offsets) - 1 if self.folded is None else self.folded.rows

    @property
    def folded(self) -> Shared | None:
        """The shared bags, if bags are pooled once for several samples."""
        return self.shared if self.pooled else None

    @property
    def first(self) -> np.ndarray:
        """[features + 1]: each feature's first position."""
        if self.shared is not None:
            return self.offsets[self.shared.first]
        features = len(self.positions.parts)
        return self.offsets[:: self.batch] if self.batch else np.zeros(features + 1, np.int32)

    def by_bag(self, mask: np.ndarray) -> np.ndarray:
        """Repeat a value per feature for each of its rows in the output."""
        if not self.pooled:
            return np.repeat(mask, np.diff(self.first))
        return np.tile(mask, self.batch) if self.shared is None else self.shared.by_bag(mask)

    def unpooled(self) -> "BankIds":
        each = np.arange(self.count, dtype=np.int32)
        return BankIds(self.positions, self.offsets, each, self.scale[:0], self.batch, False, True, self.shared)


def check_form(sparse: Sparse) -> None:
    for method in ("keys", "values", "offsets", "weights_or_none"):
        if not callable(getattr(sparse, method, None)):
            given = "its .sparse" if hasattr(sparse, "sparse") else "a KeyedJagged or a KeyedJaggedTensor"
            raise TypeError(
                f"ids are a {type(sparse).__name__}, which has no {method}(): pass {given}, or tell lookahead where it "
                "is with sparse=lambda batch: ..."
            )


def capture(sparse: Sparse, features: Sequence[str], *, copy: bool = True) -> Ids:
    """Copy a batch's ids into arrays and check their form. Bags that no sample uses are dropped, along with their
    ids."""
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
    inverse = inverse_of(sparse, keys, len(offsets) - 1)
    if inverse is None and ((len(offsets) - 1) % len(keys) or not len(offsets)):
        raise BadIds(
            f"offsets has {len(offsets)} entries, but {len(keys)} features need a multiple of {len(keys)} plus 1: pass a "
            "start for each feature and sample, and the end"
        )
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
    return _of_samples(Ids(keys, values, offsets, array, inverse))


def _of_samples(ids: Ids) -> Ids:
    """Drop the ids of bags that no sample uses: the expanded batch would not have them and so would not train them."""
    if ids.inverse is None or (left_in := ids.inverse.without_unused()) is None:
        return ids
    used, inverse = left_in
    lengths = np.diff(ids.offsets)
    offsets = np.zeros(int(used.sum()) + 1, ids.offsets.dtype)
    np.cumsum(lengths[used], out=offsets[1:])
    kept = np.repeat(used, lengths)
    weights = None if ids.weights is None else ids.weights[kept]
    values, left = ids.values[kept], np.flatnonzero(kept)
    return Ids(ids.keys, values, offsets, weights, inverse, left)


def positions_of(ids: Ids, schema: Schema, bank: int) -> Positions:
    """Check every id of a bank's features, and return their positions in the order (feature, sample, place in the
    bag)."""
    starts, features = ids.offsets, schema.banks[bank].features
    bags = [ids.bags(ids.keys.index(f.name)) for f in features]
    parts = [(f.table, starts[b.start], starts[b.stop], 0) for f, b in zip(features, bags)]
    positions = Positions(ids.values, np.array(parts, np.int64).reshape(-1, 4))
    total = len(positions)
    if max(total, ids.samples * len(features) + sum(b.stop - b.start for b in bags)) >= 1 << 31:
        raise BadIds(f"a batch of {total} ids is too large: split it below 2**31")
    rows = np.array([schema.tables[f.table].rows for f in features], np.int64)
    bad = _check(positions.values, positions.parts, rows)
    if bad >= 0:
        raise BadIds(_complaint(ids, schema, int(bad)))
    return positions


def resolve(ids: Ids, positions: Positions, schema: Schema, bank: int, dtype: np.dtype) -> BankIds:
    """Add bags and scales to the positions of a bank's features."""
    batch, features, total = ids.samples, schema.banks[bank].features, len(positions)
    place = [ids.keys.index(f.name) for f in features]
    weighted = ids.weights is not None
    first = np.array([ids.bags(p).start for p in place], np.int64)
    inverse = [] if ids.inverse is None else [ids.inverse.of[p] for p in place]
    bags, shared = len(features) * batch, None
    if any(each is not None for each in inverse):
        shared = Shared.of(inverse, [ids.bags(p).stop - ids.bags(p).start for p in place], batch)
        bags = int(shared.first[-1])
    mean = np.array([schema.tables[f.table].pooling == "mean" for f in features], np.bool_)
    offsets, bag_of = np.empty(bags + 1, np.int32), np.empty(total, np.int32)
    scale = np.empty(total if weighted or mean.any() else 0, dtype)
    weights = ids.weights.astype(dtype, copy=False) if ids.weights is not None else NO_SCALE.astype(dtype)
    of_plain = np.arange(len(features)), np.full(len(features), len(features)), np.full(len(features), batch)
    rows = of_plain if shared is None else shared.rows_of_bags()
    one_each = fill_bags(ids.offsets, weights, first, *rows, mean, offsets, bag_of, scale)
    if one_each and not weighted:
        scale = scale[:0]  # also for a mean
    if shared is not None:
        shared.divide(offsets)
    return BankIds(positions, offsets, bag_of, scale, batch, one_each=one_each and shared is None, shared=shared)


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
        check_form(sparse)
        features = self.schema.features
        keys = set(sparse.keys())
        here = [name for name in features if name in keys]
        ids = capture(sparse, here or features, copy=False)
        missing = tuple(name for name in features if name not in keys)
        if not missing:
            return ids
        none = np.full(len(missing) * ids.samples, ids.offsets[-1], ids.offsets.dtype)
        offsets = np.concatenate([ids.offsets, none])
        inverse = None if ids.inverse is None else ids.inverse.with_empty(len(missing))
        return Ids(ids.keys + missing, ids.values, offsets, ids.weights, inverse)

    def check(self, ids: Ids) -> Ids:
        """Check every id. Return the ids as this collection has them, with the positions of each bank."""
        return replace(ids, positions=[positions_of(ids, self.schema, bank) for bank in range(len(self.schema.banks))])

    def resolve(self, ids: Ids) -> Ids:
        parts = [resolve(ids, part, self.schema, bank, self.dtype) for bank, part in enumerate(ids.positions)]
        ids.banks = parts if self.pooled else [part.unpooled() for part in parts]
        return ids


def _complaint(ids: Ids, schema: Schema, position: int) -> str:
    bag = int(np.searchsorted(ids.offsets, position, side="right")) - 1
    place = next(p for p in range(len(ids.keys)) if bag < ids.bags(p).stop)
    name, sample = ids.keys[place], bag - ids.bags(place).start
    inverse = None if ids.inverse is None else ids.inverse.of[place]
    if inverse is not None and (inverse == sample).any():
        sample = int(np.argmax(inverse == sample))
    table = next(t for t in schema.tables if name in t.features)
    return (
        f"feature {name!r}, sample {sample}: id {ids.values[position]} is outside table {table.name!r}, "
        f"which has rows 0 to {table.rows - 1}: map ids to these, or make the table as large"
    )


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
