"""Our own loops over the ids of a bag, DCAT's attention and DIN's interests, compared with torch sample by sample."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from skirl.core.once import Distinct
from skirl.models.attention import attend
from skirl.models.base import fit
from skirl.models.din import ActivationUnit
from skirl.models.history import SamplesByBag
from tests.models.plain import on_threads

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
Made = tuple[Callable[[], Tensor], Callable[[], Tensor], list[Tensor]]
"""A result by our loops, the same by torch for each sample, and what both depend on."""

pytestmark = pytest.mark.skipif(not fit(torch.zeros(1)), reason="the loops need lanes")


def drawn(shape: str, own: int, of_ids: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Distinct, list[slice]]:
    """Draw numbers of samples and of ids, with the bags and where the ids of each sample are."""
    lengths, inverse = SHAPES[shape]
    torch.manual_seed(0)
    shapes = (len(inverse), own), (sum(lengths), of_ids)
    samples, ids = (torch.randn(of, dtype=dtype).requires_grad_() for of in shapes)
    offsets = [*accumulate(lengths, initial=0)]
    where = [slice(offsets[bag], offsets[bag + 1]) for bag in inverse]
    return samples, ids, Distinct(ids, torch.tensor(offsets), torch.tensor(inverse)), where


def attention(shape: str, width: int, columns: int, dtype: torch.dtype) -> Made:
    own, of_ids, bags, where = drawn(shape, 3 * width, columns * width, dtype)

    def seen(sample: int) -> Tensor:
        """Return an ordinary softmax over the sample's ids and itself."""
        query, *mine = own[sample].view(3, HEADS, -1)
        theirs = of_ids[where[sample], -2 * width :].unflatten(1, (2, HEADS, -1)).unbind(1)
        keys, values = (torch.cat([many, one[None]]) for many, one in zip(theirs, mine, strict=True))
        scores = torch.einsum("hd,nhd->hn", query, keys) / query.shape[1] ** 0.5
        return torch.einsum("hn,nhd->hd", scores.softmax(1), values).flatten()

    plainly = lambda: torch.stack([*map(seen, range(len(where)))])  # noqa: E731
    return lambda: attend(own, of_ids, SamplesByBag.of(bags), HEADS), plainly, [own, of_ids]


def interests(shape: str, dim: int, width: int, dtype: torch.dtype) -> Made:
    target, rows, bags, where = drawn(shape, dim, dim, dtype)
    unit = ActivationUnit(dim, width).to(dtype)

    def plainly() -> Tensor:
        return torch.stack([(unit(rows[at], t) * rows[at]).sum(0) for at, t in zip(where, target, strict=True)])

    return lambda: unit.interests(bags, target), plainly, [rows, target, *unit.parameters()]


KINDS = [(attention, width, columns) for width in (4, 12, 64) for columns in (2, 3)]
KINDS += [(interests, dim, width) for dim, width in ((3, 1), (16, 8), (34, 11))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("made", "size", "other"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_they_agree_with_each_sample_by_itself(
    shape: str, made: Callable[..., Made], size: int, other: int, dtype: torch.dtype
) -> None:
    ours, theirs, of = made(shape, size, other, dtype)
    found, expected = ours(), theirs()
    torch.testing.assert_close(found, expected, **NEAR[dtype])
    weights = torch.randn(found.shape, dtype=dtype)
    for one, plain in zip(*(torch.autograd.grad((out * weights).sum(), of) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, plain, **NEAR[dtype])


@pytest.mark.parametrize(("made", "size", "other"), [(attention, 12, 3), (interests, 16, 8)])
def test_bits_do_not_depend_on_threads(made: Callable[..., Made], size: int, other: int) -> None:
    def found() -> list[Tensor]:
        ours, _, of = made("in no order", size, other, torch.float32)
        out = ours()
        return [out.detach(), *torch.autograd.grad(out.square().sum(), of)]

    for one, many in zip(on_threads(1, found), on_threads(3, found), strict=True):
        assert torch.equal(one, many)
