"""How a table is cut, in TorchRec's terms. None of this needs TorchRec."""

import pytest

from skirl.placement.spec import Piece
from skirl.placement.torchrec import laid_out
from skirl.train.placed import PlacedTable


def test_a_rank_without_rows_still_has_a_shard():
    kind, shards = laid_out(PlacedTable("t", 5, 8, None), 4)
    assert kind == "row_wise" and shards[3] == (Piece(0, 5, 5, 0, 8), 3)


def test_columns_that_no_kernel_takes_are_refused():
    with pytest.raises(ValueError, match="table 't' has 6 columns at a rank"):
        laid_out(PlacedTable("t", 50, 16, {0: 6, 1: 10}), 2)
