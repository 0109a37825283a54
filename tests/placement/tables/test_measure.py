"""Costs are measured on the engine's kernels: they compute the right results, and a killed measurement can be resumed."""

import json
from dataclasses import replace

import numpy as np
import pytest

from skirl.cli import main
from skirl.core.optim import row_optimizer
from skirl.placement.tables import bench_plans, bench_tables, calibrate, measure
from skirl.placement.tables import training as training_of_nets
from skirl.placement.tables.calibrate import training
from skirl.placement.tables.costs import load_costs, shipped
from skirl.placement.tables.measure import Lookups, MeasuredTables, Ready, Rounds, Sentinel, noise_of, rounds_of
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.pool import pool
from skirl.placement.tables.spec import TableSpec, specs_text
from skirl.placement.tables.terms import TERMS
from skirl.tools.machine import machine


@pytest.fixture(scope="module")
def arena() -> MeasuredTables:
    return MeasuredTables(1 << 20)


@pytest.mark.parametrize(("optimizer", "plain"), [("sgd", False), ("rowwise-adagrad", True)])
def test_what_is_timed_is_a_step(arena, monkeypatch, optimizer, plain):
    monkeypatch.setattr(arena, "plain", plain)
    [made] = pool(1, batch=32, max_dim=4, seed=3, optimizer=optimizer)
    made = replace(made, spec=replace(made.spec, rows=3000, dim=8))
    lookups = Lookups(made, 0)
    part = Ready(arena, lookups, Piece(0, 1000, 2500, 0, 8))
    ids, bags = lookups.of(Piece(0, 1000, 2500, 0, 8))
    assert len(ids) and ids.min() >= 0 and ids.max() < 1500
    part.cache[:] = np.random.default_rng(0).random(part.cache.shape)
    part.grads[:] = 1.0
    before = part.cache.copy()
    part.forward()
    wanted = np.zeros((32, 8))
    np.add.at(wanted, bags, before[ids, :8])  # this piece begins where the arena begins
    assert np.allclose(part.out, wanted, rtol=1e-4)
    part.backward()
    changed = np.flatnonzero((part.cache != before).any(axis=1))
    assert set(changed) <= set(ids) and len(changed) > 0.9 * len(set(ids))
    width = row_optimizer(optimizer)().width(8)
    assert part.cache.shape[1] == width


def test_batches_that_are_larger_than_the_arena_get_room(monkeypatch):
    monkeypatch.setattr(measure, "OUTPUTS", 1 << 9)
    arena, [made] = MeasuredTables(1 << 12, plain=True), pool(1, batch=100, max_dim=4, seed=3)
    small, large = (Ready(arena, Lookups(made, 0), Piece(0, 0, made.spec.rows, 0, dim)) for dim in (4, 20))
    assert small.out.shape == (100, 4) and large.out.shape == large.grads.shape == (100, 20)
    assert not np.shares_memory(large.out, large.grads) and arena.run_ms([small, large]) > 0


def test_parts_of_a_table_have_its_ids_between_them():
    [made] = pool(1, batch=32, max_dim=4, seed=4)
    lookups = Lookups(made, 1)
    rows = made.spec.rows
    parts = [lookups.of(Piece(0, *ends, 0, 4)) for ends in ((0, rows // 3), (rows // 3, rows))]
    assert sum(len(ids) for ids, _ in parts) == len(lookups.ids) == made.spec.ids
    assert len(np.unique(lookups.ids)) == pytest.approx(made.spec.distinct, rel=0.2)


def test_a_killed_measurement_goes_on(arena, tmp_path):
    ready = [c.ready(arena) for c in training("sgd", 2, 0, batches=(16,))]
    path, what = tmp_path / "r", {"seed": 0}
    first = rounds_of(arena, ready, 3, 0, known=Rounds(path, what))
    path.write_text(path.read_text() + "[0.1, 0.")  # killed while writing a line
    again = rounds_of(arena, ready, 5, 0, known=Rounds(path, what))
    assert again.shape == (5, 2) and (again[:3] == first).all()
    assert len(path.read_text().splitlines()) == 6 and noise_of(again) >= 0
    assert len(rounds_of(arena, ready, 9, 0, late=lambda: True)) == 2
    with pytest.raises(ValueError, match="has measurements of something else"):
        Rounds(path, {"seed": 1})
    head = path.read_text().splitlines()[0]
    path.write_text(head + "\n")  # killed before the first round: there is nothing to lose
    assert Rounds(path, {"seed": 1}).rounds == [] and json.loads(path.read_text())["measured"] == {"seed": 1}
    for other in (head + "\n[0.1, 0.", "notes of mine\n", head, '{"measured": 1}\n', "[]\n"):
        path.write_text(other)
        with pytest.raises(ValueError, match="has measurements of something else"):
            Rounds(path, {"seed": 2})
        assert path.read_text() == other
    path.write_text("\n".join([head, *map(json.dumps, again.tolist()), ""]))
    text = path.read_text()
    for line in ("[0.1, 0.", "{}", '["a"]', "[NaN]"):
        path.write_text(f"{text}{line}\n")
        with pytest.raises(ValueError, match=r"r, line 7 is not a round of measurements: remove the line"):
            Rounds(path, what)
        assert path.read_text() == f"{text}{line}\n"


@pytest.mark.parametrize("late", [False, True])
def test_a_disturbed_round_is_measured_again(arena, monkeypatch, late):
    """The machine is slower by half in the second round, and for a single turn in the third, which is nothing."""
    at, slow, rounds = [0.0], [1.0, 1.5, 1.5, 1.0, 1.0], [0]

    def run(parts):
        return slow[rounds[0]]

    class Planted(Sentinel):
        def turn(self):
            took = 1.4 if rounds[0] == 4 and not self.turns else slow[rounds[0]]
            super().turn()
            self.turns[-1] = took if self.turns[-1] == 1 else 99.0

        def calm(self):
            if self.turns:
                rounds[0] += 1
            return super().calm()

    def clock():
        at[0] += 1
        return at[0]

    monkeypatch.setattr(arena, "run_ms", run)
    sentinel = Planted(arena, clock)
    found = rounds_of(arena, [[]] * 20, 2 if late else 3, 0, late=lambda: late, sentinel=sentinel)
    assert sentinel.disturbed == (1 if late else 2)
    assert found.tolist() == ([[1.0] * 20, [1.5] * 20] if late else [[1.0] * 20] * 3)


OWN = [TableSpec(f"own {n}", 900 + n, 12, 64, 64.0 * n, 9.0 * n) for n in range(1, 10)]


def test_ones_own_tables_are_dealt_and_looked_up_by_smaller_batches():
    own = calibrate.Own.of(OWN, 3)
    assert len(own.judges) == 2 and {*own.learned} | {*own.judges} == {*OWN} and len(own.learned) == 7
    assert (own.batches, own.other_batches) == ((16, 32, 64), (24, 48))
    for batch, some in ((16, own.learned), (48, own.judges)):
        for combination in calibrate.training("adam", 3, 0, (batch,), own=some):
            for spec, rows, _ in combination.pieces:
                [of] = [of for of in some if of.name == spec.name]
                assert (spec.batch, spec.ids, spec.optimizer) == (
                    batch,
                    of.ids * batch / 64,
                    "adam",
                ) and rows <= of.rows
                assert 0 < spec.distinct <= min(of.distinct, spec.ids) and sum(spec.reuse) == pytest.approx(1)
    assert calibrate.Own.of([replace(spec, batch=4096) for spec in OWN], 3).batches == calibrate.BATCHES
    with pytest.raises(ValueError, match="there are 3 tables: list at least 4, of which one judges the costs"):
        calibrate.Own.of(OWN[:3], 0)


def test_one_combination_in_four_is_of_published_tables_with_single_ids(monkeypatch):
    """Other ones judge: Criteo's smaller data set is learned from, and its larger one judges."""
    monkeypatch.setattr(calibrate, "_TABLES", 5)
    for made, rows in (
        (training("sgd", 24, 0, (16, 32)), 10131227),
        (calibrate.held_out("sgd", 24, 0, (16, 32)), 292775614),
    ):
        names = [{part[0].spec.name[0] for part in of.parts} for of in made]
        assert names.count({"t"}) == 18 and names.count({"C"}) == 6
        pieces = [piece for of, name in zip(made, names, strict=True) for piece in of.pieces if name == {"C"}]
        assert {spec.ids for spec, *_ in pieces} == {16.0, 32.0} and max(spec.rows for spec, *_ in pieces) == rows
        assert len({dim for *_, dim in pieces}) > 5 and any(rows < spec.rows for spec, rows, _ in pieces)


@pytest.mark.parametrize("own", [False, True])
def test_costs_are_written_and_used(tmp_path, capsys, monkeypatch, own):
    monkeypatch.setattr(calibrate, "DIMS", (4, 8))
    monkeypatch.setattr(calibrate, "BATCHES", (16,))
    monkeypatch.setattr(calibrate, "OTHER_BATCHES", (24,))
    monkeypatch.setattr(training_of_nets, "EPOCHS", 3)
    monkeypatch.setattr(training_of_nets, "TUNED", 3)
    monkeypatch.setattr(calibrate, "_TABLES", 4)
    monkeypatch.setattr(calibrate, "MeasuredTables", lambda: MeasuredTables(1 << 20))
    out = tmp_path / "c.json"
    flags = ["--minutes", "1e-9", "--combinations", "10", "--optimizers", "sgd", "--out", str(out)]
    if own:
        (tmp_path / "t.json").write_text(specs_text(OWN))
        flags += ["--tables", str(tmp_path / "t.json")]
    assert main(["place", "costs", *flags]) == 0
    said = capsys.readouterr().out
    for text in ("14 combinations of tables, 2 rounds", f"use --costs {out}", "on tables that neither has seen"):
        assert text in said
    costs = load_costs(out, link=1e9, ranks=2)
    assert set(costs.ms) == {"sgd"} and sum(costs.ms["sgd"]) > 0 and len(list(tmp_path.iterdir())) == 1 + own
    assert costs.machine is not None and (costs.machine["processor"], costs.machine["device"]) == (
        machine()["processor"], "cpu",
    )  # fmt: skip
    assert costs.net is not None and costs.report["held_out"] == 4 and costs.report["learned"] == 10


def test_few_measurements_go_on_from_costs_of_another_machine(monkeypatch):
    """On average over twenty measurements: by chance, some are good enough by themselves."""
    monkeypatch.setattr(calibrate, "_TABLES", 20)
    combinations = training("sgd", 25, 0, batches=(16,))
    terms = np.array([c.terms() for c in combinations])
    true = np.array(shipped(1e9, 2).ms["sgd"]) * 3
    off = np.zeros(2)
    for seed in range(20):
        noise = np.exp(abs(np.random.default_rng(seed).normal(0, 0.4, 12)))
        few = calibrate.Measured(combinations[:12], terms[:12] @ true * noise)
        for n, start in enumerate((None, shipped(1, 1))):
            ratios = terms[12:] @ few.fitted(start)["sgd"] / (terms[12:] @ true)
            off[n] += np.abs(ratios / np.median(ratios) - 1).mean()
    assert off[1] < 0.8 * off[0]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--optimizers", "lion"], "--optimizers has 'lion': set it to some of"),
        (["--optimizers", "sgd", "sgd"], "--optimizers is sgd sgd: name at least one, each once"),
        (["--minutes", "0"], "--minutes is 0.0: set it above 0"),
        (["--combinations", "3"], "--combinations is 3: set it to 10 or more"),
        (["--exchange", "1"], "--exchange is 1: set it to 2 to 64, or to 0"),
        (["--start", "none.json"], "none.json is not a file: name costs that `skirl place costs` wrote"),
        (["--tables", "none.json"], "none.json is not a file: name one that lists tables"),
        (["--out", "c.txt"], "--out is 'c.txt': name a file that ends in .json"),
    ],
)
def test_wrong_flags_are_one_sentence(capsys, flags, text):
    assert main(["place", "costs", *flags]) in (1, 2)
    assert text in capsys.readouterr().err


def test_figures_of_plans_are_ratios_by_hand():
    times = [
        dict.fromkeys(("random", "size", "dim", "lookup", "size_lookup", "additive_lpt"), (10.0, 5.0, 1.0, 3.0))
    ] * 2
    times = [
        of | {"row_wise": (8.0, 8.0, 2.0, 3.0), "whole": (7.0, 5, 1, 3.0), "columns": (6.0, 5, 1, 3.0)} for of in times
    ]
    times = [
        of | {"rows": (ms, 4.5, 1.0, 3.0), "checked": (0.9 * ms, 4, 1, 3.0), "lookup": (9.0, 5.0, 2.0, 4.0)}
        for of, ms in zip(times, (4.5, 5.4))
    ]
    times[1] |= {"torchrec whole": (6.0, 4.0, 1.0, 3.0), "torchrec rows": (9.0, 4.0, 1.0, 3.0)}
    found = bench_plans.compared(["a", "b"], times)
    assert found["vs_torchrec"] == pytest.approx(5.4 / 6) and found["vs_torchrec_by"]["torchrec rows"] == pytest.approx(
        0.6
    )
    assert found["torchrec_tasks"] == 1 and found["worst_vs_any"] == found["vs_torchrec"]
    assert found["greedy"] == "lookup" and found["vs_greedy"] == pytest.approx(0.55)
    assert found["with_check"] == pytest.approx(0.495) and found["check_vs_without"] == pytest.approx(0.9)
    assert found["best_cell"] == pytest.approx(0.5) and found["gap_closed"] == pytest.approx((4.5 + 3.6) / 8)
    assert found["gap_closed_with_check"] == pytest.approx((9 - 4.05 + 9 - 4.86) / 8)
    assert found["vs_row_wise"] == pytest.approx((4.5 + 5.4) / 16)
    assert found["by_split"]["whole"] == pytest.approx(7 / 9) and len(TERMS) == 10
    assert found["vs_greedy_exchange"] == 0.5 and found["vs_greedy_compute"] == pytest.approx(0.75)
    json.dumps(found)


@pytest.mark.parametrize("theirs", [False, True])
def test_estimates_of_torchrec_are_printed_where_they_were_measured(theirs):
    kinds = ["additive", "net", "dim", "lookup", *["torchrec", "torchrec_fitted"] * theirs]
    result = {"part": "model", "chosen": "net", "why": "", "gpu": "", "exchange": "net"}
    result |= {"exchange_error": 0.1, "exchange_noise": 0.1}
    for name in ("", "other_batch_"):
        result |= {f"{name}tau_ceiling": 0.9, f"{name}median_noise": 0.01}
        for n, kind in enumerate(kinds):
            result |= {f"{name}{kind}_tau": n / 10, f"{name}{kind}_median_error": 0.2}
    lines = bench_tables.told(result)
    said = "TorchRec's estimator tau 0.400 and error 20.0%, that fitted tau 0.500 and error 20.0%"
    assert all((said in lines[name]) == theirs for name in ("held-out tables", "another batch"))


def test_parts_are_measured_on_a_gpu_too_or_say_that_there_is_none(monkeypatch):
    asked = []
    monkeypatch.setattr(bench_tables.bench_model, "model", lambda *of: asked.append(of) or {"tau": 0.9})
    monkeypatch.setattr(bench_tables.bench_plans, "plans", lambda *of: asked.append(of) or {"tau": 0.9})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for part in ("model", "plans"):
        assert bench_tables.measured(part, 3, 0, pool="mlperf") == {"tau": 0.9, "gpu": "not run (no device)"}
    assert asked == [(0, "skirl-cpu", "mlperf", 3), (3, 0, "skirl-cpu", "mlperf")]
    with pytest.raises(ValueError, match="backend skirl-cuda runs on a GPU"):
        bench_tables.measured("model", 3, 0, "skirl-cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(bench_tables, "missing", lambda name: "no" if name == "fbgemm-cuda" else None)
    asked.clear()
    found = bench_tables.measured("model", None, 4)
    assert found == {"tau": 0.9, "gpu": {"skirl-cuda": {"tau": 0.9}, "fbgemm-cuda": "not run (no)"}}
    assert [of[:2] for of in asked] == [(4, "skirl-cpu"), (4, "skirl-cuda")]
    of_gpu = {"skirl-cuda": {"tau": 0.9, "median_error": 0.1, "chosen": "net"}, "fbgemm-cuda": "not run (no)"}
    said = bench_tables._gpu("model", of_gpu)
    assert said == "skirl-cuda: tau 0.900 median_error 0.100 chosen net, fbgemm-cuda: not run (no)"
