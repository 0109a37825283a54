"""DLRM, Wide & Deep, DeepFM, DCNv2 and Deep & Cross against the formulas of their papers."""

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from skirl.models import DIN, DLRM, DCNv2, DeepCross, DeepFM, Model, WideDeep
from skirl.models.dcnv2 import Structure
from tests.models.plain import DENSE, Rows, agree, batches, collection, mlp

D = 6


def test_dlrm_agrees_with_its_formula() -> None:
    def formula(p: dict[str, Tensor], dense: Tensor, rows: Rows) -> Tensor:
        x = mlp(p, "bottom", dense)
        vectors = [x, *rows.values()]
        products = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
        return mlp(p, "top", torch.hstack([x, torch.stack(products, dim=1)]), relu_at_end=False)[:, 0]

    torch.manual_seed(0)
    agree(DLRM(collection(D), DENSE, bottom=(16,), top=(12, 5)), formula, batches())


def test_initial_values_are_of_the_papers_width() -> None:
    torch.manual_seed(7)
    _, _, weight, bias, *_ = (p.detach() for p in DLRM(collection(D)).top.parameters())  # 1024 to 1024
    assert float(weight.std()) == pytest.approx((2 / 2048) ** 0.5, rel=0.01)
    assert float(bias.std()) == pytest.approx((1 / 1024) ** 0.5, rel=0.1)


def test_wide_and_deep_agrees_with_its_formula() -> None:
    def formula(p: dict[str, Tensor], dense: Tensor, rows: Rows) -> Tensor:
        wide = sum(row[:, D] for row in rows.values())
        vectors = [row[:, :D] for row in rows.values()]
        last = mlp(p, "deep", torch.hstack([dense, *vectors]))
        return wide + (last * p["head.weight"]).sum(1) + p["head.bias"]

    torch.manual_seed(0)
    agree(WideDeep(collection(D + 1), DENSE, deep=(9, 5)), formula, batches())


def deepfm(p: dict[str, Tensor], dense: Tensor, rows: Rows) -> Tensor:
    fields = [row[:, :D] for row in rows.values()]
    fields += [torch.outer(dense[:, k], p["dense_vectors"][k]) for k in range(DENSE)]
    first = sum(row[:, D] for row in rows.values()) + (dense * p["dense_weights"]).sum(1)
    second = torch.stack([(a * b).sum(1) for a, b in combinations(fields, 2)]).sum(0)
    deep = mlp(p, "deep", torch.hstack(fields)) @ p["head.weight"][0] + p["head.bias"]
    return first + second + deep


def test_deepfm_agrees_with_its_formula() -> None:
    torch.manual_seed(0)
    model = DeepFM(collection(D + 1), DENSE, deep=(9, 5), dropout=0)
    nn.init.normal_(model.dense_weights)
    nn.init.normal_(model.dense_vectors, std=0.2)
    agree(model, deepfm, batches())


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
def test_dcnv2_agrees_with_its_formula(structure: Structure, rank: int | None) -> None:
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


ALL = [DLRM, WideDeep, DeepCross, DeepFM, DCNv2, DIN]


@pytest.mark.parametrize("kind", ALL)
def test_no_dense_features_are_enough(kind: type[Model]) -> None:
    data = batches(1)[0]
    data.dense = data.dense[:, :0]
    model = kind.tiny(collection(kind.row_dim(8)), dense_features=0)
    model.loss(data).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
