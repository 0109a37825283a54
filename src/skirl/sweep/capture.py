"""The dense part of a variant's step as one graph: forward, loss and backward over weights, rows' outputs and data."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn.utils.stateless import _reparametrize_module as reparametrized
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from skirl.models import pairs
from skirl.nn.collection import Collection
from skirl.nn.optimizers import Anchor
from skirl.nn.output import Output
from skirl.sweep.contender import Contender, Loss


class Unfit(ValueError):
    """Why the dense part of a step does not run as a graph."""


_ATEN = torch.ops.aten
DRAWS = {
    _ATEN.bernoulli_.float, _ATEN.rand.default, _ATEN.rand_like.default, _ATEN.randn.default, _ATEN.randn_like.default,
    _ATEN.uniform_.default, _ATEN.normal_.default,
}  # fmt: skip
"""Operators whose random numbers depend on shapes alone, as those of dropout."""


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what a graph takes from a model: weights, and buffers, lest they become constants of the graph."""
    weights = {name: weight for name, weight in model.named_parameters() if not isinstance(weight, Anchor)}
    return {**weights, **dict(model.named_buffers())}


def tensors_of(batch: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors of a batch, and what makes one of others."""
    inside = getattr(batch, "__dict__", batch)
    leaves, spec = tree_flatten(inside)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def with_others(tensors: Sequence[Tensor]) -> Any:
        own = dict(enumerate(leaves)) | dict(zip(places, tensors, strict=True))
        found = tree_unflatten([*own.values()], spec)
        if inside is batch:
            return found
        other = copy(batch)
        vars(other).update(found)
        return other

    return [leaves[place] for place in places], with_others


class Dense:
    """The dense part of a model's step as a function of tensors. It returns what the loss function does, then the
    gradients of trained weights and of rows' outputs."""

    def __init__(self, model: nn.Module, loss: Loss, rows: Output, batch: Any) -> None:
        if not rows.fixed:
            raise Unfit("a batch has lists of rows or bags that samples share, so each step would be another graph")
        self._model, self._loss, self._rows = model, loss, rows
        self.weights = inputs_of(model)
        self.banks = [bank.detach().requires_grad_() for bank in rows.banks]
        self.data, self._batch_of = tensors_of(batch)
        self.trained = [name for name, weight in self.weights.items() if weight.requires_grad]
        self.live: list[list[bool]] = []
        """Of each bank: which features get a gradient."""
        self.kept: TreeSpec | None = None

    @property
    def inputs(self) -> list[Tensor]:
        return [*self.weights.values(), *self.banks, *self.data]

    def __call__(
        self, *given: Tensor, phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
    ) -> list[Tensor | None]:
        begin, end = len(self.weights), len(self.weights) + len(self.banks)
        own, leaves = dict(zip(self.weights, given, strict=False)), given[begin:end]
        with phase("forward"), reparametrized(self._model, own), ExitStack() as lookups:
            over, self.live = self._rows.over(leaves)
            for each in [each for each in self._model.modules() if isinstance(each, Collection)]:
                each.forward = lambda sparse: over.only(sparse.keys())
                lookups.callback(delattr, each, "forward")
            found, self.kept = tree_flatten(self._loss(self._model, self._batch_of(given[end:])))
            kept = [each.detach() if isinstance(each, Tensor) else each for each in found]
        with phase("backward"):
            grads = torch.autograd.grad(found[0], [*(own[name] for name in self.trained), *leaves], allow_unused=True)
        return [*kept, *grads]


@dataclass(eq=False)
class Captured:
    """A graph of a model's step, whose inputs and outputs are those of `Dense`."""

    graph: fx.GraphModule
    trained: Sequence[str]
    rows: Sequence[str]
    """The inputs that are rows' outputs."""
    live: Sequence[Sequence[bool]]
    kept: TreeSpec
    draws: Sequence[Callable[[], Tensor]] = ()
    """What draws its first inputs, in the order of the model."""

    def drawn(self) -> list[Tensor]:
        return [draw() for draw in self.draws]

    def draw_apart(self) -> None:
        """Make inputs of the graph, before all others, of the random numbers that it draws."""
        graph = self.graph.graph
        nodes = [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
        if other := next((node for node in nodes if node.target not in DRAWS), None):
            raise Unfit(f"{other.target} draws random numbers")
        self.draws = [*map(_draw_of, nodes)]
        first = next(iter(graph.nodes))
        for node in nodes:
            with graph.inserting_before(first):
                node.replace_all_uses_with(graph.placeholder(f"drawn_{node.name}"))
            graph.erase_node(node)
        graph.eliminate_dead_code()
        self.graph.recompile()


def hand_over(
    of: Dense | Captured, contender: Contender, weights: Mapping[str, Tensor], rows: Output, outputs: Sequence[Any]
) -> None:
    """Give a variant its gradients, which trains its rows."""
    assert of.kept is not None
    losses = of.kept.num_leaves
    found = tree_unflatten(outputs[:losses], of.kept)
    for name, grad in zip(of.trained, outputs[losses:], strict=False):
        own = weights[name]
        own.grad = own.grad if grad is None else grad if own.grad is None else own.grad.add_(grad)
    rows.backward(outputs[losses + len(of.trained) :], of.live)
    contender.trained(contender.keep(found))


def _draw_of(node: fx.Node) -> Callable[[], Tensor]:
    def empty(of: fx.Node) -> Any:
        like = of.meta["val"]
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    target, args, kwargs = node.target, node.args, node.kwargs
    assert callable(target)
    return lambda: target(*map_arg(args, empty), **kwargs)


def capture(dense: Dense) -> Captured:
    """Capture a step. Nothing of the batch's size is allocated."""
    from skirl.sweep.passes import annotate, traced

    pairs.captures = True  # its loops are an operator then
    try:
        graph = traced(lambda *given: dense(*given, phase=lambda name: annotate({"phase": name})), dense.inputs)
    finally:
        pairs.captures = False
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    assert dense.kept is not None
    rows = names[len(dense.weights) : len(dense.weights) + len(dense.banks)]
    return Captured(graph, dense.trained, rows, dense.live, dense.kept)
