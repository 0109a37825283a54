"""The dense part of a step as one graph: forward, loss and backward, with rows' outputs, weights and data as its inputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, eq=False)
class Captured:
    """A graph. Its inputs: weights, rows' outputs, dense features, labels, `places`. Its outputs: what the loss function
    returns, and the gradients of trained weights and of rows' outputs."""

    graph: fx.GraphModule
    step: Step
    weights: Sequence[str]
    trained: Sequence[str]
    rows: Sequence[str]
    """The inputs that are rows' outputs."""
    places: Sequence[Tensor]
    of_batch: bool
    """Whether it is the graph of its batch alone, since places or the numbers of rows depend on it."""
    live: Sequence[Sequence[bool]]
    """Of each bank: which features get a gradient."""
    kept: TreeSpec

    def inputs(self, model: nn.Module, rows: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        weights = named_weights(model)
        return [*(weights[name] for name in self.weights), *rows, batch.dense, batch.labels, *self.places]

    def results(self, outputs: Sequence[Any]) -> tuple[Any, Sequence[Tensor | None], Sequence[Tensor | None]]:
        """Return what the loss function returned, the gradients of trained weights, and those of rows' outputs."""
        losses, weights = self.kept.num_leaves, self.kept.num_leaves + len(self.trained)
        return tree_unflatten(outputs[:losses], self.kept), outputs[losses:weights], outputs[weights:]


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return what a model's graph takes from it: parameters, and buffers, lest they become constants of the graph."""
    weights = {name: weight for name, weight in model.named_parameters() if not isinstance(weight, Anchor)}
    return {**weights, **dict(model.named_buffers())}


class _Whole(nn.Module):
    """A model and its loss, so that torch can call both with other weights."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Any:
        return self.loss(self.model, batch)


def capture(model: nn.Module, loss: Loss, rows: Output | Sequence[Tensor], batch: Batch) -> Captured:
    """Capture the step of a model over its collection's output, or over given tensors, which are the `sparse` of its batch
    then. Nothing of the batch's size is allocated."""
    weights, whole = named_weights(model), _Whole(model, loss)
    banks = [bank.detach().requires_grad_() for bank in (rows.banks if isinstance(rows, Output) else rows)]
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    begin, end = len(weights), len(weights) + len(banks)
    told = list[Any]()

    def step(*given: Tensor) -> list[Tensor | None]:
        own, leaves = dict(zip(weights, given, strict=False)), given[begin:end]
        with annotate({"phase": "forward"}):
            over, live = rows.over(leaves) if isinstance(rows, Output) else (None, [])
            data = replace(batch, dense=given[end], labels=given[end + 1], sparse=batch.sparse if over else leaves)
            with looking_up(model, over):
                of_model = {f"model.{name}": weight for name, weight in own.items()}
                found, spec = tree_flatten(torch.func.functional_call(whole, of_model, (data,)))
            kept = [each.detach() if isinstance(each, Tensor) else each for each in found]
        with annotate({"phase": "backward"}):
            grads = torch.autograd.grad(found[0], [*(own[name] for name in trained), *leaves], allow_unused=True)
        told[:] = live, spec
        return [*kept, *grads]

    graph, places, of_batch = traced(step, [*weights.values(), *banks, batch.dense, batch.labels])
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"][begin:end]
    of_batch |= any(not each.pooled for each in model.modules() if isinstance(each, Collection))
    return Captured(graph, step_of(graph, names), [*weights], trained, names, places, of_batch, *told)


@contextmanager
def looking_up(model: nn.Module, output: Output | None) -> Iterator[None]:
    """Give a model this output for what it looks up, and operators for loops of our own."""
    collections = [] if output is None else [each for each in model.modules() if isinstance(each, Collection)]
    for collection in collections:
        collection.forward = lambda sparse: cast(Output, output).only(sparse.keys())
    pairs.captures = True
    try:
        yield
    finally:
        pairs.captures = False
        for collection in collections:
            del collection.forward
