"""The forms of a sweep's dense part: variants one after the other, or those of one graph as one graph over stacks."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from skirl.nn.collection import Collection
from skirl.sweep.capture import Captured, Dense, Unfit, capture, hand_over, inputs_of, tensors_of
from skirl.sweep.contender import Contender, Loss, step_dense
from skirl.tools.rng_state import of_torch, put_torch, unchanged
from skirl.tools.units import parse_bytes

if TYPE_CHECKING:
    from skirl.sweep.memory.orchestrate import Memory

log = logging.getLogger("skirl")

Form = Literal["loop", "fused"]

MEASURED = 20
"""Steps until the faster form is known."""
MOST = 8
"""Most layouts of batches that are probed. In others, variants train in turn."""
FIRST, AGAIN = (1, 10), 100
"""Fused steps after which the probe is repeated, and until it is again: a model or a loss may compute something else by
then, which a graph does not."""

FEW = 256
"""Fewest numbers that tell whether an operator has the bits of others; what sums up fewer is computed one by one."""
EXACT = {
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "relu", "threshold_backward", "clamp", "clamp_min", "clamp_max",
    "maximum", "minimum", "where", "sqrt", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_not", "masked_fill",
    "fill", "zero", "clone", "copy", "ones_like", "zeros_like", "full_like", "empty_like", "new_zeros",
}  # fmt: skip
"""Operators that have one right result for each number. Those by others, such as exp, depend on the place in a tensor: the
last ones fill no vector of the CPU."""
PROBED = EXACT | {
    "mm", "addmm", "pairs", "pairs_backward", "sum", "cat", "stack", "_unsafe_view", "index_select", "gather",
    "slice_backward", "select_backward", "constant_pad_nd", "_softmax", "_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward",
}  # fmt: skip
"""Operators that may run for all variants at once, if that has the bits of one by one on random numbers."""
PRODUCTS = {torch.ops.aten.mm.default: torch.bmm, torch.ops.aten.addmm.default: torch.baddbmm}
"""Products of one variant, and of all."""


class Stack:
    """A value that differs between variants: the tensors of all, [variants, ...]."""

    def __init__(self, of: Tensor) -> None:
        self.of = of


class Stacking(fx.Interpreter):
    """Computes a graph for all variants at once: an operator for all where that has the bits of one by one."""

    def __init__(self, graph: fx.GraphModule, variants: int, exact: bool) -> None:
        super().__init__(graph)
        self._variants, self._exact = variants, exact
        self.alone: dict[str, bool] = {}
        """Of each operator, once it was computed in both ways on random numbers: whether it is run one by one."""

    def run_node(self, n: fx.Node) -> Any:
        self._name = n.name
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Stack)]
        if not places or not isinstance(target, torch._ops.OpOverload):
            return target(*args, **kwargs)

        def call(*own: Tensor) -> Any:
            given = dict(enumerate(leaves)) | dict(zip(places, own, strict=True))
            one, named = tree_unflatten([*given.values()], spec)
            return target(*one, **named)

        def one_by_one() -> Any:
            each = [tree_flatten(call(*own)) for own in zip(*stacks, strict=True)]
            found = zip(*(tensors for tensors, _ in each), strict=True)
            return tree_unflatten([stack_of(of) if isinstance(of[0], Tensor) else of[0] for of in found], each[0][1])

        def together() -> Any:
            if target.namespace == "skirl":  # sample by sample
                tensors = [self._whole(arg) for arg in args]
                out = target(*(each.flatten(0, 1) for each in tensors))
                return tree_map_only(Tensor, lambda each: Stack(each.unflatten(0, tensors[0].shape[:2])), out)
            if target in PRODUCTS:
                *bias, a, b = (self._whole(arg) for arg in args)
                return Stack(
                    PRODUCTS[target](*(each.view(len(each), -1, each.shape[-1]) for each in bias), a, b, **kwargs)
                )
            return tree_map_only(Tensor, Stack, torch.vmap(call)(*stacks))

        stacks = [leaves[place].of for place in places]
        if self._name not in self.alone:
            probed = _name_of(target) in PROBED and kwargs.get("alpha", 1) == 1
            square = target is torch.ops.aten.pow.Tensor_Scalar and args[1] in (1, 2)
            self.alone[self._name] = self._is_alone(target, probed or square, stacks, one_by_one, together)
        return one_by_one() if self.alone[self._name] else together()

    def _is_alone(self, target: Any, probed: bool, stacks: list[Tensor], one_by_one: Any, together: Any) -> bool:
        if any(out.alias_info is not None for out in target._schema.returns):
            if target._schema.is_mutable and _name_of(target) not in EXACT:
                raise Unfit(f"{target} writes in place")
            return False  # a view
        if self._exact and not probed:
            return True
        try:
            wanted, found = tree_leaves(one_by_one()), tree_leaves(together())
        except (NotImplementedError, RuntimeError):  # vmap does not have all operators
            return True
        least = min(FEW * self._variants, *(each.numel() for each in stacks))
        few = any(isinstance(of, Stack) and of.of.numel() < least for of in wanted)
        return self._exact and (few or not all(map(same_bits, map(bare, found), map(bare, wanted))))

    def _whole(self, value: Any) -> Tensor:
        return bare(value) if isinstance(value, Stack) else value.expand(self._variants, *value.shape)


def _name_of(target: Any) -> str:
    return target._schema.name.partition("::")[2].rstrip("_")


def stack_of(each: Sequence[Tensor]) -> Stack:
    """Return tensors as a stack, whose parts lie in memory as they do."""
    order = sorted(range(each[0].dim()), key=lambda dim: -each[0].stride(dim))
    return Stack(
        torch.stack([of.permute(order) for of in each]).permute(0, *(1 + order.index(d) for d in range(len(order))))
    )


def bare(value: Any) -> Any:
    return value.of if isinstance(value, Stack) else value


class Fused:
    """The graphs of variants alike as one, over stacks of all that differs."""

    def __init__(self, captured: Captured, each: Sequence[Dense], exact: bool) -> None:
        from skirl.sweep.passes import stacked

        self.captured, self._own = captured, len(captured.draws) + len(each[0].inputs) - len(each[0].data)
        self._differs = list[bool]()
        stacking = Stacking(captured.graph, len(each), exact)

        def whole(*given: Tensor) -> list[Any]:
            found = stacking.run(*map(Stack, given[: self._own]), *given[self._own :])
            self._differs = [isinstance(out, Stack) for out in found]
            return [*map(bare, found)]

        with torch.no_grad(), unchanged():
            inputs = self._inputs([[*captured.drawn(), *own] for own in random_inputs(each)])
            whole(*inputs)
            self._graph = stacked(whole, inputs)

    def _inputs(self, each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the inputs of all: stacks, then the data, which all share."""
        # No views of one stack for good: products depend on how a weight lies in memory.
        return [*map(torch.stack, zip(*(one[: self._own] for one in each), strict=True)), *each[0][self._own :]]

    @torch.no_grad()
    def __call__(self, each: Sequence[Sequence[Tensor]]) -> list[tuple[Any, ...]]:
        found = zip(self._graph(*self._inputs(each)), self._differs, strict=True)
        return [*zip(*(out.unbind() if differs else [out] * len(each) for out, differs in found), strict=True)]


# The probe.


def noise(like: Tensor, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Return random numbers in the layout of a tensor."""
    last = sum((n - 1) * step for n, step in zip(like.shape, like.stride())) if like.numel() else -1
    numbers = torch.randn(last + 1, generator=generator).mul_(scale).to(like.device, like.dtype)
    return numbers.as_strided(like.shape, like.stride()).requires_grad_(like.requires_grad)


def same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return torch.equal(a.detach().reshape(-1).view(torch.uint8), b.detach().reshape(-1).view(torch.uint8))


def close(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.numel():
        return same_bits(a, b)
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.detach().abs().max()))


def random_inputs(each: Sequence[Dense]) -> list[list[Tensor]]:
    """Return random weights and rows of each variant, with its buffers and the data."""
    draw, inputs = torch.Generator().manual_seed(0), list[list[Tensor]]()
    for dense in each:
        weights = dense.weights.values()
        drawn = [
            noise(of, draw, max(1, *of.shape[-1:]) ** -0.5) if isinstance(of, nn.Parameter) else of for of in weights
        ]
        inputs.append([*drawn, *(noise(bank, draw) for bank in dense.banks), *dense.data])
    return inputs


def agree(each: Sequence[Dense], fused: Fused, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether variants alone and fused make the same of random weights and rows."""
    inputs, lone = random_inputs(each), list[Any]()
    with unchanged():
        for seed, (dense, own) in enumerate(zip(each, inputs, strict=True)):
            torch.manual_seed(seed)
            lone.append(dense(*own))
            torch.manual_seed(seed)
            own[:0] = fused.captured.drawn()
    both = zip(fused(inputs), lone, strict=True)
    return all(same(*pair) for found, wanted in both for pair in zip(found, wanted, strict=True))


def alike(captured: Captured, dense: Dense) -> Hashable:
    """Return what is equal in variants whose steps are one graph."""
    constants = tuple((of.shape, of.cpu().numpy().tobytes()) for _, of in captured.graph.named_buffers())
    inputs = tuple((each.shape, each.stride(), each.dtype) for each in dense.inputs)
    live = tuple(map(tuple, captured.live))
    return captured.graph.code, tuple(captured.trained), captured.kept, live, inputs, constants


class State:
    """All of a model but the numbers of its weights."""

    def __init__(self, contender: Contender) -> None:
        self._contender, self._model = contender, contender.model
        modules = [vars(each) for each in self._model.modules() if not isinstance(each, Collection)]
        held = (dict, list, set)
        was = [{name: of.copy() if isinstance(of, held) else of for name, of in own.items()} for own in modules]
        self._attributes = [*zip(modules, was, strict=True)]
        self._trained = [(weight, weight.requires_grad) for weight in self._model.parameters()]
        self._written = [(buffer, buffer._version) for buffer in self._model.buffers()]
        self.generator = contender.generator
        every = [each for module in self._model.modules() for each in vars(module).items()]
        self.hooked = any(name == "forward" or (name.endswith("hooks") and of) for name, of in every)

    def holds(self) -> bool:
        try:
            same = all(own == was for own, was in self._attributes) and self._contender.model is self._model
        except Exception:  # attributes that cannot be compared, such as tensors
            return False
        trained = all(weight.requires_grad is was for weight, was in self._trained)
        return same and trained and all(buffer._version == was for buffer, was in self._written)


class Group:
    """Variants that train in one form: if two fit, they take turns until both are measured."""

    def __init__(self, contenders: Sequence[Contender], fused: Fused | None = None, *, exact: bool = True) -> None:
        self.contenders, self.fused, self.exact = contenders, fused, exact
        self.seconds: dict[Form, list[float]] = {"fused": [], "loop": []}
        self._weights: list[dict[str, Tensor]] = []
        self._steps = self._checked = 0
        """Those that were fused, and the last before which the probe was repeated."""

    @property
    def form(self) -> Form:
        if self.fused is None:
            return "loop"
        rare = min(self.seconds, key=lambda form: len(self.seconds[form]))
        if 2 * len(self.seconds[rare]) < MEASURED:
            return rare
        return min(self.seconds, key=lambda form: min(self.seconds[form]))  # other processes only add

    def train(self, form: Form, loss: Loss, batch: Any) -> Form:
        began = time.perf_counter()
        if form == "loop" or not self._fused(loss, batch):
            form = "loop"
            for contender in self.contenders:
                with contender.turn():
                    contender.train(loss, batch)
        probed = form == "fused" and self._checked == self._steps
        if 2 * len(self.seconds[form]) < MEASURED and not probed:
            self.seconds[form].append(time.perf_counter() - began)
        return form

    def _fused(self, loss: Loss, batch: Any) -> bool:
        """Train all as one. Return False, with nothing trained, if by now they compute something else."""
        assert self.fused is not None
        captured = self.fused.captured
        rows = [one.embeddings.look_up(batch, checked=n > 0) for n, one in enumerate(self.contenders)]
        self._weights = self._weights or [inputs_of(contender.model) for contender in self.contenders]
        self._steps += 1
        if self._steps in FIRST or self._steps % AGAIN == 0:
            each = [Dense(one.model, loss, own, batch) for one, own in zip(self.contenders, rows, strict=True)]
            if not agree(each, self.fused, same_bits if self.exact else close):
                if self._steps > 1:
                    raise RuntimeError(
                        f"models or their loss compute something else than {self._steps - self._checked} steps ago from the "
                        "same weights and batch, and a graph does not: train in `for variant in sweep`, which calls them"
                    )
                self.fused = None
                return False
            self._checked = self._steps
        data, inputs = tensors_of(batch)[0], list[list[Tensor]]()
        for contender, weights, own in zip(self.contenders, self._weights, rows, strict=True):
            with contender.turn() if captured.draws else nullcontext():
                inputs.append([*captured.drawn(), *weights.values(), *own.banks, *data])
        found = self.fused(inputs)
        for contender, weights, own, outputs in zip(self.contenders, self._weights, rows, found, strict=True):
            contender.exact &= self.exact
            hand_over(captured, contender, weights, own, outputs)  # nothing draws random numbers by now
        step_dense(self.contenders)
        return True


class Forms:
    """The forms of a sweep's steps: probed, measured, and chosen anew when variants leave."""

    only: Form | None = None
    """The form wherever it fits, instead of the faster one. If it is the loop, nothing is probed."""

    def __init__(self, loss: Loss, inexact: bool, memory: str | None, device: torch.device) -> None:
        self.steps: Counter[str] = Counter()
        if memory not in (None, "auto"):
            parse_bytes(memory)
        self._memory, self._device, self._planned = memory, device, cast("Memory | None", None)
        self._graphs = device.type == "cuda"
        """Whether to try first if all fit into one CUDA graph."""
        self._loss, self._inexact, self._unfit = loss, inexact, False
        self._last: Any = None
        """The layout of the last batch: one that comes once, as an epoch's end, is not worth a probe of seconds."""
        self.forget()

    def forget(self) -> None:
        """Let go of all models."""
        self._groups: dict[Any, list[Any]] = {}
        """By layout: groups, or a CUDA graph of all."""
        self._graph_of: dict[Any, Captured] = {}
        """By layout and variant, of those that were fused before a variant left."""
        self._states: dict[str, State] = {}

    def leave(self, gone: Contender) -> None:
        for layout, groups in self._groups.items():
            for group in [group for group in groups if group.fused is not None]:
                self._graph_of |= {(layout, one.name): group.fused.captured for one in group.contenders}
        self._groups = {}
        self._states.pop(gone.name, None)

    def step(self, racing: Sequence[Contender], batch: Any) -> None:
        if self._memory is not None:
            from skirl.sweep.memory.orchestrate import planned

            self._planned = self._planned or planned(self._memory, self._device)
            self._planned.step(racing, batch, self._loss)
            self.steps["planned"] += len(racing)
            return
        if not all(state.holds() for state in self._states.values()):
            self._unfit = bool(self._groups)  # else another has just left
            self.forget()
            log.info("variants train in turn: a model has changed")
        turns = self._unfit or len(racing) == 1 or self.only == "loop"
        layout = None if turns else self._layout(racing[0], batch)
        again, self._last = layout == self._last or self.only is not None, layout
        if layout is not None and again and layout not in self._groups and len(self._groups) < MOST:
            self._groups[layout] = self._probed(racing, batch, layout)
            self.steps["loop"] += len(racing)
            return
        for group in self._groups.get(layout) or [Group(racing)]:
            form = self.only if self.only is not None and group.fused is not None else group.form
            self.steps[group.train(form, self._loss, batch)] += len(group.contenders)

    def _layout(self, contender: Contender, batch: Any) -> Any:
        """Return what the bits may depend on: shapes and strides of a batch's tensors; None if rows have other shapes in
        each batch, as lists and bags that samples share."""
        current = contender.embeddings.current
        assert current.work is not None
        banks = current.work.micros[current.micro].banks
        if any(ids.shares or not ids.pooled for ids in banks):
            return None
        parts = [(part.shape, part.stride(), part.dtype) for part in tensors_of(batch)[0]]
        return (*(ids.batch for ids in banks), *parts)

    def _probed(self, racing: Sequence[Contender], batch: Any, layout: Any) -> list[Any]:
        """Train all in turn, and find which of them run as one."""
        if self._graphs:
            from skirl.sweep.graphed import Graphed

            try:
                with unchanged():
                    graph = Graphed(racing, self._loss, batch)
            except Exception as error:  # of a model or a loss that waits for the GPU, draws numbers, or keeps some
                log.info("variants are no CUDA graph: %s", error)
                self._graphs = False
            else:
                Group(racing).train("loop", self._loss, batch)
                return [graph]
        states = [State(contender) for contender in racing]
        same = dict[Hashable, list[tuple[Contender, Any, Any]]]()
        Group(racing).train("loop", self._loss, batch)
        for contender, state in zip(racing, states, strict=True):
            try:
                if state.hooked or not state.holds():
                    raise Unfit("a step calls hooks, or changes more of a model than its weights")
                dense = Dense(contender.model, self._loss, contender.embeddings.current.out, batch)
                with unchanged():
                    if (captured := self._graph_of.get((layout, contender.name))) is None:
                        captured = capture(dense)
                        captured.draw_apart()
                    put_torch(state.generator)
                    captured.drawn()
                    if not all(map(torch.equal, of_torch(), contender.generator)):
                        raise Unfit("a step draws random numbers that its graph does not")
            except Exception as error:  # of a torch without some names, or of a model that waits for numbers
                log.info("variant %s trains in turn: %s", contender.name, error)
                same.setdefault(contender.name, []).append((contender, None, None))
            else:
                same.setdefault(alike(captured, dense), []).append((contender, dense, captured))
        groups = [self._together(members) for members in same.values()]
        self._states |= {
            one.name: State(one) for group in groups if group.fused is not None for one in group.contenders
        }
        return groups

    def _together(self, members: Sequence[tuple[Contender, Any, Any]]) -> Group:
        contenders, each, captured = zip(*members, strict=True)
        if len(contenders) > 1:
            try:
                fused = Fused(captured[0], each, not self._inexact)
                exact = agree(each, fused, same_bits)
                if exact or (self._inexact and agree(each, fused, close)):
                    return Group(contenders, fused, exact=exact)
                why: object = "fused, they would have other bits for batches of this size"
            except Exception as error:  # of an operator that does not stack
                why = error
            log.info("variants %s train in turn: %s", ", ".join(one.name for one in contenders), why)
        return Group(contenders)
