"""The forms of a sweep's dense part: variants one after the other, or those of one architecture fused under vmap."""

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import repeat
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.nn.utils.stateless import _reparametrize_module as reparametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from skirl.models.pairs import pairs
from skirl.nn.collection import Collection
from skirl.nn.optimizers import Anchor
from skirl.nn.output import Output
from skirl.sweep.contender import Contender, Loss
from skirl.tools.rng_state import unchanged

log = logging.getLogger("skirl")

Form = Literal["loop", "fused"]

MEASURED = 20
"""Steps until the faster form is known."""
MOST = 8
"""Most layouts of batches that are probed. In others, variants train in turn."""


class Unfit(Exception):
    """Why variants do not fuse."""


# Operators under vmap.


@contextmanager
def outside() -> Iterator[None]:
    """Leave vmap for a while, and whatever replaces operators."""
    with temporarily_pop_interpreter_stack(), torch._C.DisableTorchFunction():
        yield


class Linear(torch.autograd.Function):
    """Layers of all variants as products of stacks, [variants, n, width], each summed as a lone layer sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        across = weight.transpose(1, 2)
        return torch.bmm(x, across) if bias is None else torch.baddbmm(bias[:, None], x, across)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        grad_x = torch.bmm(grad, weight) if of_x else None
        return grad_x, torch.bmm(grad.mT, x) if of_weight else None, grad.sum(1) if of_bias else None


def by_stack(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return Linear.apply(x.flatten(1, -2), weight, bias).unflatten(1, x.shape[1:-1])


def one_by_one(function: Callable[..., Tensor], *stacks: Any) -> Tensor:
    each = (stack.unbind() if isinstance(stack, Tensor) else repeat(stack) for stack in stacks)
    return torch.stack([function(*one) for one in zip(*each)])


ONE_BY_ONE = (linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, scaled_dot_product_attention)
"""Operators that vmap replaces by others, which sum in another order."""


class Operators(TorchFunctionMode):
    """Under vmap: layers as products of stacks, which have the bits of lone layers, and other products one by one."""

    def __init__(self, variants: int) -> None:
        super().__init__()
        self._variants = variants

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func is not pairs and func not in ONE_BY_ONE) or any(isinstance(of, Tensor) for of in kwargs.values()):
            return func(*args, **kwargs)
        level, stacks = functorch.maybe_current_level(), [self._stack(arg) for arg in args]
        with outside():
            if func is pairs:  # sample by sample
                x, vectors, _ = stacks
                out = pairs(x.flatten(0, 1), vectors.flatten(0, 1), args[2]).unflatten(0, x.shape[:2])
            elif func is linear and stacks[0].dim() > 2 and stacks[1].shape[1] > 1:  # one output is no matrix product
                out = by_stack(*stacks)
            else:
                out = one_by_one(partial(func, **kwargs), *stacks)
        return functorch._add_batch_dim(out, 0, level)

    def _stack(self, value: Any) -> Any:
        """Return the tensors of all variants, [variants, ...]."""
        if not isinstance(value, Tensor):
            return value
        if not functorch.is_batchedtensor(value):
            return value.expand(self._variants, *value.shape)
        return functorch.get_unwrapped(value).movedim(functorch.maybe_get_bdim(value), 0)


class Outputs(Mapping[str, Tensor]):
    """The lookups of all variants as one, under vmap."""

    def __init__(self, each: Sequence[Output]) -> None:
        self._each = each

    def _all(self, of: Callable[[Output], Any]) -> Any:
        level = functorch.maybe_current_level()
        with outside():
            found = [of(output) for output in self._each]
            rows = Outputs(found) if isinstance(found[0], Output) else torch.stack(found)
        return rows if isinstance(rows, Outputs) else functorch._add_batch_dim(rows, 0, level)

    def __getitem__(self, name: str) -> Tensor:
        return self._all(lambda output: output[name])

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self._all(lambda output: getattr(output, method)(*args))

    def __iter__(self) -> Iterator[str]:
        return iter(self._each[0])

    def __len__(self) -> int:
        return len(self._each[0])


# Numbers of the probe.


def noise(like: Tensor, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Return random numbers in the layout of a tensor."""
    last = sum((n - 1) * step for n, step in zip(like.shape, like.stride())) if like.numel() else -1
    numbers = torch.randn(last + 1, generator=generator).mul_(scale).to(like.device, like.dtype)
    return numbers.as_strided(like.shape, like.stride()).requires_grad_(like.requires_grad)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a.detach().reshape(-1).view(torch.uint8), b.detach().reshape(-1).view(torch.uint8))


def close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or not a.numel():
        return (a is None) == (b is None)
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.detach().abs().max()))


# Variants that are one model but for their numbers.


@contextmanager
def instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Put another forward in the place of a module's own."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the dense weights of a model."""
    return {name: weight for name, weight in model.named_parameters() if not isinstance(weight, Anchor)}


def with_weights(model: nn.Module, weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
    """Call a model's own forward, whatever stands in its place, with other weights."""
    with reparametrized(model, dict(weights)):
        return type(model).forward(model, *args, **kwargs)


def shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: of.copy() if isinstance(of, dict | list | set) else of for name, of in attributes.items()}


_PLAIN = {*vars(nn.Module())} - {"training"}


def architecture(contender: Contender) -> list[Any]:
    """Return what is equal in variants that are one model but for their numbers."""
    model = contender.model
    found: list[Any] = [(table.dim, table.features) for table in contender.embeddings.tables]
    for name, module in model.named_modules():
        if not isinstance(module, Collection):
            found += [name, type(module), {key: value for key, value in vars(module).items() if key not in _PLAIN}]
    found += [(name, w.shape, w.stride(), w.dtype, w.requires_grad) for name, w in weights_of(model).items()]
    return found + [(name, b.dtype, b.shape, b.cpu().numpy().tobytes()) for name, b in model.named_buffers()]


def equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # attributes that cannot be compared, such as tensors
        return False


def grouped(contenders: Sequence[Contender]) -> list[list[Contender]]:
    groups: list[tuple[Any, list[Contender]]] = []
    for contender in contenders:
        own = architecture(contender)
        alike = next((alike for other, alike in groups if equal(own, other)), None)
        if alike is None:
            groups.append((own, [contender]))
        else:
            alike.append(contender)
    return [alike for _, alike in groups]


class Choice:
    """The form for batches of one layout: if both fit, they take turns until both are measured."""

    def __init__(self, fits: bool, exact: bool) -> None:
        self.fits, self.exact = fits, exact
        self.seconds: dict[Form, list[float]] = {"fused": [], "loop": []}

    @property
    def form(self) -> Form:
        if not self.fits:
            return "loop"
        rare = min(self.seconds, key=lambda form: len(self.seconds[form]))
        return (
            rare if 2 * len(self.seconds[rare]) < MEASURED else min(self.seconds, key=lambda f: median(self.seconds[f]))
        )


class Group:
    """Variants of one architecture."""

    def __init__(self, contenders: Sequence[Contender], loss: Loss, inexact: bool) -> None:
        self.contenders, self._loss, self._inexact = contenders, loss, inexact
        models = [contender.model for contender in contenders]
        self._operators = Operators(len(models))
        self._weights = [weights_of(model) for model in models]
        self._buffers = [buffer for model in models for buffer in model.buffers()]
        self._attributes = [vars(m) for model in models for m in model.modules() if not isinstance(m, Collection)]
        self._before = self._state()
        self._choices: dict[Any, Choice] = {}
        self._unfit = len(models) == 1 or any(
            name == "forward" or (name.endswith("hooks") and of) for own in self._attributes for name, of in own.items()
        )

    def _state(self) -> Any:
        """Return all of the models but the numbers of their weights."""
        trained = [weight.requires_grad for own in self._weights for weight in own.values()]
        models, versions = [c.model for c in self.contenders], [buffer._version for buffer in self._buffers]
        return models, [shallow(own) for own in self._attributes], trained, versions

    def step(self, batch: Any, only: Form | None) -> Form:
        """Train all on a batch, and return in which form."""
        if not self._unfit and not equal(self._state(), self._before):
            self._refuse("a model has changed")
        layout = None if self._unfit else self._layout(batch)
        if layout is not None and layout not in self._choices and len(self._choices) < MOST:
            self._choices[layout] = self._probed(batch)
            return "loop"
        choice = self._choices.get(layout) or Choice(fits=False, exact=True)
        form, began = only if only is not None and choice.fits else choice.form, time.perf_counter()
        if form == "loop" or not self._fused(batch, choice.exact):
            form = "loop"
            for contender in self.contenders:
                with contender.turn():
                    contender.train(self._loss, batch)
        if 2 * len(choice.seconds[form]) < MEASURED:
            choice.seconds[form].append(time.perf_counter() - began)
        return form

    def _layout(self, batch: Any) -> Any:
        """Return what the bits may depend on: shapes and strides of a batch's tensors; None if rows have other shapes in
        each batch, as lists and bags that samples share."""
        current, tensors = self.contenders[0].embeddings.current, tree_leaves(getattr(batch, "__dict__", batch))
        assert current.work is not None
        banks = current.work.micros[current.micro].banks
        if any(ids.shares or not ids.pooled for ids in banks):
            return None
        parts = [(part.shape, part.stride(), part.dtype) for part in tensors if isinstance(part, Tensor)]
        return (*(ids.batch for ids in banks), *parts)

    def _refuse(self, why: object) -> Choice:
        self._unfit = True
        log.info("variants %s train in turn: %s", ", ".join(c.name for c in self.contenders), why)
        return Choice(fits=False, exact=True)

    def _fused(self, batch: Any, exact: bool) -> bool:
        """Train all as one. Return False, with nothing trained, if they do not fit."""
        generators = [contender.generator for contender in self.contenders]
        try:
            losses = self._losses(batch)
        except Exception as error:  # of vmap, of a loss that does something new, or of the batch: then in turn too
            for contender, generator in zip(self.contenders, generators, strict=True):
                contender.generator = generator
            self._refuse(error)
            return False
        torch.autograd.backward(losses)
        for contender, loss in zip(self.contenders, losses, strict=True):
            with contender.turn():
                contender.exact &= exact
                contender.step(loss)
        return True

    def _losses(self, batch: Any) -> list[Tensor]:
        calls, logits, losses = list[Any](), list[Tensor](), list[Tensor]()

        def answer(*args: Any, **kwargs: Any) -> Tensor:
            calls.append((args, kwargs))
            if len(calls) == 1:
                logits.extend(self._forward(self._weights, self._look_up, *calls[0]))
            check_calls(calls, len(losses) + 1)
            return logits[len(losses)]

        for contender in self.contenders:
            with contender.turn(), instead(contender.model, answer):
                losses.append(contender.loss_of(self._loss, batch))
            check_graph(losses[-1], logits)
        check_calls(calls, len(losses))
        return losses

    def _forward(
        self, weights: Sequence[Mapping[str, Tensor]], look_up: Any, args: Any, kwargs: Any
    ) -> Sequence[Tensor]:
        """Return the logits of each variant, by one forward of the first one's model."""
        stacks = {name: torch.stack([own[name] for own in weights]) for name in weights[0]}
        with instead(self.contenders[0].embeddings, look_up), self._operators:
            return torch.vmap(lambda own: with_weights(self.contenders[0].model, own, args, kwargs))(stacks).unbind()

    def _look_up(self, sparse: Any) -> Outputs:
        with outside(), ExitStack() as turns:
            for contender in self.contenders:
                turns.enter_context(contender.embeddings.turn())
            return Outputs([type(c.embeddings).forward(c.embeddings, sparse) for c in self.contenders])

    def _probed(self, batch: Any) -> Choice:
        """Train all in turn, then probe the fused form on random numbers of the same layouts."""
        calls, grads = list[Any](), list[Tensor]()
        generators = [contender.generator for contender in self.contenders]
        for contender in self.contenders:

            def noted(*args: Any, model: Any = contender.model, **kwargs: Any) -> Any:
                calls.append((args, kwargs))
                found = type(model).forward(model, *args, **kwargs)
                if isinstance(found, Tensor) and found.requires_grad:
                    found.register_hook(grads.append)
                return found

            with contender.turn(), instead(contender.model, noted):
                contender.train(self._loss, batch)
        try:
            check_calls(calls, len(self.contenders))
            if not equal(self._state(), self._before):
                raise Unfit("a step changes more of a model than its weights")
            if any(not all(map(torch.equal, c.generator, state)) for c, state in zip(self.contenders, generators)):
                raise Unfit("a step draws random numbers")
            with unchanged(), warnings.catch_warnings(action="ignore"):  # vmap warns of what is slow
                return self._compared(calls[0], grads)
        except Exception as error:  # of vmap or autograd as well
            return self._refuse(error)

    def _compared(self, call: tuple[Any, Any], grads: Sequence[Tensor]) -> Choice:
        """Compare logits and gradients of weights and rows in both forms, on random numbers."""
        lone, lone_grads, inputs = list[Any](), list[Any](), list[Tensor]()
        drawn = partial(noise, generator=torch.Generator().manual_seed(0))
        weights = [{n: drawn(w, scale=max(1, *w.shape[-1:]) ** -0.5) for n, w in own.items()} for own in self._weights]
        outs = [contender.embeddings.current.out for contender in self.contenders]
        banks = [[drawn(bank) for bank in out.banks] for out in outs]
        outputs = [out.over(own)[0] for out, own in zip(outs, banks, strict=True)]
        grads = [drawn(grad) for grad in grads]
        for contender, own, rows, output, grad in zip(self.contenders, weights, banks, outputs, grads, strict=True):
            leaves = [leaf for leaf in (*own.values(), *rows) if leaf.requires_grad]
            with instead(contender.embeddings, lambda sparse, output=output: output.only(sparse.keys())):
                lone.append(with_weights(contender.model, own, *call))
            lone_grads += torch.autograd.grad(lone[-1], leaves, grad, allow_unused=True)
            inputs += leaves
        fused = self._forward(weights, lambda sparse: Outputs(outputs).only(sparse.keys()), *call)
        both = [*lone, *lone_grads], [*fused, *torch.autograd.grad(fused, inputs, grads, allow_unused=True)]
        exact = all(map(same_bits, *both))
        if not exact and not self._inexact:
            log.info("fused, %d variants would have other bits for batches of this size", len(self.contenders))
        return Choice(fits=exact or (self._inexact and all(map(close, *both))), exact=exact)


def check_calls(calls: Sequence[tuple[Any, Any]], count: int) -> None:
    """Raise unless each model was called once, and all with the same."""
    same = {(*map(id, args), *((name, id(of)) for name, of in kwargs.items())) for args, kwargs in calls}
    if len(calls) != count or len(same) != 1:
        raise Unfit("losses do not call each model once, with the same")


def check_graph(loss: Tensor, logits: Sequence[Tensor]) -> None:
    """Raise unless a loss depends on weights and rows by its logits alone: gradients would add up in another order."""
    end = logits[0].grad_fn if logits else None
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [] if node is end else [before for before, _ in node.next_functions]
    if end not in seen or any(hasattr(node, "variable") for node in seen):
        raise Unfit("a loss takes other weights or rows than those of its logits")


class Forms:
    """The forms of a sweep's steps: probed, measured, and chosen anew when variants leave."""

    only: Form | None = None
    """The form wherever it fits, instead of the faster one."""

    def __init__(self, loss: Loss, inexact: bool) -> None:
        self.steps: Counter[str] = Counter()
        """Steps of variants in each form."""
        self._loss, self._inexact = loss, inexact
        self._groups: list[Group] = []

    def step(self, racing: Sequence[Contender], batch: Any) -> None:
        """Train all on a batch."""
        self._groups = self._groups or [Group(alike, self._loss, self._inexact) for alike in grouped(racing)]
        for group in self._groups:
            self.steps[group.step(batch, self.only)] += len(group.contenders)

    def forget(self) -> None:
        """Let go of all models."""
        self._groups = []
