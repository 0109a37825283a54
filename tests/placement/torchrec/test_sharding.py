"""How a table is cut, in TorchRec's terms, and what TorchRec would do differently. None of this needs TorchRec."""

import pytest

from skirl.placement.spec import Piece
from skirl.placement.torchrec import laid_out

BAD = [
    ([(1, 0, 17, 0, 16), (0, 17, 34, 0, 16), (2, 34, 50, 0, 16)], "cut by rows unevenly"),
    ([(0, 0, 25, 0, 16), (1, 25, 50, 0, 4), (0, 25, 50, 4, 16)], "or by columns as well"),
    ([(0, 0, 50, 0, 4), (1, 0, 50, 4, 8), (0, 0, 50, 8, 16)], "has parts of 4 and 8 columns at rank 0"),
]


def test_a_rank_without_rows_still_has_a_shard():
    kind, shards = laid_out("t", 5, 8, [(Piece(0, 2 * r, min(5, 2 * r + 2), 0, 8), r) for r in range(3)], 4)
    assert kind == "row_wise" and shards[3] == (Piece(0, 5, 5, 0, 8), 3)


def test_what_torchrec_would_run_otherwise_is_refused():
    for of, says in BAD:
        with pytest.raises(ValueError, match=says):
            laid_out("t", 50, 16, [(Piece(0, *part), rank) for rank, *part in of], 3)
