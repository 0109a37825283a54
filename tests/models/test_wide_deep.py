"""Wide & Deep against its formula."""

import pytest
import torch
from torch import Tensor

from skirl.models import WideDeep
from tests.models.plain import DENSE, Rows, agree, batches, collection, mlp

D = 6


@pytest.mark.parametrize("rows_in_deep", [True, False])
def test_agrees_with_its_formula(rows_in_deep: bool) -> None:
    def formula(p: dict[str, Tensor], dense: Tensor, rows: Rows) -> Tensor:
        wide = sum(row[:, D] for row in rows.values())
        vectors = [row[:, :D] for row in rows.values()]
        if rows_in_deep:
            last = mlp(p, "deep", torch.hstack([dense, *vectors]))
        else:
            last = torch.hstack([mlp(p, "deep", dense), *vectors])
        return wide + (last * p["head.weight"]).sum(1) + p["head.bias"]

    torch.manual_seed(0)
    agree(WideDeep(collection(D + 1), DENSE, deep=(9, 5), rows_in_deep=rows_in_deep), formula, batches())
