"""Ids of a batch by table."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.positions import Positions
from skirl.oracle.distinct import _by_table
from tests.cases import cases


@cases(100)
@given(
    parts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=8),
    tables=st.sets(st.integers(0, 4), min_size=1),
)
def test_parts_by_table_with_those_of_other_banks_in_front(parts, tables):
    order, begin, rows = sorted(tables), 0, []
    for table, length in parts:
        rows.append([table, begin, begin + length, 10 * table])
        begin += length
    batch = Positions(np.arange(begin), np.array(rows, np.int64).reshape(-1, 4))
    local = np.array([order.index(t) if t in tables else -1 for t in range(5)])
    sorted_parts, part_at, at = np.empty((len(rows), 4), np.int64), *np.zeros((2, len(order) + 1), np.int64)
    most = _by_table(batch.parts, local, sorted_parts, part_at, at)
    expected = [[*row[1:], row[1]] for t in (-1, *range(len(order))) for row in rows if local[row[0]] == t]
    assert sorted_parts.tolist() == expected
    before = [[row for row in rows if local[row[0]] < t] for t in range(len(order) + 1)]
    assert part_at.tolist() == list(map(len, before))
    assert at.tolist() == [sum(row[2] - row[1] for row in of) for of in before] and at[-1] == begin
    assert most == max(np.diff(at).tolist())
