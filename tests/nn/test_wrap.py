"""`skirl.wrap` and `skirl.EmbeddingBag`: a model of plain PyTorch, or a bag, trains on as it would have."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import skirl


class Model(nn.Module):
    """Bags of two kinds, one called twice, and rows one by one with a padding row, in a container of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.EmbeddingBag(40, 4, mode="sum")
        self.item = nn.EmbeddingBag(50, 4, mode="mean", include_last_offset=True)
        self.words = nn.ModuleList([nn.Embedding(30, 4, padding_idx=0)])
        self.place = nn.Embedding(3, 4)
        self.top = nn.Linear(16, 1)

    def forward(self, user: Tensor, seen: Any, bought: Any, words: Tensor) -> Tensor:
        text = (self.words[0](words) + self.place(torch.arange(3))).tanh().sum(1)
        return self.top(torch.cat([self.user(user), self.item(*seen), self.item(*bought), text], dim=1))


def batch(seed: int) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, n, (6, k), generator=draw) for n, k in ((40, 2), (50, 3), (50, 3), (30, 3))]
    user, seen, bought, words = ids
    ends = torch.tensor([0, 2, 2, 9, 12, 17, 18])
    return user, (seen.flatten(), ends), (bought.flatten(), ends), words


CALLS = {"features": {"item": ["seen", "bought"]}, "skip": ["pl*"]}


def sparse(wrapped: skirl.Wrapped, of: tuple[Any, ...]) -> skirl.KeyedJagged:
    user, seen, bought, words = of
    return wrapped.sparse(**{"user": user, "seen": seen, "bought": bought, "words.0": words})


def test_it_trains_on_as_it_would_have() -> None:
    plain = Model()
    model = copy.deepcopy(plain)
    wrapped = skirl.wrap(model, optimizer=skirl.SGD(lr=0.1), cache=60, **CALLS)  # type: ignore[arg-type]
    assert [*wrapped.replaced] == ["user", "item", "words.0"]
    assert len([*model.parameters()]) == 1 + 1 + 2  # the anchor, `place`, `top`
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(*batch(99)), plain.eval()(*batch(99)))
    dense = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    plain.train(), model.train()
    loader = [batch(i) for i in range(20)]
    with skirl.lookahead(loader, model, sparse=lambda of: sparse(wrapped, of)) as batches:
        for of in batches:
            losses = [each(*of).square().mean() for each in (plain, model)]
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-6)
            for loss, optimizer in zip(losses, dense, strict=True):
                loss.backward(), optimizer.step(), optimizer.zero_grad()
    assert wrapped.embeddings.engine.counters.fetched
    for name, weight in (("user", plain.user.weight), ("item", plain.item.weight), ("words.0", plain.words[0].weight)):
        torch.testing.assert_close(wrapped.embeddings.rows(name, range(len(weight))), weight.data, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


def test_weights_of_some_bags_and_frozen_rows() -> None:
    plain = nn.ModuleDict({"a": nn.EmbeddingBag(9, 2, mode="sum"), "b": nn.EmbeddingBag(9, 2, mode="sum")})
    plain["b"].requires_grad_(False)
    model = copy.deepcopy(plain)
    wrapped = skirl.wrap(model, optimizer=skirl.SGD(lr=0.5), cache=18)
    ids, weights = torch.tensor([[1, 2], [2, 3]]), torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    call = lambda of: wrapped.sparse(a=(of, None, weights), b=of)  # noqa: E731
    with skirl.lookahead([ids] * 2, model, sparse=call) as batches:
        for of in batches:
            for each in (plain, model):
                (each["a"](of, None, weights).square().sum() + each["b"](of).sum()).backward()
            plain["a"].weight.data -= 0.5 * plain["a"].weight.grad  # type: ignore[operator]
            plain["a"].weight.grad = None
    for name in "ab":
        torch.testing.assert_close(wrapped.embeddings.rows(name, range(9)), plain[name].weight.data)  # type: ignore[arg-type]


def test_calls_that_are_wrong() -> None:
    model = Model()
    with pytest.raises(ValueError, match="nothing to replace"):
        skirl.wrap(nn.Linear(2, 2), optimizer=skirl.SGD(lr=0.1), cache=5)
    with pytest.raises(ValueError, match=r"features names 'itm': name some of user, item, words\.0"):
        skirl.wrap(Model(), optimizer=skirl.SGD(lr=0.1), cache=60, features={"itm": ["a"]}, skip=["place"])
    wrapped = skirl.wrap(model, optimizer=skirl.SGD(lr=0.1), cache=60, **CALLS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got user: give it user=, seen=, bought=, words\.0="):
        wrapped.sparse(user=batch(0)[0])
    with pytest.raises(ValueError, match="different numbers of samples"):
        sparse(wrapped, (batch(0)[0][:3], *batch(0)[1:]))
    with pytest.raises(RuntimeError, match=r"train under skirl\.lookahead"):
        model(*batch(0))
    with (
        skirl.lookahead([batch(0)], model, sparse=lambda of: sparse(wrapped, of)) as batches,
        pytest.raises(ValueError, match="takes the batch that the lookahead yielded last"),
    ):
        for _ in batches:
            model(*batch(1))


# EmbeddingBag by itself.

WEIGHT = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([3, 9, 3, 0, 7, 49, 0])


def both(**options: Any) -> tuple[nn.EmbeddingBag, skirl.EmbeddingBag]:
    plain = nn.EmbeddingBag(50, 4, _weight=WEIGHT.clone(), **options)
    ours = skirl.EmbeddingBag(50, 4, _weight=WEIGHT.clone(), **options, optimizer=skirl.SGD(lr=0.1), cache=20)
    return plain, ours


@pytest.mark.parametrize("padding", [None, 0, -47])
@pytest.mark.parametrize(
    ("how", "mode"),
    [*product(("matrix", "offsets", "last offset"), ("sum", "mean")), ("weights", "sum"), ("weighted matrix", "sum")],
)
def test_as_torchs(how: str, mode: Any, padding: int | None) -> None:
    plain, ours = both(mode=mode, include_last_offset=how == "last offset", padding_idx=padding)
    call: dict[str, Any] = {
        "matrix": {"input": IDS[:6].view(2, 3)},
        "offsets": {"input": IDS, "offsets": torch.tensor([0, 2, 2, 5])},
        "last offset": {"input": IDS, "offsets": torch.tensor([0, 2, 2, 5, 7])},
        "weights": {"input": IDS, "offsets": torch.tensor([0, 4]), "per_sample_weights": torch.arange(7.0)},
        "weighted matrix": {"input": IDS[:6].view(3, 2), "per_sample_weights": torch.arange(6.0).view(3, 2)},
    }[how]
    dense = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        expected, found = plain(**call), ours(**call)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        for out in (expected, found):
            out.square().sum().backward()
        dense.step(), dense.zero_grad()
    plain.eval(), ours.eval()
    everything = torch.arange(50).view(50, 1)
    found = ours.rows(skirl.KeyedJagged.one_hot(["weight"], everything))["weight"]
    torch.testing.assert_close(found, plain.weight, rtol=1e-5, atol=1e-6)


def test_under_a_lookahead() -> None:
    plain, ours = both(mode="sum")
    loader = [torch.randint(0, 50, (6, 2), generator=torch.Generator().manual_seed(i)) for i in range(20)]
    dense = torch.optim.SGD(plain.parameters(), lr=0.1)
    with skirl.lookahead(loader, ours, sparse=ours.sparse) as batches:
        for ids in batches:
            expected, found = plain(ids), ours(ids)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            for out in (expected, found):
                out.square().sum().backward()
            dense.step(), dense.zero_grad()
    assert ours.rows.engine.counters.fetched
