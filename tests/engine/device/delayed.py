"""CUDA streams that are delayed at random, so that a copy or a kernel that no event protects comes too late."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from skirl.engine.device.transfers import CudaStream, CudaStreams

LONGEST = 2_000_000
"""Clock cycles: about a millisecond."""


class DelayedStream(CudaStream):
    """Sleeps on the device before its work, at random."""

    def __init__(self, stream: torch.cuda.Stream, rng: np.random.Generator, share: float) -> None:
        super().__init__(stream)
        self._rng = rng
        self._share = share

    def run(self, work: Callable[[], None]) -> None:
        self._hold_up()
        super().run(work)

    def now(self, work: Callable[[], Any]) -> Any:
        self._hold_up()
        return super().now(work)

    def _hold_up(self) -> None:
        if self._rng.random() < self._share:
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(int(self._rng.integers(LONGEST)))


class DelayedStreams(CudaStreams):
    """share: the share of work that is delayed."""

    def __init__(self, device: torch.device, seed: int, share: float) -> None:
        super().__init__(device)
        self.compute, self.inward, self.outward = (
            DelayedStream(stream.stream, np.random.default_rng([seed, i]), share)  # type: ignore[attr-defined]
            for i, stream in enumerate((self.compute, self.inward, self.outward))
        )
        self._loop = self.compute
