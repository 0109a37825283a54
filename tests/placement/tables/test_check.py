"""`skirl place tables --check`: plans are judged by measurements, and the measurements are reported."""

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from skirl.cli import main
from skirl.placement.tables.allowed import forbidden
from skirl.placement.tables.baselines import row_wise
from skirl.placement.tables.check import Bench, candidates, cells, checked, corrected, exchange_of, learned
from skirl.placement.tables.costs import shipped
from skirl.placement.tables.measure import MeasuredTables
from skirl.placement.tables.pieces import Piece, halves, whole
from skirl.placement.tables.plan_file import TablePlan
from skirl.placement.tables.plan_report import moved_bytes
from skirl.placement.tables.pool import drawn
from skirl.placement.tables.problem import Problem, Ranks, canonical
from skirl.placement.tables.search import SearchResult, search
from skirl.placement.tables.spec import TableSpec, reuse_of, specs_text
from tests.placement.tables.test_nets import costs as by_net

ADDITIVE = replace(shipped(1e9, 3), kind="additive")
SPECS = [TableSpec(f"t{n}", 400 * n + 60, 16, 32, 32.0 * n + 32, 9.0 * n + 9, optimizer="sgd") for n in range(6)]


def problem_of(**how: Any) -> Problem:
    specs = [SPECS[n] for n in canonical(SPECS)]
    return Problem(specs, Ranks((1 << 40,) * 3, (1.0, 1.0, 2.0), (1.0,) * 3), ADDITIVE, **how)


def problem_with(specs: Any = None, ranks: Any = None) -> Problem:
    plain = problem_of()
    return Problem(specs or plain.specs, ranks or plain.ranks, plain.costs)


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(problem_of(), seconds=1e9, others=3)


class Told(Bench):
    """A fake machine: a piece takes what costs say, but those of some tables take longer."""

    def __init__(self, problem: Problem, slow: dict[str, float]) -> None:
        super().__init__(problem, 0, arena=MeasuredTables(1 << 10))
        self.slow, self.asked, self.differs = slow, 0, 0.0

    def ms(self, pieces: Any, late: Any) -> np.ndarray:
        self.asked += 1
        self.noise.append(self.differs)
        specs = self.problem.specs
        each = [[self.problem.cost(p)[0] * self.slow.get(specs[p.table].name, 1.0) for p in of] for of in pieces]
        return np.array([sum(of) for of in each])


def real(problem: Problem, placed: Any, slow: dict[str, float]) -> float:
    """Return the time of a plan's busiest rank on that machine, added up piece by piece."""
    ms = [0.0, 0.0, 0.0]
    for item, rank in zip(placed.items, placed.at.tolist(), strict=True):
        for piece in item:
            compute, exchange, _ = problem.cost(piece)
            ms[rank] += compute * slow.get(problem.specs[piece.table].name, 1.0) / problem.ranks.speeds[rank] + exchange
    return max(ms)


def test_the_best_measured_is_given_out_and_climbed_from():
    problem, slow = problem_of(rows=False), {"t3": 9.0, "t5": 0.2}
    found = search(problem, seconds=1e9, others=2)
    assert len(found.others) == 2 and found.others[0].score >= found.placed.score
    result = checked(problem, candidates(problem, found), 1e9, bench=Told(problem, slow))
    best = real(problem, result.best.placed, slow)
    assert result.best.busiest == pytest.approx(best) and result.best.predicted == result.best.placed.score[1]
    assert [of.busiest for of in result.tried] == pytest.approx([real(problem, of.placed, slow) for of in result.tried])
    assert best == pytest.approx(min(of.busiest for of in result.tried))
    slow_costs: Any = Slow(slow)
    knowing = Problem(problem.specs, problem.ranks, slow_costs, rows=False)
    ideal = search(knowing, seconds=1e9).placed.score[1]
    assert result.best.name.startswith("climbed") and best <= 1.01 * ideal < 0.9 * real(problem, found.placed, slow)
    assert learned(Told(problem, slow), result.best, bool) == pytest.approx(
        {s.name: slow.get(s.name, 1.0) for s in SPECS}
    )


class Slow:
    """Costs that know how slow some tables really are."""

    def __init__(self, slow: dict[str, float]) -> None:
        self.slow, self.by_net, self.exchange = slow, False, ADDITIVE.exchange

    def compute(self, spec: TableSpec, rows: int, dim: int) -> float:
        return ADDITIVE.compute(spec, rows, dim) * self.slow.get(spec.name, 1.0)

    def part(self, spec: TableSpec, rows: int, dim: int) -> Any:
        return self.compute(spec, rows, dim), ADDITIVE.part(spec, rows, dim)[1]


class Together(Told):
    """A fake machine on which parts together take what a net says, scaled by their tables, and half as much again."""

    def ms(self, pieces: Any, late: Any) -> np.ndarray:
        self.noise.append(0.0)
        costs, specs = self.problem.costs, self.problem.specs
        found = []
        for of in pieces:
            parts = [costs.part(specs[p.table], p.rows, p.dim) for p in of]
            each = [part[0] * self.slow.get(specs[p.table].name, 1.0) for part, p in zip(parts, of, strict=True)]
            factor = costs.factors(np.array([sum(part[1] for part in parts)]))[0] if of else 1.0
            found.append(sum(each) * factor * (1.5 if len(of) > 1 else 1.0))
        return np.array(found)


def test_by_a_net_what_was_measured_is_predicted_and_climbed_from():
    slow, ranks = {"t3": 4.0, "t5": 0.5}, Ranks((1 << 40,) * 2, (1.0, 2.0), (1.0, 1.0))
    problem = Problem([SPECS[n] for n in canonical(SPECS)], ranks, by_net(2, seed=3), "never", False)
    bench, found = Together(problem, slow), search(problem, seconds=1e9, others=2)
    result = checked(problem, candidates(problem, found), 1e9, bench=bench)
    placed, best = result.best.placed, result.best
    factors = learned(bench, best, bool)
    assert factors == pytest.approx({s.name: 1.5 * slow.get(s.name, 1.0) for s in SPECS})
    said = corrected(problem, factors).at(placed.items, placed.at).load
    assert said == pytest.approx(best.compute + exchange_of(problem, placed))
    factor = problem.at(placed.items, placed.at).slow
    assert factor is not None and (factor * ranks.speeds > 1.2).all()

    def real(at: Any) -> float:
        plan = problem.at(problem.root(), np.array(at))
        return float((bench.plans([plan])[0] + exchange_of(problem, plan)).max())

    least = min(real(at) for at in itertools.product(range(2), repeat=6))
    assert best.name.startswith("climbed") and best.busiest <= 1.03 * least < 0.95 * result.tried[0].busiest


def test_without_time_the_given_plans_are_measured_and_no_more(found):
    problem, times = problem_of(), iter(range(1000))
    bench = Told(problem, {})
    plans = candidates(problem, found)
    result = checked(problem, plans, 0.5, bench=bench, now=lambda: next(times))
    assert bench.asked == 2 and [of.name for of in result.tried] == list(plans)


def test_what_is_within_the_noise_changes_nothing(found):
    problem = problem_of()
    busiest = found.placed.pieces(int(found.placed.load.argmax()))
    slow = {problem.specs[piece.table].name: 3.0 for piece in busiest}
    bench = Told(problem, slow)
    bench.differs = 0.9
    result = checked(problem, candidates(problem, found), 1e9, bench=bench)
    assert result.best.name == "predicted 1" and result.best.busiest > 1.05 * min(of.busiest for of in result.tried)


def test_candidates_keep_to_what_tables_may(found):
    problem = problem_of()
    assert {"predicted 1", "longest first", "row-wise"} <= candidates(problem, found).keys()
    assert len({cells(of) for of in candidates(problem, found).values()}) == len(candidates(problem, found))
    pinned = problem_with(specs=[replace(problem.specs[0], rank=1), *problem.specs[1:]])
    assert not {"longest first", "row-wise"} & candidates(pinned, found).keys()
    whole = problem_with(specs=[replace(problem.specs[0], split="no"), *problem.specs[1:]])
    assert "row-wise" not in candidates(whole, found)
    tight = problem_with(ranks=Ranks((130_000, 1 << 30, 1 << 30), (1.0,) * 3, (1.0,) * 3))
    assert row_wise(tight).score[0] > 0 and "row-wise" not in candidates(tight, found)


FORBIDDEN = [
    ({"rank": 1}, [(0, 0, 460, 0, 16)], "is at rank 0, and has to be at rank 1"),
    ({"rank": 0}, [(0, 0, 9, 0, 16), (0, 9, 460, 0, 16)], "is cut by rows"),
    (
        {"group": "g"},
        [(0, 0, 460, 0, 16)],
        "table 'twin' is at rank 1, and has to be at rank 0, with table 't1' of its group 'g'",
    ),
    ({"split": "rows"}, [(0, 0, 460, 0, 8), (1, 0, 460, 8, 16)], "is cut by columns"),
    ({"split": "columns"}, [(0, 0, 9, 0, 16), (1, 9, 460, 0, 16)], "is cut by rows"),
    ({"optimizer": "rowwise-adagrad"}, [(0, 0, 460, 0, 8), (1, 0, 460, 8, 16)], "is cut by columns"),
    ({}, [(0, 0, 460, 0, 8), (1, 0, 9, 8, 16), (2, 9, 460, 8, 16)], None),
    ({"group": "g", "rank": 1}, [(1, 0, 460, 0, 16)], None),
]


def test_what_tables_forbid_is_told():
    for how, pieces, says in FORBIDDEN:
        twin = replace(SPECS[2], name="twin", **({"group": "g"} if "group" in how else {}))
        problem = Problem([replace(SPECS[1], **how), twin], problem_of().ranks, ADDITIVE)
        items = (*((Piece(0, *of),) for _, *of in pieces), (whole(1, twin),))
        found = forbidden(problem, problem.at(items, np.array([*(rank for rank, *_ in pieces), 1])))
        assert found is None if says is None else says in str(found), (how, found)
    kept = Problem([SPECS[1]], problem_of().ranks, ADDITIVE, rows=False)
    halved = kept.at(tuple((half,) for half in halves(whole(0, SPECS[1]), "rows") or ()), np.array([0, 1]))
    assert forbidden(kept, halved) == "table 't1' is cut by rows, which it may not be"


def test_what_takes_less_and_is_forbidden_is_not_given_out(tmp_path, capsys, monkeypatch):
    """Neither a round robin that breaks pins, nor a plan with columns that would train a different model."""
    monkeypatch.setattr("skirl.placement.tables.check.MeasuredTables", lambda: MeasuredTables(1 << 16))
    listed, out, old = (tmp_path / name for name in ("t.json", "p.json", "old.json"))
    specs = [replace(spec, optimizer="rowwise-adagrad", rank=0) for spec in SPECS[3:]]
    halved = tuple(tuple(zip(halves(whole(n, spec), "columns") or (), (0, 1))) for n, spec in enumerate(specs))
    TablePlan(2, tuple((s.name, s.rows, s.dim, s.optimizer) for s in specs), halved).save(old)
    flags = [
        "place",
        "tables",
        str(listed),
        "--check",
        "0.05s",
        "--seconds",
        "0.2",
        "--quiet",
        "--force",
        "--out",
        str(out),
    ]
    for of, more, says in (
        (specs, [], "but table 't4' is at rank 1, and has to be at rank 0"),
        ([replace(spec, rank=None) for spec in specs], ["--from", str(old)], "is cut by columns, which it may not be"),
    ):
        listed.write_text(specs_text(of))
        assert main([*flags, *more]) == 0
        said = capsys.readouterr().out
        assert says in " ".join(said.split())
        assert all(
            p.dim == 16 and (of[0].rank is None or rank == 0) for at in TablePlan.load(out).pieces for p, rank in at
        )


def test_a_machine_keeps_the_least_of_all_times():
    problem = problem_of()
    bench, plan = Bench(problem, 0, arena=MeasuredTables(1 << 16)), row_wise(problem)
    first = bench.plans([plan])[0].copy()
    [second] = bench.plans([plan])
    assert (second <= first).all() and (second > 0).all() and exchange_of(problem, plan).max() > 0


@pytest.mark.parametrize("distinct", [1.0, 3.0, 400.0, 640.0])
@pytest.mark.parametrize("known", [True, False])
def test_ids_are_made_as_a_table_is_known(distinct, known):
    counts = np.minimum(2 ** (np.arange(int(distinct)) % 4), 640)
    spec = TableSpec("a", 5000, 8, 64, 640.0, distinct, reuse_of(counts) if known else ())
    ids = drawn(spec, np.random.default_rng(5))
    assert len(ids) == 640 and ids.min() >= 0 and ids.max() < 5000
    found, often = np.unique(ids, return_counts=True)
    assert len(found) == distinct and (not known or distinct != 400 or (often == 1).mean() > 0.2)


def test_bytes_that_move_are_those_of_cells(found):
    problem = problem_of()
    before, after = row_wise(problem), found.placed
    cell = {}
    for item, rank in zip(before.items, before.at.tolist(), strict=True):
        for p in item:
            cell |= {(p.table, row): rank for row in range(p.row, p.row_end)}
    moved = 0
    for item, rank in zip(after.items, after.at.tolist(), strict=True):
        for p in item:
            moved += sum(cell[p.table, row] != rank for row in range(p.row, p.row_end)) * p.dim * 4
    assert moved_bytes(problem.specs, before, after) == moved > 0


def test_what_is_printed_and_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("skirl.placement.tables.check.MeasuredTables", lambda: MeasuredTables(1 << 16))
    listed, out, page = (tmp_path / name for name in ("t.json", "p.json", "p.html"))
    listed.write_text(specs_text(SPECS))
    flags = [
        "place",
        "tables",
        str(listed),
        "--ranks",
        "2",
        "--quiet",
        "--seconds",
        "0.2",
        "--memory",
        "1MB",
        "--force",
        "--out",
        str(out),
    ]
    assert main([*flags, "--page", str(page)]) == 0
    assert "--check 20s" in page.read_text() and "round robin" in capsys.readouterr().out
    old = tmp_path / "old.json"
    old.write_bytes(out.read_bytes())
    flags += ["--check", "0.05s", "--from", str(old), "--page", str(page)]
    assert main(flags) == 0
    said = capsys.readouterr().out
    for text in (
        "(measured ",
        " ms measured, ",
        "above perfect balance",
        "plans in",
        "measuring again",
        f"{old}: ",
        "page",
    ):
        assert text in said
    assert main([*flags, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    best = next(of for of in result["check"]["plans"] if of["name"] == result["check"]["name"])
    ranks = [of["measured_ms"] + of["forward_ms"] + of["backward_ms"] for of in result["ranks"]]
    assert max(ranks) == pytest.approx(best["measured_ms"]) == pytest.approx(result["check"]["busiest_ms"])
    drawn = page.read_text()
    for text in (
        "Predicted against measured",
        "Cost over search time",
        f"Before: {old}",
        "measured / predicted",
        "<svg",
    ):
        assert text in drawn
    TablePlan.load(out).check(SPECS)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--check", "soon"], "--check is 'soon': write it like 20s or 1m"),
        (["--page", "p.pdf"], "--page is 'p.pdf': name a file that ends in .html"),
        (["--from", "gone.json"], "gone.json is not a file: name a plan that `skirl place tables` wrote"),
        (["--from", "OLD", "--ranks", "3"], "old.json is for 2 ranks, and there are 3: set --ranks 2"),
    ],
)
def test_wrong_flags_are_a_sentence_and_no_file(tmp_path, capsys, flags, text):
    listed, old = tmp_path / "t.json", tmp_path / "old.json"
    listed.write_text(specs_text(SPECS[:2]))
    pieces = [{"rank": 0, "rows": [0, s.rows], "columns": [0, s.dim]} for s in SPECS[:2]]
    tables = [
        {"name": s.name, "rows": s.rows, "dim": s.dim, "optimizer": "sgd", "pieces": [of]}
        for s, of in zip(SPECS[:2], pieces, strict=True)
    ]
    old.write_text(json.dumps({"format": "skirl-table-plan", "format_version": 1, "ranks": 2, "tables": tables}))
    given = [flag.replace("OLD", str(old)) for flag in flags]
    assert main(["place", "tables", str(listed), "--out", str(tmp_path / "p.json"), "--quiet", *given]) in (1, 2)
    said = capsys.readouterr().err.strip()
    assert text in said and "\n" not in said and not (tmp_path / "p.json").exists()
