"""`skirl.EmbeddingBag` compared with nn.EmbeddingBag: the same calls, outputs and gradients."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import skirl

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
