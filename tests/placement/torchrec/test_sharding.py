"""How a table is cut, in TorchRec's terms, and what TorchRec would do differently. None of this needs TorchRec."""

import numpy as np
import pytest

from skirl.placement.spec import Piece
from skirl.placement.torchrec.planner import laid_out
from skirl.placement.torchrec.statistics import stack_distances

GOOD = [
    ("table_wise", [(1, 0, 50, 0, 16)], [1]),
    ("column_wise", [(0, 0, 50, 4, 16), (1, 0, 50, 0, 4)], [1, 0]),
    ("column_wise", [(0, 0, 50, 0, 4), (1, 0, 50, 4, 12), (0, 0, 50, 12, 16)], [0, 1, 0]),
    ("row_wise", [(2, 34, 50, 0, 16), (0, 0, 17, 0, 16), (1, 17, 34, 0, 16)], [0, 1, 2]),
]
BAD = [
    ([(0, 0, 30, 0, 16), (1, 30, 50, 0, 16)], "is cut by rows unevenly"),
    ([(1, 0, 17, 0, 16), (0, 17, 34, 0, 16), (2, 34, 50, 0, 16)], "cut by rows unevenly"),
    ([(0, 0, 25, 0, 16), (1, 25, 50, 0, 4), (0, 25, 50, 4, 16)], "or by columns as well"),
    ([(0, 0, 50, 0, 4), (1, 0, 50, 4, 8), (0, 0, 50, 8, 16)], "has parts of 4 and 8 columns at rank 0"),
]


def pieces(of: list[tuple[int, ...]]) -> list[tuple[Piece, int]]:
    return [(Piece(0, *part), rank) for rank, *part in of]


def test_ways_have_torchrecs_names_and_order():
    for kind, of, ranks in GOOD:
        found, shards = laid_out("t", 50, 16, pieces(of), 3)
        assert (found, [rank for _, rank in shards]) == (kind, ranks), of
        assert sorted(shards) == sorted(pieces(of))
    kind, shards = laid_out("t", 4, 8, [(Piece(0, n, n + 1, 0, 8), n) for n in range(4)], 4)
    assert (kind, len(shards)) == ("row_wise", 4)
    kind, shards = laid_out(
        "t", 5, 8, [(Piece(0, 0, 2, 0, 8), 0), (Piece(0, 2, 4, 0, 8), 1), (Piece(0, 4, 5, 0, 8), 2)], 4
    )
    assert kind == "row_wise" and shards[3] == (Piece(0, 5, 5, 0, 8), 3)  # a rank without rows still has a shard


def test_what_torchrec_would_run_otherwise_is_refused():
    for of, says in BAD:
        with pytest.raises(ValueError, match=says):
            laid_out("t", 50, 16, pieces(of), 3)


def test_stack_distances_are_those_of_a_list():
    rows, stack = np.random.default_rng(0).integers(0, 30, 400), list[int]()
    for row, found in zip(rows.tolist(), stack_distances(rows, 30).tolist(), strict=True):
        assert found == (stack[::-1].index(row) + 1 if row in stack else 0)
        stack = [*(of for of in stack if of != row), row]
    for wrong in ([0, 30], [-1, 0]):
        with pytest.raises(ValueError, match="name rows from 0 on, below their count"):
            stack_distances(np.array(wrong), 30)
