"""The backward of a bank on a GPU: gradients summed by row and given to the optimizer."""

from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import numpy as np
import torch

from skirl.engine.device.base import BankRows, Sums, joined_scales
from skirl.engine.device.streams import Streams
from skirl.engine.device.transfers import Arrival
from skirl.engine.kernels.tree import Parts, TreePlan
from skirl.engine.work import Work


class Computes(Protocol):
    """The part of the GPU that a backward needs."""

    at: torch.device
    dtype: torch.dtype
    kernels: ModuleType
    update: Callable[..., None]

    def empty(self, rows: int, dim: int) -> torch.Tensor: ...

    def up(self, array: np.ndarray) -> torch.Tensor: ...


class GpuBackward(BankRows):
    """The backward and the update of a bank on a GPU. Work on a stream may run later, so it holds all that it needs."""

    rows: torch.Tensor
    """The cache, in the dtype of its numbers."""
    _gpu: Computes
    _streams: Streams
    _nothing: torch.Tensor
    _no_scale: torch.Tensor
    _now: Arrival | None
    """The arrival of the current step."""
    _small: dict[str, tuple[bytes, torch.Tensor]]

    def update(self, work: Work, scalars: np.ndarray, step: int) -> None:
        if len(work.micros) > 1:
            self.apply(work, self.sums(work), scalars, step, 1 / work.shards)
            return
        arrival, gpu, grads = self._current(work), self._gpu, work.gradient(self.facts.number)
        views, scales, mask = arrival.views, self._scales(arrival), work.live_rows(self.facts.number)

        def apply() -> None:
            live = self._nothing if mask.all() else self._remembered("live", mask)
            groups = (
                views["group_start"],
                views["group_pos"],
                self._bags_of(arrival),
                self._sent(views, scales),
                grads,
                live,
            )
            stretches = views["stretches"]
            m = len(stretches)
            marks = torch.empty(m + len(views["rows"]) if m else 0, dtype=torch.int32, device=gpu.at)
            scratch = stretches, gpu.empty(m, self.facts.dim), marks
            self._apply(views, groups, scalars, step, scratch)

        self._streams.begin()  # autograd's thread has the stream of the forward
        self._streams.compute.run(apply)

    def sums(self, work: Work, block: range | None = None) -> Sums:
        bank = self.facts.number
        arrival, tree, grads, mask = self._current(work), None, work.gradient(bank), work.live_rows(bank)
        views, scales = arrival.views, self._scales(arrival)
        if block is not None or arrival.tree is None:
            parts = work.parts(bank)
            tree = TreePlan.of(*work.groups(bank), parts if block is None else parts.within(block))
        starts = ("read_start", "read_pos") if work.reads else ("group_start", "group_pos")
        groups_of = views[starts[0]], views[starts[1]]

        def sums() -> Sums:
            live = self._nothing if mask.all() else self._remembered("live", mask)
            groups = self._bags_of(arrival), self._sent(views, scales), grads, live
            if tree is not None:
                return self._summed(groups_of, groups, tree, self._gpu.up(tree.stretches), self._gpu.up(tree.runs))
            assert arrival.tree is not None
            return self._summed(groups_of, groups, arrival.tree, views["stretches"], views["runs"])

        self._streams.begin()
        return self._streams.compute.now(sums)

    def combined(self, work: Work, parts: Parts, given: Sums) -> Sums:
        step, arrival = work.steps[self.facts.number], self._current(work)
        tree = TreePlan.of(step.group_start, step.group_pos, parts)

        def sums() -> Sums:
            each = torch.arange(len(given.values), dtype=torch.int32, device=self._gpu.at)
            groups = each, self._no_scale, given.values, given.counted
            if step is arrival.work.steps[self.facts.number]:
                starts = arrival.views["group_start"], arrival.views["group_pos"]
            else:
                starts = self._gpu.up(step.group_start), self._gpu.up(step.group_pos)
            return self._summed(starts, groups, tree, self._gpu.up(tree.stretches), self._gpu.up(tree.runs))

        self._streams.begin()
        return self._streams.compute.now(sums)

    def apply(self, work: Work, sums: Sums, scalars: np.ndarray, step: int, times: float = 1.0) -> None:
        rows, views, at = len(sums.values), self._current(work).views, self._gpu.at

        def apply() -> None:
            # The sums are applied as the gradients of rows with one position each.
            each = torch.arange(rows + 1, dtype=torch.int32, device=at)
            scale = self._no_scale if times == 1 else torch.full((rows,), times, dtype=self._gpu.dtype, device=at)
            groups = each, each[:-1], each[:-1], scale, sums.values, sums.counted
            none = self._nothing.view(0, 3), self._gpu.empty(0, self.facts.dim), self._nothing
            self._apply(views, groups, scalars, step, none)

        self._streams.begin()
        self._streams.compute.run(apply)

    def _summed(
        self, starts: tuple[torch.Tensor, torch.Tensor], groups: tuple[torch.Tensor, ...], tree: TreePlan,
        stretches: torch.Tensor, runs: torch.Tensor,
    ) -> Sums:  # fmt: skip
        m, rows = len(stretches), len(starts[0]) - 1
        partial = self._gpu.empty(m, self.facts.dim)
        marks = torch.empty(m + rows, dtype=torch.int32, device=self._gpu.at)
        self._gpu.kernels.sums(*starts, *groups, stretches, runs, tree.rounds, partial, marks)
        return Sums(partial[:rows], marks[:rows] > 0)

    def _apply(
        self, views: dict[str, torch.Tensor], groups: tuple[torch.Tensor, ...], scalars: np.ndarray, step: int,
        scratch: tuple[torch.Tensor, ...],
    ) -> None:  # fmt: skip
        facts = self.facts
        self._gpu.update(
            self.rows, facts.dim, facts.rule, views["rows"], views["keys"], *groups, self._remembered("scalars", scalars),
            facts.clips, *scratch, rounding=(facts.seed, step) if facts.half else None,
        )  # fmt: skip

    def _current(self, work: Work) -> Arrival:
        assert self._now is not None and self._now.work.micros is work.micros, "rows of another step are in place"
        return self._now

    def _bags_of(self, arrival: Arrival) -> torch.Tensor:
        return arrival.views["bag_of"] if arrival.shared_bags is None else arrival.shared_bags

    def _scales(self, arrival: Arrival) -> np.ndarray | None:
        """Return the factors of all positions if the loop has set others than were sent, else None."""
        ids = [m.banks[self.facts.number] for m in arrival.work.micros]
        same = all(i.scale is sent for i, sent in zip(ids, arrival.scales, strict=True))
        return None if same else joined_scales(ids, self.facts.dtype)

    def _sent(self, views: dict[str, torch.Tensor], scales: np.ndarray | None) -> torch.Tensor:
        if scales is None:
            return views["scale"]
        return self._gpu.up(scales) if len(scales) else self._no_scale

    def _remembered(self, name: str, array: np.ndarray) -> torch.Tensor:
        """Return a small array on the device. It is copied again only if it has changed."""
        content = array.tobytes()
        if name not in self._small or self._small[name][0] != content:
            self._small[name] = content, self._gpu.up(array)
        return self._small[name][1]
