"""The dense optimizers beside a collection: which have stepped, with which scale, and what became of the gradients."""

import logging
import sys
from collections.abc import Sequence
from functools import cache
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from skirl.core.groups import TorchHandle

log = logging.getLogger("skirl")


class Anchor(nn.Parameter):
    """Makes backward run if no other Parameter precedes the lookup; `requires_grad_` reaches it. Its gradient is empty
    too, and gone when backward returns: `torch.autograd.grad` can ask for it, but no norm includes it."""

    @classmethod
    def of(cls, nothing: Tensor) -> "Anchor":
        anchor = cls(nothing)
        anchor.register_post_accumulate_grad_hook(_forget)
        return anchor


def _forget(anchor: Tensor) -> None:
    anchor.grad = None


stepped: "WeakKeyDictionary[torch.optim.Optimizer, int]" = WeakKeyDictionary()
"""The optimizers of this process that have made a step, with the thread of the last one."""
unscaled: "WeakSet[Any]" = WeakSet()
"""Current steps of collections whose rows a backward has updated without a GradScaler since the last optimizer step."""
hearing: "WeakSet[Any]" = WeakSet()
"""What is told before each step of an optimizer: shards of steps in a loop."""

_SCALING, _DEEPEST = "torch.amp.grad_scaler", 8


@cache
def watch() -> None:
    register_optimizer_step_pre_hook(_steps)
    register_optimizer_step_post_hook(_has_stepped)


def _has_stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    stepped[optimizer] = get_ident()


def _steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, TorchHandle):
        return
    if optimizer not in stepped:
        _check_parameters(optimizer)
    if unscaled:
        if _scaled():
            raise RuntimeError(
                f"a GradScaler steps {_name(optimizer)}, and rows were trained with gradients that it had scaled, because "
                "the embeddings do not know it: start over, and pass it to them, EmbeddingBagCollection(..., "
                "grad_scaler=scaler), or set embeddings.grad_scaler = scaler before the first backward. If it scales "
                "another loss than theirs, pass them torch.amp.GradScaler(enabled=False)"
            )
        unscaled.clear()
    for one in list(hearing):
        one.before_step(optimizer)


def _check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise or warn, before an optimizer's first step, if it was given anchors alone: they do not train rows."""
    groups = [group["params"] for group in optimizer.param_groups]
    idle = [number for number, group in enumerate(groups) if group and all(isinstance(p, Anchor) for p in group)]
    if not idle or torch._C._current_graph_task_id() != -1:  # in a backward, each parameter may have its own
        return
    if len(idle) == sum(map(bool, groups)):
        raise RuntimeError(
            f"{_name(optimizer)} was given only the parameters of embeddings, which hold no rows: rows have their own "
            "optimizer, EmbeddingBagCollection(..., optimizer=skirl.Adam(lr=...)), and backward applies it. Give torch's "
            "the parameters of the whole model, or leave it out"
        )
    log.warning(
        "group %d of %s has only the parameters of embeddings, and no effect on rows: set lr and weight_decay of their own "
        "optimizer, EmbeddingBagCollection(..., optimizer=skirl.Adam(lr=...))",
        idle[0],
        _name(optimizer),
    )


def _name(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__name__


def _scaled() -> bool:
    """Return whether a GradScaler is making this optimizer step. Only the stack shows it."""
    frame: Any = sys._getframe(2)
    for _ in range(_DEEPEST):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == _SCALING:
            return frame.f_locals["self"].is_enabled()
        frame = frame.f_back
    return False


class DenseGradients:
    """What became of the dense gradients that the step before left behind. One weight that was stepped or cleared is
    enough to be content: a GradScaler skips steps, and of several optimizers one may rest."""

    def __init__(self) -> None:
        watch()
        self.of: Sequence[torch.optim.Optimizer] | None = None
        """The optimizers that train with these rows; None: all that step in the loop's thread."""
        self._step = -1
        self._backwards = self._known = 0
        self._weights: list[Tensor] = []
        """Those of the optimizers, the smallest first."""
        self._kept: list[tuple[Tensor, int, ref[Tensor], int]] = []
        """Weights that a backward gave a gradient: each with its version, its gradient and that one's version."""
        self._before: dict[int, tuple[ref[Tensor], int]] = {}
        """By id of a weight: its gradient after a backward, and that one's version."""
        self._thread = get_ident()
        """The loop's weights; those of other loops are theirs, which may write their gradients now."""
        self._smallest: Tensor | None = None
        """The values of the first: fused optimizers and `weight.data -= ...` leave its version as it is."""

    def in_backward(self, step: int) -> None:
        if stepped:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._ended(step))

    def in_forward(self) -> None:
        """Called in each forward: gradients that somebody touched since the backward are not left as they were."""
        self._thread = get_ident()
        for weight, version, known, grad_version in self._kept:
            grad = weight.grad
            if grad is None or grad is not known() or (weight._version, grad._version) != (version, grad_version):
                self._kept = []
                return

    def _ended(self, step: int) -> None:
        if step != self._step:
            self._step = step
            if self._accumulated():
                self._kept = []
                raise RuntimeError(
                    "this batch added to the dense gradients of the batch before, whose rows had been updated by its own "
                    "backward already. To accumulate over k batches pass accumulate=k to skirl.lookahead; otherwise call "
                    "step() and zero_grad() of the dense optimizer for each batch, and requires_grad_(False) for dense "
                    "weights that are not trained"
                )
        if self._known != len(stepped) or self._backwards % 64 == 0:  # a loop may add optimizers, and weights to them
            self._known = len(stepped)
            ours = self.of
            if ours is None:
                ours = [optimizer for optimizer, thread in list(stepped.items()) if thread == self._thread]
            weights = [w for optimizer in ours for group in optimizer.param_groups for w in group["params"]]
            self._weights = sorted((w for w in weights if isinstance(w, nn.Parameter)), key=Tensor.numel)
        self._backwards += 1
        before, self._before, self._kept = self._before, {}, []
        for weight in self._weights:
            if (grad := weight.grad) is not None:
                known, version = before.get(id(weight), (None, 0))
                self._before[id(weight)] = ref(grad), grad._version
                if known is None or known() is not grad or version != grad._version:  # other models' stay as they were
                    self._kept.append((weight, weight._version, ref(grad), grad._version))
        self._smallest = self._kept[0][0].detach().clone() if self._kept else None

    def _accumulated(self) -> bool:
        added: list[bool] = []
        for weight, version, known, grad_version in self._kept:
            grad = weight.grad
            if weight._version != version or grad is None or grad is not known() or grad._version > grad_version + 1:
                return False
            added.append(grad._version == grad_version + 1)
        return added[:1] == [True] and self._smallest is not None and torch.equal(self._kept[0][0], self._smallest)
