"""The step that the loop is in: its forwards, backwards and micro-batches."""

from collections.abc import Sequence
from threading import get_ident
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from skirl.core.handle import TorchHandle
from skirl.core.ids import Ids
from skirl.engine.engine import Engine
from skirl.engine.work import Work
from skirl.nn.optimizers import stepped, unscaled, watch
from skirl.nn.same_batch import SameBatch
from skirl.tools.interrupts import uninterrupted


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


class Loop(Protocol):
    """What brings steps one after the other: a lookahead."""

    @property
    def iterating(self) -> bool:
        """Whether a pass has begun and not ended."""
        ...

    def coming(self) -> list[Ids]:
        """The batches after the one in the loop, as far as they were read."""
        ...

    def settle(self) -> None:
        """End the step in the loop, so that rows are as after it."""

    def drain(self) -> None:
        """Wait until rows that have left the cache are in the store."""

    def close(self) -> None:
        """End the pass and let the embeddings go."""


class CurrentStep:
    """The current step of one collection. A ticket of each bank goes through autograd and comes back here."""

    def __init__(
        self, engine: Engine, optimizer: TorchHandle, anchor: Tensor, same: SameBatch, grad_scaler: Any
    ) -> None:
        self.engine = engine
        self.loop: Loop | None = None
        """The lookahead over these rows, while it is open."""
        self.work: Work | None = None
        self.micro = 0
        self.out: Any = None
        """What was looked up for the current micro-batch."""
        self._same = same
        self.dense = DenseGradients()
        self._optimizer = optimizer
        self.anchor = anchor
        self.grad_scaler: Any = grad_scaler

    def opened(self, loop: Loop | None) -> None:
        """Called by a lookahead that begins; with `None` when it ends."""
        if loop is not None and self.loop is not None:
            raise RuntimeError(
                "another lookahead over these embeddings is open: leave its with-block first, or call "
                "embeddings.lookahead.close()"
            )
        self.finish()
        self.loop = loop
        if loop is None:
            unscaled.discard(self)
            self._same.settle(wait=True)

    def expect(self, work: Work, micro: int) -> None:
        """The next forward is of this micro-batch."""
        self._leave()
        self.work, self.micro = work, micro

    def _leave(self) -> None:
        """The micro-batch is not in the loop any more."""
        self.out = None  # it holds the graph of its lookup
        if self.work is not None:
            self._same.leave(self.work.micros[self.micro])

    def enter(self) -> Ids:
        """Its forward runs now."""
        if self.work is None:
            raise RuntimeError(
                "no batch is current: run forward on the batch that the lookahead yielded last, inside its loop"
            )
        if self.engine.store.read_only:
            raise RuntimeError(
                f"{self.engine.store!r} cannot be trained: call model.eval() to look rows up, or make the embeddings with "
                "another store and skirl.load the checkpoint into them"
            )
        self.dense.in_forward()
        micro = self.work.micros[self.micro]
        if micro.returned:
            raise RuntimeError(
                "the batch in the loop had its backward, which ends its lookups: look all of it up before, and sum the "
                "losses. For a second look use model.eval() or torch.no_grad(); for micro-batches use "
                "lookahead(accumulate=k)"
            )
        return micro

    @property
    def returned_now(self) -> bool:
        """Whether the micro-batch in the loop had its backward."""
        return self.work is not None and self.work.micros[self.micro].returned

    def finish(self, apply: bool = True) -> None:
        """The step is over: apply the gradients of the micro-batches that came back, or drop them."""
        with uninterrupted():
            self._leave()
            work, self.work = self.work, None
            if apply and work is not None and not work.applied and (work.returned or not self.engine.rows.local):
                self._update(work)

    def update_together(self) -> None:
        """All of the step's backwards that come have come: with several trainers each sends what it has, or nothing."""
        with uninterrupted():
            work = self.work
            if work is not None and not work.applied and not self.engine.rows.local:
                self._update(work)

    def settle(self) -> None:
        """Bring rows to the state after the step in the loop, in the cache or in the store."""
        self._same.settle(wait=True)  # a checkpoint of wrong rows would be the newest
        if self.loop is not None:
            self.loop.settle()
            self.loop.drain()
        else:
            self.finish()

    def drain(self) -> None:
        """Wait until rows that have left the cache are in the store."""
        if self.loop is not None:
            self.loop.drain()

    def require(self, work: Work) -> None:
        """Refuse a backward that comes too late."""
        if work is not self.work:
            raise RuntimeError(
                "backward of a batch that is not current any more: its rows may have left the cache. Call backward "
                "before the next batch is taken, and before skirl.save; several lookups of one batch need a skirl.lookahead"
            )

    def trained(self, bank: int) -> np.ndarray:
        """Of each feature of a bank: whether its rows are trained by a forward that begins now."""
        return self.engine.trained(bank) & self.anchor.requires_grad

    @property
    def trains(self) -> bool:
        """Whether any rows are trained by a forward that begins now."""
        return self.anchor.requires_grad and not self.engine.frozen.all()

    def returned(self, ticket: "Ticket", grad: Tensor | None, of_bags: Tensor | None = None) -> None:
        """Backward reached one bank of one micro-batch: its output, and shared bags that the loop took."""
        if (grad is None and of_bags is None) or not ticket.live.any():
            return
        grad, of_bags = (None if g is None else g.reshape(-1, g.shape[-1]).contiguous() for g in (grad, of_bags))
        if ticket.ids.folded is not None:
            _keep_shared(self.engine, ticket.work, ticket.bank, ticket.micro, grad, of_bags)
        else:
            assert grad is not None
            ticket.work.keep(ticket.bank, ticket.micro, grad, self.engine.device.empty)
        ticket.work.live[ticket.bank, ticket.micro] = ticket.live & ticket.trained

    def backward_done(self, work: Work) -> None:
        """Backward of one micro-batch is complete; the last one updates the rows."""
        self.dense.in_backward(self.engine.counters.steps)
        with uninterrupted():  # a step that returned and was not updated would be applied later, by `finish`
            work.returned += 1
            if work.returned == len(work.micros):
                self._update(work)

    def _update(self, work: Work) -> None:
        """Under `uninterrupted`."""
        scaler = self.grad_scaler
        if scaler is None and any(live.any() for live in work.live.values()):
            unscaled.add(self)
        finite = scaler is None or not scaler.is_enabled() or self._unscale(work)
        settings = self._optimizer.settings()
        try:
            if not self.engine.update(work, settings, finite):
                self._optimizer.anchor.grad = torch.full_like(self._optimizer.anchor, torch.inf)
        except BaseException as error:
            self.engine.lose(f"rows of a step were being updated when {error!r} happened", error)
            raise

    def _unscale(self, work: Work) -> bool:
        """Divide the loss scale out; False when a gradient is not finite and the step is to be skipped.

        The anchor's gradient says which, so that `scaler.step(embeddings.optimizer)` lets the scaler know as well: rows
        may overflow where no dense gradient does, and would be skipped for ever at a scale that nobody lowers.
        """
        self._optimizer.anchor.grad = torch.zeros_like(self._optimizer.anchor)
        assert self.grad_scaler is not None
        inverse = 1.0 / self.grad_scaler.get_scale()
        for (bank, micro), grad in work.grads.items():
            live, ids = work.live[bank, micro], work.micros[micro].banks[bank]
            rows = grad
            if bank in work.apart:
                rows = torch.cat([grad, work.apart[bank]])
            if ids.shared is not None or not live.all():
                rows = rows[torch.from_numpy(ids.by_bag(live)).to(grad.device)]
            if not torch.isfinite(rows).all():  # of rows that are trained: what is frozen may be anything
                return False
        for place, grad in work.grads.items():
            work.grads[place] = grad * inverse if len(work.micros) == 1 else grad.mul_(inverse)
        for of_bags in work.apart.values():
            of_bags.mul_(inverse)
        return True


def _keep_shared(
    engine: Engine, work: Work, bank: int, micro: int, grad: torch.Tensor | None, of_bags: torch.Tensor | None
) -> None:
    """Keep the gradient of a micro-batch whose samples share bags.

    - `grad`: gradient of the output, [batch * features, dim]; None: it has none.
    - `of_bags`: gradient of the shared bags themselves, [shared bags, dim], if the loop used them; None: they have
      none.
    """
    shared, rows, dim = work.micros[micro].banks[bank].folded, engine.banks[bank], engine.schema.banks[bank].dim
    assert shared is not None
    empty, alone = engine.device.empty, len(work.micros) == 1 and engine.rows.local
    if alone and rows.reads_apart and grad is not None and work.micros[micro].learned is None:
        work.grads[bank, micro] = grad  # not copied: it may be far larger than that of the shared bags
        work.apart[bank] = folded = empty(shared.bags, dim)
    else:
        into = work.room(bank, micro, dim, empty)
        folded = into[shared.samples :]
        if grad is not None and shared.plain.any():
            into[: shared.samples].copy_(grad)
    rows.fold(shared, grad, folded)
    if of_bags is not None:
        folded += of_bags


class Ticket:
    """One bank of one micro-batch on its way through autograd: which features' gradients came back."""

    def __init__(self, current: CurrentStep, work: Work, micro: int, bank: int) -> None:
        self.current = current
        self.engine = current.engine
        self.work = work
        self.micro = micro
        self.bank = bank
        self.ids = work.micros[micro].banks[bank]
        self.live = np.zeros(len(self.engine.schema.banks[bank].features), np.bool_)
        self.trained = current.trained(bank)
        """Of each feature: whether its rows are trained, as of its forward."""
        self.passes = self.trained.copy()
        """Of each feature: whether a gradient of it goes anywhere: to its rows, or to the weights of its ids."""
        self.used = False

    def release(self) -> None:
        """Let go of the batch: who keeps a loss keeps its graph, and this ticket with it."""
        del self.work, self.ids
