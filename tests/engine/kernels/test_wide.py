"""The loops compiled for one dim have the bits of the plain loops, which test_cpu.py compares with the reference."""

import os
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config

from skirl.core.optim import FTRL, SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from skirl.engine import kernels
from skirl.engine.kernels import cpu, wide
from skirl.engine.kernels.tree import ONE, Gradients
from tests.cases import cases
from tests.processes import interpreter

pytestmark = pytest.mark.skipif(config.DISABLE_JIT, reason="the plain loops are taken then")

WHOLE = settings.get_current_profile_name() == "campaign"
DIMS = [4, 8, 9, 12, 20, 40, 48, 113] if WHOLE else [4, 17, 40]  # 113: seven vectors and one number
OPTIMIZERS: list[RowOptimizer] = [
    SGD(lr=0.1, clip=0.5),
    Adagrad(lr=0.1, weight_decay=0.01),
    RowwiseAdagrad(lr=0.1),
    RowwiseAdagrad(lr=0.1, weight_decay=0.01, clip=0.5),
    Adam(lr=0.1),
    SGD(lr=0.1, momentum=0.9),
    FTRL(lr=0.1, l1=0.3, l2=0.1),
]
BOOLS = [False, True]
POOLED = list(product(DIMS, BOOLS, BOOLS))
UPDATED = list(product(DIMS, OPTIMIZERS))
"""Each takes seconds to compile: a campaign runs all, `make test` each optimizer and each way to pool with one dim."""
if not WHOLE:
    POOLED = [(DIMS[sum(how)], *how) for how in product(BOOLS, repeat=2)]
    UPDATED = [*zip((6, 24, 48, 9, 8, 16), OPTIMIZERS[:2] + OPTIMIZERS[3:], strict=True)]


def bits(array):
    return array.view(np.int32).tolist()


class Drawn:
    """A cache and the jagged ids of one step: some rows hot, some bags empty, with -0.0 and inf among the numbers."""

    def __init__(self, data, dim, width, one):
        rng = self.rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        self.features, self.batch = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 9))
        bags, rows = self.features * self.batch, data.draw(st.integers(1, 60))
        self.lengths = np.ones(bags, np.int64) if one else rng.integers(0, 4, bags)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        self.slot_of = rng.permutation(rows).astype(np.int32)
        self.row_of = np.minimum(rng.geometric(0.2, self.offsets[-1]) - 1, rows - 1)
        self.slots = self.slot_of[self.row_of]
        self.cache = rng.standard_normal((rows, width)).astype(np.float32)
        self.cache[:, dim:] = np.abs(self.cache[:, dim:])
        self.cache[rng.random(self.cache.shape) < 0.02] = -0.0
        self.cache[0, 0] = data.draw(st.sampled_from([1.0, np.inf]))
        n = len(self.slots)
        self.scale = rng.standard_normal(n if data.draw(st.booleans()) else 0).astype(np.float32)
        self.bags = bags
        self.lo = data.draw(st.integers(0, bags))


@cases(60)
@given(st.data(), st.sampled_from(POOLED))
def test_pooled_bits_are_those_of_the_plain_loop(data, how):
    dim, one, across = how
    width = dim + (1 if across else data.draw(st.sampled_from([0, dim])))
    drawn = Drawn(data, dim, width, one)
    plain = np.full((drawn.bags, dim), np.nan, np.float32)
    fast = plain.copy()
    one = one and drawn.bags > 0
    offsets = drawn.offsets[:0] if one else drawn.offsets
    for kernel, out in ((cpu.pool, plain), (wide.pool_kernel(dim, across, one), fast)):
        bags = offsets, offsets[1:], drawn.features
        kernel(drawn.cache, dim, drawn.slots, *bags, drawn.scale, out, drawn.lo, drawn.bags)
    assert bits(plain) == bits(fast)


@cases(60)
@given(st.data(), st.sampled_from(UPDATED))
def test_updated_bits_are_those_of_the_plain_loop(data, how):
    dim, optimizer = how
    drawn = Drawn(data, dim, optimizer.width(dim), data.draw(st.booleans()))
    distinct, group = np.unique(drawn.row_of, return_inverse=True)
    start = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=len(distinct)))]).astype(np.int32)
    positions = np.argsort(group, kind="stable").astype(np.int32)
    columns = np.concatenate([np.arange(drawn.batch) * drawn.features + f for f in range(drawn.features)])
    bag_of = np.repeat(columns, drawn.lengths).astype(np.int32)
    grads = drawn.rng.standard_normal((drawn.bags, dim)).astype(np.float32)
    live = drawn.rng.random(drawn.features) < data.draw(st.sampled_from([0.5, 1.1]))
    scalars = np.array([optimizer.numbers(0.1, optimizer.weight_decay, 3)], np.float32)
    lo = data.draw(st.integers(0, len(distinct)))
    caches = []
    rule = optimizer.rule
    for kernel in (cpu.update_kernel(rule), kernels.update_for(dim, np.dtype(np.float32), rule, True)):
        caches.append(drawn.cache.copy())
        kernel(
            caches[-1], dim, drawn.slot_of[distinct], distinct.astype(np.int64),
            Gradients(start, positions, bag_of, drawn.scale, grads, live), ONE, scalars, lo, len(distinct),
        )  # fmt: skip
    assert bits(caches[0]) == bits(caches[1])


def test_other_rows_take_the_plain_loops(monkeypatch):
    single, double = np.dtype(np.float32), np.dtype(np.float64)
    assert kernels.pool_for(16, 17, single, True) is not cpu.pool
    assert kernels.pool_for(16, 17, double, True) is cpu.pool
    for dim, dtype in ((1, single), (3, single), (11, single), (25, single), (272, single), (16, double)):
        assert kernels.update_for(dim, dtype, SGD().rule, True) is cpu.update_kernel(SGD().rule)
    monkeypatch.setattr(config, "DISABLE_JIT", 1)
    assert kernels.pool_for(16, 17, single, True) is cpu.pool


UPDATE = """
import numpy as np
from skirl.core.optim import SGD
from skirl.engine import kernels
from skirl.engine.kernels.tree import ONE, Gradients
rows, keys, start = np.arange(2, dtype=np.int32), np.arange(2), np.array([0, 300, 301], np.int32)  # one row is hot
place, cache, scale = np.arange(301, dtype=np.int32), np.ones((2, 16), np.float32), np.empty(0, np.float32)
kernels.update_for(16, cache.dtype, SGD().rule, True)(
    cache, 16, rows, keys,
    Gradients(start, place, place, scale, np.ones((301, 16), np.float32), np.ones(1, np.bool_)), ONE,
    np.array([[np.inf, 0, 1, 0, 0, 0, 0, 0]], np.float32), 0, 2)
assert cache[:, 0].tolist() == [-299, 0]
"""


@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")
def test_the_next_process_compiles_nothing(tmp_path):
    """Numba's own cache never finds a kernel again that was made inside a function and calls another one made there."""
    found = []
    for _ in range(2):
        done = interpreter(UPDATE, env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)})
        assert done.returncode == 0, done.stderr
        found.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()})
    assert found[0] and found[0] == found[1]
