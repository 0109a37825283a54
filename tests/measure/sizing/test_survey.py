"""A survey, compared with sets and counters over the same ids."""

from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl import KeyedJagged
from skirl.measure.sizing.survey import Survey, hottest
from tests.cases import cases
from tests.oracle import brute
from tests.oracle.traces import SCHEMA, traces

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
        everything = Counter(key for batch in keys for key in batch)
        assert survey.ids == sum(map(len, keys))
        assert sum(survey.touched) == len(everything)
        assert survey.used.sum(axis=0).tolist() == [len(set(batch)) for batch in keys]
        seen: set = set()
        for new, batch in zip(survey.new, keys, strict=True):
            assert new == len(set(batch) - seen)
            seen |= set(batch)
        for f, table in enumerate(survey.tables()):
            mine = [n for (g, _), n in everything.items() if g == f]
            assert (table.name, table.touched, table.accesses) == (NAMES[f], len(mine), sum(mine))
        for window, mean in survey.working_set((1, 3)).items():
            whole = len(keys) // window
            parts = [set().union(*map(set, keys[i * window : (i + 1) * window])) for i in range(whole)]
            assert mean == sum(map(len, parts)) / whole
        # The numbers keep the order that decides ties, and the mapping to rows.
        number: list[dict] = [{}, {}]
        for batch, (_, rows) in zip(survey.batches(), drawn, strict=True):
            for bank, features in enumerate(((0, 2, 3), (1,))):
                ids = brute.distinct([f << 48 | row for f in features for row in rows[f]])
                assert len(batch[bank]) == len(ids)
                for key, given_number in zip(ids, batch[bank].tolist()):
                    assert number[bank].setdefault(key, given_number) == given_number
        for bank in (0, 1):
            assert sorted(number[bank].values()) == [bank << 48 | n for n in range(len(number[bank]))]


@cases(60)
@given(counts=st.lists(st.integers(1, 1000), max_size=300))
def test_hottest(counts):
    descending = sorted(counts, reverse=True)
    for name, share in (("1%", 0.01), ("10%", 0.1)):
        few = max(1, round(share * len(counts)))
        expected = sum(descending[:few]) / sum(counts) if counts else 0.0
        assert hottest(np.array(counts, np.int64))[name] == expected
