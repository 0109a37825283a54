"""A survey, compared with sets and counters, and its curves, compared with a brute-force cache over the same batches."""

import numpy as np
import torch
from hypothesis import assume, given

from skirl import KeyedJagged, Table
from skirl.core.tables import Schema
from skirl.oracle.planner import Plan
from skirl.sizing.size import KINDS, LEAST, Survey, cache_sizes, curves, point
from tests.cases import cases
from tests.oracle import brute
from tests.oracle.traces import SCHEMA, traces

ONE = Schema.of([Table("a", 100, 4)])


def surveyed(trace: list[list[int]], schema: Schema = ONE) -> Survey:
    survey = Survey(schema)
    for ids in trace:
        lengths = torch.ones(len(ids), dtype=torch.int64)
        survey.add(KeyedJagged(["a"], torch.tensor(ids, dtype=torch.int64), lengths=lengths))
    return survey


@cases(60)
@given(trace=traces())
def test_least_and_lru_are_those_of_brute_force(trace):
    trace = [ids for ids in trace if ids]
    assume(trace)
    touched = len({key for ids in trace for key in ids})
    with surveyed(trace) as survey:
        for cache in cache_sizes(survey):
            for plan, reference in ((Plan("epoch"), brute.belady), (Plan(1, policy="lru"), brute.lru)):
                expected = [len(came) for came in reference(trace, cache)]
                found = point(survey, cache, plan)
                assert found.moved == sum(expected) - touched
                assert found.read.sum() <= found.moved


def test_a_deeper_window_never_moves_more_than_lru_nor_less_than_the_least():
    rng = np.random.default_rng(0)
    with surveyed([(99 * rng.random(8) ** 3).astype(int).tolist() for _ in range(120)]) as survey:
        found = curves(survey, cache_sizes(survey, (0.2, 0.4)), prefetch=2)
        for i in range(2):
            moved = {name: found[name][i].moved for name in KINDS}
            assert all(moved[LEAST] <= count <= moved["LRU"] for count in moved.values()), moved
        assert found[LEAST][1].moved < found[LEAST][0].moved < found["LRU"][0].moved


def test_sizes_hold_the_largest_batch_and_no_more_than_all_rows():
    with surveyed([list(range(40)), [1]]) as survey:
        assert cache_sizes(survey) == [40]
    with surveyed([list(range(i, i + 10)) for i in range(90)]) as survey:
        assert cache_sizes(survey) == [11, 20, 50, 99]


def test_tables_of_several_dims_share_the_cache():
    schema = Schema.of([Table("a", 100, 4), Table("b", 100, 8)])
    rng = np.random.default_rng(1)
    with Survey(schema) as survey:
        for _ in range(30):
            survey.add(KeyedJagged.one_hot(["a", "b"], torch.from_numpy(rng.integers(0, [60, 20], (16, 2)))))
        sizes = cache_sizes(survey, (0.6, 0.9))
        found = curves(survey, sizes, prefetch=2)
    assert all(least.moved <= lru.moved for least, lru in zip(found[LEAST], found["LRU"], strict=True))
    assert found["LRU"][0].moved > 0


NAMES = ["a", "other", "b", "c"]


def sparse_of(ids: list[int]) -> tuple[KeyedJagged, list[list[int]]]:
    """Return small numbers as ids of four features, and the ids of each feature."""
    rows = [[i // 4 % 7 for i in ids if i % 4 == f] for f in range(4)]
    rows[2] = [row * 87_654_321 % 100_000_000 for row in rows[2]]  # a table far too large for an array
    lengths = [[len(part)] for part in rows]
    values = [value for part in rows for value in part]
    return KeyedJagged(NAMES, torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths).view(-1)), rows


@cases(60)
@given(trace=traces(rows=60))
def test_counts_are_those_of_sets(trace):
    drawn = [sparse_of(ids) for ids in trace]
    keys = [[(f, row) for f, part in enumerate(rows) for row in part] for _, rows in drawn]
    with Survey(SCHEMA) as survey:
        for sparse, _ in drawn:
            survey.add(sparse)
        everything = {key for batch in keys for key in batch}
        assert survey.ids == sum(map(len, keys))
        assert sum(survey.touched) == len(everything)
        assert survey.used.sum(axis=0).tolist() == [len(set(batch)) for batch in keys]
        # The numbers keep the order that decides ties, and the mapping to rows.
        number: list[dict] = [{}, {}]
        for batch, (_, rows) in zip(survey, drawn, strict=True):
            for bank, features in enumerate(((0, 2, 3), (1,))):
                ids = brute.distinct([f << 48 | row for f in features for row in rows[f]])
                assert len(batch[bank]) == len(ids)
                for key, given_number in zip(ids, batch[bank].tolist()):
                    assert number[bank].setdefault(key, given_number) == given_number
        for bank in (0, 1):
            assert sorted(number[bank].values()) == [bank << 48 | n for n in range(len(number[bank]))]
