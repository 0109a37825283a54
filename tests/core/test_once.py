"""OncePerBag compared with the same encoder run for every sample, in plain PyTorch with autograd's gradients."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import skirl
from skirl.core.once import Distinct, OncePerBag, expand

DIM = 4


class Attention(nn.Module):
    """A softmax over each bag's rows, weighting them; two tensors, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(DIM, 1), nn.Linear(DIM, 5)

    def forward(self, rows: Tensor, mask: Tensor) -> dict[str, Tensor]:
        shares = self.score(rows).squeeze(2).masked_fill(~mask, -1e9).softmax(1) * mask
        return {"seen": (shares[:, :, None] * self.value(rows)).sum(1), "length": mask.sum(1).to(rows.dtype)}


class Both(nn.Module):
    """Uses two features, jagged: the product of the sums of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, 3), nn.Linear(DIM, 3)

    def forward(self, a: Tensor, ends: Tensor, b: Tensor, others: Tensor) -> tuple[Tensor, ...]:
        made = []
        for layer, rows, offsets in ((self.one, a, ends), (self.two, b, others)):
            made.append(torch.stack([layer(part).sum(0) for part in rows.split(offsets.diff().tolist())]))
        return made[0] * made[1], made[0]


def bags_of(lengths: list[int], inverse: list[int], seed: int) -> Distinct:
    rows = torch.randn(sum(lengths), DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    return Distinct(rows.requires_grad_(), offsets, torch.tensor(inverse, dtype=torch.int64))


def sample_by_sample(bags: Distinct) -> Distinct:
    """Return the same as a plain batch, in which each sample has its own copy of its bag's rows."""
    parts = bags.rows.split(bags.offsets.diff().tolist())
    own = [parts[bag] for bag in bags.inverse.tolist()]
    return Distinct(torch.cat(own), torch.tensor([0, *np.cumsum([len(part) for part in own])]), torch.arange(len(own)))


def flat(made: Any) -> Tensor:
    parts = list(made.values()) if isinstance(made, dict) else made if isinstance(made, tuple) else [made]
    return torch.cat([part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts], dim=1)


def check(encoder: OncePerBag, features: list[Distinct]) -> None:
    """Check that outputs and gradients, of rows and of weights, equal those of the encoder run over every sample."""
    weights = [feature.rows for feature in features] + list(encoder.parameters())
    plain = [sample_by_sample(feature) for feature in features]
    inputs = [part for of in plain for part in (of.padded() if encoder.takes == "padded" else of[:2])]
    found = []
    for out in (flat(encoder(*features)), flat(encoder.module(*inputs))):
        scale = torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape)
        grads = torch.autograd.grad((out * scale).sin().sum(), weights, allow_unused=True, materialize_grads=True)
        found.append([out.detach(), *grads])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@st.composite
def shapes(draw: Any) -> tuple[list[int], list[int]]:
    bags = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 3), min_size=bags, max_size=bags))
    return lengths, draw(st.lists(st.integers(0, bags - 1), min_size=1, max_size=9))


@given(shapes())
@example(([3], [0, 0, 0, 0]))
@example(([2, 0, 1], [0, 1, 2]))
@example(([0, 0], [1, 0, 1]))
def test_an_encoder_runs_as_over_every_sample(shape: tuple[list[int], list[int]]):
    torch.manual_seed(0)
    check(OncePerBag(Attention().double(), takes="padded"), [bags_of(*shape, seed=0)])
    check(OncePerBag(Both().double(), takes="jagged"), [bags_of(*shape, seed=seed) for seed in range(2)])


def test_gradients_are_summed_sample_by_sample_from_zero():
    """With floats of very different sizes, every order has different bits."""
    draw = torch.Generator().manual_seed(1)
    inverse = torch.randint(0, 7, (300,), generator=draw)
    grad = torch.randn(300, 5, generator=draw) * 10.0 ** torch.randint(-6, 6, (300, 1), generator=draw)
    rows = torch.zeros(8, 5, requires_grad=True)
    expand(rows, inverse).backward(grad)
    expected = torch.zeros(8, 5)
    for sample, bag in enumerate(inverse.tolist()):
        expected[bag] += grad[sample]
    assert rows.grad is not None and torch.equal(rows.grad, expected)
    assert not torch.equal(torch.stack([grad[inverse == bag].flip(0).sum(0) for bag in range(7)]), expected[:7])


def test_over_a_collection_an_encoder_trains_the_rows_of_bags():
    """Rows after a step equal those of the expanded batch. An encoder that counts its rows saw each bag once."""
    ids = skirl.KeyedJagged(
        ["item", "seen", "liked"], torch.arange(13), lengths=torch.tensor([1, 1, 1, 1, 3, 2, 2, 2]), strides=[4, 2, 2],
        inverse={("seen", "liked"): torch.tensor([0, 1, 0, 0])},
    )  # fmt: skip
    tables = [skirl.Table("item", 20, DIM, features=("item", "seen")), skirl.Table("liked", 20, DIM)]
    found, counted = [], []
    for of in (ids, ids.expanded()):
        torch.manual_seed(0)
        rows = skirl.EmbeddingBagCollection(tables, optimizer=skirl.SGD(lr=1.0), cache=40)
        module = nn.Sequential(nn.Linear(DIM, 6), nn.Tanh())
        module.register_forward_pre_hook(lambda _, inputs: counted.append(len(inputs[0])))
        encoder, out = OncePerBag(module), rows(of)
        made = encoder(out.distinct("seen")) * encoder(out.distinct("liked"))
        (made * torch.arange(24.0).view(4, 6)).sum().backward()
        found.append([made.detach(), *(p.grad for p in encoder.parameters())])
        found[-1] += [rows.rows(table.name, range(20)) for table in tables]
    assert counted == [2, 2, 4, 4]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 8)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "batchnorm"),
        (nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.2))), "dropout"),
        (nn.GRU(4, 4, num_layers=2, dropout=0.1), "dropout"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "dropout"),
        (Transformer(), "dropout"),
        (nn.RReLU(), "dropout"),
    ],
)
def test_what_would_mean_something_else_is_refused_unless_allowed(module: nn.Module, kind: Any):
    with pytest.raises(ValueError, match=rf'take it out, or pass allow=\("{kind}",\)'):
        OncePerBag(module)
    assert OncePerBag(module, allow=(kind,)).module is module
    assert OncePerBag(module, allow=kind).module is module


def test_wrong_use_gets_a_sentence():
    bags, other = bags_of([1, 2], [0, 1, 1], 0), bags_of([1, 2], [0, 1, 0], 1)
    encoder = OncePerBag(Both().double(), takes="jagged")
    with pytest.raises(TypeError, match=r"was called with Tensor: pass out.distinct\(name\)"):
        encoder(bags.rows)
    with pytest.raises(TypeError, match="was called with nothing"):
        encoder()
    with pytest.raises(ValueError, match=r"features 0 and 1 \(2 and 2 bags\) have different inverses: pass features"):
        encoder(bags, other)
    with pytest.raises(ValueError, match="3 rows for 2 bags, and the encoder takes one for each: set takes to 'padd"):
        OncePerBag(nn.Linear(DIM, 2))(bags)
    with pytest.raises(ValueError, match=r"returned a tensor of shape \[3, 4\] for 2 bags"):
        OncePerBag(_Returns(torch.zeros(3, 4)), takes="padded")(bags)
    with pytest.raises(ValueError, match="the encoder returned str"):
        OncePerBag(_Returns("what"), takes="padded")(bags)
    with pytest.raises(ValueError, match="takes is 'nested'"):
        OncePerBag(nn.Identity(), takes="nested")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="allow names 'batch_norm'"):
        OncePerBag(nn.Identity(), allow=("batch_norm",))  # type: ignore[arg-type]


class _Returns(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, *_: Tensor) -> Any:
        return self.what
