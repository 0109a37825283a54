"""Optimizers, clipping, GradScaler and autograd over a model's parameters, as people use them: rows are not among these."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import skirl
from tests.habits.plain import DIM, RATE, ROWS, Plain, Tower, batches, first_rows

Loop = Callable[[Tower, Tensor], Any]


def train(tower: nn.Module, step: Loop, number: int = 3) -> None:
    with skirl.lookahead(batches(number), tower, sparse=lambda ids: ids) as ahead:
        for ids in ahead:
            step(tower, tower(ids))  # type: ignore[arg-type]


def items(tower: Tower) -> Tensor:
    return tower.rows.rows("item", range(ROWS))


def test_a_group_of_embeddings_alone_is_told_once(caplog: pytest.LogCaptureFixture):
    tower = Tower()
    both = torch.optim.SGD([{"params": part.parameters(), "lr": RATE} for part in (tower.top, tower.rows)])
    with caplog.at_level(logging.WARNING, "skirl"):
        train(tower, lambda tower, loss: (loss.backward(), both.step(), both.zero_grad()))
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "group 1 of torch.optim.SGD has only the parameters of embeddings, and no effect on rows: set lr"
    )


def test_an_optimizer_over_the_whole_model_is_fine(caplog: pytest.LogCaptureFixture):
    tower = Tower()
    dense = torch.optim.AdamW(tower.parameters(), lr=RATE)
    first = items(tower)
    with caplog.at_level(logging.WARNING, "skirl"):
        train(tower, lambda tower, loss: (loss.backward(), dense.step(), dense.zero_grad()))
    assert not caplog.records and not torch.equal(items(tower), first)


def test_an_optimizer_for_each_parameter_in_backward_is_fine():
    """As in torch's tutorial: `register_post_accumulate_grad_hook(lambda p: optimizers[p].step())`."""
    tower, plain = Tower(), Plain()
    for model in (tower, plain):
        own = {p: torch.optim.SGD([p], lr=RATE) for p in model.parameters()}

        def hook(p: Tensor, own: Any = own) -> None:
            own[p].step()
            own[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
    train(tower, lambda tower, loss: loss.backward())
    for ids in batches(3):
        plain(ids).backward()
    torch.testing.assert_close(tower.top.weight, plain.top.weight, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(items(tower), plain.rows["item"].weight.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("frozen_before", [False, True])
def test_autograd_grad_of_all_parameters(frozen_before: bool):
    """Rows are updated as by backward; the parameter that stands for them gets an empty gradient."""
    tower, plain = Tower(), Plain()
    tower.requires_grad_(not frozen_before)
    tower.requires_grad_(True)
    found: list[tuple[Tensor, ...]] = []
    train(tower, lambda tower, loss: found.append(torch.autograd.grad(loss, list(tower.parameters()))), 1)
    [ids] = batches(1)
    expected = torch.autograd.grad(plain(ids), list(plain.parameters()))
    [[anchor, *dense]] = found
    assert anchor.shape == (0,) and [p.grad for p in tower.parameters()] == [None] * 3
    torch.testing.assert_close(dense, list(expected[-2:]), rtol=1e-12, atol=1e-14)
    by_hand = first_rows("item") - RATE * expected[1]
    torch.testing.assert_close(items(tower), by_hand, rtol=1e-12, atol=1e-14)


def test_the_parameter_of_rows_never_has_a_gradient():
    """Norms and maxima over gradients equal those of the dense part alone, to the last bit."""
    tower = Tower(optimizer=skirl.SGD(lr=RATE, clip=1e9))

    def step(tower: Tower, loss: Tensor) -> None:
        loss.backward()
        assert next(tower.parameters()).grad is None
        for kind in (2.0, math.inf):
            ours, dense = (nn.utils.get_total_norm([p.grad for p in part.parameters() if p.grad is not None], kind)
                           for part in (tower, tower.top))  # fmt: skip
            assert torch.equal(ours, dense)
            assert torch.equal(nn.utils.clip_grad_norm_(tower.parameters(), 1e9, kind), dense)
        tower.zero_grad()

    train(tower, step)


def scaled(parameters: Callable[[Tower], Any], more: Any, scaler: Any) -> Tower:
    """Train with a GradScaler that steps only the dense optimizer."""
    tower = Tower(dtype=torch.float32, **more)
    tower.top.float()
    dense = torch.optim.SGD(parameters(tower), lr=RATE)

    def step(tower: Tower, loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(dense)
        scaler.update()
        dense.zero_grad()

    train(tower, step)
    return tower


OF_ALL, OF_TOP = Tower.parameters, lambda tower: tower.top.parameters()


@pytest.mark.parametrize("parameters", [OF_ALL, OF_TOP], ids=["all", "dense"])
def test_a_grad_scaler_that_rows_do_not_know_is_refused_at_its_first_step(parameters: Any):
    with pytest.raises(RuntimeError, match=r"rows were trained with gradients that it had"):
        scaled(parameters, {}, torch.amp.GradScaler("cpu", init_scale=4.0))


def test_a_scheduler_between_a_grad_scaler_and_its_optimizer_hides_nothing():
    tower, scaler = Tower(), torch.amp.GradScaler("cpu", init_scale=4.0)
    dense = torch.optim.Adam(tower.top.parameters(), lr=RATE, fused=True)
    torch.optim.lr_scheduler.LambdaLR(dense, lambda step: 1.0)
    tower.rows.optimizer.step()  # changes nothing, here or below
    with pytest.raises(RuntimeError, match=r"^a GradScaler steps torch\.optim\.Adam"):
        train(
            tower, lambda tower, loss: (scaler.scale(loss).backward(), tower.rows.optimizer.step(), scaler.step(dense))
        )


@pytest.mark.parametrize("parameters", [OF_ALL, OF_TOP], ids=["all", "dense"])
def test_a_grad_scaler_that_rows_know_or_that_is_off_trains_as_without(parameters: Any):
    """A scale that is a power of two changes no bit."""
    scaler, off = torch.amp.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", enabled=False)
    runs = [
        scaled(parameters, {"grad_scaler": scaler}, scaler),
        scaled(parameters, {"grad_scaler": off}, off),
        scaled(parameters, {}, off),
    ]
    for run in runs[1:]:
        assert torch.equal(items(run), items(runs[0])) and torch.equal(run.top.weight, runs[0].top.weight)


def test_another_model_with_a_grad_scaler_is_none_of_ours():
    """One after the other in one process, and alternating; the rows' own dense part is stepped in between."""
    tower, other, scaler = Tower(), nn.Linear(DIM, 1), torch.amp.GradScaler("cpu")
    dense, theirs = (torch.optim.SGD(model.parameters(), lr=RATE) for model in (tower, other))

    def step_theirs() -> None:
        scaler.scale(other(torch.ones(1, DIM)).sum()).backward()
        scaler.step(theirs)
        scaler.update()

    train(tower, lambda tower, loss: (loss.backward(), dense.step(), dense.zero_grad(), step_theirs()))
    step_theirs()
    rows = Tower()
    train(rows, lambda tower, loss: loss.backward())  # without any torch optimizer
    step_theirs()
