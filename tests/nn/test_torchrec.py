"""A TorchRec model whose rows skirl has taken over, compared with the original model."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import skirl

torchrec = pytest.importorskip("torchrec", reason="not installed: constraints/others.txt")


class Collection(torchrec.EmbeddingBagCollection):
    """A user's own, from a module that knows no KeyedTensor."""


class Model(nn.Module):
    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        config, pooling = torchrec.EmbeddingBagConfig, torchrec.PoolingType
        self.inner = nn.ModuleDict({
            "ebc": Collection(
                device=torch.device("cpu"),
                is_weighted=weighted,
                tables=[
                    config(name="t1", embedding_dim=8, num_embeddings=100, feature_names=["a"]),
                    config(name="t2", embedding_dim=4, num_embeddings=50, feature_names=["b", "c"], pooling=pooling.SUM),
                ],
            )
        })  # fmt: skip
        self.top = nn.Linear(16, 1)

    def forward(self, features: Any) -> torch.Tensor:
        out = self.inner["ebc"](features)
        assert out.keys() == ["a", "b", "c"] and out.length_per_key() == [8, 4, 4]
        return self.top(torch.cat([out["a"], out["b"], out["c"]], dim=1)) + out.values().sum(1, keepdim=True)


def wrapped(model: Model, **options: Any) -> Model:
    assert [*skirl.wrap(model, **options).replaced.items()] == [("inner.ebc", "Collection")]
    return model


def features(seed: int, longest: int, weighted: bool = False) -> Any:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (3 * 5,), generator=draw)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=draw)
    weights = torch.rand(len(values), generator=draw) if weighted else None
    return torchrec.KeyedJaggedTensor(keys=["a", "b", "c"], values=values, lengths=lengths, weights=weights)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_model_works_on_with_the_same_rows(weighted: bool, ahead: bool) -> None:
    torch.manual_seed(0)
    theirs = Model(weighted)
    model = wrapped(copy.deepcopy(theirs), optimizer=skirl.SGD(lr=0.1), cache=60)
    with torch.no_grad():
        one = features(1, 1)
        if not weighted:
            assert torch.equal(model.eval()(one), theirs(one))
    dense = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (theirs, model.train())]
    loader: Any = [features(i, 4, weighted) for i in range(10)]
    sparse = model.inner["ebc"].sparse  # type: ignore[union-attr,index]
    with skirl.lookahead(loader, model, sparse=sparse) if ahead else nullcontext(loader) as batches:  # type: ignore[arg-type]
        for batch in batches:
            losses = []
            for m, optimizer in zip((theirs, model), dense, strict=True):
                losses.append(m(batch).square().mean())
                losses[-1].backward()
                optimizer.step(), optimizer.zero_grad()
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)


def test_weights_that_torchrec_leaves_out_are_left_out() -> None:
    theirs = Model()
    model = wrapped(copy.deepcopy(theirs), optimizer=skirl.SGD(lr=0.1), cache=60).eval()
    torch.testing.assert_close(model(features(3, 3, True)), theirs(features(3, 3, True)))


def test_bags_and_sequences_of_one_model() -> None:
    """A pooled and an unpooled collection beside a lookup of torch's: all rows are in one collection that pools nothing."""
    config, tables = torchrec.EmbeddingConfig, {"embedding_dim": 8, "num_embeddings": 50}
    theirs = Model()
    theirs.inner["ec"] = torchrec.EmbeddingCollection(
        tables=[config(name="t3", feature_names=["d"], **tables)], need_indices=True, device=torch.device("cpu")
    )
    theirs.inner["one"] = nn.Embedding(50, 8)
    model = copy.deepcopy(theirs)
    both = skirl.wrap(model, optimizer=skirl.SGD(lr=0.1), cache=100)

    def loss(model: Any, of: Any, rows: torch.Tensor) -> torch.Tensor:
        steps = model.inner["ec"](torchrec.KeyedJaggedTensor(["d"], of.values()[:5], lengths=torch.ones(5).long()))["d"]
        assert torch.equal(steps.weights(), of.values()[:5])
        return (model(of) + (steps.values() * model.inner["one"](rows)).sum(1, keepdim=True)).square().mean()

    def ids(of: Any) -> Any:
        steps = skirl.KeyedJagged.one_hot(["d"], of.values()[:5].view(5, 1))
        return both.sparse(**{"inner.ebc": of, "inner.ec": steps, "inner.one": of.values()[:5]})

    dense = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (theirs, model)]
    with skirl.lookahead([features(i, 4) for i in range(10)], model, sparse=ids) as batches:
        for of in batches:
            losses = [loss(each, of, of.values()[:5]) for each in (theirs, model)]
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
            for one, optimizer in zip(losses, dense, strict=True):
                one.backward(), optimizer.step(), optimizer.zero_grad()
