"""Moves of a bank on a GPU for steps other than the one in the loop, on a separate stream. **Not run on a GPU yet.**"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from skirl.engine.device.gpu_backward import GpuBackward
from skirl.engine.device.streams import Stream
from skirl.engine.device.transfers import Arrival, Departure
from skirl.engine.work import Work

T = TypeVar("T")

# What has to hold between the loop's stream and the one aside, and what ensures it. Each of the two keeps its own order.
#
# rows and gradients aside are those of the step before     `branch`: aside waits for the loop's stream
# early values of rows that come are there                  `values_ahead`: aside waits for the inward event
# no row leaves, and no value is read, before it moved      `join`: the loop's stream waits for aside, before it loads a step
# memory of one stream is not reused under the other        `picked` and `place` keep what they get


class GpuMoves(GpuBackward):
    """The loop gives all moves to the device, in one order on all trainers. The device does them while it computes."""

    moves_ahead = True
    rows: torch.Tensor
    _pending: dict[int, Departure]
    _fill: Callable[..., None]
    """Writes the first records of rows: of these keys, to these slots of an array."""
    _is_aside = False
    _where: np.ndarray
    """By slot, for rows that are coming: the index of their records. -1 otherwise."""

    def branch(self) -> None:
        self._streams.begin()
        self._streams.aside.wait(self._streams.compute.record())

    def aside(self, work: Callable[..., T], *args: Any) -> T:
        self._is_aside = True
        try:
            return self._streams.aside.now(lambda: work(*args))
        finally:
            self._is_aside = False

    def join(self) -> None:
        self._streams.compute.wait(self._streams.aside.record())

    def _here(self) -> Stream:
        """Return the stream that work goes to now."""
        if self._is_aside:
            return self._streams.aside
        self._streams.begin()  # autograd's thread has the stream of the forward
        return self._streams.compute

    def values(self, work: Work, which: np.ndarray | None = None) -> torch.Tensor:
        planned, slots = self._current(work).views["slots"], work.steps[self.facts.number].slots
        return self._here().now(
            lambda: self._weights(self.rows, planned if which is None else self._gpu.up(slots[which]))
        )

    def values_ahead(self, work: Work, which: np.ndarray | None = None) -> torch.Tensor:
        facts, step = self.facts, work.steps[self.facts.number]
        arrival: Arrival = work.fetched[facts.number]
        stream = self._here()
        assert arrival.came is not None
        stream.wait(arrival.came)
        slots = step.slots if which is None else step.slots[which]

        def values() -> torch.Tensor:
            # Rows that are still to come get whatever is in their slots now.
            out = self._weights(self.rows, self._gpu.up(slots))
            fetched = arrival.rows.on_device(len(step.fetch_keys), facts.width, self._gpu.dtype)
            coming: list[tuple[np.ndarray, np.ndarray, torch.Tensor]] = []
            coming.append((step.fetch_slots, np.arange(len(step.fetch_slots)), fetched))
            if len(step.new_keys):
                made = self._gpu.empty(len(step.new_keys), facts.width)
                each = np.arange(len(step.new_keys), dtype=np.int32)
                self._fill(self._gpu.up(step.new_keys), self._gpu.up(each), self._numbers(made))
                coming.append((step.new_slots, each, made))
            for number in np.unique(step.forward_step):
                gone, of = self._pending[int(number)], step.forward_step == number
                records = gone.block.on_device(gone.count, facts.width, self._gpu.dtype)
                coming.append((step.forward_slots[of], step.forward_index[of], records))
            for places, index, records in coming:
                self._where[places] = index
                found = self._where[slots]
                self._where[places] = -1
                if len(at := np.flatnonzero(found >= 0)):
                    weights = self._weights(self._numbers(records), self._gpu.up(found[at]))
                    out.index_copy_(0, self._gpu.up(at), weights)
            return out

        return stream.now(values)

    def picked(self, vectors: torch.Tensor, which: np.ndarray) -> torch.Tensor:
        stream = self._here()
        stream.keep(vectors)
        return stream.now(lambda: vectors.index_select(0, self._gpu.up(which)))

    def place(self, into: torch.Tensor, which: np.ndarray, vectors: torch.Tensor) -> None:
        stream = self._here()
        stream.keep(into)
        index = which.astype(np.int64)

        def put() -> None:
            into.index_copy_(0, self._gpu.up(index), vectors)

        stream.run(put)

    def _weights(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the weights of some records, in the dtype of computation."""
        out = self._gpu.empty(len(slots), self.facts.dim)
        self._gpu.kernels.pool(rows, self.facts.dim, slots, self._nothing, 1, self._no_scale, out)
        return out

    def _numbers(self, records: torch.Tensor) -> torch.Tensor:
        """Return records in the dtype of their numbers, from the one in which they travel."""
        return records.view(self.facts.half) if self.facts.half else records
