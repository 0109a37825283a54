"""DCNv2 against its formula, and Deep & Cross, which uses its layers."""

import pytest
import torch
from torch import Tensor

from skirl.models import DCNv2, DeepCross
from skirl.models.dcnv2 import Structure
from tests.models.plain import DENSE, Rows, agree, batches, collection, mlp

D = 6


def crossed(p: dict[str, Tensor], x0: Tensor, layers: int, rank: int | None) -> Tensor:
    """Apply cross layers: element i of each is x0_i (sum_j W_ij x_j + b_i) + x_i."""
    x = x0
    for at in range(layers):
        name = f"cross.layers.{at}"
        if rank is None:
            w, b = p[f"{name}.weight"], p[f"{name}.bias"]
        else:
            w, b = p[f"{name}.1.weight"] @ p[f"{name}.0.weight"], p[f"{name}.1.bias"]
        x = torch.einsum("bi,ij,bj->bi", x0, w, x) + x0 * b + x
    return x


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("structure", ["stacked", "parallel"])
def test_agrees_with_its_formula(structure: Structure, rank: int | None) -> None:
    def formula(p: dict[str, Tensor], dense: Tensor, rows: Rows) -> Tensor:
        x0 = torch.hstack([dense, *rows.values()])
        cross = crossed(p, x0, 2, rank)
        if structure == "stacked":
            end = mlp(p, "deep", cross)
        else:
            end = torch.hstack([cross, mlp(p, "deep", x0)])
        return end @ p["head.weight"][0] + p["head.bias"]

    torch.manual_seed(0)
    model = DCNv2(collection(D), DENSE, cross=2, rank=rank, deep=(9, 5), structure=structure)
    agree(model, formula, batches())


def test_deep_and_cross_agrees_with_its_formula() -> None:
    def formula(p: dict[str, Tensor], dense: Tensor, rows: Rows) -> Tensor:
        x0 = torch.hstack([mlp(p, "bottom", dense), *rows.values()])
        return mlp(p, "top", crossed(p, x0, 2, 3), relu_at_end=False)[:, 0]

    torch.manual_seed(0)
    agree(DeepCross(collection(D), DENSE, bottom=(9,), rank=3, top=(8, 5)), formula, batches())


@pytest.mark.parametrize(("flags", "text"), [({"rank": 0}, "rank is 0: set it between 1 and 22"),
                                              ({"structure": "beside"}, "set it to 'stacked' or 'parallel'")])  # fmt: skip
def test_wrong_sizes_are_refused(flags, text) -> None:
    with pytest.raises(ValueError, match=text):
        DCNv2(collection(D), DENSE, **flags)
