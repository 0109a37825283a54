"""On a GPU: the dense part of all variants as one CUDA graph, whose branches are the variants, each with its own kernels.
No GPU has run it yet."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from skirl.sweep.capture import Dense, Unfit, hand_over, inputs_of, tensors_of
from skirl.sweep.contender import Contender, Loss, step_dense
from skirl.sweep.fused import same_bits
from skirl.tools.rng_state import of_torch

WARM = 3
"""Runs before a graph is captured: libraries choose their kernels in the first."""


class Graphed:
    """Trains variants on batches of one layout. It is captured on the first one, which is not trained on here."""

    form = "graph"
    fused = None

    def __init__(self, contenders: Sequence[Contender], loss: Loss, batch: Any) -> None:
        self.contenders = contenders
        device = contenders[0].embeddings.engine.device.at
        self._data = [each.to(device, copy=True) for each in tensors_of(batch)[0]]
        self._weights = [inputs_of(contender.model) for contender in contenders]
        self._parts = [Dense(one.model, loss, one.embeddings.look_up(batch), batch) for one in contenders]
        self._rows, self._inputs, eager = list[list[Tensor]](), list[list[Tensor]](), list[Any]()
        main, branches = torch.cuda.current_stream(device), [torch.cuda.Stream(device) for _ in contenders]
        # Warm on the streams that are captured, since autograd returns to the stream of a leaf.
        for part, branch in zip(self._parts, branches, strict=True):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                own = [each.detach().requires_grad_(each.requires_grad) for each in part.weights.values()]
                self._rows.append([bank.detach().clone().requires_grad_() for bank in part.banks])
                self._inputs.append([*own, *self._rows[-1], *self._data])
                buffers = [each for each in own if not each.requires_grad]
                before, states = [each.clone() for each in buffers], of_torch()
                eager.append([part(*self._inputs[-1]) for _ in range(WARM)][-1])
                if not all(map(torch.equal, before, buffers)):
                    for each, was in zip(buffers, before, strict=True):
                        each.copy_(was)
                    raise Unfit("a model changes its buffers")
                if not all(map(torch.equal, states, of_torch())):
                    raise Unfit("a step draws random numbers")
            main.wait_stream(branch)
        self._graph, self._results = torch.cuda.CUDAGraph(), list[Any]()
        # Other threads copy rows meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            trunk = torch.cuda.current_stream(device)
            for part, inputs, branch in zip(self._parts, self._inputs, branches, strict=True):
                branch.wait_stream(trunk)
                with torch.cuda.stream(branch):
                    self._results.append(part(*inputs))
            for branch in branches:
                trunk.wait_stream(branch)
        self._graph.replay()
        if not all(same_bits(*pair) for both in zip(eager, self._results) for pair in zip(*both, strict=True)):
            raise Unfit("captured, variants have other bits")

    def train(self, form: Any, loss: Loss, batch: Any) -> str:
        outputs = [one.embeddings.look_up(batch, checked=n > 0) for n, one in enumerate(self.contenders)]
        with torch.no_grad():
            for rows, out in zip(self._rows, outputs, strict=True):
                for held, bank in zip(rows, out.banks, strict=True):
                    held.copy_(bank)
            for held, each in zip(self._data, tensors_of(batch)[0], strict=True):
                held.copy_(each, non_blocking=True)
        self._graph.replay()
        for one, part, weights, out, found in zip(
            self.contenders, self._parts, self._weights, outputs, self._results, strict=True
        ):
            end = len(found) - len(out.banks)  # the next replay overwrites what is kept
            hand_over(part, one, weights, out, [*tree_map_only(Tensor, Tensor.clone, found[:end]), *found[end:]])
        step_dense(self.contenders)
        return self.form
