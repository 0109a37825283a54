"""A model over skirl's rows, trained in step with its formula in plain PyTorch over nn.EmbeddingBag tables."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import skirl
from skirl.core.batch import Batch, KeyedJagged
from skirl.models import Model
from tests.streams import jagged


class Rows(dict[str, Tensor]):
    """The pooled rows [batch, dim] of each feature, with the ids and the tables they come from."""

    def __init__(self, sparse: KeyedJagged, tables: list[Tensor]) -> None:
        self.sparse, self.tables = sparse, tables


Formula = Callable[[dict[str, Tensor], Tensor, Rows], Tensor]
"""Computes logits from the model's parameters by name, dense features and rows."""

DENSE = 4
FEATURES = ("user", "clicked", "bought")


def tables(dim: int) -> list[skirl.Table]:
    return [skirl.Table("user", 30, dim, pooling="mean"), skirl.Table("item", 20, dim, features=("clicked", "bought"))]


def batches(number: int = 3, samples: int = 16, longest: int = 3, one: Sequence[str] = ()) -> list[Batch]:
    """Return batches with bags of 0 to `longest` ids, and exactly one id in the features named by `one`."""
    made = []
    for seed in range(number):
        rng = np.random.default_rng(seed)
        sparse = jagged(rng, dict.fromkeys(FEATURES, 20), samples, most=longest, one=one)
        dense, labels = (
            rng.standard_normal((samples, DENSE), np.float32),
            rng.integers(0, 2, samples).astype(np.float32),
        )
        made.append(Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels)))
    return made


def collection(dim: int, pooled: bool = True) -> skirl.EmbeddingBagCollection | skirl.EmbeddingCollection:
    """Return skirl's rows, updated by SGD, with a cache that is too small for all of them."""
    kind = skirl.EmbeddingBagCollection if pooled else skirl.EmbeddingCollection
    return kind(tables(dim), optimizer=skirl.SGD(lr=0.5), cache=45, seed=3)


class Bags(nn.Module):
    """The same tables as nn.EmbeddingBag modules, with the initial rows of a collection copied in."""

    def __init__(self, rows: skirl.EmbeddingBagCollection | skirl.EmbeddingCollection, **options: bool) -> None:
        super().__init__()
        make = nn.EmbeddingBag.from_pretrained
        first = {t.name: rows.rows(t.name, range(t.rows)) for t in rows.tables}
        made = {t.name: make(first[t.name], freeze=False, mode=t.pooling, **options) for t in rows.tables}
        self.bags = nn.ModuleDict(made)
        self.owner = {name: table.name for table in rows.tables for name in table.features}

    def forward(self, sparse: KeyedJagged) -> Rows:
        out, samples = Rows(sparse, [bag.weight for bag in self.bags.values()]), sparse.stride()
        for f, name in enumerate(sparse.keys()):
            bounds = sparse.offsets()[f * samples : (f + 1) * samples + 1]
            values = sparse.values()[bounds[0] : bounds[-1]]
            if name in self.owner:
                out[name] = self.bags[self.owner[name]](values, bounds[:-1] - bounds[0])
        return out


def agree(model: Model, formula: Formula, data: Sequence[Batch]) -> None:
    """Train both on the data, and check that every logit, dense gradient and row agrees to 1e-5."""
    rows = model.embeddings
    assert isinstance(rows, (skirl.EmbeddingBagCollection, skirl.EmbeddingCollection))
    bags = Bags(rows)
    own = dict(model.named_parameters())
    plain = {name: p.detach().clone().requires_grad_() for name, p in own.items()}
    first = torch.optim.SGD(own.values(), lr=0.1)
    second = torch.optim.SGD([{"params": list(plain.values())}, {"params": list(bags.parameters()), "lr": 0.5}], lr=0.1)
    with skirl.lookahead(data, model) as stream:
        for batch in stream:
            first.zero_grad()
            second.zero_grad()
            loss = model.loss(batch)
            logits = formula(plain, batch.dense, bags(batch.sparse))
            expected = -torch.where(batch.labels > 0, logits.sigmoid(), 1 - logits.sigmoid()).log().mean()
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
            loss.backward()
            expected.backward()
            for name, parameter in own.items():
                torch.testing.assert_close(parameter.grad, plain[name].grad, rtol=1e-5, atol=1e-5, msg=name)
            first.step()
            second.step()
    model.eval()
    with torch.no_grad():
        logits = formula(plain, data[0].dense, bags(data[0].sparse))
        torch.testing.assert_close(model(data[0]), logits, rtol=1e-5, atol=1e-5)
    for table, bag in zip(rows.tables, bags.bags.values(), strict=True):
        torch.testing.assert_close(rows.rows(table.name, range(table.rows)), bag.weight.detach(), rtol=1e-5, atol=1e-5)


def mlp(p: dict[str, Tensor], name: str, x: Tensor, relu_at_end: bool = True) -> Tensor:
    """Apply the layers p["name.0.weight"], p["name.2.weight"] and so on, with ReLU between them."""
    places = sorted({int(key.split(".")[1]) for key in p if key.startswith(name + ".") and key.endswith("weight")})
    for place in places:
        x = x @ p[f"{name}.{place}.weight"].T + p[f"{name}.{place}.bias"]
        x = x.relu() if relu_at_end or place != places[-1] else x
    return x


def on_threads(threads: int, work: Callable[[], Any]) -> Any:
    """Return what `work` does with so many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return work()
    finally:
        torch.set_num_threads(before)
