"""The dense part of a step as one graph: forward, loss and backward, with rows' outputs, weights and data as its inputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache as remember
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from skirl.core.batch import Batch
from skirl.models import pairs
from skirl.nn.collection import Collection
from skirl.nn.optimizers import Anchor
from skirl.nn.output import Output
from skirl.sweep.memory.passes import annotate, traced
from skirl.sweep.memory.simulate import Step, step_of

Loss = Callable[[Any, Any], Any]
"""Returns the loss of a model and a batch, or the loss and what else is kept."""


@dataclass(frozen=True)
class Captured:
    """A graph, and what goes into and comes out of it."""

    graph: fx.GraphModule
    step: Step
    rows: tuple[str, ...]
    """Its inputs that are rows' outputs."""
    weights: tuple[str, ...]
    """Parameters and buffers by name: its first inputs. Rows' outputs, dense features, labels and `places` follow."""
    trained: tuple[str, ...]
    places: list[Tensor]
    live: list[list[bool]]
    """Of each bank: which features get a gradient."""
    kept: TreeSpec
    """What the loss function returns."""

    def inputs(self, model: nn.Module, rows: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        of_model = dict(named_weights(model))
        return [*(of_model[name] for name in self.weights), *rows, batch.dense, batch.labels, *self.places]

    def results(self, outputs: Sequence[Tensor | None]) -> tuple[Any, list[Tensor | None], list[Tensor | None]]:
        """Return what the loss function returned, the gradients of trained weights, and those of rows' outputs."""
        losses, weights = self.kept.num_leaves, self.kept.num_leaves + len(self.trained)
        kept = tree_unflatten(outputs[:losses], self.kept)
        return kept, list(outputs[losses:weights]), list(outputs[weights:])


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a graph of a model takes as inputs. A constant would be copied into it."""
    yield from ((name, weight) for name, weight in model.named_parameters() if not isinstance(weight, Anchor))
    yield from model.named_buffers()


class _Whole(nn.Module):
    """A model and its loss, so that torch can call both with other weights."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Any:
        return self.loss(self.model, batch)


def capture(model: nn.Module, loss: Loss, rows: Output | Sequence[Tensor], batch: Batch) -> Captured:
    """Capture a step of a model over the output of its collection, or over given tensors, which then are the batch's
    `sparse` in its graph. Nothing of the batch's size is allocated."""
    weights = dict(named_weights(model))
    banks = [bank.detach().requires_grad_() for bank in (rows.banks if isinstance(rows, Output) else rows)]
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    whole, live, specs = _Whole(model, loss), list[list[bool]](), list[TreeSpec]()

    def step(*given: Tensor) -> list[Tensor | None]:
        own = dict(zip(weights, given, strict=False))
        leaves, (dense, labels) = given[len(own) : len(own) + len(banks)], given[len(own) + len(banks) :]
        with annotate({"phase": "forward"}):
            over, cuts = rows.over(leaves) if isinstance(rows, Output) else (None, [[] for _ in banks])
            data = replace(batch, dense=dense, labels=labels, sparse=batch.sparse if over else leaves)
            with looking_up(model, over):
                of_model = {f"model.{name}": weight for name, weight in own.items()}
                found = torch.func.functional_call(whole, of_model, (data,))
            kept, spec = tree_flatten(found)
            specs.append(spec)
            told = [each.detach() if isinstance(each, Tensor) else each for each in kept]
        with annotate({"phase": "backward"}):
            wanted = [
                *(own[name] for name in trained),
                *leaves,
                *(each for cut in cuts for each in cut if each.requires_grad),
            ]
            grads = list(torch.autograd.grad(kept[0], wanted, allow_unused=True))
            of_cuts, of_banks = iter(grads[len(trained) + len(leaves) :]), list[Tensor | None]()
            live.clear()
            for own_grad, bank, cut in zip(grads[len(trained) :], leaves, cuts, strict=False):
                parts = [next(of_cuts) if each.requires_grad else None for each in cut]
                live.append([own_grad is not None or part is not None for part in parts])
                of_banks.append(_joined(own_grad, parts, cut, bank))
        return [*told, *grads[: len(trained)], *of_banks]

    graph, places = traced(step, [*weights.values(), *banks, batch.dense, batch.labels])
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    of_rows = tuple(names[len(weights) : len(weights) + len(banks)])
    return Captured(graph, step_of(graph, of_rows), of_rows, tuple(weights), tuple(trained), places, live, specs[-1])


def _joined(whole: Tensor | None, parts: Sequence[Tensor | None], cut: Sequence[Tensor], bank: Tensor) -> Tensor | None:
    """Return the gradient of a bank, given that of the bank as one and those of its features, as autograd adds them."""
    if all(part is None for part in parts):
        return whole
    each = [torch.zeros_like(of) if part is None else part for part, of in zip(parts, cut, strict=True)]
    joined = torch.stack(each, 1) if bank.dim() == 3 else torch.cat(each)
    return joined if whole is None else whole + joined


@contextmanager
def looking_up(model: nn.Module, output: Output | None) -> Iterator[None]:
    """Give a model this output for what it looks up, and operators for loops of our own."""
    collections = [] if output is None else [each for each in model.modules() if isinstance(each, Collection)]
    for collection in collections:
        collection.forward = lambda sparse: cast(Output, output).only(sparse.keys())
    pairs.in_graph = _pairs()
    try:
        yield
    finally:
        pairs.in_graph = None
        for collection in collections:
            del collection.forward


@remember
def _pairs() -> Callable[[Tensor, Tensor], Tensor]:
    """Return DLRM's pairs as an operator of torch. In a loop of one's own it would take as long again as autograd does."""

    @torch.library.custom_op("skirl::pairs", mutates_args=())
    def products(x: Tensor, vectors: Tensor) -> Tensor:
        return pairs.products(x.contiguous(), vectors.contiguous())

    @products.register_fake
    def _(x: Tensor, vectors: Tensor) -> Tensor:
        n = vectors.shape[1]
        return x.new_empty(len(x), x.shape[1] + n * (n + 1) // 2)

    @torch.library.custom_op("skirl::pairs_backward", mutates_args=())
    def gradients(x: Tensor, vectors: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return pairs.gradients(x.contiguous(), vectors.contiguous(), grad.contiguous())

    @gradients.register_fake
    def _(x: Tensor, vectors: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), x.new_empty(vectors.shape)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    products.register_autograd(lambda ctx, grad: gradients(*ctx.saved_tensors, grad), setup_context=keep)
    return products
