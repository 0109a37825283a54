"""Exactness against plain PyTorch: sparse EmbeddingBags and torch's own optimizers, up to rounding."""

import numpy as np
import pytest
import torch
from torch import nn

import skirl
from skirl import SGD, Adagrad, Adam, KeyedJagged, Table
from tests.models.plain import Bags
from tests.streams import Stream, stored_rows

TABLES = (
    Table("user", 300, 4),
    Table("item", 200, 4, features=("clicked", "bought")),
    Table("tag", 100, 3, pooling="mean"),
)
FEATURES = {name: t for t, table in enumerate(TABLES) for name in table.features}
OPTIMIZERS = {
    "sgd": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (Adagrad(lr=0.1, lr_decay=0.01), lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01)),
    "adam": (Adam(lr=0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01)),
}


class Small(nn.Module):
    """Any embeddings with an MLP on top."""

    def __init__(self, embeddings: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.embeddings = embeddings
        torch.manual_seed(0)
        width = sum(TABLES[t].dim for t in FEATURES.values())
        self.top = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)

    def forward(self, sparse: KeyedJagged) -> torch.Tensor:
        out = self.embeddings(sparse)
        return self.top(torch.cat([out[name] for name in FEATURES], 1))


def train_both(name: str, dtype: torch.dtype, steps: int):
    """Train `steps` steps of the model with our embeddings under a lookahead, and with EmbeddingBags."""
    rule, make = OPTIMIZERS[name]
    stream = Stream(TABLES, seed=7, sizes=(4, 4), universe=40)
    items = [stream.draw(i) for i in range(steps)]
    embeddings = skirl.EmbeddingBagCollection(TABLES, optimizer=rule, cache=60, seed=3, dtype=dtype)
    ours, plain = Small(embeddings, dtype), Small(Bags(embeddings, sparse=True), dtype)
    dense = [torch.optim.SGD(model.top.parameters(), lr=0.05) for model in (ours, plain)]
    sparse = make(plain.embeddings.parameters())
    losses = []
    with skirl.lookahead(items, ours, depth=4) as batches:
        for item in batches:
            pair = []
            for model in (ours, plain):
                loss = nn.functional.softplus(model(item.sparse)[:, 0] * item.targets.to(dtype)).mean()
                loss.backward()
                pair.append(loss.item())
            sparse.step()
            sparse.zero_grad()
            for optimizer in dense:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(pair)
    embeddings.flush()
    assert embeddings.engine.counters.fetched > 0 or steps == 1
    rows = stored_rows(embeddings.engine)
    table_of = {key: key >> 48 for key in rows}
    mine = [rows[key][: TABLES[t].dim] for key, t in table_of.items()]
    theirs = [
        plain.embeddings.bags[TABLES[t].name].weight[key & (1 << 48) - 1].detach().numpy()
        for key, t in table_of.items()
    ]
    weights = [torch.cat([p.detach().flatten() for p in model.top.parameters()]).numpy() for model in (ours, plain)]
    return np.array(losses).T, np.concatenate(mine), np.concatenate(theirs), weights


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # raised by torch.optim.Adagrad itself
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("dtype", "steps", "tolerance"), [(torch.float32, 1, 1e-5), (torch.float64, 100, 1e-12)], ids=["one", "hundred"]
)
def test_agrees_with_embedding_bag(name, dtype, steps, tolerance):
    losses, mine, theirs, weights = train_both(name, dtype, steps)
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=tolerance)
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)
    np.testing.assert_allclose(weights[0], weights[1], rtol=0, atol=tolerance)
