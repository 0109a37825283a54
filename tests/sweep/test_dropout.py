"""Dropout in lanes, compared with torch's own."""

import pytest
import torch
from torch import nn

from skirl.sweep.dense import Watched, drawn_from, dropouts

SHAPES = ((1,), (7, 33), (3, 5, 64), (0, 4), (5000, 3))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_bits_and_draws_are_those_of_torch(p, inplace):
    layer, own = nn.Dropout(p, inplace), torch.Generator().manual_seed(11)
    torch.manual_seed(11)
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(5)) for shape in SHAPES]
    values += [values[1].t().clone().t(), values[2].double(), values[2].bfloat16()]
    for given in values:
        expected, found = (given.clone().requires_grad_() for _ in range(2))
        theirs = layer(expected * 1)
        before = torch.get_rng_state()
        with drawn_from(own, [layer]):
            ours = layer(found * 1)
        assert torch.equal(before, torch.get_rng_state()), "the process's generator was drawn from"
        assert torch.equal(own.get_state(), before), "as many numbers were not drawn"
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        theirs.square().sum().backward()
        ours.square().sum().backward()
        assert expected.grad is not None and found.grad is not None and torch.equal(found.grad, expected.grad)


def test_only_torchs_own_dropout_counts():
    class Mine(nn.Dropout):
        pass

    bound = nn.Dropout()
    bound.forward = lambda input: input
    plain = nn.Dropout()
    assert dropouts(nn.Sequential(plain, Mine(), nn.Dropout2d(), nn.AlphaDropout(), bound)) == [plain]
    assert dropouts(lambda x: x) == []
    compiled = nn.Sequential(nn.Dropout())
    compiled.compile(backend="eager")
    assert dropouts(compiled) == [], "its code has been made with torch's own"


@pytest.mark.parametrize("at", ["before", "between", "after", "never"])
def test_what_else_is_drawn_is_noticed(at):
    layer, x = nn.Dropout(), torch.ones(4)
    watched = Watched([layer])
    with watched.watching():
        for moment in ("before", "between", "after"):
            if at == moment:
                torch.rand(())
            if moment != "after":
                layer(x)
    assert watched.alone == (at == "never")
