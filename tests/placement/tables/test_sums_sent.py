"""What ranks send each other under a plan, counted number by number."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.placement.tables.costs import shipped
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.problem import Placed, Problem, Ranks
from skirl.placement.tables.spec import TableSpec
from skirl.placement.tables.sums_sent import sent_ms, sums_sent

ROWS, DIM = 7, 12


@st.composite
def plans(draw):
    """A table in rows, in columns, or in columns of which some are cut by rows; and a whole one."""
    ranks = draw(st.integers(2, 4))
    columns = [0, *sorted(draw(st.sets(st.sampled_from([4, 8])))), DIM]
    pieces = []
    for begin, end in pairwise(columns):
        cuts = [0, *sorted(draw(st.sets(st.integers(1, ROWS - 1), max_size=3))), ROWS]
        pieces += [Piece(0, a, b, begin, end) for a, b in pairwise(cuts)]
    pieces.append(Piece(1, 0, ROWS, 0, 4))
    at = [draw(st.integers(0, ranks - 1)) for _ in pieces]
    nothing = np.zeros(ranks)
    placed = Placed(tuple((p,) for p in pieces), np.array(at), nothing, nothing.astype(np.int64), nothing)
    batch = draw(st.integers(ranks, 9))
    ids = st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, batch - 1)), max_size=12)
    return placed, [draw(ids), draw(ids)], batch, ranks


def test_rows_at_three_ranks_send_sums_where_they_have_ids():
    pieces = [Piece(0, 0, 3, 0, 8), Piece(0, 3, ROWS, 0, 8), Piece(0, 0, ROWS, 8, DIM), Piece(1, 0, ROWS, 0, 4)]
    nothing = np.zeros(3)
    placed = Placed(tuple((p,) for p in pieces), np.array([0, 2, 1, 1]), nothing, nothing.astype(np.int64), nothing)
    check_sent(placed, [[(0, 0), (6, 0), (5, 1), (2, 4), (1, 4), (3, 8)], [(0, 0), (3, 7)]], 9, 3)


@given(plans())
def test_each_number_is_sent_once(case):
    check_sent(*case)


def check_sent(placed, ids, batch, ranks) -> None:
    """A sample gets one sum of each column from each rank that has this column of any of its rows."""
    wanted = np.zeros((ranks, ranks), int)
    for table, dim in ((0, DIM), (1, 4)):
        for column in range(dim):
            sums = set()
            for row, sample in ids[table]:
                [rank] = [
                    int(rank)
                    for (p,), rank in zip(placed.items, placed.at)
                    if p.table == table and p.row <= row < p.row_end and p.col <= column < p.col_end
                ]
                sums.add((sample, rank))
            for sample, rank in sums:
                mine = next(n for n in range(ranks) if sample < batch * (n + 1) // ranks)
                wanted[rank, mine] += 1
    both = [np.array(of, np.int64).reshape(-1, 2) for of in ids]
    arrays = [(of[:, 0], of[:, 1]) for of in both]
    found = sums_sent(placed, arrays, batch)
    assert found.tolist() == wanted.tolist()
    assert (
        sums_sent(placed, [(rows[::-1], samples[::-1]) for rows, samples in arrays], batch).tolist() == wanted.tolist()
    )


def test_its_time_is_that_of_bytes_over_the_link():
    """Where each sample has ids, a whole table takes what its costs say."""
    spec = TableSpec("a", 9, 8, 16, 16.0, 9.0)
    problem = Problem([spec], Ranks.like(4), shipped(1e6, 4))
    [item] = problem.root()
    placed = problem.at((item,), np.array([2]))
    sent = sums_sent(placed, [(np.arange(16) % 9, np.arange(16))], 16)
    assert sent_ms(problem, sent) == pytest.approx([0, 0, problem.cost(item[0])[1], 0])
    few = sums_sent(placed, [(np.arange(3), np.array([0, 8, 9]))], 16)
    assert sent_ms(problem, few)[2] == pytest.approx(2e3 * 8 * 4 / 1e6)  # the second and third are at home
