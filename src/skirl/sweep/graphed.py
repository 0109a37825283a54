"""On a GPU: the dense part of all variants as one CUDA graph, whose branches are the variants, each with its own kernels."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from skirl.core.batch import Batch
from skirl.sweep.capture import Unfit, instead, reparametrized, weights_of
from skirl.sweep.contender import Contender, Loss, random_states
from skirl.sweep.fused import same_bits
from skirl.tools.rng_state import unchanged

log = logging.getLogger("skirl")

WARM = 3
"""Runs before a graph is captured: libraries choose their kernels in the first."""


class Graphed:
    """Trains variants on batches of one shape. It is captured on the first one, which is not trained on here."""

    def __init__(self, contenders: Sequence[Contender], loss: Loss, batch: Batch) -> None:
        self.contenders, self._loss = contenders, loss
        device = contenders[0].embeddings.engine.device.at
        self._batch = replace(batch, dense=batch.dense.to(device), labels=batch.labels.to(device))
        self._rows: list[list[Tensor]] = []
        self._live: list[Any] = []
        self._outputs: list[Any] = []
        outputs = []
        for contender in contenders:
            with contender.turn():
                outputs.append(contender.embeddings(batch.sparse))
            self._rows.append([bank.detach().clone().requires_grad_(bank.requires_grad) for bank in outputs[-1].banks])
        self._weights = [weights_of(contender.model) for contender in contenders]
        main, branches = torch.cuda.current_stream(device), [torch.cuda.Stream(device) for _ in contenders]
        self._own, eager = list[dict[str, Tensor]](), list[Any]()
        # Warm on the streams that are captured, since autograd returns to the stream of a leaf.
        for n, branch in enumerate(branches):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                own = self._weights[n].items()
                self._own.append({name: weight.detach().requires_grad_(weight.requires_grad) for name, weight in own})
                self._rows[n] = [bank.detach().requires_grad_(bank.requires_grad) for bank in self._rows[n]]
                part, live = outputs[n].over(self._rows[n])
                self._outputs.append(part)
                self._live.append(live)
                before = [buffer.clone() for buffer in contenders[n].model.buffers()], random_states()
                alone = [self._run(n) for _ in range(WARM)]
                eager.append(alone[-1])
                for buffer, was in zip(contenders[n].model.buffers(), before[0], strict=True):
                    if not torch.equal(buffer, was):
                        buffer.copy_(was)
                        raise Unfit("a model changes its buffers")
                if not all(map(torch.equal, before[1], random_states())):
                    raise Unfit("a step draws random numbers")
            main.wait_stream(branch)
        self._graph, self._results = torch.cuda.CUDAGraph(), list[Any]()
        # Other threads copy rows meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            trunk = torch.cuda.current_stream(device)
            for n, branch in enumerate(branches):
                branch.wait_stream(trunk)
                with torch.cuda.stream(branch):
                    self._results.append(self._run(n))
            for branch in branches:
                trunk.wait_stream(branch)
        self._graph.replay()
        if not all(map(same_bits, tree_leaves(eager), tree_leaves(self._results))):
            raise Unfit("captured, variants have other bits")

    def fits(self, batch: Batch) -> bool:
        """Return whether a batch has the shape that was captured."""
        own = self._batch
        return batch.dense.shape == own.dense.shape and batch.labels.shape == own.labels.shape

    def _run(self, n: int) -> tuple[Tensor, Any, Sequence[Tensor | None]]:
        contender, own = self.contenders[n], self._own[n]
        trained = [weight for weight in own.values() if weight.requires_grad]

        with (
            instead(contender.embeddings, lambda sparse: self._outputs[n].only(sparse.keys())),
            reparametrized(contender.model, own),
        ):
            found = self._loss(contender.model, self._batch)
        loss, kept = found if isinstance(found, tuple) else (found, None)
        return loss.detach(), kept, torch.autograd.grad(loss, [*trained, *self._rows[n]], allow_unused=True)

    def step(self, batch: Batch) -> None:
        outputs = []
        for contender, rows in zip(self.contenders, self._rows, strict=True):
            with contender.turn():
                outputs.append(contender.embeddings(batch.sparse))
            with torch.no_grad():
                for held, bank in zip(rows, outputs[-1].banks, strict=True):
                    held.copy_(bank)
        self._batch.dense.copy_(batch.dense, non_blocking=True)
        self._batch.labels.copy_(batch.labels, non_blocking=True)
        self._graph.replay()
        for n, (contender, out) in enumerate(zip(self.contenders, outputs, strict=True)):
            loss, kept, grads = self._results[n]
            weights = [weight for weight in self._weights[n].values() if weight.requires_grad]
            for weight, grad in zip(weights, grads, strict=False):
                own = weight.grad
                weight.grad = own if grad is None else grad.clone() if own is None else own.add_(grad)
            with contender.turn():
                out.backward(grads[len(weights) :], self._live[n])
                contender.kept = tree_map_only(Tensor, Tensor.clone, kept)
                contender.step(loss)


class Graphs:
    """The graph of the variants that race, captured anew when some leave. What cannot be captured trains in turns."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self._unfit = loss, False
        self._graph: Graphed | None = None

    def step(self, racing: Sequence[Contender], batch: Any) -> bool:
        """Train all on a batch. Return False, with nothing trained, if they have to be trained in turns."""
        if self._unfit or not isinstance(batch, Batch) or not all(one.embeddings.pooled for one in racing):
            return False
        current = racing[0].embeddings.current
        if current.work is not None and current.work.micros[current.micro].shares:
            return False
        if self._graph is None:
            try:
                with unchanged():
                    self._graph = Graphed(racing, self._loss, batch)
            except Exception as error:  # of a model or a loss that waits for the GPU, draws numbers, or keeps some
                log.info("variants train in turns: %s", error)
                self._unfit = True
                return False
        if not self._graph.fits(batch):
            return False
        self._graph.step(batch)
        return True

    def forget(self) -> None:
        self._graph = None
