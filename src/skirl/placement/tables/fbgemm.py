"""FBGEMM's operator as a backend: all tables of a rank in one call, their rows in one arena. Its CPU operator is measured
by thread CPU times; its CUDA operator, **not run on a GPU yet**, by CUDA events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import log2
from time import thread_time
from typing import Any

import numpy as np
import torch

from skirl.core.optim import row_optimizer
from skirl.placement.tables.gpu import GpuArena
from skirl.placement.tables.measure import ARENA, Lookups, MeasuredTables
from skirl.placement.tables.pieces import Piece

KINDS = {
    "sgd": "EXACT_SGD", "rowwise-adagrad": "EXACT_ROWWISE_ADAGRAD", "adagrad": "EXACT_ADAGRAD", "adam": "ADAM",
}  # fmt: skip
"""FBGEMM's names of the row optimizers that it has."""
ON_GPU_ALONE = ("adam",)
"""Those that it has only on a GPU."""
NARROW = 4
"""The least dim, of which all others are multiples."""
_LR = 1e-6


def check_optimizers(names: Sequence[str], device: str = "cpu") -> None:
    """Raise if FBGEMM's operator lacks one of some row optimizers.

    **Arguments**

    - `names`: names of row optimizers.
    - `device`: kind of the device that it runs on.
    """
    there = [name for name in KINDS if device != "cpu" or name not in ON_GPU_ALONE]
    for name in names:
        if name not in there:
            where = "CPU" if device == "cpu" else "CUDA"
            raise ValueError(
                f"optimizer is {name!r}, which FBGEMM's {where} operator lacks: set it to one of {', '.join(there)}"
            )


def check_dim(table: str, dim: int) -> None:
    """Raise if FBGEMM's operator cannot run a dim.

    **Arguments**

    - `table`: name of the table that has it.
    - `dim`: the dim.
    """
    if dim % NARROW:
        raise ValueError(
            f"table {table!r} has dim {dim}, and FBGEMM's operator takes multiples of {NARROW}: give it another dim, or "
            "leave the table out"
        )


class FbgemmPart:
    """A part of a table for FBGEMM's operator.

    **Arguments**

    - `lookups`: lookups of the whole table.
    - `piece`: the part.
    - `floats`: the floats of weights that an arena has for its optimizer.
    """

    def __init__(self, lookups: Lookups, piece: Piece, floats: int) -> None:
        spec = lookups.made.spec
        check_dim(spec.name, piece.dim)
        self.optimizer, self.batch, self.dim = spec.optimizer, spec.batch, piece.dim
        ids, bags = lookups.of(piece)
        room = floats // piece.dim
        self.rows = min(piece.rows, room)
        self.first = (lookups.seed * 7919 * 4096 + piece.col * 104729) % (room - self.rows + 1)
        self.ids = ids % self.rows
        self.lengths = np.bincount(bags, minlength=spec.batch)


@dataclass(frozen=True)
class Memory:
    """The weights and the state of one row optimizer, as parts of an arena.

    **Arguments**

    - `weights`: the weights.
    - `states`: arrays of its state, none, one or two.
    - `by_row`: whether it has one number for each row.
    """

    weights: torch.Tensor
    states: tuple[torch.Tensor, ...]
    by_row: bool

    @classmethod
    def of(cls, floats: torch.Tensor, optimizer: str) -> "Memory":
        """Divide an arena.

        **Arguments**

        - `floats`: the arena's floats.
        - `optimizer`: the row optimizer.
        """
        width = row_optimizer(optimizer)().width
        by_row = optimizer == "rowwise-adagrad"
        size = (
            len(floats) * NARROW // width(NARROW) // NARROW * NARROW
        )  # for the narrowest rows, whose state is largest
        state = size // NARROW if by_row else size
        count = 1 if by_row else width(NARROW) // NARROW - 1
        ends = [size + n * state for n in range(count + 1)]
        return cls(floats[:size], tuple(floats[end : end + state] for end in ends[:-1]), by_row)


class Call:
    """One call of FBGEMM's operator, for parts with one row optimizer and one batch size.

    **Arguments**

    - `parts`: the parts.
    - `memory`: where their rows are.
    - `grads`: gradients of all pooled vectors, [batch, sum of dims].
    - `device`: the device.
    """

    def __init__(self, parts: Sequence[FbgemmPart], memory: Memory, grads: torch.Tensor, device: torch.device) -> None:
        training = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        kinds = import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
        where = training.EmbeddingLocation, training.ComputeDevice
        place = (where[0].HOST, where[1].CPU) if device.type == "cpu" else (where[0].DEVICE, where[1].CUDA)
        self.operator: Any = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(1, part.dim, *place) for part in parts],  # their memory is replaced by the arena's
            optimizer=getattr(kinds, KINDS[parts[0].optimizer]), learning_rate=_LR, device=device,
            bounds_check_mode=common.BoundsCheckMode.NONE,
        )  # fmt: skip
        self._place(parts, memory, "host" if device.type == "cpu" else "dev")
        lengths = np.concatenate([part.lengths for part in parts])
        self.ids = torch.from_numpy(np.concatenate([part.ids for part in parts])).to(device)
        self.offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to(device)
        self.grads, self.out = grads, grads

    def _place(self, parts: Sequence[FbgemmPart], memory: Memory, where: str) -> None:
        """Have the operator use the arena, and the sizes of the parts."""
        operator, rows = self.operator, [part.rows for part in parts]
        starts = np.array([part.first * part.dim for part in parts])
        at = np.array([part.first for part in parts]) if memory.by_row else starts
        for prefix, tensor, offsets in [
            ("weights", memory.weights, starts),
            *((f"momentum{n}", state, at) for n, state in enumerate(memory.states, start=1)),
        ]:
            getattr(operator, f"{prefix}_{where}").data = tensor
            getattr(operator, f"{prefix}_offsets").copy_(torch.from_numpy(offsets))
            setattr(operator, f"{prefix}_physical_offsets", offsets.tolist())
        ends = np.concatenate([[0], np.cumsum(rows)])
        operator.rows_per_table.copy_(torch.tensor(rows))
        operator.hash_size_cumsum.copy_(torch.from_numpy(ends))
        operator.total_hash_size = int(ends[-1])
        operator.total_hash_size_bits = int(log2(float(ends[-1])) + 1)

    def forward(self) -> None:
        """Look up and pool."""
        self.out = self.operator(self.ids, self.offsets)

    def backward(self) -> None:
        """Sum gradients and update rows."""
        self.out.backward(self.grads)
        self.out = self.grads  # frees the output, whose memory the next call then gets


def calls_of(
    parts: Sequence[FbgemmPart], floats: torch.Tensor, grads: Callable[[int, int], torch.Tensor], device: torch.device
) -> list[Call]:
    """Return the calls for some parts: one, unless they have several row optimizers or batch sizes.

    **Arguments**

    - `parts`: the parts.
    - `floats`: the arena's floats.
    - `grads`: returns a place for this many gradients, [batch, dims].
    - `device`: the device.
    """
    alike: dict[tuple[str, int], list[FbgemmPart]] = {}
    for part in parts:
        alike.setdefault((part.optimizer, part.batch), []).append(part)
    return [
        Call(some, Memory.of(floats, optimizer), grads(batch, sum(part.dim for part in some)), device)
        for (optimizer, batch), some in alike.items()
    ]


def run(calls: Sequence[Call]) -> None:
    """Run a step: all calls forward, then all backward.

    **Arguments**

    - `calls`: the calls.
    """
    for call in calls:
        call.forward()
    for call in calls:
        call.backward()


class FbgemmArena(MeasuredTables):
    """The memory in which FBGEMM's CPU operator is measured, on one thread.

    **Arguments**

    - `floats`: number of floats for rows and their optimizer state.
    """

    def __init__(self, floats: int = ARENA) -> None:
        super().__init__(floats)
        self.floats = torch.from_numpy(self.rows)

    def ready(self, lookups: Lookups, piece: Piece) -> FbgemmPart:
        """Return a part of a table, ready to be run.

        **Arguments**

        - `lookups`: lookups of the whole table.
        - `piece`: the part.
        """
        return part_of(self.floats, lookups, piece)

    def together(self, parts: Sequence[FbgemmPart]) -> list[Call]:
        """Return what `run_ms` takes for a rank with these parts.

        **Arguments**

        - `parts`: parts of the rank.
        """
        return calls_of(
            parts, self.floats, lambda batch, dims: torch.from_numpy(self.output(batch, dims)), torch.device("cpu")
        )

    def run_ms(self, parts: list[Call]) -> float:
        """Return the CPU milliseconds that a rank takes for a step.

        **Arguments**

        - `parts`: what `together` returned.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that all of it runs on this thread, whose time is taken
        try:
            self.evict()
            began = thread_time()
            run(parts)
            return 1e3 * (thread_time() - began)
        finally:
            torch.set_num_threads(threads)


class FbgemmCudaArena(GpuArena):
    """The memory in which FBGEMM's CUDA operator is measured. The arguments are those of `GpuArena`."""

    def ready(self, lookups: Lookups, piece: Piece) -> FbgemmPart:
        """Return a part of a table, ready to be run.

        **Arguments**

        - `lookups`: lookups of the whole table.
        - `piece`: the part.
        """
        return part_of(self.floats, lookups, piece)

    def together(self, parts: Sequence[FbgemmPart]) -> Callable[[], None]:
        """Return what `run_ms` takes for a rank with these parts.

        **Arguments**

        - `parts`: parts of the rank.
        """
        calls = calls_of(parts, self.floats, self.place, self.on)
        return lambda: run(calls)


def part_of(floats: torch.Tensor, lookups: Lookups, piece: Piece) -> FbgemmPart:
    """Return a part of a table for FBGEMM's operator.

    **Arguments**

    - `floats`: the arena's floats.
    - `lookups`: lookups of the whole table.
    - `piece`: the part.
    """
    optimizer = lookups.made.spec.optimizer
    check_optimizers([optimizer], floats.device.type)
    return FbgemmPart(lookups, piece, len(Memory.of(floats, optimizer).weights))
