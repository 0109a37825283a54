"""FBGEMM's operator is measured in the arena: it computes a step of these parts there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fbgemm_gpu")

import torch

from skirl.placement import fbgemm
from skirl.placement.fbgemm import FbgemmArena, Memory
from skirl.placement.measure import Lookups, check_kernel_here
from skirl.placement.spec import Piece, TableSpec
from tests.cases import cases

BATCH, LR = 16, 0.5


@pytest.fixture(scope="module")
def arena() -> FbgemmArena:
    return FbgemmArena(1 << 19)


def some_parts(optimizer, dims=(8, 12), rows=900, batch=BATCH):
    """Parts of tables: the middle of their rows, and all of their columns."""
    specs = [
        TableSpec(f"t{n}", rows, dim, batch, 9.0 * batch, 7.0 * batch, optimizer=optimizer)
        for n, dim in enumerate(dims)
    ]
    return [(Lookups(of, n), Piece(n, 100, rows - 50, 0, of.dim)) for n, of in enumerate(specs, start=9)]


def by_hand(optimizer, weights, state, ids, bags):
    """One step with gradients of 1: pooled rows, and rows and state afterwards."""
    out = np.zeros((BATCH, weights.shape[1]))
    np.add.at(out, bags, weights[ids])
    counts = np.bincount(ids, minlength=len(weights))[:, None]
    if optimizer == "sgd":
        return out, weights - LR * counts, state
    state = state + (counts**2).astype(float)  # all columns have the same gradient
    return out, np.where(counts > 0, weights - LR * counts / (np.sqrt(state) + 1e-8), weights), state


@cases(60)
@given(
    st.sampled_from(sorted(fbgemm.KINDS)), st.integers(1, 12).map(lambda n: 4 * n), st.integers(1, 3000),
    st.integers(500, 4000), st.integers(0, 99), st.integers(0, 2000),
)  # fmt: skip
def test_a_part_is_inside_its_memory(optimizer, dim, rows, floats, number, begin):
    spec = TableSpec("a", rows, dim, 4, 9.0, min(5.0, rows), optimizer=optimizer)
    memory = Memory.of(torch.zeros(floats), optimizer)
    piece = Piece(0, min(begin, rows - 1), rows, 0, dim)
    part = fbgemm.FbgemmPart(Lookups(spec, number), piece, len(memory.weights))
    assert 0 < part.rows <= piece.rows and part.first >= 0 and (part.first + part.rows) * dim <= len(memory.weights)
    for state in memory.states:
        assert (part.first + part.rows) * (1 if memory.by_row else dim) <= len(state)
    assert part.lengths.sum() == len(part.ids) and ((part.ids >= 0) & (part.ids < part.rows)).all()
    assert len(memory.weights) + sum(map(len, memory.states)) <= floats


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise-adagrad", "adagrad"])
def test_what_is_timed_is_a_step(monkeypatch, optimizer, device):
    """Compare outputs, rows and state of two parts with those by hand."""
    try:
        check_kernel_here(f"fbgemm-{device}")
    except ValueError as why:
        pytest.skip(str(why))
    arena = FbgemmArena(1 << 19, device=device)
    monkeypatch.setattr(fbgemm, "_LR", LR)
    of, rng = some_parts(optimizer), np.random.default_rng(0)
    parts = [arena.ready(*each) for each in of]
    arena.floats[:] = torch.from_numpy(rng.random(len(arena.floats), np.float32) + 0.5).to(arena.floats.device)
    memory = Memory.of(arena.floats, optimizer)
    [call] = arena.together(parts)

    def rows_of(part):
        first, end = part.first, part.first + part.rows
        weights = memory.weights.cpu().numpy()[first * part.dim : end * part.dim].reshape(-1, part.dim).astype(float)
        if not memory.states:
            return weights, np.zeros((part.rows, 1))
        [state] = (held.cpu().numpy() for held in memory.states)
        width = 1 if memory.by_row else part.dim
        return weights, state[first * width : end * width].reshape(-1, width).astype(float)

    before = [rows_of(part) for part in parts]
    for width in (1, 8, 12):  # parts may share memory; these do not
        one, other = sorted(part.first * min(width, part.dim) for part in parts)
        assert one + 750 * width <= other
    call.grads[:] = 1.0
    call.forward()
    outs = call.out.detach().cpu().numpy()
    call.backward()
    column = 0
    for part, (weights, state), (lookups, piece) in zip(parts, before, of, strict=True):
        ids, bags = lookups.of(piece)
        out, after, state_after = by_hand(optimizer, weights, state, ids, bags)
        assert len(ids) and np.allclose(outs[:, column : column + part.dim], out, rtol=1e-4)
        found = rows_of(part)
        assert np.allclose(found[0], after, rtol=1e-4) and np.allclose(found[1], state_after, rtol=1e-4)
        column += part.dim
    assert arena.run_ms([call]) > 0


def test_of_a_table_larger_than_the_arena_a_part_is_measured():
    arena = FbgemmArena(1 << 10)
    [(lookups, piece)] = some_parts("adagrad", (16,), rows=5000)
    part = arena.ready(lookups, piece)
    assert (part.rows, part.first) == (32, 0) and part.ids.max() < 32 and arena.run_ms(arena.together([part])) > 0


def test_tables_of_several_batch_sizes_and_optimizers_take_a_call_each(arena):
    of = [*some_parts("sgd"), *some_parts("adagrad"), *some_parts("sgd", batch=8), *some_parts("sgd", (4, 4))]
    calls = arena.together([arena.ready(*each) for each in of])
    assert [tuple(call.grads.shape) for call in calls] == [(16, 28), (16, 20), (8, 20)]
    assert arena.run_ms(calls) > 0 and arena.together([]) == [] and arena.run_ms([]) >= 0
