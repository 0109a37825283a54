"""Exactness against plain PyTorch: sparse EmbeddingBags and torch's own optimizers, up to rounding."""

import numpy as np
import pytest
import torch
from torch import nn

import skirl
from skirl import SGD, Adagrad, Adam, KeyedJagged, Table
from skirl.core.initial import first_rows
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


class Plain(nn.Module):
    """The same tables as nn.EmbeddingBag modules, starting from the same rows."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        numpy_dtype = np.float64 if dtype == torch.float64 else np.float32
        self.bags = nn.ModuleList()
        for t, table in enumerate(TABLES):
            keys = np.arange(table.rows) | t << 48
            rows = first_rows(keys, table.initial, table.dim, seed, numpy_dtype)
            self.bags.append(
                nn.EmbeddingBag.from_pretrained(torch.from_numpy(rows), freeze=False, mode=table.pooling, sparse=True)
            )

    def forward(self, sparse: KeyedJagged, weights: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        batch, keys, offsets = sparse.stride(), sparse.keys(), sparse.offsets()
        out = {}
        for name, t in FEATURES.items():
            begin = keys.index(name) * batch
            starts = offsets[begin : begin + batch + 1]
            ids, offsets_in = sparse.values()[starts[0] : starts[-1]], starts[:-1] - starts[0]
            if weights is None:
                out[name] = self.bags[t](ids, offsets_in)
                continue
            scale = weights[starts[0] : starts[-1]]
            if TABLES[t].pooling == "mean":  # by hand: nn.EmbeddingBag takes no weights for a mean
                scale = scale / starts.diff().repeat_interleave(starts.diff())
            out[name] = nn.functional.embedding_bag(
                ids, self.bags[t].weight, offsets_in, per_sample_weights=scale, mode="sum", sparse=True
            )
        return out


def train_both(name: str, dtype: torch.dtype, steps: int):
    """Train `steps` steps of the model with our embeddings under a lookahead, and with EmbeddingBags."""
    rule, make = OPTIMIZERS[name]
    stream = Stream(TABLES, seed=7, sizes=(4, 4), universe=40)
    items = [stream.draw(i) for i in range(steps)]
    embeddings = skirl.EmbeddingBagCollection(TABLES, optimizer=rule, cache=60, seed=3, dtype=dtype)
    ours, plain = Small(embeddings, dtype), Small(Plain(dtype, 3), dtype)
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
    theirs = [plain.embeddings.bags[t].weight[key & (1 << 48) - 1].detach().numpy() for key, t in table_of.items()]
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
