"""The engine's Triton kernels as a backend: one launch for all tables of a rank that have one dim, as a bank has, timed by
CUDA events. **Not run on a GPU yet**: tests run it in Triton's interpreter, with a clock of their own."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from skirl.engine.kernels.hot_rows import stretches_of
from skirl.placement.tables.measure import ARENA, EVICTED, OUTPUTS, WATCHED, Indexed, Lookups, MeasuredTables
from skirl.placement.tables.pieces import Piece

_FLOAT = 4
Step = Callable[[], None]


def by_events(step: Step) -> float:
    """Return the milliseconds that a GPU takes for a step, between two events on the current stream.

    **Arguments**

    - `step`: starts the step.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


class GpuArena(MeasuredTables):
    """Memory on a GPU in which parts of tables are measured, one rank after the other.

    **Arguments**

    - `floats`: number of floats for rows and their optimizer state.
    - `on`: the device; tests take the CPU.
    - `timer`: runs a step and returns its milliseconds.
    """

    clock: Callable[[], float] = staticmethod(perf_counter)

    def __init__(self, floats: int = ARENA, *, on: str = "cuda", timer: Callable[[Step], float] = by_events) -> None:
        self.on, self.timer = torch.device(on), timer
        self.device, cache = on, 0
        if self.on.type == "cuda":
            about = torch.cuda.get_device_properties(self.on)
            self.device, cache = about.name, about.L2_cache_size
        self.floats = torch.ones(floats, device=self.on)
        self.places = torch.ones(OUTPUTS, device=self.on)
        self.read = torch.ones(max(EVICTED, 2 * cache // _FLOAT), device=self.on)
        self._at = 0

    def place(self, rows: int, dim: int) -> torch.Tensor:
        """Return the next place for pooled vectors or their gradients. Start over at the end; grow if they do not fit.

        **Arguments**

        - `rows`, `dim`: how many vectors, and the numbers of each.
        """
        count = rows * dim
        if count > len(self.places):
            self.places, self._at = torch.ones(2 * count, device=self.on), 0
        if self._at + count > len(self.places):
            self._at = 0
        begin, self._at = self._at, self._at + count
        return self.places[begin : begin + count].view(rows, dim)

    def evict(self) -> float:
        """Start to read enough to evict everything else from the GPU's cache."""
        self.read.sum()
        return 0.0

    def watched(self) -> None:
        """Do the sentinel's small work, and wait for it."""
        self.read[:WATCHED].sum()
        if self.on.type == "cuda":
            torch.cuda.synchronize(self.on)

    def ready(self, lookups: Lookups, piece: Piece) -> Any:
        """Return a part of a table, ready to be run.

        **Arguments**

        - `lookups`: lookups of the whole table.
        - `piece`: the part.
        """
        return Indexed(lookups, piece, len(self.floats))

    def together(self, parts: Sequence[Any]) -> Step:
        """Return what `run_ms` takes for a rank with these parts.

        **Arguments**

        - `parts`: parts of the rank.
        """
        alike: dict[tuple[int, ...], list[Indexed]] = {}
        for part in parts:
            alike.setdefault((part.width, part.dim, part.kind, part.batch), []).append(part)
        banks = [KernelParts(self, some) for some in alike.values()]

        def step() -> None:
            for bank in banks:
                bank.forward()
            for bank in banks:
                bank.backward()

        return step

    def run_ms(self, parts: Step) -> float:
        """Return the milliseconds that the GPU takes for a rank's step.

        **Arguments**

        - `parts`: what `together` returned.
        """
        self.evict()
        return self.timer(parts)


class KernelParts:
    """Parts of one dim, row optimizer and batch size, which the Triton kernels take together.

    **Arguments**

    - `arena`: the arena that holds their rows.
    - `parts`: the parts.
    """

    def __init__(self, arena: GpuArena, parts: Sequence[Indexed]) -> None:
        from skirl.engine.kernels import gpu

        self.gpu, first, count = gpu, parts[0], len(parts)
        self.dim, self.kind, self.features = first.dim, first.kind, count
        records = len(arena.floats) // first.width
        self.cache = arena.floats[: records * first.width].view(records, first.width)
        positions = np.cumsum([0, *(len(of.slots) for of in parts)])
        starts = [of.group_start[:-1] + before for of, before in zip(parts, positions[:-1], strict=True)]
        start = np.concatenate([*starts, positions[-1:]]).astype(np.int32)
        bags = [of.offsets[:-1] + before for of, before in zip(parts, positions[:-1], strict=True)]
        stretches = stretches_of(start)

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(arena.on)

        self.slots = put(np.concatenate([of.slots for of in parts]))
        self.offsets = put(np.concatenate([*bags, positions[-1:]]).astype(np.int32))
        self.rows, self.keys = (put(np.concatenate([getattr(of, name) for of in parts])) for name in ("rows", "keys"))
        self.start, self.stretches = put(start), put(stretches)
        self.pos = put(
            np.concatenate([of.group_pos + before for of, before in zip(parts, positions, strict=False)]).astype(
                np.int32
            )
        )
        self.bag_of = put(np.concatenate([of.bag_of * count + n for n, of in enumerate(parts)]).astype(np.int32))
        self.scalars = put(first.scalars)
        self.out, self.grads = (arena.place(first.batch * count, first.dim) for _ in range(2))
        self.none, self.live = put(np.empty(0, np.float32)), put(np.empty(0, np.bool_))
        self.partial = put(np.empty((len(stretches), first.dim), np.float32))
        self.marks = put(np.empty(len(stretches) + len(self.rows), np.int32))

    def forward(self) -> None:
        """Look up and pool."""
        self.gpu.pool(self.cache, self.dim, self.slots, self.offsets, self.features, self.none, self.out)

    def backward(self) -> None:
        """Sum gradients and update rows."""
        self.gpu.update(
            self.cache, self.dim, self.kind, self.rows, self.keys, self.start, self.pos, self.bag_of, self.none,
            self.grads, self.live, self.scalars, False, self.stretches, self.partial, self.marks,
        )  # fmt: skip
