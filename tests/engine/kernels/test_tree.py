"""Sums over micro-batches and over hot rows: every kernel and the reference add in the order of one tree, in stretches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.optim import SGD, Adam, RowwiseAdagrad
from skirl.core.reference import Reference
from skirl.core.tables import Table
from skirl.engine import kernels
from skirl.engine.kernels import cpu
from skirl.engine.kernels.tree import NOWHERE, ONE, STRETCH, Gradients, Parts, TreePlan
from tests.cases import cases
from tests.engine.kernels.test_cpu import OPTIMIZERS, World, assert_same_bits, draw_bags, draw_tables
from tests.engine.kernels.test_gpu import Arena, on_devices


def halves(parts, begin, end):
    """Return the sum of leaves begin..end as the sum of its two halves; None if there are no terms."""
    if end - begin == 1:
        return parts.get(begin)
    both = [halves(parts, begin, (begin + end) // 2), halves(parts, (begin + end) // 2, end)]
    found = [part for part in both if part is not None]
    return found[0] + found[1] if len(found) == 2 else found[0] if found else None


def stretched(terms, length=STRETCH):
    """Return the sum of one part's terms, stretch by stretch; None stands for a term without a gradient."""
    total = np.zeros_like(next(term for term in terms if term is not None))
    for begin in range(0, len(terms), length):
        part = np.zeros_like(total)
        for term in terms[begin : begin + length]:
            if term is not None:
                part = part + term
        total = total + part
    return total


class Step:
    """Positions of some rows in some parts, with their sums."""

    def __init__(self, seed, dim, dtype, leaves, *, scaled, dead, hot=False, skip=()):
        rng = np.random.default_rng(seed)
        self.leaves, rows, features = leaves, 7, 3
        each = rng.integers(0, 12, len(leaves)) if not hot else rng.integers(300, 900, len(leaves))
        row_of = np.concatenate([np.minimum(rng.geometric(0.4, n) - 1, rows - 1) for n in each]).astype(np.int64)
        row_of = np.concatenate([row_of, np.arange(rows)])  # every row of a step has at least one position
        each[-1] += rows
        n = len(row_of)
        self.parts = Parts(np.cumsum(each), np.array([NOWHERE if leaf in skip else leaf for leaf in leaves]))
        self.bag_of = rng.permutation(n).astype(np.int32)
        self.grads = (rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-3, 4, (n, 1))).astype(dtype)
        self.grads[rng.random((n, dim)) < 0.1] = -0.0
        self.live = np.array([True, not dead, True])
        self.grads[~self.live[np.arange(n) % features]] = np.nan
        self.scale = rng.standard_normal(n if scaled else 0).astype(dtype)
        order = np.argsort(row_of, kind="stable").astype(np.int32)
        self.start = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))]).astype(np.int32)
        self.pos = order
        self.sums, self.counted = np.zeros((rows, dim), dtype), np.zeros(rows, np.bool_)
        part_of = np.repeat(np.arange(len(leaves)), each)
        for u in range(rows):
            terms = {}
            for pos in order[self.start[u] : self.start[u + 1]]:
                bag = self.bag_of[pos]
                term = self.grads[bag] if not scaled else self.scale[pos] * self.grads[bag]
                leaf = leaves[part_of[pos]]
                if leaf not in skip:
                    terms.setdefault(leaf, []).append(term if self.live[bag % features] else None)
            parts = {leaf: stretched(of) for leaf, of in terms.items() if any(term is not None for term in of)}
            total = halves(parts, 0, 1 << max(leaves).bit_length())
            if total is not None:
                self.sums[u], self.counted[u] = total, True

    @property
    def given(self):
        return Gradients(self.start, self.pos, self.bag_of, self.scale, self.grads, self.live)


@st.composite
def steps(draw, dims, dtypes, **fixed):
    leaves = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=9)))
    skip = draw(st.sampled_from([(), (), tuple(leaves[: len(leaves) // 2])]))
    return Step(
        draw(st.integers(0, 2**32)), draw(st.sampled_from(dims)), draw(st.sampled_from(dtypes)), leaves,
        scaled=draw(st.booleans()), dead=draw(st.booleans()), skip=skip, **fixed,
    )  # fmt: skip


def check(step, kernel):
    out, counted = np.full_like(step.sums, np.nan), np.zeros(len(step.sums), np.bool_)
    none = np.empty(0, np.int64)
    kernel(out, out.shape[1], counted, none, step.given, step.parts, none, 0, len(out))
    assert_same_bits(out, step.sums, "sums")
    np.testing.assert_array_equal(counted, step.counted)


@cases(60)
@given(steps([1, 5, 16], [np.float32, np.float64]))
def test_plain_loops(step):
    check(step, cpu.update_kernel(None))


@cases(40)
@given(steps([4, 17], [np.float32]))
def test_rows_as_one_value(step):
    kernel = kernels.update_for(step.sums.shape[1], np.dtype(np.float32), None, False)
    assert kernel is not cpu.update_kernel(None)
    check(step, kernel)


@pytest.mark.parametrize("dim", [3, 16])
def test_hot_rows(dim):
    """Several stretches in one part: each part starts its stretches afresh."""
    step = Step(0, dim, np.float32, [0, 1, 2, 5], scaled=True, dead=True, hot=True)
    assert np.diff(step.start).max() > 3 * STRETCH
    check(step, cpu.update_kernel(None))
    check(step, kernels.update_for(dim, np.dtype(np.float32), None, False))


def on_gpu(step, device):
    from skirl.engine.kernels import gpu

    arena = Arena(device)
    plan = TreePlan.of(step.start, step.pos, step.parts)
    rows, m = len(step.sums), len(plan.stretches)
    live = np.empty(0, np.bool_) if step.live.all() else step.live
    partial = arena.put(np.full((m, step.sums.shape[1]), np.nan, step.sums.dtype))
    marks = arena.put(np.full(m + rows, 9, np.int32))
    given = Gradients(*map(arena.put, step.given._replace(live=live)))
    gpu.sums(given, arena.put(plan.stretches), arena.put(plan.runs), plan.rounds, partial, marks)
    assert_same_bits(partial[:rows].cpu().numpy(), step.sums, "sums")
    np.testing.assert_array_equal(marks[:rows].cpu().numpy() > 0, step.counted)
    arena.check()


@on_devices
@cases(6)
@given(step=steps([3, 16], [np.float32, np.float64]))
def test_on_a_gpu(device, step):
    on_gpu(step, device)


@on_devices
def test_hot_rows_on_a_gpu(device):
    on_gpu(Step(1, 4, np.float32, [0, 3], scaled=False, dead=True, hot=True), device)


@cases(60)
@given(st.data())
def test_a_step_of_shards_equals_the_reference(data):
    """Shards, micro-batches of a shard, rows that some of them lack, and features without a gradient in some."""
    draw, rng = data.draw, np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dtype, dim = draw(st.sampled_from([np.float32, np.float64])), draw(st.sampled_from([2, 16]))
    optimizer, tables = draw(st.sampled_from(OPTIMIZERS)), draw_tables(draw, dim)
    world = World(tables, optimizer, dtype, draw(st.integers(1, 3)), rng)
    world.update = kernels.update_for(dim, np.dtype(dtype), optimizer.rule, False)
    reference = Reference(tables, optimizer, seed=5, dtype=dtype)
    shards, accumulate = draw(st.sampled_from([(1, 5), (2, 1), (4, 1), (2, 3), (8, 1)]))
    for _ in range(draw(st.integers(1, 3))):
        micro_batches, grads = [], []
        for _ in range(shards * accumulate):
            batch = 3
            micro_batches.append({f: draw_bags(draw, rng, t.rows, batch, False) for t in tables for f in t.features})
            some = {f: rng.standard_normal((batch, dim)).astype(dtype) for t in tables for f in t.features}
            grads.append({f: g for f, g in some.items() if rng.random() < 0.7})
        world.step(micro_batches, grads, shards)
        for m, batch in enumerate(micro_batches):
            reference.forward(batch, accumulate=m > 0)
        reference.backward(*grads, shards=shards)
        for key, record in reference.rows.items():
            assert_same_bits(world.cache[world.slot[key]], record, f"table {key >> 48} row {key & 2**48 - 1}")
    assert world.steps.tolist() == reference.table_steps


def test_the_order_shows():
    """Another order gives other bits; otherwise nothing here would prove anything."""
    step = Step(3, 8, np.float32, list(range(8)), scaled=False, dead=False)
    chain = np.zeros_like(step.sums)
    for u in range(len(chain)):
        for i in range(step.start[u], step.start[u + 1]):
            chain[u] += step.grads[step.bag_of[step.pos[i]]]
    assert (chain != step.sums).any()
    assert torch.allclose(torch.from_numpy(chain), torch.from_numpy(step.sums), rtol=1e-3, atol=1)


COUNTS = [1, 255, 256, 257, 511, 512, 513, 1000, 5000]
KERNELS = [("plain", 5, np.float32), ("plain", 16, np.float64), ("wide", 16, np.float32), ("wide", 64, np.float32)]


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("which", "dim", "dtype"), KERNELS)
def test_sums(which, dim, dtype, scaled, dead):
    """With weights of -0.0 and a learning rate of -1, the cache ends up with the sum, including its sign."""
    rng = np.random.default_rng(0)
    start = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int32)
    n, u = start[-1], len(COUNTS)
    grads = (rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-3, 4, (n, 1))).astype(dtype)
    grads[rng.random((n, dim)) < 0.1] = -0.0
    grads[start[5] : start[6]] = -0.0
    live = np.array([True, True, not dead])
    pos, scale = rng.permutation(n).astype(np.int32), rng.standard_normal(n if scaled else 0).astype(dtype)
    cache, rows = np.full((u, dim), -0.0, dtype), rng.permutation(u).astype(np.int32)
    bag_of = np.argsort(pos).astype(np.int32)  # index i in group_pos is in bag i
    kernel = (
        cpu.update_kernel(SGD().rule)
        if which == "plain"
        else kernels.update_for(dim, np.dtype(dtype), SGD().rule, True)
    )
    kernel(
        cache, dim, rows, np.zeros(u, np.int64), Gradients(start, pos, bag_of, scale, grads, live), ONE,
        np.array([[np.inf, 0, -1, 0, 0, 0, 0, 0]], dtype), 0, u,
    )  # fmt: skip
    for i, count in enumerate(COUNTS):
        mine = slice(start[i], start[i + 1])
        terms = grads[mine] * scale[pos[mine], None] if scaled else grads[mine]
        terms = [term if live[bag % 3] else None for bag, term in enumerate(terms, start[i])]
        assert_same_bits(cache[rows[i]], stretched(terms), f"{count} positions")
        if count > 2 * STRETCH:  # the order must matter, or this test would prove nothing
            assert (cache[rows[i]] != stretched(terms, count)).any()


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1, clip=0.5), RowwiseAdagrad(lr=0.1)], ids=repr)
def test_the_reference_has_the_same_borders(optimizer):
    """A feature without a gradient in one micro-batch, in the middle of the row's positions, moves no border."""
    tables = [Table("t", 3, 4, features=("a", "b", "c"))]
    rng = np.random.default_rng(2)
    world, reference = World(tables, optimizer, np.float32, 1, rng), Reference(tables, optimizer, seed=5)
    for _ in range(2):
        batches, grads = [], []
        for size in (400, 333):
            ids = {f: np.minimum(rng.geometric(0.8, size) - 1, 2).tolist() for f in "abc"}
            batches.append({f: (ids[f], list(range(size + 1)), None) for f in "abc"})
            grads.append({f: rng.standard_normal((size, 4)).astype(np.float32) for f in "abc"})
        del grads[0]["b"], grads[1]["a"]
        world.step(batches, grads)
        for m, batch in enumerate(batches):
            reference.forward(batch, accumulate=m > 0)
        reference.backward(*grads)
        for key, record in reference.rows.items():
            assert_same_bits(world.cache[world.slot[key]], record, f"row {key}")
