"""The movement of different schemes between trainers, compared with obvious loops over sets."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.placement import Placement
from skirl.core.positions import Positions
from skirl.core.tables import ROW_BITS, Schema
from skirl.measure.bench.best_owner import best_owners
from skirl.measure.bench.driven import Driven
from skirl.measure.bench.movement import CountSettings, StepRows, counted, ids_of, numbering, published, schemes
from skirl.oracle.options import Plan
from tests.cases import cases
from tests.oracle import brute

SCHEMA = Schema.of([Table("a", 40, 4), Table("b", 7, 4)])

Step = list[list[int]]
"""The keys that each trainer uses in one step."""


@st.composite
def streams(draw) -> list[Step]:
    """Draw some steps of some trainers."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    ranks, steps, most = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 8))

    def part() -> list[int]:
        a, b = (rng.integers(0, rows, rng.integers(0, most + 1)) for rows in (draw(ROWS), 7))
        return [*a.tolist(), *(b | 1 << ROW_BITS).tolist()]

    return [[part() for _ in range(ranks)] for _ in range(steps)]


ROWS = st.sampled_from([5, 12, 40])


def as_ids(steps: list[Step]) -> list[list[Positions]]:
    return [[Positions.of(np.array(part, np.int64)) for part in step] for step in steps]


def owners_of(ranks: int) -> dict[int, int]:
    keys = np.array([row | table << ROW_BITS for table, rows in ((0, 40), (1, 7)) for row in range(rows)])
    return dict(zip(keys.tolist(), Placement.even(ranks).site_of(keys).tolist()))


def asked(step: Step, owner: int, owners: dict[int, int]) -> list[int]:
    """Return the rows that one owner is asked for, trainer after trainer."""
    return [key for part in step for key in brute.distinct(part) if owners[key] == owner]


@cases(60)
@given(steps=streams(), more=st.integers(0, 6), window=st.integers(1, 5), begin=st.integers(0, 3))
def test_vectors_of_owners(steps, more, window, begin):
    """Each step has a value before it and a gradient after it, which are critical if an adjacent step needs them."""
    ranks, owners = len(steps[0]), owners_of(len(steps[0]))
    most = max(len(set(asked(step, o, owners))) for step in steps for o in range(ranks))
    capacity, chosen = max(1, most) + more, range(begin, len(steps))
    ends = [min(n + window, len(steps)) for n in range(len(steps))]
    left = [brute.victims([asked(step, o, owners) for step in steps], capacity, ends) for o in range(ranks)]
    values = gradients = values_critical = gradients_critical = 0
    for t in chosen:
        used = {key for part in steps[t - 1] for key in part} if t else set()
        wanted = {key for part in steps[t + 1] for key in part} if t + 1 < len(steps) else set()
        evicted = {key for of in left for key in of[t + 1]} if t + 1 < len(steps) else set()
        for reader, part in enumerate(steps[t]):
            for key in set(part):
                if owners[key] != reader:
                    values += 1
                    gradients += 1
                    values_critical += key in used
                    gradients_critical += key in wanted or key in evicted
    found = counted(SCHEMA, as_ids(steps), ranks, capacity, window, chosen)
    owned = found.owned
    assert (owned.values, owned.gradients) == (values, gradients)
    assert (owned.values_critical, owned.gradients_critical) == (values_critical, gradients_critical)
    assert (owned.all, owned.critical) == (values + gradients, values_critical + gradients_critical)
    for rows, step in zip(found.rows, steps, strict=True):
        ids = [key for part in step for key in part]
        assert sorted(rows.keys.tolist()) == sorted(set(ids))
        for key, once, users in zip(rows.keys.tolist(), rows.once.tolist(), rows.users.tolist()):
            assert once == (ids.count(key) == 1)
            assert users == sum(1 << rank for rank, part in enumerate(step) if key in part)


def as_rows(steps: list[Step]) -> list[StepRows]:
    out = []
    for step in steps:
        ids = [key for part in step for key in part]
        keys = sorted(set(ids))
        users = [sum(1 << rank for rank, part in enumerate(step) if key in part) for key in keys]
        once = [ids.count(key) == 1 for key in keys]
        out.append(StepRows(np.array(keys, np.int64), np.array(once, np.bool_), np.array(users, np.uint64)))
    return out


@cases(60)
@given(steps=streams(), window=st.integers(1, 5), begin=st.integers(0, 3))
def test_rows_that_the_published_rule_synchronises(steps, window, begin):
    chosen, wanted = range(begin, len(steps)), {"now": 0, "later": 0, "none": 0}
    for t in chosen:
        ids = [key for part in steps[t] for key in part]
        for key in set(ids):
            again = [s for s in range(t + 1, len(steps)) if any(key in part for part in steps[s])]
            if again and again[0] == t + 1:
                wanted["now"] += 1
            elif ids.count(key) == 1 and not any(s <= t + window for s in again):
                wanted["none"] += 1
            else:
                wanted["later"] += 1
    assert published(SCHEMA, as_rows(steps), window, chosen) == wanted


@cases(60)
@given(steps=streams(), moves=st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_no_owners_move_less_than_the_best(steps, moves):
    """Tries all sequences of owners of a row, for its first four uses."""
    ranks, owners, dim, seen = len(steps[0]), owners_of(len(steps[0])), 4, dict[int, int]()
    uses: dict[int, list[set[int]]] = {}
    for step in steps:  # rows used more than four times would have too many sequences to try
        for key in {key for part in step for key in part}:
            seen[key] = seen.get(key, 0) + 1
        for part in step:
            part[:] = [key for key in part if seen[key] <= 4]
        for key in {key for part in step for key in part}:
            uses.setdefault(key, []).append({rank for rank, part in enumerate(step) if key in part})
    wanted = [0] * len(moves)
    for of in uses.values():
        for n, move in enumerate(moves):
            wanted[n] += min(
                sum(2 * dim * len(users - {owner}) for users, owner in zip(of, chosen))
                + sum(move for a, b in itertools.pairwise(chosen) if a != b)
                for chosen in itertools.product(range(ranks), repeat=len(of))
            )
    by_key = sum(2 * dim * len(users - {owners[key]}) for key, of in uses.items() for users in of)
    if uses:
        assert best_owners(numbering(SCHEMA), as_rows(steps), ranks, dim, moves) == (wanted, by_key)


def test_owners_that_are_sampled_have_the_halves_that_they_have_among_all():
    task = CountSettings(4, samples=16, window=3, steps=3, warm=1, cache=400, rows_scale=0.01)
    schema = Schema.of(task.source.tables(4))
    found = []
    for owners in (None, (1, 3)):
        driven = Driven(schema, 4, 400, Plan(3, ramp=False), owners)
        found.append(list(driven.steps(ids_of(task.source, 4))))
    whole, some = found
    assert len(whole) == len(some) == task.source.batches
    for all_halves, halves in zip(whole, some):
        for half, same in zip((all_halves[1], all_halves[3]), halves, strict=True):
            for name in ("serve", "ids", "values", "gradients"):
                assert getattr(half, name).tolist() == getattr(same, name).tolist()
            assert half.step.keys.tolist() == same.step.keys.tolist()


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ratios_are_those_of_the_counts(ranks):
    task = CountSettings(ranks, samples=8, window=3, steps=4, warm=2, cache=1000, rows_scale=0.001)
    steps = [[part.keys().tolist() for part in batch] for batch in ids_of(task.source, ranks)]
    site = {
        key: int(Placement.even(ranks).site_of(np.array([key]))[0]) for step in steps for part in step for key in part
    }
    owners = pooled = 0
    for t in range(2, 6):
        for reader, part in enumerate(steps[t]):
            owners += 2 * sum(site[key] != reader for key in set(part))
            for feature in range(26):  # table-wise: each trainer has some features, the last one fewer
                for home in range(ranks):
                    pooled += 2 * 8 * (home != reader) / ranks * (feature < 26)
    found = schemes(task)
    assert found["vectors"]["owners"] == owners / 4 and found["vectors"]["alltoall"] == pytest.approx(pooled / 4)
    assert found["rows_vs_alltoall"] == pytest.approx(pooled / owners)
    rows, vectors = found["rows"], found["vectors"]
    assert sum(rows.values()) == sum(len({key for part in steps[t] for key in part}) for t in range(2, 6)) / 4
    assert vectors["allreduce"] == 2 * (ranks - 1) * (rows["now"] + rows["later"])
    assert found["critical_vs_allreduce"] == 2 * (ranks - 1) * rows["now"] / vectors["owners_critical"]
    assert found["rows_vs_best"]["adam"] >= 1 and found["rows_vs_best"]["rowwise_adagrad"] >= 1
