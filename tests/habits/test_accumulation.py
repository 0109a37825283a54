"""Gradients that a loop accumulates by itself: refused where rows would still be stepped alone, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import skirl
from skirl import KeyedJagged
from tests.habits.plain import RATE, Tower, batches, loss_of

REFUSED = r"added to the dense gradients of the batch before.*pass accumulate=k to skirl\.lookahead"


def train(step: Callable[[int, Tensor], Any], tower: nn.Module, number: int = 6) -> int:
    """Call `step(number, loss)` for each batch, and return the number of steps."""
    with skirl.lookahead(batches(number), tower, sparse=lambda ids: ids) as ahead:
        for i, ids in enumerate(ahead):
            step(i, tower(ids))
    return ahead.step


class Two(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, ids: KeyedJagged) -> Tensor:
        out = self.look_up(ids)
        return loss_of(self.top, out) + self.other(out["bought"]).sum()


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_accumulated_by_hand(parts, k, another_model):
    """`if step % k == 0: optimizer.step(); optimizer.zero_grad()`, by one optimizer or two."""
    model = Two()
    modules = [model] if parts == 1 else [model.top, model.other]
    all_of_them = [torch.optim.SGD(part.parameters(), lr=RATE) for part in modules]

    def step(i: int, loss: Tensor) -> None:
        (loss / k).backward()
        for dense in all_of_them if i % k == k - 1 else ():
            dense.step()
            dense.zero_grad()

    with pytest.raises(RuntimeError, match=REFUSED):
        train(step, model, 3 * k)


@pytest.fixture
def another_model():
    """Which was trained in this thread, and whose smallest weight keeps its gradient."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    return optimizer


ORDERS: dict[str, Callable[[torch.optim.Optimizer, Tensor], Any]] = {
    "zero_grad after step": lambda dense, loss: (loss.backward(), dense.step(), dense.zero_grad()),
    "zero_grad before backward": lambda dense, loss: (dense.zero_grad(), loss.backward(), dense.step()),
    "zero_grad in place": lambda dense, loss: (dense.zero_grad(set_to_none=False), loss.backward(), dense.step()),
    "zero_grad, and no step": lambda dense, loss: (loss.backward(), dense.zero_grad()),
    "step, and no zero_grad": lambda dense, loss: (loss.backward(), dense.step()),  # torch trains like this
}
KINDS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_an_order_of_step_and_zero_grad(order, kind, another_model):
    tower = Tower()
    dense = torch.optim.AdamW(tower.parameters(), lr=RATE, **kind)
    (sum(p.sum() for p in tower.parameters())).backward()
    dense.step()  # it is noticed from here on
    dense.zero_grad()
    assert train(lambda i, loss: ORDERS[order](dense, loss), tower) == 6


def test_a_step_that_the_grad_scaler_skips():
    """The loss scale is so high that gradients are not finite."""
    tower = Tower(dtype=torch.float32)
    tower.top.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    tower.rows.grad_scaler = scaler
    dense = torch.optim.SGD(tower.parameters(), lr=RATE)
    before = tower.top.weight.detach().clone()

    def step(i: int, loss: Tensor) -> None:
        scaler.scale(1e9 * loss).backward()
        scaler.step(dense)
        scaler.update()
        dense.zero_grad()

    assert train(step, tower, 4) == 4
    assert torch.equal(tower.top.weight, before)


def test_two_optimizers_of_which_one_rests():
    """One steps every batch, the other every third and keeps its gradients until then."""
    two = Two()
    often, seldom = (torch.optim.SGD(part.parameters(), lr=RATE) for part in (two.top, two.other))

    def step(i: int, loss: Tensor) -> None:
        loss.backward()
        often.step()
        often.zero_grad()
        if i % 3 == 2:
            seldom.step()
            seldom.zero_grad()

    assert train(step, two, 9) == 9


def test_another_model_that_accumulates_beside():
    """Its gradients do not concern us, although its optimizer has stepped."""
    other, rows = (
        nn.Linear(2, 1),
        skirl.EmbeddingBagCollection(Tower().rows.tables, optimizer=skirl.SGD(lr=RATE), cache=70),
    )
    dense = torch.optim.SGD(other.parameters(), lr=RATE)
    with skirl.lookahead(batches(9), rows, sparse=lambda ids: ids) as ahead:
        for i, ids in enumerate(ahead):
            rows(ids)["user"].sum().backward()
            other(torch.ones(1, 2)).sum().backward()
            if i % 3 == 2:
                dense.step()
                dense.zero_grad()
    assert ahead.step == 9
