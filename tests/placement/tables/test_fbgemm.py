"""FBGEMM's operator is measured in the arena: it computes a step of these parts there, and its costs are those of others."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fbgemm_gpu")

import torch

from skirl.cli import main
from skirl.placement.tables import calibrate, fbgemm, measure, place
from skirl.placement.tables import training as training_of_nets
from skirl.placement.tables.calibrate import training
from skirl.placement.tables.costs import load_costs, save_costs, shipped
from skirl.placement.tables.fbgemm import FbgemmArena, FbgemmCudaArena, Memory
from skirl.placement.tables.measure import Lookups, Rounds, noise_of, rounds_of
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.pool import Made, pool
from skirl.placement.tables.spec import TableSpec, specs_text
from tests.cases import cases

BATCH, LR = 16, 0.5


@pytest.fixture(scope="module")
def arena() -> FbgemmArena:
    return FbgemmArena(1 << 19)


def some_parts(optimizer, dims=(8, 12), rows=900, batch=BATCH):
    """Parts of tables: the middle of their rows, and all of their columns."""
    made = pool(len(dims), batch=batch, max_dim=4, seed=3, optimizer=optimizer)
    return [
        (Lookups(replace(of, spec=replace(of.spec, rows=rows, dim=dim)), n), Piece(n, 100, rows - 50, 0, dim))
        for n, (of, dim) in enumerate(zip(made, dims, strict=True), start=9)
    ]


def by_hand(optimizer, weights, state, ids, bags):
    """One step with gradients of 1: pooled rows, and rows and state afterwards."""
    out = np.zeros((BATCH, weights.shape[1]))
    np.add.at(out, bags, weights[ids])
    counts = np.bincount(ids, minlength=len(weights))[:, None]
    if optimizer == "sgd":
        return out, weights - LR * counts, state
    touched = counts > 0
    state = state + (counts**2).astype(float)  # all columns have the same gradient
    after = weights - LR * counts / (np.sqrt(state) + 1e-8)
    return out, np.where(touched, after, weights), state


@cases(60)
@given(
    st.sampled_from(sorted(fbgemm.KINDS)), st.integers(1, 12).map(lambda n: 4 * n), st.integers(1, 3000),
    st.integers(500, 4000), st.integers(0, 99), st.integers(0, 2000),
)  # fmt: skip
def test_a_part_is_inside_its_memory(optimizer, dim, rows, floats, seed, begin):
    spec = TableSpec("a", rows, dim, 4, 9.0, min(5.0, rows), optimizer=optimizer)
    memory = Memory.of(torch.zeros(floats), optimizer)
    piece = Piece(0, min(begin, rows - 1), rows, 0, dim)
    part = fbgemm.FbgemmPart(Lookups(Made(spec, 3.0), seed), piece, len(memory.weights))
    assert 0 < part.rows <= piece.rows and part.first >= 0 and (part.first + part.rows) * dim <= len(memory.weights)
    for state in memory.states:
        assert (part.first + part.rows) * (1 if memory.by_row else dim) <= len(state)
    assert part.lengths.sum() == len(part.ids) and ((part.ids >= 0) & (part.ids < part.rows)).all()
    assert len(memory.weights) + sum(map(len, memory.states)) <= floats


STEPS = ["sgd", "rowwise-adagrad", "adagrad"]


@pytest.mark.parametrize("optimizer", STEPS)
def test_what_is_timed_is_a_step(arena, monkeypatch, optimizer):
    check_step(arena, monkeypatch, optimizer)


@pytest.mark.parametrize(
    "on",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")],
        ),
    ],
)
@pytest.mark.parametrize("optimizer", STEPS)
def test_what_is_timed_on_a_gpu_is_a_step(monkeypatch, optimizer, on):
    monkeypatch.setattr("skirl.placement.tables.gpu.OUTPUTS", 1 << 12)
    arena = FbgemmCudaArena(1 << 19, on=on)
    check_step(arena, monkeypatch, optimizer)
    if on == "cuda":
        assert arena.run_ms(arena.together([arena.ready(*each) for each in some_parts(optimizer)])) > 0


def check_step(arena, monkeypatch, optimizer):
    """Run a step of two parts, and compare outputs, rows and state with those by hand."""
    monkeypatch.setattr(fbgemm, "_LR", LR)
    of, rng = some_parts(optimizer), np.random.default_rng(0)
    parts = [arena.ready(*each) for each in of]
    arena.floats[:] = torch.from_numpy(rng.random(len(arena.floats), np.float32) + 0.5).to(arena.floats.device)
    memory = Memory.of(arena.floats, optimizer)
    calls, made = list[fbgemm.Call](), fbgemm.calls_of
    monkeypatch.setattr(fbgemm, "calls_of", lambda *of: calls.extend(made(*of)) or calls)
    arena.together(parts)
    [call] = calls

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


def test_the_arena_has_room_for_weights_and_their_state():
    floats = torch.zeros(1000)
    for optimizer, sizes in (
        ("sgd", [1000]), ("rowwise-adagrad", [800, 200]), ("adagrad", [500, 500]), ("adam", [332, 332, 332]),
    ):  # fmt: skip
        memory = Memory.of(floats, optimizer)
        assert [len(memory.weights), *map(len, memory.states)] == sizes, optimizer
        ends = [of.data_ptr() + 4 * len(of) for of in (memory.weights, *memory.states)]
        begins = [of.data_ptr() for of in (memory.weights, *memory.states)]
        assert begins == [floats.data_ptr(), *ends[:-1]] and ends[-1] <= floats.data_ptr() + 4 * 1000
    arena = FbgemmArena(1 << 10)
    [(lookups, piece)] = some_parts("adagrad", (16,), rows=5000)
    part = arena.ready(lookups, piece)  # more rows than fit
    assert (part.rows, part.first) == (32, 0) and part.ids.max() < 32 and arena.run_ms(arena.together([part])) > 0


def test_tables_of_several_batch_sizes_and_optimizers_take_a_call_each(arena):
    of = [*some_parts("sgd"), *some_parts("adagrad"), *some_parts("sgd", batch=8), *some_parts("sgd", (4, 4))]
    calls = arena.together([arena.ready(*each) for each in of])
    assert [tuple(call.grads.shape) for call in calls] == [(16, 28), (16, 20), (8, 20)]
    assert arena.run_ms(calls) > 0 and arena.together([]) == [] and arena.run_ms([]) >= 0


def test_all_of_it_is_timed_on_one_thread(arena, monkeypatch):
    seen, threads = [], torch.get_num_threads()
    monkeypatch.setattr(fbgemm, "run", lambda calls: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    arena.run_ms([])
    assert seen == [1] and torch.get_num_threads() == 2
    torch.set_num_threads(threads)


def test_a_killed_measurement_goes_on_and_not_with_another_backend(arena, tmp_path):
    ready = [c.ready(arena) for c in training("sgd", 2, 0, batches=(16,))]
    path, what = tmp_path / "r", {"backend": "fbgemm-cpu"}
    first = rounds_of(arena, ready, 2, 0, known=Rounds(path, what))
    path.write_text(path.read_text() + "[0.1, 0.")  # killed while writing a line
    again = rounds_of(arena, ready, 4, 0, known=Rounds(path, what))
    assert again.shape == (4, 2) and (again[:2] == first).all() and (again > 0).all() and noise_of(again) >= 0
    with pytest.raises(ValueError, match="has measurements of something else"):
        Rounds(path, {"backend": "skirl-cpu"})


def test_costs_are_measured_and_plans_with_them(tmp_path, capsys, monkeypatch):
    """skirl place costs, then tables with --check; another backend's costs are refused."""
    for name, value in (("DIMS", (4, 8)), ("BATCHES", (16,)), ("OTHER_BATCHES", (24,)), ("_TABLES", 4)):
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(training_of_nets, "EPOCHS", 3)
    monkeypatch.setattr(measure, "OUTPUTS", 1 << 16)
    monkeypatch.setattr(fbgemm, "FbgemmArena", lambda: FbgemmArena(1 << 18))
    monkeypatch.setattr(calibrate, "ROUNDS", 2)
    out, tables, plan = (tmp_path / name for name in ("c.json", "t.json", "p.json"))
    flags = ["--backend", "fbgemm-cpu", "--minutes", "1e-9", "--combinations", "10", "--optimizers", "adagrad", "--out"]
    assert main(["place", "costs", *flags, str(out)]) == 0
    said = capsys.readouterr().out
    for text in ("fbgemm-cpu, 14 combinations of tables, 2 rounds", f"use --costs {out} --backend fbgemm-cpu"):
        assert text in said
    costs = load_costs(out, link=1e9, ranks=2, backends=("fbgemm-cpu",))
    assert costs.net is not None and costs.report["held_out"] == 4 and costs.noise is not None
    assert sum(costs.ms["adagrad"]) > 0 and not list(tmp_path.glob("*.rounds"))

    specs = [TableSpec(f"t{n}", 400, 8, 16, 32.0, 20.0, optimizer="adagrad") for n in range(4)]
    tables.write_text(specs_text(specs))
    flags = ["place", "tables", str(tables), "--costs", str(out), "--seconds", "0.2", "--out", str(plan)]
    assert main([*flags, "--backend", "fbgemm-cpu", "--check", "0.1s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(rank["measured_ms"] > 0 for rank in found["ranks"]) and plan.is_file()
    assert main([*flags, "--force"]) == 1
    assert (
        "for backend 'fbgemm-cpu', not for 'skirl-cpu': measure costs for 'skirl-cpu', or set --backend to fbgemm-cpu"
        in (capsys.readouterr().err)
    )
    assert main(["place", "costs", "--start", str(out)]) == 1
    assert "for backend 'fbgemm-cpu', not for 'skirl-cpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--optimizers", "adam"], "optimizer is 'adam', which FBGEMM's CPU operator lacks: set it to one of sgd, "),
        (["--optimizers", "ftrl"], "optimizer is 'ftrl', which FBGEMM's CPU operator lacks: set it to one of sgd, "),
        (
            ["--tables", "t.json"],
            "has dim 6, and FBGEMM's operator takes multiples of 4: give it another dim, or leave",
        ),
    ],
)
def test_what_fbgemm_cannot_run_is_one_sentence(tmp_path, monkeypatch, capsys, flags, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fbgemm, "FbgemmArena", lambda: FbgemmArena(1 << 12))
    monkeypatch.setattr(calibrate, "DIMS", ())
    (tmp_path / "t.json").write_text(specs_text([TableSpec(f"t{n}", 50, 6, 8, 8.0, 8.0) for n in range(4)]))
    assert main(["place", "costs", "--backend", "fbgemm-cpu", "--minutes", "1e-9", "--combinations", "10", *flags]) == 1
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_what_fbgemm_cannot_run_is_refused_before_the_search(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(place, "planned", lambda *of, **how: pytest.fail("it was searched"))
    path, tables = tmp_path / "c.json", tmp_path / "t.json"
    save_costs(replace(shipped(1, 1), backend="fbgemm-cpu"), path)
    flags = ["place", "tables", str(tables), "--backend", "fbgemm-cpu", "--costs", str(path), "--check", "1s"]
    for dim, optimizer, text in (
        (6, "sgd", "table 't' has dim 6, and FBGEMM's operator takes multiples of 4: give it another dim"),
        (8, "adam", "optimizer is 'adam', which FBGEMM's CPU operator lacks: set it to one of"),
    ):
        tables.write_text(specs_text([TableSpec("t", 50, dim, 8, 8.0, 8.0, optimizer=optimizer)]))
        assert main(flags) == 1 and text in capsys.readouterr().err


def test_the_cuda_operator_takes_the_same_calls(monkeypatch):
    """On the CPU, with a timer that counts; a GPU only differs in where memory is and in the clock."""
    seen = []

    def timer(step):
        step()
        seen.append(step)
        return 3.0

    monkeypatch.setattr("skirl.placement.tables.gpu.OUTPUTS", 1 << 12)
    monkeypatch.setattr("skirl.placement.tables.gpu.EVICTED", 1 << 12)
    arena = FbgemmCudaArena(1 << 14, on="cpu", timer=timer)
    before = arena.floats.clone()
    step = arena.together([arena.ready(*each) for each in some_parts("rowwise-adagrad")])
    assert arena.run_ms(step) == 3.0 and seen == [step] and (arena.floats != before).any()
