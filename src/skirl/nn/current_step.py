"""The step that a collection is in: its forwards, backwards and micro-batches, and how it comes without a lookahead."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skirl.core.batch import KeyedJagged, Sparse
from skirl.core.groups import TorchHandle
from skirl.core.ids import Hashes, Ids, capture, check_form, hashes_of
from skirl.core.inverse import given_inverse
from skirl.engine.engine import Engine
from skirl.engine.packs import Pack
from skirl.engine.window import Window
from skirl.engine.work import Work
from skirl.nn.optimizers import DenseGradients, unscaled
from skirl.oracle.planner import Plan
from skirl.tools.interrupts import Hold

_OTHERS = (
    "forward takes the batch that the lookahead yielded last, unchanged, and got other ids of feature {name!r}, whose rows "
    "are not there. Take batches only from the lookahead, and let what reads ahead (Lightning, a double-buffered loop) wrap "
    "the loader; change ids before: in the Dataset, in collate_fn or in lookahead(sparse=...); of a wrapped module that is "
    "called several times, name the calls: skirl.wrap(features={{{name!r}: [...]}})"
)
OTHER_WEIGHTS = (
    "forward takes weights of ids as the lookahead yielded them, without a gradient, and got others: make them before, in "
    "lookahead(sparse=...), of a wrapped model sparse=lambda batch: wrapped.sparse(...); where they are made in the loop or "
    "trained, multiply the rows of a skirl.EmbeddingCollection by them"
)


class SameBatch:
    """Checks that forwards of one collection get the batch in the loop. Ids on a GPU are copied and
    compared without waiting, so a mismatch is raised in a later step."""

    def __init__(self, features: Sequence[str]) -> None:
        self._features = frozenset(features)
        self._pending: list[tuple[KeyedJagged, Hashes, Any]] = []
        """What forwards got on a GPU, on its way to the host, with the batch's hashes and the event after the copies."""

    def check(self, sparse: Sparse, ids: Ids) -> None:
        """Raise if ids or weights are not those of the current batch."""
        check_form(sparse)
        shared = ids.shares or given_inverse(sparse) is not None
        if sparse.values().device.type == "cpu" or sparse.weights_or_none() is not None or shared:
            self._compare(capture(sparse, (), copy=False), ids.hashes)
        else:
            self._compare_later(sparse, ids)

    def _compare(self, now: Ids, known: Hashes) -> None:
        found = hashes_of(now)
        if found == known:
            return
        given = {name: hashes for name, hashes in found.items() if name in self._features}
        wrong = next((name for name in given if name not in known or known[name][0] != given[name][0]), None)
        if wrong is not None:
            raise ValueError(_OTHERS.format(name=wrong))
        if any(known[name] != hashes for name, hashes in given.items()):
            raise ValueError(OTHER_WEIGHTS)

    def _compare_later(self, sparse: Sparse, ids: Ids) -> None:
        self.settle()
        if self._features.isdisjoint(sparse.keys()):
            return  # looking up a missing feature raises its own error
        values, offsets = (
            torch.empty_like(of, device="cpu", pin_memory=of.is_cuda).copy_(of, non_blocking=True)
            for of in (sparse.values(), sparse.offsets())
        )
        after = None
        if sparse.values().is_cuda:
            after = torch.cuda.Event()
            after.record()
        self._pending.append((KeyedJagged(sparse.keys(), values, offsets=offsets), ids.hashes, after))

    def settle(self, *, wait: bool = False) -> None:
        """Raise if a forward got other ids on a GPU; wait: also wait for copies still on their way."""
        while self._pending:
            here, known, after = self._pending[0]
            if after is not None and not wait and not after.query():
                return
            if after is not None:
                after.synchronize()
            del self._pending[0]
            try:
                self._compare(capture(here, (), copy=False), known)
            except ValueError as error:
                self._pending.clear()
                wrong = f"{error}. A step before this one has trained wrong rows: resume from a checkpoint"
                raise ValueError(wrong) from None


class CurrentStep:
    """The current step of one collection. A ticket of each bank goes through autograd and comes back here."""

    def __init__(self, engine: Engine, pack: Pack, optimizer: TorchHandle, anchor: Tensor, grad_scaler: Any) -> None:
        self.engine = engine
        self.pack = pack
        self.loop: Any = None
        """The lookahead that brings the steps, while it is open."""
        self.work: Work | None = None
        self.micro = 0
        self.out: Any = None
        self.same = SameBatch(engine.schema.features)
        self.dense = DenseGradients()
        self._optimizer = optimizer
        self.anchor = anchor
        self.grad_scaler: Any = grad_scaler

    def opened(self, loop: Any) -> None:
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
            self.same.settle(wait=True)

    def expect(self, work: Work, micro: int) -> None:
        self.out = None  # it holds the graph of its lookup
        self.work, self.micro = work, micro

    def enter(self) -> Ids:
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
        return self.work is not None and self.work.micros[self.micro].returned

    def finish(self, apply: bool = True) -> None:
        """The step is over: apply the gradients of the micro-batches that came back, or drop them."""
        with Hold():
            self.out = None
            work, self.work = self.work, None
            if apply and work is not None and not work.applied and (work.returned or not self.engine.rows.local):
                self._update(work)

    def update_together(self) -> None:
        """All of the step's backwards that come have come: with several trainers each sends what it has, or nothing."""
        with Hold():
            work = self.work
            if work is not None and not work.applied and not self.engine.rows.local:
                self._update(work)

    def settle(self) -> None:
        """Bring rows to the state after the step in the loop, in the cache or in the store."""
        self.same.settle(wait=True)  # a checkpoint of wrong rows would be the newest
        if self.loop is not None:
            self.loop.settle()
            self.loop.drain()
        else:
            self.finish()

    def drain(self) -> None:
        if self.loop is not None:
            self.loop.drain()

    def require(self, work: Work) -> None:
        if work is not self.work:
            raise RuntimeError(
                "backward of a batch that is not current any more: its rows may have left the cache. Call backward "
                "before the next batch is taken, and before skirl.save; several lookups of one batch need a skirl.lookahead"
            )

    def trained(self, bank: int) -> np.ndarray:
        """Of each feature of a bank: whether its rows are trained by a forward that begins now."""
        return self.pack.trained(bank) & self.anchor.requires_grad

    @property
    def trains(self) -> bool:
        return self.anchor.requires_grad and not self.pack.frozen.all()

    def returned(self, ticket: "Ticket", grad: Tensor | None, of_bags: Tensor | None = None) -> None:
        """Backward reached one bank of one micro-batch: its output, and shared bags that the loop took."""
        if (grad is None and of_bags is None) or not ticket.live.any():
            return
        grad, of_bags = (None if g is None else g.reshape(-1, g.shape[-1]).contiguous() for g in (grad, of_bags))
        if ticket.ids.shares:
            self._keep_shared(ticket, grad, of_bags)
        else:
            assert grad is not None
            if len(ticket.work.micros) > 1:  # whoever made it may reuse its memory
                into = ticket.work.room(ticket.bank, ticket.micro, grad.shape[-1], self.engine.device.empty)
                grad = into.copy_(grad)
            ticket.work.grads[ticket.bank, ticket.micro] = grad
        ticket.work.live[ticket.bank, ticket.micro] = ticket.live & ticket.trained

    def _keep_shared(self, ticket: "Ticket", grad: Tensor | None, of_bags: Tensor | None) -> None:
        """Keep the gradient of a micro-batch whose samples share bags: that of the output, [batch * features, dim], and
        that of the shared bags themselves, [shared bags, dim], if the loop used them."""
        engine, ids, bank = self.engine, ticket.ids, ticket.bank
        into = ticket.work.room(bank, ticket.micro, self.pack.schema.banks[bank].dim, engine.device.empty)
        folded = into[ids.samples :]
        if grad is not None and len(ids.columns) < ids.features:
            into[: ids.samples].copy_(grad)
        else:
            into[: ids.samples].zero_()  # nobody reads it but who looks for numbers that are not finite
        engine.banks[bank].fold(ids, grad, folded)
        if of_bags is not None:
            folded += of_bags

    def backward_done(self, work: Work) -> None:
        """Backward of one micro-batch is complete; the last one updates the rows."""
        with Hold():  # a step that returned and was not updated would be applied later, by `finish`
            work.returned += 1
            if work.returned == len(work.micros):
                self._update(work)

    def _update(self, work: Work) -> None:
        """Under a `Hold`."""
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
        """Divide the loss scale out; False when a gradient is not finite and the step is to be skipped. The anchor's
        gradient says which, so that `scaler.step(embeddings.optimizer)` tells the scaler: rows may overflow where no
        dense gradient does."""
        self._optimizer.anchor.grad = torch.zeros_like(self._optimizer.anchor)
        inverse = 1.0 / self.grad_scaler.get_scale()
        for (bank, micro), grad in work.grads.items():
            live, ids, rows = work.live[bank, micro], work.micros[micro].banks[bank], grad
            if ids.shares or not live.all():
                rows = rows[torch.from_numpy(ids.by_bag(live)).to(grad.device)]
            if not torch.isfinite(rows).all():  # of rows that are trained: what is frozen may be anything
                return False
        for place, grad in work.grads.items():
            work.grads[place] = grad * inverse if len(work.micros) == 1 else grad.mul_(inverse)
        return True


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
        self.used = False

    def release(self) -> None:
        """Let go of the batch: who keeps a loss keeps its graph, and this ticket with it."""
        del self.work, self.ids


_PLAN = Plan(depth=1, prefetch=0)


class StepByStep:
    """The steps of one collection without a lookahead. They share a window until something invalidates it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._window: Window | None = None
        self._done = 0

    def forget(self) -> None:
        self._window = None

    def step(self, ids: Ids) -> Work:
        engine = self._engine
        if self._window is None:
            self._window, self._done = Window([engine], _PLAN), 0
            engine.forget_moves()
        with Hold() as hold:
            try:
                work = self._planned(self._window, ids)
                with hold.released():  # a store may hang
                    engine.fetch(work)
                leaving = engine.load(work)
                self._done = work.number + 1
                self._window.executed(self._done)
                hold.most = 2  # the first Ctrl-C waits for the write, the second abandons the rows
                engine.write(leaving)
                hold.most = None
            except BaseException:
                self._window.rollback(self._done)  # the step did not happen
                self._window = None
                raise
        return work

    def _planned(self, window: Window, ids: Ids) -> Work:
        capacity = self._engine.capacity
        by_one = capacity.by_one or capacity.split is None  # a lookahead will split by its window
        try:
            window.enter([ids])
            works = window.next()
            if works is None:  # it fits if the cache is split anew among banks
                self._engine.drop_caches()
                window.begin_anew()
                works = window.next()
                assert works is not None
        finally:
            capacity.by_one = by_one
        return works[0]
