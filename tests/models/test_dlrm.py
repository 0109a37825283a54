"""DLRM against an implementation with only loops and matrix products."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.tables import Table
from skirl.models import DLRM


class Fake(nn.Module):
    """Returns vectors of one-hot ids from plain tensors."""

    def __init__(self, tables: list[Table]) -> None:
        super().__init__()
        self.tables = tables
        self.rows = nn.ParameterList(torch.randn(table.rows, table.dim) for table in tables)

    def forward(self, sparse: KeyedJagged) -> Any:
        ids = sparse.values().view(len(sparse.keys()), -1)
        owners = [rows for rows, table in zip(self.rows, self.tables) for _ in table.features]
        vectors = [rows[column] for rows, column in zip(owners, ids)]
        return SimpleNamespace(stacked=lambda: torch.stack(vectors, dim=1))


TABLES = [Table("user", rows=30, dim=8), Table("item", rows=20, dim=8, features=("clicked", "bought"))]


def batch(samples: int = 6) -> Batch:
    ids = torch.randint(0, 20, (samples, 3))
    sparse = KeyedJagged.one_hot(["user", "clicked", "bought"], ids)
    return Batch(torch.randn(samples, 4), sparse, torch.randint(0, 2, (samples,)).float())


def by_hand(model: DLRM, data: Batch, sample: int) -> torch.Tensor:
    """Compute one sample's logit by the paper."""

    def mlp(layers: nn.Sequential, x: torch.Tensor, relu_at_end: bool) -> torch.Tensor:
        linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        for linear in linears:
            x = linear.weight @ x + linear.bias
            if relu_at_end or linear is not linears[-1]:
                x = x.clamp(min=0)
        return x

    x = mlp(model.bottom, data.dense[sample], relu_at_end=True)
    vectors = [x, *model.embeddings(data.sparse).stacked()[sample]]
    products = [vectors[i].dot(vectors[j]) for i in range(len(vectors)) for j in range(i)]
    return mlp(model.top, torch.cat([x, torch.stack(products)]), relu_at_end=False)[0]


def test_forward_is_the_papers() -> None:
    torch.manual_seed(0)
    model, data = DLRM(Fake(TABLES), dense_features=4, bottom=(16,), top=(12, 5)), batch()
    expected = torch.stack([by_hand(model, data, sample) for sample in range(6)])
    torch.testing.assert_close(model(data), expected)
    loss = nn.functional.binary_cross_entropy(torch.sigmoid(expected), data.labels)
    torch.testing.assert_close(model.loss(data), loss)


def test_gradients_are_the_papers() -> None:
    torch.manual_seed(0)
    model, data = DLRM(Fake(TABLES), dense_features=4, bottom=(16,), top=(12, 5)).double(), batch()
    data.dense = data.dense.double()
    expected = torch.stack([by_hand(model, data, sample) for sample in range(6)])
    parameters = list(model.parameters())
    got = torch.autograd.grad(model.loss(data), parameters)
    loss = nn.functional.binary_cross_entropy_with_logits(expected, data.labels.double())
    torch.testing.assert_close(got, torch.autograd.grad(loss, parameters))


def test_initial_values_are_seeded_and_of_the_papers_width() -> None:
    def made() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [p.detach() for p in DLRM.paper(Fake(TABLES)).top.parameters()]

    first, again = made(), made()
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    weight, bias = first[2], first[3]  # 1024 to 1024
    assert float(weight.std()) == pytest.approx((2 / 2048) ** 0.5, rel=0.01)
    assert float(bias.std()) == pytest.approx((1 / 1024) ** 0.5, rel=0.1)
