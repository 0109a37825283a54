"""Attention of samples to the ids of their bag, compared with torch's operations for each sample by itself."""

import pytest
import torch
from torch import Tensor

from skirl.core.once import Distinct
from skirl.models.attention import attend
from skirl.models.history import SamplesByBag
from skirl.models.loops import fit

SHAPES = {
    "sessions": ([4, 0, 20, 33], [0] * 9 + [1, 1, 2] + [3] * 8),
    "in no order": ([1, 16, 2], [2, 0, 2, 1, 0, 2, 2, 1]),
    "a bag without samples": ([3, 5, 17], [2, 0, 0]),
    "all empty": ([0, 0], [0, 1, 1]),
}
HEADS = 2
DTYPES = [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
"""Compiled for doubles, the loops are no other code, and take 20 s more."""
NEAR = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float64: {}}

pytestmark = pytest.mark.skipif(not fit(torch.zeros(1)), reason="the loops need lanes")


def drawn(shape: str, width: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Distinct]:
    lengths, inverse = SHAPES[shape]
    draw = torch.Generator().manual_seed(0)
    own = torch.randn(len(inverse), 3 * width, generator=draw, dtype=dtype, requires_grad=True)
    of_ids = torch.randn(sum(lengths), columns * width, generator=draw, dtype=dtype, requires_grad=True)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return own, of_ids, Distinct(of_ids.detach(), ends, torch.tensor(inverse))


def plainly(own: Tensor, of_ids: Tensor, bags: Distinct) -> Tensor:
    """Return what each sample sees, by an ordinary softmax over its ids and itself."""
    width, out = own.shape[1] // 3, []
    for sample, bag in enumerate(bags.inverse.tolist()):
        query, *mine = own[sample].view(3, HEADS, -1)
        theirs = of_ids[bags.offsets[bag] : bags.offsets[bag + 1], -2 * width :].unflatten(1, (2, HEADS, -1)).unbind(1)
        keys, values = (torch.cat([many, one[None]]) for many, one in zip(theirs, mine, strict=True))
        scores = torch.einsum("hd,nhd->hn", query, keys) / query.shape[1] ** 0.5
        out.append(torch.einsum("hn,nhd->hd", scores.softmax(1), values).flatten())
    return torch.stack(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("width", [4, 12, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_agrees_with_an_ordinary_softmax(shape: str, width: int, columns: int, dtype: torch.dtype) -> None:
    own, of_ids, bags = drawn(shape, width, columns, dtype)
    ours, theirs = attend(own, of_ids, SamplesByBag.of(bags), HEADS), plainly(own, of_ids, bags)
    torch.testing.assert_close(ours, theirs, **NEAR[dtype])
    weights = torch.randn(ours.shape, dtype=dtype)
    for one, other in zip(*(torch.autograd.grad((out * weights).sum(), (own, of_ids)) for out in (ours, theirs))):
        torch.testing.assert_close(one, other, **NEAR[dtype])


def test_bits_do_not_depend_on_threads() -> None:
    found = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            own, of_ids, bags = drawn("in no order", 16, 3, torch.float32)
            seen = attend(own, of_ids, SamplesByBag.of(bags), HEADS)
            seen.square().sum().backward()
        finally:
            torch.set_num_threads(before)
        found.append([seen.detach(), own.grad, of_ids.grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
