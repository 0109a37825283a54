"""A TorchRec model whose rows skirl has taken over, compared with the original model."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import skirl
import skirl.nn.drop_ins as ours

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


def features(seed: int, longest: int, weighted: bool = False) -> Any:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (3 * 5,), generator=draw)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=draw)
    weights = torch.rand(len(values), generator=draw) if weighted else None
    return torchrec.KeyedJaggedTensor(keys=["a", "b", "c"], values=values, lengths=lengths, weights=weights)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_model_works_on_with_the_same_rows(weighted: bool) -> None:
    torch.manual_seed(0)
    theirs = Model(weighted)
    model = ours.swap(copy.deepcopy(theirs), optimizer=skirl.SGD(lr=0.1), cache=60)
    assert isinstance(model, Model)
    with torch.no_grad():
        one = features(1, 1)
        if not weighted:
            assert torch.equal(model.eval()(one), theirs(one))
    dense = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (theirs, model.train())]
    for i in range(10):
        losses = []
        for m, optimizer in zip((theirs, model), dense, strict=True):
            losses.append(m(features(i, 4, weighted)).square().mean())
            losses[-1].backward()
            optimizer.step(), optimizer.zero_grad()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)


def test_weights_that_torchrec_leaves_out_are_left_out() -> None:
    theirs = Model()
    model = ours.swap(copy.deepcopy(theirs), optimizer=skirl.SGD(lr=0.1), cache=60).eval()
    torch.testing.assert_close(model(features(3, 3, True)), theirs(features(3, 3, True)))


def test_under_a_lookahead() -> None:
    loader, losses = [features(i, 3) for i in range(20)], []
    for ahead in (True, False):
        torch.manual_seed(0)
        model = ours.swap(Model(), optimizer=skirl.Adagrad(lr=0.1), cache=60)
        sparse = model.inner["ebc"].sparse  # type: ignore[union-attr,index]

        def train(batches: Any, model: nn.Module = model) -> list[float]:
            found = []
            for batch in batches:
                loss = (model(batch) - 1).square().mean()
                loss.backward()
                found.append(loss.item())
            return found

        if ahead:
            with skirl.lookahead(loader, model, sparse=sparse) as batches:
                losses.append(train(batches))
        else:
            losses.append(train(loader))
    assert losses[0] == losses[1]
