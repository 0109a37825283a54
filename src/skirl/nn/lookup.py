"""A forward: ids of the step looked up, or what an earlier forward has looked up."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skirl.core.ids import BankIds
from skirl.engine.engine import Engine
from skirl.nn.current_step import Ticket


@dataclass(slots=True)
class FoundRows:
    ids: BankIds
    rows: np.ndarray
    """Records, or only their weights."""
    place: np.ndarray
    """The index in `rows` of each id's row."""


def shaped(flat: Tensor, engine: Engine, bank: int, ids: BankIds) -> tuple[Tensor, Tensor | None]:
    """Return a bank's output, [batch, features, dim] or unpooled [ids, dim], and its shared bags, [bags, dim]."""
    if not engine.pooled:
        return flat, None
    shape, shared = (ids.batch, len(engine.schema.banks[bank].features), flat.shape[-1]), ids.folded
    if shared is None:
        return flat.view(shape), None
    return flat[: shared.samples].view(shape), flat[shared.samples :]


class Lookup(torch.autograd.Function):
    """Forward: gather and pool each bank; returns two a bank, its output and its shared bags or None. Backward: hand
    their gradients to the current step."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor | None, tickets: list[Ticket]) -> tuple[Tensor | None, ...]:
        ctx.tickets = tickets
        ctx.set_materialize_grads(False)
        out: list[Tensor | None] = []
        stopped: list[Tensor | None] = []
        for ticket in tickets:
            flat = ticket.engine.banks[ticket.bank].pool(ticket.work, ticket.micro)
            both = shaped(flat, ticket.engine, ticket.bank, ticket.ids)
            out += both
            if weights is not None:
                ticket.passes[:] = True
            stopped += () if ticket.passes.any() else both
        ctx.mark_non_differentiable(*(each for each in stopped if each is not None))
        return tuple(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first = ctx.tickets[0]
        if first.used:
            raise RuntimeError(
                "backward ran twice over one batch: its rows were already updated. Sum the losses and call it once"
            )
        current, work = first.current, first.work
        current.require(work)
        first.used = work.micros[first.micro].returned = True
        weights = work.micros[first.micro].learned
        weights_grad = None if weights is None else torch.zeros_like(weights)
        for ticket, grad, of_bags in zip(ctx.tickets, grads[::2], grads[1::2], strict=True):
            current.returned(ticket, grad, of_bags)
            if weights_grad is not None:
                _weight_grad(ticket, weights_grad)
        current.backward_done(work)
        for ticket in ctx.tickets:
            ticket.release()
        return current.anchor.new_empty(0), weights_grad, None


def _weight_grad(ticket: Ticket, out: Tensor) -> None:
    """Write the gradient of a bank's id weights to `out`. Must run before the rows change."""
    engine, work = ticket.engine, ticket.work
    grads = work.grads.get((ticket.bank, ticket.micro))
    if grads is None or not engine.pooled:
        return
    live = ticket.live if ticket.ids.folded is None else ticket.ids.by_bag(ticket.live)
    dots = engine.banks[ticket.bank].weight_grad(work, ticket.micro, grads, live)
    micro = work.micros[ticket.micro]
    ids = micro.weighted or micro
    n = 0
    for feature in engine.schema.banks[ticket.bank].features:
        starts = ids.starts(ids.keys.index(feature.name))
        part = dots[n : n + int(starts[-1] - starts[0])]
        if engine.schema.tables[feature.table].pooling == "mean":
            part = part / np.repeat(np.diff(starts), np.diff(starts))
        at = slice(int(starts[0]), int(starts[-1]))
        place = at if ids.left is None else torch.from_numpy(ids.left[at]).to(out.device)
        out[place] = torch.from_numpy(np.ascontiguousarray(part)).to(out.device, out.dtype)
        n += len(part)


class Whole(torch.autograd.Function):
    """The stacked output. Its gradient counts as one for every feature."""

    @staticmethod
    def forward(ctx: Any, bank: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket = ticket
        return bank.view_as(bank)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ticket.live[:] = True
        return grad, None


class Cut(torch.autograd.Function):
    """The features of these columns one by one, or their shared bags: stretches of rows of these sizes, or without sizes
    the second dimension. Backward records which of them got a gradient, which counts for all ids of its feature."""

    @staticmethod
    def forward(
        ctx: Any, bank: Tensor, ticket: Ticket, columns: Sequence[int], sizes: list[int] | None = None
    ) -> tuple[Tensor, ...]:
        ctx.ticket, ctx.shape, ctx.columns, ctx.sizes = ticket, bank.shape, columns, sizes
        ctx.set_materialize_grads(False)
        return tuple(bank.unbind(1) if sizes is None else bank.split(sizes))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *rows, dim = ctx.shape
        out = ctx.ticket.engine.device.empty(prod(rows), dim).view(ctx.shape)
        parts = out.unbind(1) if ctx.sizes is None else out.split(ctx.sizes)
        for column, part, grad in zip(ctx.columns, parts, grads, strict=True):
            if grad is None:
                part.zero_()  # autograd may add the gradient of the stacked output
            else:  # a gradient of the stacked output makes every feature live
                part.copy_(grad)
                ctx.ticket.live[column] = True
        return out, None, None, None
