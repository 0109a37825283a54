"""The Triton kernels are measured as a bank runs them: a step of all parts, computed as by hand, in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from skirl.engine.kernels.gpu_math import INTERPRETED
from skirl.placement.tables import gpu, measure
from skirl.placement.tables.gpu import GpuArena
from skirl.placement.tables.measure import Lookups, Sentinel, rounds_of
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.pool import pool

interpreted = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
BATCH, LR = 8, 0.5


class Timer:
    """Runs steps, and tells the next of some times."""

    def __init__(self, times=()):
        self.times, self.steps = list(times), []

    def __call__(self, step):
        step()
        self.steps.append(step)
        return self.times.pop(0) if self.times else 1.0


def small_arena(monkeypatch, on="cpu") -> GpuArena:
    monkeypatch.setattr(gpu, "OUTPUTS", 1 << 9)
    monkeypatch.setattr(gpu, "EVICTED", 1 << 9)
    return GpuArena(10_000, on="cpu", timer=Timer()) if on == "cpu" else GpuArena(10_000, on=on)


@pytest.fixture(
    params=[pytest.param("cpu", id="interpreter", marks=interpreted), pytest.param("cuda", marks=on_gpu)],
)
def arena(monkeypatch, request) -> GpuArena:
    return small_arena(monkeypatch, request.param)


def read(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()


def some(optimizer, dims=(4, 8, 4)):
    made = pool(len(dims), batch=BATCH, max_dim=4, seed=3, optimizer=optimizer)
    facts = {"ids": 20.0, "distinct": 19.0, "rows": 300}
    made = [replace(of, spec=replace(of.spec, dim=dim, **facts)) for of, dim in zip(made, dims, strict=True)]
    return [(Lookups(of, 1 << n), Piece(n, 50, 290, 0, of.spec.dim)) for n, of in enumerate(made)]


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise-adagrad"])
def test_what_is_timed_is_a_step(arena, monkeypatch, optimizer):
    monkeypatch.setattr(measure, "_LR", LR)
    of = some(optimizer)
    parts = [arena.ready(*each) for each in of]
    banks = list[gpu.KernelParts]()
    made = gpu.KernelParts
    monkeypatch.setattr(gpu, "KernelParts", lambda *args: banks.append(made(*args)) or banks[-1])
    step = arena.together(parts)
    assert [(bank.dim, bank.features) for bank in banks] == [(4, 2), (8, 1)]
    arena.floats[:] = torch.from_numpy(np.random.default_rng(0).random(len(arena.floats), np.float32) + 0.5).to(
        arena.on
    )
    before = [read(bank.cache).astype(float) for bank in banks]
    slots = [set(part.slots.tolist()) for part in parts]
    assert not slots[0] & slots[2]  # parts may share memory; these do not
    outs = {}
    for bank in banks:
        bank.grads.view(BATCH, bank.features, bank.dim)[:] = torch.arange(1.0, bank.features + 1, device=arena.on)[
            :, None
        ]
        bank.forward()
        outs[bank.dim] = read(bank.out).reshape(BATCH, bank.features, bank.dim)
    banks[0].backward()
    for number, (n, feature) in enumerate(((0, 0), (1, 0), (0, 1))):
        (lookups, piece), part, cache = of[number], parts[number], before[n]
        ids, bags = lookups.of(piece)
        offset = lookups.seed * 7919 * 4096
        at = (ids + offset) % len(cache)
        wanted = np.zeros((BATCH, part.dim))
        np.add.at(wanted, bags, cache[at, : part.dim])
        assert len(ids) and np.allclose(outs[part.dim][:, feature], wanted, rtol=1e-5)
        if n:
            continue
        counts = np.bincount(at, minlength=len(cache)) * (feature + 1)
        after, touched = cache.copy(), counts > 0
        if optimizer == "sgd":
            after[touched] -= LR * counts[touched, None]
        else:
            after[touched, 4] += counts[touched] ** 2.0
            after[touched, :4] -= LR * counts[touched, None] / (np.sqrt(after[touched, 4:]) + 1e-8)
        assert np.allclose(read(banks[0].cache)[touched], after[touched], rtol=1e-4)
    ms = arena.run_ms(step)
    assert ms == 1.0 if arena.on.type == "cpu" else ms > 0


def test_a_row_of_many_lookups_is_summed_in_stretches(arena):
    [(lookups, piece)] = some("sgd", (4,))
    lookups.ids, lookups.bags = np.full(600, 60), np.sort(np.arange(600) % BATCH)
    other = some("sgd", (4, 4))[1]
    bank = gpu.KernelParts(arena, [arena.ready(*other), arena.ready(lookups, piece)])
    assert bank.stretches[:, 2].tolist()[-1] == len(bank.slots) and len(bank.stretches) == 3
    bank.grads[:] = torch.arange(2.0, device=arena.on).repeat(BATCH)[
        :, None
    ]  # nothing for the first part, 1 for the second
    slot = int(bank.slots[-1])
    before = bank.cache[slot].clone()
    bank.backward()
    assert torch.allclose(before - bank.cache[slot], torch.full((4,), 600e-6, device=arena.on), atol=2e-7)


@interpreted
def test_rounds_are_the_events_times_and_the_sentinel_waits_for_the_gpu(monkeypatch):
    arena = small_arena(monkeypatch)
    waits, timer = [], arena.timer
    assert isinstance(timer, Timer)
    parts = [arena.ready(*each) for each in some("sgd", (4, 4))]
    timer.times = [9.0, 9.0, 5.0, 6.0, 5.0, 6.0]
    monkeypatch.setattr(arena, "evict", lambda: waits.append("evict"))
    monkeypatch.setattr(arena, "watched", lambda: waits.append("watch"))
    rounds = rounds_of(arena, [parts[:1], parts[1:]], 2, 0, sentinel=Sentinel(arena, lambda: 0.0))
    assert sorted(rounds.ravel().tolist()) == [5.0, 5.0, 6.0, 6.0]
    assert waits.count("evict") == 6 and waits.count("watch") == 8  # each turn of it works twice
    assert arena.device == "cpu" and arena.clock is gpu.perf_counter


def test_an_output_that_is_too_large_gets_room(arena):
    places = [arena.place(10, 20), arena.place(10, 20), arena.place(100, 20), arena.place(100, 20)]
    assert [tuple(of.shape) for of in places] == [(10, 20), (10, 20), (100, 20), (100, 20)]
    for one, other in (places[:2], places[2:]):
        assert one.data_ptr() != other.data_ptr() and bool((one == 1).all())
