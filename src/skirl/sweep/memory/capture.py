"""The dense part of a step as one graph: forward, loss and backward, with rows' outputs, weights and data as its inputs."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from skirl.core.batch import Batch
from skirl.models import pairs
from skirl.nn.collection import Collection
from skirl.nn.output import Output
from skirl.sweep.contender import Loss
from skirl.sweep.fused import instead, reparametrized, weights_of
from skirl.sweep.memory.passes import annotate, traced
from skirl.sweep.memory.simulate import Step, step_of


@dataclass(eq=False)
class Captured:
    """A graph. Its inputs: weights, rows' outputs, dense features, labels. Its outputs: what the loss function
    returns, and the gradients of trained weights and of rows' outputs."""

    graph: fx.GraphModule
    step: Step
    trained: Sequence[str]
    rows: Sequence[str]
    """The inputs that are rows' outputs."""
    live: Sequence[Sequence[bool]]
    """Of each bank: which features get a gradient."""
    kept: TreeSpec

    def inputs(self, model: nn.Module, rows: Output, batch: Batch) -> list[Tensor]:
        return [*named_weights(model).values(), *rows.banks, batch.dense, batch.labels]

    def results(self, outputs: Sequence[Any]) -> tuple[Any, Sequence[Tensor | None], Sequence[Tensor | None]]:
        """Return what the loss function returned, the gradients of trained weights, and those of rows' outputs."""
        losses, weights = self.kept.num_leaves, self.kept.num_leaves + len(self.trained)
        return tree_unflatten(outputs[:losses], self.kept), outputs[losses:weights], outputs[weights:]


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return what a model's graph takes from it: parameters, and buffers, lest they become constants of the graph."""
    return {**weights_of(model), **dict(model.named_buffers())}


def capture(model: nn.Module, loss: Loss, rows: Output, batch: Batch) -> Captured:
    """Capture the step of a model over its collection's output. Nothing of the batch's size is allocated."""
    if not rows.fixed:
        raise ValueError(
            "a batch has lists of rows or bags that samples share, so each step would have to be planned anew: run without "
            "--memory"
        )
    weights, banks = named_weights(model), [bank.detach().requires_grad_() for bank in rows.banks]
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    begin, end = len(weights), len(weights) + len(banks)
    told = list[Any]()

    def step(*given: Tensor) -> list[Tensor | None]:
        own, leaves = dict(zip(weights, given, strict=False)), given[begin:end]
        with annotate({"phase": "forward"}), reparametrized(model, own), ExitStack() as lookups:
            over, live = rows.over(leaves)
            for each in [each for each in model.modules() if isinstance(each, Collection)]:
                lookups.enter_context(instead(each, lambda sparse: over.only(sparse.keys())))
            found, spec = tree_flatten(loss(model, replace(batch, dense=given[end], labels=given[end + 1])))
            kept = [each.detach() if isinstance(each, Tensor) else each for each in found]
        with annotate({"phase": "backward"}):
            grads = torch.autograd.grad(found[0], [*(own[name] for name in trained), *leaves], allow_unused=True)
        told[:] = live, spec
        return [*kept, *grads]

    pairs.captures = True  # its loops are an operator then
    try:
        graph = traced(step, [*weights.values(), *banks, batch.dense, batch.labels])
    finally:
        pairs.captures = False
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"][begin:end]
    return Captured(graph, step_of(graph, names), trained, names, *told)
