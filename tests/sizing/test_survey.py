"""A survey, compared with sets and counters over the same ids."""

import torch
from hypothesis import given

from skirl import KeyedJagged
from skirl.sizing.survey import Survey
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
