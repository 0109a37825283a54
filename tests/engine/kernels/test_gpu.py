"""The Triton kernels have the bits of the CPU kernels, which test_cpu.py compares with the reference.

Without a GPU they run in Triton's interpreter. That proves their logic, but not how a GPU rounds: for this,
test_gpu_code.py reads what they compile to. `make test-gpu` runs the same tests on a GPU. Every array lies between
poisoned margins: an index read past its end leads to a row of NaN, and nothing may be written there.
"""

import mmap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from skirl.core.initial import Constant, Normal, Uniform, as_arrays
from skirl.core.initial import fill as cpu_fill
from skirl.core.optim import SGD, Adam, RowwiseAdagrad
from skirl.engine.kernels import cpu, gpu
from skirl.engine.kernels.gpu_math import INTERPRETED
from skirl.engine.kernels.tree import ONE, STRETCH, Gradients, stretches_of
from tests.cases import cases
from tests.engine.kernels.test_cpu import OPTIMIZERS
from tests.nn.rounding import random_bits, rounded

DIMS = [1, 3, 16, 48, 64, 100, 128, 256, 1000]
DTYPES = st.sampled_from([np.float32, np.float32, np.float64])
SEEDS = st.integers(0, 2**32)
MARGIN = 64

on_devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="interpreter", marks=pytest.mark.skipif(not INTERPRETED, reason="there is a GPU")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


class Arena:
    """Puts arrays on a device, each in the middle of a larger one that is poisoned outside of it."""

    def __init__(self, device):
        self.device = device
        self.placed = []

    def put(self, array, poison=None):
        poison = np.nan if poison is None and array.dtype.kind == "f" else poison or 0
        whole = np.full((len(array) + 2 * MARGIN, *array.shape[1:]), poison, array.dtype)
        whole[MARGIN : MARGIN + len(array)] = array
        tensor = torch.from_numpy(whole).to(self.device)
        self.placed.append((tensor, len(array), torch.from_numpy(whole.copy())))
        return tensor[MARGIN : MARGIN + len(array)]

    def check(self):
        for tensor, n, before in self.placed:
            for part in (slice(0, MARGIN), slice(MARGIN + n, None)):
                same_bits(tensor[part], before[part].numpy())


def same_bits(got, expected):
    """Compare bits, except that any NaN equals any other: its bits depend on the processor."""
    got = got.cpu().numpy()
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype.kind == "f":
        bits = f"u{got.itemsize}"
        got, expected = (np.where(x != x, x.dtype.type(np.nan), x).view(bits) for x in (got, expected))
    np.testing.assert_array_equal(got, expected)


def numbers(rng, shape, dtype):
    """Draw numbers, some of them -0.0: summing from zero loses its sign, a copy does not."""
    x = rng.standard_normal(shape).astype(dtype)
    return np.where(rng.random(shape) < 0.1, dtype(-0.0), x)


def draw_records(rng, rows, dim, width, dtype):
    """Draw a cache whose last row is poisoned, and slots among the other rows."""
    cache = numbers(rng, (rows + 1, width), dtype)
    cache[:, dim:] = np.abs(cache[:, dim:])
    cache[rows] = np.nan
    return cache


def draw_scale(rng, n, dtype, scaled):
    return numbers(rng, n if scaled else 0, dtype)


@on_devices
@cases(25)
@given(SEEDS, st.sampled_from(DIMS), DTYPES, st.integers(1, 3), st.integers(0, 5), st.booleans(), st.booleans())
def test_pool(device, seed, dim, dtype, features, batch, one, scaled):
    rng, arena = np.random.default_rng(seed), Arena(device)
    bags, rows = features * batch, 9
    cache = draw_records(rng, rows, dim, dim + int(rng.integers(0, 3)), dtype)
    lengths = np.ones(bags, np.int64) if one else rng.choice([0, 1, 2, 3, 4, 5, 9], bags)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    slots = rng.integers(0, rows, offsets[-1]).astype(np.int32)
    scale = draw_scale(rng, len(slots), dtype, scaled)
    if one:
        offsets = offsets[:0] if bags else offsets
    expected = np.full((bags, dim), np.nan, dtype)
    cpu.pool(cache, dim, slots, offsets, offsets[1:], features, scale, expected, 0, bags)
    out = arena.put(np.full((bags, dim), np.nan, dtype))
    gpu.pool(arena.put(cache), dim, arena.put(slots, rows), arena.put(offsets, 0), features, arena.put(scale), out)
    same_bits(out, expected)
    arena.check()


class Grouped:
    """The positions of one step grouped by row, as the oracle hands them to backward."""

    def __init__(self, rng, counts, dim, optimizer, dtype, features=3, scaled=False, dead=False):
        n, rows = int(sum(counts)), len(counts) + 2
        self.dim, self.optimizer = dim, optimizer
        self.cache = draw_records(rng, rows, dim, optimizer.width(dim), dtype)
        self.rows = rng.permutation(rows)[: len(counts)].astype(np.int32)
        self.keys = np.sort(rng.integers(0, 3, len(counts)) << 48 | rng.permutation(len(counts))).astype(np.int64)
        self.start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.pos = rng.permutation(n).astype(np.int32)
        self.bag_of = rng.integers(0, 5 * features, n).astype(np.int32)
        self.scale = draw_scale(rng, n, dtype, scaled)
        self.live = rng.random(features) < 0.6 if dead else np.ones(features, np.bool_)
        self.grads = numbers(rng, (5 * features, dim), dtype)
        self.grads[~self.live[np.arange(5 * features) % features]] = np.nan
        self.scalars = np.array([optimizer.numbers(0.1, optimizer.weight_decay, step) for step in (1, 2, 30)], dtype)

    def on_cpu(self, cache):
        step = self.dim, self.rows, self.keys, self.given, ONE, self.scalars
        cpu.update_kernel(self.optimizer.rule)(cache, *step, 0, len(self.rows))

    @property
    def given(self):
        return Gradients(self.start, self.pos, self.bag_of, self.scale, self.grads, self.live)

    def on_gpu(self, arena, cache, rounding=None):
        stretches = stretches_of(self.start)
        m = len(stretches)
        partial = arena.put(np.full((m, self.dim), np.nan, self.grads.dtype))
        marks = arena.put(np.full(m + len(self.rows), -1, np.int32), -1)
        given = self.given._replace(live=self.live[:0] if self.live.all() else self.live)
        gpu.update(
            cache, self.dim, self.optimizer.rule, arena.put(self.rows), arena.put(self.keys),
            Gradients(*map(arena.put, given)), arena.put(self.scalars), self.optimizer.clip is not None,
            arena.put(stretches), partial, marks, rounding=rounding,
        )  # fmt: skip

    def compare(self, device):
        arena, expected = Arena(device), self.cache.copy()
        self.on_cpu(expected)
        cache = arena.put(self.cache)
        self.on_gpu(arena, cache)
        same_bits(cache, expected)
        arena.check()


@on_devices
@cases(40)
@given(
    SEEDS, st.lists(st.integers(1, 7), max_size=9), st.sampled_from(DIMS), st.sampled_from(OPTIMIZERS), DTYPES,
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_update(device, seed, counts, dim, optimizer, dtype, scaled, dead):
    Grouped(np.random.default_rng(seed), counts, dim, optimizer, dtype, scaled=scaled, dead=dead).compare(device)


@on_devices
@pytest.mark.parametrize("dead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_hot_rows_are_summed_in_stretches(device, dead):
    counts = [1, STRETCH - 1, STRETCH, STRETCH + 1, 3, 3 * STRETCH + 2]
    rng = np.random.default_rng(0)
    Grouped(rng, counts, 16, RowwiseAdagrad(lr=0.1), np.float32, scaled=not dead, dead=dead).compare(device)


@on_devices
@pytest.mark.parametrize("alive", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)), 2, None])
def test_a_hot_row_counts_if_any_of_its_stretches_does(device, alive):
    """Adam moves a row whose gradient is 0, but not one without a gradient."""
    drawn = Grouped(np.random.default_rng(0), [3 * STRETCH], 4, Adam(lr=0.1), np.float32, features=2, dead=True)
    drawn.live = np.array([True, False])
    drawn.bag_of[drawn.pos] = 1
    if alive is not None:
        drawn.bag_of[drawn.pos[alive * STRETCH + 5]] = 0
    drawn.grads[0::2], drawn.grads[1::2] = 0, np.nan
    drawn.compare(device)


@on_devices
@cases(15)
@given(SEEDS, st.sampled_from([1, 17, 65, 192, 3000]), st.integers(0, 9), st.sampled_from(["f4", "f8", "f2"]))
def test_moves(device, seed, width, n, dtype):
    rng, arena = np.random.default_rng(seed), Arena(device)
    cache = draw_records(rng, 12, 1, width, np.dtype(dtype).type)
    slots, index = rng.permutation(12)[:n].astype(np.int32), rng.integers(0, 5, n).astype(np.int32)
    source = numbers(rng, (5, width), np.dtype(dtype).type)
    of = arena.put(slots, 12)

    out = arena.put(np.full((n, width), np.nan, dtype))
    gpu.move(arena.put(cache), of, out, None)
    same_bits(out, cache[slots])

    moved = cache.copy()
    moved[slots] = source[index]
    for rows, which in ((arena.put(source[index]), None), (arena.put(source), arena.put(index))):
        target = arena.put(cache)
        gpu.move(rows, which, target, of)
        same_bits(target, moved)
    arena.check()


@on_devices
@cases(15)
@given(SEEDS, st.sampled_from(DIMS), st.integers(0, 5), st.integers(0, 9), DTYPES, st.booleans())
def test_fill(device, seed, dim, state, n, dtype, normal):
    rng, arena = np.random.default_rng(seed), Arena(device)
    inits = [Uniform(0.5), Constant(-0.0), Normal(0.1) if normal else Uniform(3.0)]
    init = as_arrays(inits, dtype)
    keys = (rng.integers(0, 3, n) << 48 | rng.integers(0, 2**48, n)).astype(np.int64)
    slots = rng.permutation(12)[:n].astype(np.int32)
    expected = np.full((12, dim + state), np.nan, dtype)
    cache = arena.put(expected)
    cpu_fill(keys, slots, expected, 0, dim, dim + state, seed, *init, 0.1, 0, n)
    gpu.fill(
        arena.put(keys), arena.put(slots), cache, dim, dim + state, seed, arena.put(init[0]), arena.put(init[1]),
        torch.tensor(init[2], device=device), 0.1,
    )  # fmt: skip
    same_bits(cache, expected)
    arena.check()


def huge(rows, width, device):
    """Return memory that, on a CPU, is not allocated until it is touched."""
    if device != "cpu":
        return torch.empty(rows, width, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python does not name before 3.13
    return torch.frombuffer(mmap.mmap(-1, rows * width * 4, flags=flags), dtype=torch.float32).view(rows, width)


@on_devices
def test_slots_whose_first_number_is_past_two_to_the_31(device):
    rng, dim, optimizer = np.random.default_rng(0), 64, Adam(lr=0.1)
    width = optimizer.width(dim)
    cache = huge(2**31 // width + 9, width, device)
    last = len(cache) - 1
    assert last * width > 2**31
    drawn = Grouped(rng, [3], dim, optimizer, np.float32)
    small = drawn.cache[drawn.rows]
    at_first, at_last = np.zeros(1, np.int32), np.full(1, last, np.int32)
    results = []
    for array, at in ((torch.from_numpy(small.copy()).to(device), at_first), (cache, at_last)):
        arena, init = Arena(device), as_arrays([Uniform(0.5)] * 3)
        slot, drawn.rows = arena.put(at), at
        pooled, taken = (arena.put(np.full(shape, np.nan, np.float32)) for shape in ((2, dim), (1, width)))
        empty, first = arena.put(np.empty(0, np.float32)), arena.put(np.zeros(1, np.int32))
        gpu.move(arena.put(small), None, array, slot)
        gpu.pool(array, dim, slot, first[:0], 1, empty, pooled[:1])
        drawn.on_gpu(arena, array)
        gpu.move(array, slot, taken, None)
        results.append([x.cpu().clone() for x in (pooled, taken)])
        gpu.fill(
            arena.put(drawn.keys), slot, array, dim, array.shape[1], 5, *map(arena.put, init), 0.1,
        )  # fmt: skip
        results[-1].append(array[at[0]].cpu().clone())
    for got, expected in zip(*results):
        same_bits(got, expected.numpy())


HALVES = [torch.bfloat16, torch.float16]


@on_devices
@pytest.mark.parametrize("half", HALVES, ids=str)
@cases(12)
@given(SEEDS, st.sampled_from([1, 3, 16, 100]), st.sampled_from(OPTIMIZERS), st.sampled_from([1e-6, 1.0, 3e4]))
def test_half_precision_rows_are_rounded_at_random(device, half, seed, dim, optimizer, size):
    """Float32 arithmetic on rows that are exact in the half type, followed by plain stochastic rounding."""
    rng, arena = np.random.default_rng(seed), Arena(device)
    drawn = Grouped(rng, [1, 3, 1, 2, 6], dim, optimizer, np.float32, dead=True)
    drawn.grads *= np.float32(size)
    cache = torch.from_numpy(drawn.cache * np.float32(size)).to(half)
    expected = cache.float().numpy()
    drawn.on_cpu(expected)
    for u, slot in enumerate(drawn.rows):
        parts = [slice(i, min(i + dim, len(expected[slot]))) for i in range(0, len(expected[slot]), dim)]
        for part, columns in enumerate(parts):
            bits = random_bits(seed, 7, drawn.keys[u], part, columns.stop - columns.start)
            expected[slot, columns] = rounded(expected[slot, columns], bits, half)
    got = cache.to(device)
    drawn.on_gpu(arena, got, rounding=(seed, 7))
    same_bits(got.float(), expected)
    arena.check()


@on_devices
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_rounding_is_fair(device, half):
    """Ones lose 2**-12 in each of 40 steps, at most half the type's resolution: rounding to nearest would lose nothing."""
    n, dim, steps = 16, 64, 40
    cache = torch.ones(n, dim, dtype=half, device=device)
    whole = torch.arange(n, dtype=torch.int32, device=device)
    empty, start = torch.zeros(0, device=device), torch.arange(n + 1, dtype=torch.int32, device=device)
    gradients = Gradients(start, whole, whole, empty, torch.ones(n, dim, device=device), empty.bool())
    for step in range(steps):
        gpu.update(
            cache, dim, SGD().rule, whole, whole.long(), gradients, torch.tensor([[0, 0, 2.0**-12]], device=device),
            False, torch.zeros(0, 3, dtype=torch.int32, device=device), empty, whole[:0], rounding=(5, step),
        )  # fmt: skip
    lost = 1 - cache.float().mean().item()
    assert lost == pytest.approx(steps * 2.0**-12, rel=0.08)
    assert len(cache.unique()) > 3
