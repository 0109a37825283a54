"""The CPU kernels have the bits of the plain reference, however a step is split among threads."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, target
from hypothesis import strategies as st

from skirl.core.initial import Constant, Normal, Uniform, as_arrays, fill
from skirl.core.optim import FTRL, SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from skirl.core.reference import Reference
from skirl.core.tables import Schema, Table
from skirl.core.tree import leaves
from skirl.engine.kernels import cpu
from skirl.engine.kernels.tree import Gradients, Parts
from skirl.tools.threads import run
from tests.cases import cases

OPTIMIZERS: list[RowOptimizer] = [
    SGD(lr=0.1),
    Adagrad(lr=0.1, lr_decay=0.3, initial_accumulator_value=0.1),
    RowwiseAdagrad(lr=0.1),
    RowwiseAdagrad(lr=0.1, weight_decay=0.01),
    Adam(lr=0.1),
    SGD(lr=0.1, clip=0.5),
    Adagrad(lr=0.1, clip=0.5),
    RowwiseAdagrad(lr=0.1, weight_decay=0.1, clip=0.5),
    Adam(lr=0.1, clip=0.5, weight_decay=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.1),
    SGD(lr=0.1, momentum=0.5, clip=0.5),
    FTRL(lr=0.1, l1=0.3, l2=0.1, clip=0.5),
    FTRL(lr=0.1, beta=0.5, weight_decay=0.1),
]


@dataclass
class World:
    """All rows of a bank in one array, in shuffled slots, with the kernels called as a module calls them."""

    tables: list[Table]
    optimizer: RowOptimizer
    dtype: type
    threads: int
    rng: np.random.Generator
    update: Any = None

    def __post_init__(self):
        self.schema = Schema.of(self.tables)
        (self.bank,) = self.schema.banks
        self.keys = np.array([t << 48 | row for t in self.bank.tables for row in range(self.tables[t].rows)], np.int64)
        self.slots = self.rng.permutation(len(self.keys) + 3)[: len(self.keys)].astype(np.int32)
        self.slot = dict(zip(self.keys.tolist(), self.slots.tolist()))
        self.cache = np.full((len(self.keys) + 3, self.optimizer.width(self.bank.dim)), np.nan, self.dtype)
        self.steps = np.zeros(len(self.tables), np.int64)
        init = as_arrays([t.initial for t in self.tables], self.dtype)
        self.run(
            fill, len(self.keys), self.keys, self.slots, self.cache, 0, self.bank.dim, self.cache.shape[1], 5, *init,
            self.optimizer.initial_state,
        )  # fmt: skip

    def run(self, kernel, n, *args, work=None):
        run(kernel, n, *args, threads=self.threads, work=work)

    def step(self, micro_batches, grads, shards=1):
        """Run forward and backward of one step, and return the outputs of each micro-batch."""
        features, dim = self.bank.features, self.bank.dim
        keys, scale, bag_of, lengths = [], [], [], []
        first_bag = 0
        for batch in micro_batches:
            for f in features:
                ids, offsets, weights = batch[f.name]
                count = np.diff(offsets)
                keys.append(np.array(ids, np.int64) | f.table << 48)
                factor = np.ones(len(ids), self.dtype) if weights is None else np.array(weights, self.dtype)
                if self.tables[f.table].pooling == "mean":
                    factor /= np.repeat(count, count).astype(self.dtype)
                scale.append(factor)
                bag_of.append(np.repeat(np.arange(len(count)) * len(features) + f.column + first_bag, count))
                lengths.append(count)
            first_bag += len(count) * len(features)
        plain = all(t.pooling == "sum" for t in self.tables)
        plain = plain and all(b[f.name][2] is None for b in micro_batches for f in features)
        scale = np.empty(0, self.dtype) if plain else np.concatenate(scale)
        keys, bag_of = np.concatenate(keys), np.concatenate(bag_of).astype(np.int32)
        slots = np.array([self.slot[k] for k in keys.tolist()], np.int32)

        outs, first = [], 0
        for m in range(len(micro_batches)):
            mine = np.concatenate(lengths[m * len(features) : (m + 1) * len(features)])
            offsets = np.concatenate([[first], first + np.cumsum(mine)]).astype(np.int32)
            first = offsets[-1]
            out = np.full((len(mine), dim), np.nan, self.dtype)
            self.run(cpu.pool, len(mine), self.cache, dim, slots, offsets, offsets[1:], len(features), scale, out)
            outs.append({f.name: out[f.column :: len(features)] for f in features})

        live = np.zeros(first_bag, np.bool_)  # by bag: micro-batches may differ in which features got a gradient
        stacked = np.zeros((first_bag, dim), self.dtype)
        first_bag = 0
        for batch, g in zip(micro_batches, grads):
            n = len(batch[features[0].name][1]) - 1
            for f in features:
                if g.get(f.name) is not None:
                    mine = slice(first_bag + f.column, first_bag + n * len(features), len(features))
                    stacked[mine], live[mine] = g[f.name], True
            first_bag += n * len(features)
        self.steps[list({f.table for f in features if any(g.get(f.name) is not None for g in grads)})] += 1
        distinct, group = np.unique(keys, return_inverse=True)
        start = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=len(distinct)))]).astype(np.int32)
        positions = np.argsort(group, kind="stable").astype(np.int32)
        rows = np.array([self.slot[k] for k in distinct.tolist()], np.int32)
        rule = self.optimizer
        scalars = np.array([rule.numbers(rule.lr, rule.weight_decay, step) for step in self.steps.tolist()], self.dtype)
        counts = [sum(len(batch[f.name][0]) for f in features) for batch in micro_batches]
        parts = Parts(np.cumsum(counts), np.array(leaves(len(micro_batches), shards)), 1 / shards)
        self.run(
            self.update or cpu.update_kernel(self.optimizer.rule), len(distinct), self.cache, dim, rows, distinct,
            Gradients(start, positions, bag_of, scale, stacked, live), parts, scalars, work=start,
        )  # fmt: skip
        return outs


def draw_tables(draw, dim):
    kind = st.tuples(st.integers(1, 6), st.sampled_from(["sum", "mean"]), st.integers(1, 2))
    kinds = draw(st.lists(kind, min_size=1, max_size=3))
    if draw(st.booleans()):
        kinds = [(rows, "sum", features) for rows, _, features in kinds]
    inits = st.sampled_from([Uniform(0.5), Normal(0.1), Constant(0.25), Constant(-0.0)])
    return [
        Table(f"t{i}", rows, dim, tuple(f"t{i}.{k}" for k in range(features)), pooling, draw(inits))
        for i, (rows, pooling, features) in enumerate(kinds)
    ]


def draw_bags(draw, rng, rows, batch, weighted):
    sizes = rng.integers(0, draw(st.sampled_from([2, 4, 12])), batch)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids = rng.integers(0, rows, offsets[-1])
    return ids.tolist(), offsets.tolist(), rng.standard_normal(len(ids)).tolist() if weighted else None


@cases(300)
@given(st.data())
def test_every_bit_equals_the_reference(data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    # Above 16, the loops over a row are vectorized, with a remainder if dim is odd.
    tables = draw_tables(draw, draw(st.sampled_from([1, 2, 3, 4, 5, 8, 13, 16, 33, 64, 100])))
    world = World(tables, optimizer, dtype, draw(st.integers(1, 4)), rng)
    reference = Reference(tables, optimizer, seed=5, dtype=dtype)
    dim = tables[0].dim
    weighted = draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        micro_batches, grads = [], []
        alive = {f: draw(st.sampled_from([True, True, True, False])) for t in tables for f in t.features}
        for _ in range(draw(st.integers(1, 2))):
            batch = draw(st.integers(1, 6))
            micro_batches.append({f: draw_bags(draw, rng, t.rows, batch, weighted) for t in tables for f in t.features})
            some = {f: rng.standard_normal((batch, dim)).astype(dtype) for f in alive}
            some = {f: np.where(rng.random(g.shape) < 0.1, dtype(-0.0), g) for f, g in some.items()}
            grads.append({f: g for f, g in some.items() if alive[f] and rng.random() < 0.9})
        outs = world.step(micro_batches, grads)
        for m, (batch, out) in enumerate(zip(micro_batches, outs)):
            expected = reference.forward(batch, accumulate=m > 0)
            for feature in expected:
                assert_same_bits(out[feature], expected[feature], feature)
        reference.backward(*grads)
        for key, record in reference.rows.items():
            assert_same_bits(world.cache[world.slot[key]], record, f"table {key >> 48} row {key & 2**48 - 1}")
    assert world.steps.tolist() == reference.table_steps
    target(float(len(reference.rows)))


def assert_same_bits(got, expected, what):
    assert got.dtype == expected.dtype, what
    as_bits = np.uint32 if got.dtype == np.float32 else np.uint64
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(as_bits), np.ascontiguousarray(expected).view(as_bits), err_msg=what
    )


def test_nan_and_infinite_gradients_stay_in_their_row():
    for optimizer in OPTIMIZERS:
        world = World([Table("t", 3, 4)], optimizer, np.float32, 1, np.random.default_rng(0))
        before = world.cache.copy()
        grad = np.array([[np.nan] * 4, [1.0] * 4, [np.inf] * 4], np.float32)
        world.step([{"t": ([0, 1, 2], [0, 1, 2, 3], None)}], [{"t": grad}])
        assert np.isnan(world.cache[world.slot[0], :4]).all()
        assert np.isfinite(world.cache[world.slot[1]]).all()
        untouched = [s for s in range(6) if s not in world.slot.values()]
        assert_same_bits(world.cache[untouched], before[untouched], "other rows")
