"""Tables cut by rows only evenly over all ranks: every row once, no cap exceeded, and no worse than any such placement."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.placement.tables import balance
from skirl.placement.tables.costs import Costs, shipped
from skirl.placement.tables.evenly import _Blocks, blocks, search_evenly
from skirl.placement.tables.pieces import Piece, check_cover
from skirl.placement.tables.place import over_caps, planned
from skirl.placement.tables.plan_file import TablePlan
from skirl.placement.tables.pool import pool, task
from skirl.placement.tables.problem import Problem, Ranks, canonical
from skirl.placement.tables.spec import TableSpec
from tests.placement.tables.test_nets import costs as by_net


def spec_of(n: int, rows: int, dim: int, ids: int, optimizer: str, split: str) -> TableSpec:
    return TableSpec(
        f"t{n}",
        rows,
        dim,
        64,
        float(ids),
        float(min(ids, rows)) / 2,
        optimizer=optimizer,
        split=split,  # type: ignore[arg-type]
    )


TABLES = st.lists(
    st.tuples(
        st.integers(1, 3000), st.sampled_from([4, 8, 12, 24, 64]), st.integers(1, 4000),
        st.sampled_from(["sgd", "rowwise-adagrad"]),
        st.sampled_from(["any", "any", "rows", "columns", "no"]),
    ),
    min_size=1, max_size=9,
)  # fmt: skip


@settings(max_examples=12)
@given(TABLES, st.integers(1, 4), st.data())
def test_every_table_is_whole_or_by_columns_or_evenly_by_rows(tables, ranks, data):
    specs = [spec_of(n, *of) for n, of in enumerate(tables)]
    held = sum(spec.nbytes(spec.rows, spec.dim) for spec in specs)
    if sum(spec.rows for spec in specs) < ranks:
        return
    cap = int(held / ranks * data.draw(st.sampled_from([1.2, 2.0, 50.0]))) + 1
    may = [s.name for s in specs if s.rows >= ranks > 1 and s.split in ("any", "rows")]
    forced = data.draw(st.lists(st.sampled_from(may), unique=True)) if may else []
    try:
        plan, found, problem = planned(
            specs, Ranks.like(ranks, cap), shipped(1e9, ranks), seconds=0.05, even_rows=True, forced=forced
        )
    except ValueError as error:
        assert "exceeds its memory by" in str(error) or " too little" in str(error)
        return
    check_cover(specs, [piece for pieces in plan.pieces for piece, _ in pieces])
    used = [0] * ranks
    for spec, pieces in zip(specs, plan.pieces, strict=True):
        for piece, rank in pieces:
            used[rank] += spec.nbytes(piece.rows, piece.dim)
        by_rank = {rank: (piece.row, piece.row_end) for piece, rank in pieces}
        whole, evenly = len(pieces) == 1, {r: of for r, of in enumerate(blocks(spec.rows, ranks)) if of[0] < of[1]}
        by_columns = all(piece.rows == spec.rows for piece, _ in pieces)
        by_rows = (
            len(by_rank) == len(pieces) and all(piece.dim == spec.dim for piece, _ in pieces) and by_rank == evenly
        )
        assert whole or by_columns or by_rows
        assert whole or (
            spec.split in ("any", "rows") if by_rows else spec.split in ("any", "columns") and spec.optimizer == "sgd"
        )
        assert spec.name not in forced or by_rows
    assert max(used) <= cap and used == found.placed.used.tolist() and max(over_caps(problem, found.placed)) == 0
    assert plan.placed(problem).score == pytest.approx(found.placed.score)


def test_small_tables_are_cut_as_they_have_to_be():
    specs = [
        spec_of(0, 11, 8, 90, "rowwise-adagrad", "any"),
        spec_of(1, 10, 24, 4000, "sgd", "columns"),
        spec_of(2, 9, 4, 9, "sgd", "no"),
    ]
    plan, found, _ = planned(specs, Ranks.like(3), shipped(1e10, 3), seconds=5.0, even_rows=True, forced=["t0"])
    assert [(p[1:], r) for p, r in plan.pieces[0]] == [((0, 4, 0, 8), 0), ((4, 8, 0, 8), 1), ((8, 11, 0, 8), 2)]
    columns = [(p.col, p.col_end, r) for p, r in plan.pieces[1]]
    assert (
        len(columns) == 3
        and sorted(r for *_, r in columns) == [0, 1, 2]
        and [c[0] for c in columns] == [0, *(c[1] for c in columns[:-1])]
    )
    assert len(plan.pieces[2]) == 1 and found.in_time


def test_it_is_about_the_best_of_all():
    """By the sum of terms, where what parts of a rank cost adds up."""
    rng, made, ratios = np.random.default_rng(3), pool(30, batch=512, max_dim=64, seed=3), []
    for _ in range(6):
        of = task(made, 4, 2, rng, full=0.7)
        problem = Problem(
            [of.specs[n] for n in canonical(of.specs)], of.ranks, replace(shipped(1e9, 2), kind="additive")
        )
        best = np.inf
        for where in itertools.product((0, 1, None), repeat=4):  # on one rank, or cut over both
            load, used = np.zeros(2), np.zeros(2)
            for spec, at in zip(problem.specs, where, strict=True):
                parts = (
                    [(at, spec.rows)]
                    if at is not None
                    else [(r, b - a) for r, (a, b) in enumerate(blocks(spec.rows, 2))]
                )
                for rank, rows in parts:
                    compute, exchange, nbytes = problem.costs.of(spec, rows, spec.dim)
                    load[rank] += compute + exchange
                    used[rank] += nbytes
            if (used <= problem.ranks.bytes_of).all():
                best = min(best, load.max())
        placed = search_evenly(problem, seconds=5.0).placed
        ratios.append(placed.score[1] / best)
        assert placed.score[0] == 0
    assert max(ratios) < 1.02 and min(ratios) > 1 - 1e-9


def test_it_ends_in_time_whatever_takes_it(monkeypatch):
    """Asking for costs and moves advances the clock: with many tables on many ranks, not every block is asked for."""
    at, improve = [0.0], balance.improve

    class Slow(Costs):
        def part(self, spec, rows, dim):
            at[0] += 2e-3
            return super().part(spec, rows, dim)

    def moves(*args):
        at[0] += 5e-3
        return improve(*args)

    monkeypatch.setattr(balance, "improve", moves)
    of = task(pool(60, batch=512, max_dim=64, seed=1), 150, 64, np.random.default_rng(1), full=0.9)
    problem = Problem([of.specs[n] for n in canonical(of.specs)], of.ranks, Slow(shipped(1e9, 64).ms, 1e9, 64))
    short = search_evenly(problem, seconds=1.5, now=lambda: at[0])
    assert at[0] == pytest.approx(short.seconds + 0.3) and 1.2 <= short.seconds <= 1.5  # 0.3: for whole tables, before
    assert not short.in_time and short.placed.score[0] == 0


def test_blocks_together_take_what_each_takes():
    of = task(pool(9, batch=64, max_dim=64, seed=2, optimizer="sgd"), 9, 5, np.random.default_rng(2))
    specs = [*(replace(spec, rows=spec.rows // 50000 + n, distinct=1.0) for n, spec in enumerate(of.specs))]
    problem = Problem([specs[n] for n in canonical(specs)], of.ranks, by_net(5, seed=1))
    some = [0, 2, 3, 8]
    wanted = np.zeros((5, 7))
    for n in some:
        for rank, (a, b) in enumerate(blocks(problem.specs[n].rows, 5)):
            if a < b:
                piece = Piece(n, a, b, 0, problem.specs[n].dim)
                wanted[rank] += (*problem.cost(piece), *problem.adds(piece))
    assert np.allclose(_Blocks(problem, range(9)).of(some), wanted) and wanted.any(axis=0).all()


def test_it_does_not_depend_on_order():
    of = task(pool(60, batch=512, max_dim=64, seed=1), 5, 4, np.random.default_rng(1), full=0.9)
    one, other = (
        planned(specs, Ranks.like(2), shipped(1e9, 2), seconds=20.0, even_rows=True)[0]
        for specs in (of.specs, of.specs[::-1])
    )
    assert by_name(one) == by_name(other)


def by_name(plan: TablePlan) -> dict[str, list]:
    return {name: [(p[1:], r) for p, r in of] for (name, *_), of in zip(plan.tables, plan.pieces, strict=True)}
