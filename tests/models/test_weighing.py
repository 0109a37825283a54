"""DIN's interests by our own loops, compared with the activation unit called on each sample's ids."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from skirl.core.once import Distinct
from skirl.models.din import ActivationUnit
from skirl.models.loops import fit
from tests.models.test_attention import DTYPES, NEAR, SHAPES

pytestmark = pytest.mark.skipif(not fit(torch.zeros(1)), reason="the loops need lanes")


def drawn(shape: str, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Distinct]:
    lengths, inverse = SHAPES[shape]
    offsets = [*accumulate(lengths, initial=0)]
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(offsets[-1], dim, generator=draw, dtype=dtype, requires_grad=True)
    target = torch.randn(len(inverse), dim, generator=draw, dtype=dtype, requires_grad=True)
    return rows, target, Distinct(rows, torch.tensor(offsets), torch.tensor(inverse))


def by_sample(unit: ActivationUnit, bags: Distinct, target: Tensor) -> Tensor:
    out = []
    for sample, bag in enumerate(bags.inverse.tolist()):
        h = bags.rows[bags.offsets[bag] : bags.offsets[bag + 1]]
        out.append((unit(h, target[sample]) * h).sum(0))
    return torch.stack(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "width"), [(3, 1), (16, 8), (34, 11)])
@pytest.mark.parametrize("shape", SHAPES)
def test_they_agree_with_the_activation_unit_of_each_sample(
    shape: str, dim: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    unit = ActivationUnit(dim, width).to(dtype)
    rows, target, bags = drawn(shape, dim, dtype)
    ours, theirs = unit.interests(bags, target), by_sample(unit, bags, target)
    torch.testing.assert_close(ours, theirs, **NEAR[dtype])
    weights, of = torch.randn(ours.shape, dtype=dtype), [rows, target, *unit.parameters()]
    for one, other in zip(*(torch.autograd.grad((out * weights).sum(), of) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, **NEAR[dtype])


def test_bits_do_not_depend_on_threads() -> None:
    found = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.manual_seed(0)
        unit = ActivationUnit(16, 8)
        rows, target, bags = drawn("in no order", 16, torch.float32)
        torch.set_num_threads(threads)
        try:
            seen = unit.interests(bags, target)
            seen.square().sum().backward()
        finally:
            torch.set_num_threads(before)
        found.append([seen.detach(), rows.grad, target.grad, *(each.grad for each in unit.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
