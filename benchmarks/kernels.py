"""Claim: on a GPU, pooling and the fused backward move rows at the rate of a plain copy.

The bytes that each kernel has to move over its time, as a share of the bandwidth of a copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from common import Bench, main, result, seconds
from skirl.core.optim import ROW_OPTIMIZERS, RowOptimizer
from skirl.engine.device import open_device
from skirl.engine.kernels.tree import Gradients, stretches_of

SLEEP = 2_000_000
"""Clock cycles, about a millisecond: the GPU sleeps while the timed launch is queued behind it."""
Launch = tuple[Callable[[], object], int]
"""A launch of a kernel, and the bytes that it moves."""


@dataclass(frozen=True)
class Kernels(Bench):
    """Share of a copy's bandwidth that pooling and the fused backward reach on a GPU."""

    device: str = "cuda"
    """cuda, cuda:N, or interpret, which only checks that the kernels run."""
    dim: int = 64
    """Numbers in the vector of a row."""
    batch: int = 16_384
    """Samples in a step."""
    cache: int = 8_000_000
    """Rows in the cache; the default is 2 GB at dim 64, 40 times the 50 MB of an H100's L2 cache."""
    rounds: int = 20
    """Launches of each kernel."""

    def run(self) -> dict[str, Any]:
        """Time all kernels and a copy in turn and return the figures."""
        gpu = open_device(self.device, np.dtype(np.float32))
        if gpu.at.type == "cuda":
            torch.cuda.set_device(gpu.at)  # kernels run on the current device
        source = torch.ones(self.cache * self.dim // 2, device=gpu.at)
        to = torch.empty_like(source)
        work: dict[str, Launch] = {"copy": (lambda: to.copy_(source), 2 * source.nbytes)}
        shared = _Shared(self, gpu.at)
        work["forward"] = shared.forward()
        for name, optimizer in ROW_OPTIMIZERS.items():
            work[f"backward, {name}"] = shared.backward(optimizer())
        spent: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(self.rounds + 2):  # the first two compile and warm up
            for name, (launch, _) in work.items():
                spent[name].append(_timed(launch, gpu.at))
        rates = {name: nbytes / median(spent[name][2:]) for name, (_, nbytes) in work.items()}
        return result(
            "kernels", self, "dim batch", cache_rows=self.cache, distinct=shared.distinct,
            device=self.device if gpu.at.type == "cpu" else torch.cuda.get_device_name(gpu.at),
            copy_gb_s=float(f"{rates['copy'] / 1e9:.3g}"),
            share_of_copy={name: float(f"{rate / rates['copy']:.3g}") for name, rate in rates.items() if name != "copy"},
        )  # fmt: skip


class _Shared:
    """The data that all kernels of a run work on."""

    def __init__(self, flags: Kernels, at: torch.device) -> None:
        rng = np.random.default_rng(0)
        self.flags, self.at = flags, at
        slots = rng.integers(0, flags.cache, flags.batch * 26).astype(np.int32)
        rows, place = np.unique(slots, return_inverse=True)
        counts = np.bincount(place)
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        bag_of = np.arange(len(slots)).reshape(flags.batch, 26).T.reshape(-1)
        self.distinct = len(rows)

        def up(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(at)

        self.slots, self.rows = up(slots), up(rows.astype(np.int32))
        self.keys = torch.zeros(len(rows), dtype=torch.int64, device=at)
        self.start, self.pos = up(start), up(np.argsort(place, kind="stable").astype(np.int32))
        self.bag_of, self.stretches = up(bag_of.astype(np.int32)), up(stretches_of(start))
        self.grads = torch.randn(len(slots), flags.dim, device=at)
        self.empty, self.no_scale = torch.empty(0, dtype=torch.int32, device=at), torch.empty(0, device=at)

    def forward(self) -> Launch:
        from skirl.engine.kernels.gpu import pool

        flags, out = self.flags, torch.empty_like(self.grads)
        cache = torch.zeros(flags.cache, flags.dim, device=self.at)
        launch = lambda: pool(cache, flags.dim, self.slots, self.empty, 26, self.no_scale, out)  # noqa: E731
        return launch, 2 * out.nbytes + self.slots.nbytes

    def backward(self, optimizer: RowOptimizer) -> Launch:
        from skirl.engine.kernels.gpu import update

        dim, m = self.flags.dim, len(self.stretches)
        cache = torch.zeros(self.flags.cache, optimizer.width(dim), device=self.at)
        scalars = torch.tensor([optimizer.numbers(0.1, 0.0, 1)], device=self.at)
        partial = torch.empty(m, dim, device=self.at)
        marks = torch.empty(m + self.distinct, dtype=torch.int32, device=self.at)
        gradients = Gradients(self.start, self.pos, self.bag_of, self.no_scale, self.grads, self.empty)
        given = self.rows, self.keys, gradients, scalars
        launch = lambda: update(cache, dim, optimizer.rule, *given, False, self.stretches, partial, marks)  # noqa: E731
        plan = sum(array.nbytes for array in (self.rows, self.keys, self.start, self.pos, self.bag_of))
        return launch, self.grads.nbytes + 2 * self.distinct * cache.shape[1] * 4 + plan


def _timed(launch: Callable[[], object], at: torch.device) -> float:
    """Return the seconds that one launch takes, by the GPU's own clock if there is one."""
    if at.type != "cuda":
        return seconds(launch)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP)
    before.record()
    launch()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


if __name__ == "__main__":
    main(Kernels)
