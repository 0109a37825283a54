"""Hot rows: every kernel and the reference sum the positions of a row in the same stretches."""

import numpy as np
import pytest

from skirl.core.optim import SGD, Adam, RowwiseAdagrad, padded
from skirl.core.reference import Reference
from skirl.core.tables import Table
from skirl.engine import kernels
from skirl.engine.kernels import cpu
from skirl.engine.kernels.tree import STRETCH, Gradients
from tests.engine.kernels.test_cpu import World, assert_same_bits

COUNTS = [1, 255, 256, 257, 511, 512, 513, 1000, 5000]
KERNELS = [("plain", 5, np.float32), ("plain", 16, np.float64), ("wide", 16, np.float32), ("wide", 64, np.float32)]


def summed(terms, live, length):
    total = np.zeros(terms.shape[1:], terms.dtype)
    for begin in range(0, len(terms), length):
        part = np.zeros_like(total)
        for i in range(begin, min(begin + length, len(terms))):
            if live[i]:
                part += terms[i]
        total += part
    return total


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
    kernel = cpu.update_kernel(SGD().rule) if which == "plain" else kernels.update_for(dim, np.dtype(dtype), SGD().rule)
    kernel(
        cache, dim, rows, np.zeros(u, np.int64), Gradients(start, pos, bag_of, scale, grads, live),
        padded([(np.inf, 0, -1)], dtype), 0, u,
    )  # fmt: skip
    for i, count in enumerate(COUNTS):
        mine = slice(start[i], start[i + 1])
        terms = grads[mine] * scale[pos[mine], None] if scaled else grads[mine]
        counts = live[np.arange(start[i], start[i + 1]) % 3]
        assert_same_bits(cache[rows[i]], summed(terms, counts, STRETCH), f"{count} positions")
        if count > 2 * STRETCH:  # the order must matter, or this test would prove nothing
            assert (cache[rows[i]] != summed(terms, counts, count)).any()


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
