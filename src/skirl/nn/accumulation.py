"""Notices dense gradients that a loop accumulates over batches, while each batch's backward updates its rows."""

from collections.abc import Sequence
from threading import get_ident
from weakref import ref

import torch
from torch import Tensor, nn

from skirl.nn.optimizers import stepped, watch


class DenseGradients:
    """What became of the dense gradients that the step before left behind, as its optimizers are known once they stepped.

    One weight that was stepped or cleared is enough to be content: a GradScaler skips steps, and of several optimizers one
    may rest.
    """

    def __init__(self) -> None:
        watch()
        self.of: Sequence[torch.optim.Optimizer] | None = None
        """The optimizers that train with these rows; None: all that step in the loop's thread."""
        self._step = -1
        self._backwards = self._known = 0
        self._weights: list[Tensor] = []
        """Those of the optimizers, the smallest first."""
        self._kept: list[tuple[Tensor, int, ref[Tensor], int]] = []
        """Weights that have a gradient after a backward: each with its version, its gradient and that one's version."""
        self._thread = get_ident()
        """The loop's weights; those of other loops are theirs, which may write their gradients now."""
        self._smallest: Tensor | None = None
        """The values of the first: `weight.data -= ...` leaves its version as it is."""

    def in_backward(self, step: int) -> None:
        """Called in a backward of a step; the check runs at its end."""
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
        self._kept = [(w, w._version, ref(g), g._version) for w in self._weights if (g := w.grad) is not None]
        self._smallest = self._kept[0][0].detach().clone() if self._kept else None

    def _accumulated(self) -> bool:
        """Whether a backward added to gradients that were left, and to nothing else."""
        added = False
        for weight, version, known, grad_version in self._kept:
            grad = weight.grad
            if weight._version != version or grad is None or grad is not known() or grad._version > grad_version + 1:
                return False
            added = added or grad._version == grad_version + 1
        return added and self._smallest is not None and torch.equal(self._kept[0][0], self._smallest)
