"""On a GPU: the dense part of all variants as one CUDA graph, whose branches are the variants, each with its own kernels.
No GPU has run it yet."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from skirl.sweep.capture import Captured, Dense

WARM = 3
"""Runs before a graph is captured: libraries choose their kernels in the first."""


class Graphed:
    """The steps of variants, which need not be alike, as branches of one CUDA graph over copies of their inputs."""

    form: Literal["graph"] = "graph"

    def __init__(self, captured: Sequence[Captured], each: Sequence[Dense], device: torch.device) -> None:
        self.captured = captured
        main, branches = torch.cuda.current_stream(device), [torch.cuda.Stream(device) for _ in each]
        self._inputs, self._outputs = list[list[Tensor]](), list[list[Any]]()
        for dense, branch in zip(each, branches, strict=True):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):  # the one that is captured: autograd returns to the stream of a leaf
                inputs = [of.detach().to(device, copy=True).requires_grad_(of.requires_grad) for of in dense.inputs]
                self._inputs.append(inputs)
                for _ in range(WARM):
                    dense(*inputs)
            main.wait_stream(branch)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads copy rows meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            trunk = torch.cuda.current_stream(device)
            for dense, inputs, branch in zip(each, self._inputs, branches, strict=True):
                branch.wait_stream(trunk)
                with torch.cuda.stream(branch):
                    self._outputs.append(dense(*inputs))
            for branch in branches:
                trunk.wait_stream(branch)

    @torch.no_grad()
    def __call__(self, each: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
        """Return the outputs of each variant."""
        for inputs, given in zip(self._inputs, each, strict=True):
            for held, of in zip(inputs, given, strict=True):
                held.copy_(of, non_blocking=True)
        self._graph.replay()
        return [tree_map_only(Tensor, Tensor.clone, outputs) for outputs in self._outputs]
