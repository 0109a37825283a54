"""FBGEMM's operator in an arena: all tables of a rank in one call. On the CPU it is measured by thread CPU times; on a
GPU, **where nobody has run it yet**, by CUDA events."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from math import log2
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import torch

from skirl.core.optim import row_optimizer
from skirl.placement.costs import Costs
from skirl.placement.measure import ARENA, EVICTED, Arena, Lookups, measure_machine
from skirl.placement.spec import MULTIPLE, Piece

KINDS = {
    "sgd": "EXACT_SGD", "rowwise-adagrad": "EXACT_ROWWISE_ADAGRAD", "adagrad": "EXACT_ADAGRAD", "adam": "ADAM",
}  # fmt: skip
"""FBGEMM's names of the row optimizers that it has."""
_LR, _FLOAT = 1e-6, 4


def check_optimizers(names: Sequence[str], device: str = "cpu") -> None:
    known = [name for name in KINDS if device != "cpu" or name != "adam"]
    for name in names:
        if name not in known:
            where = "CPU" if device == "cpu" else "CUDA"
            raise ValueError(
                f"optimizer is {name!r}, which FBGEMM's {where} operator lacks: set it to one of {', '.join(known)}"
            )


def check_dim(table: str, dim: int) -> None:
    if dim % MULTIPLE:
        raise ValueError(
            f"table {table!r} has dim {dim}, and FBGEMM's operator takes multiples of {MULTIPLE}: leave the table out"
        )


class FbgemmPart:
    """A part of a table for FBGEMM's operator, in an arena with this many floats of weights."""

    def __init__(self, lookups: Lookups, piece: Piece, floats: int) -> None:
        spec = lookups.spec
        check_dim(spec.name, piece.dim)
        self.optimizer, self.batch, self.dim = spec.optimizer, spec.batch, piece.dim
        ids, bags = lookups.of(piece)
        room = floats // piece.dim
        self.rows = min(piece.rows, room)
        self.first = (lookups.number * 7919 * 4096 + piece.col * 104729) % (room - self.rows + 1)
        self.ids = ids % self.rows
        self.lengths = np.bincount(bags, minlength=spec.batch)


@dataclass(frozen=True)
class Memory:
    """The weights and the state of one row optimizer, as parts of an arena; `by_row` if it has one number a row."""

    weights: torch.Tensor
    states: tuple[torch.Tensor, ...]
    by_row: bool

    @classmethod
    def of(cls, floats: torch.Tensor, optimizer: str) -> "Memory":
        """Divide an arena, for the narrowest rows, whose state is largest."""
        width = row_optimizer(optimizer)().width
        by_row = optimizer == "rowwise-adagrad"
        size = len(floats) * MULTIPLE // width(MULTIPLE) // MULTIPLE * MULTIPLE
        state = size // MULTIPLE if by_row else size
        count = 1 if by_row else width(MULTIPLE) // MULTIPLE - 1
        ends = [size + n * state for n in range(count + 1)]
        return cls(floats[:size], tuple(floats[end : end + state] for end in ends[:-1]), by_row)


class Call:
    """One call of FBGEMM's operator, for parts with one row optimizer and one batch size, and gradients [batch, dims]."""

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
        self.out = self.operator(self.ids, self.offsets)

    def backward(self) -> None:
        self.out.backward(self.grads)
        self.out = self.grads  # frees the output, whose memory the next call then gets


class FbgemmArena(Arena):
    """The memory in which FBGEMM's operator is measured, on one thread of the CPU or on a GPU."""

    def __init__(self, floats: int = ARENA, *, device: str = "cpu") -> None:
        self.on = torch.device(device)
        super().__init__(floats if device == "cpu" else _FLOAT)
        self.floats, self.reads = torch.from_numpy(self.rows), torch.from_numpy(self.evicted)
        if device != "cpu":
            about = torch.cuda.get_device_properties(self.on)
            self.device = about.name
            self.floats = torch.ones(floats, device=self.on)
            self.reads = torch.ones(max(EVICTED, 2 * about.L2_cache_size // _FLOAT), device=self.on)

    def ready(self, lookups: Lookups, piece: Piece) -> FbgemmPart:
        check_optimizers([lookups.spec.optimizer], self.on.type)
        return FbgemmPart(lookups, piece, len(Memory.of(self.floats, lookups.spec.optimizer).weights))

    def together(self, parts: Sequence[FbgemmPart]) -> list[Call]:
        """One call, unless parts have several row optimizers or batch sizes."""
        alike: dict[tuple[str, int], list[FbgemmPart]] = {}
        for part in parts:
            alike.setdefault((part.optimizer, part.batch), []).append(part)
        calls = []
        for (optimizer, batch), some in alike.items():
            grads = torch.from_numpy(self.output(batch, sum(part.dim for part in some))).to(self.on)
            calls.append(Call(some, Memory.of(self.floats, optimizer), grads, self.on))
        return calls

    def run_ms(self, parts: list[Call]) -> float:
        """Milliseconds that a rank takes for a step: of CPU time, or between two events of a GPU."""

        def step() -> None:
            for call in parts:
                call.forward()
            for call in parts:
                call.backward()

        if self.on.type != "cpu":
            self.reads.sum()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that all of it runs on this thread, whose time is taken
        try:
            self.evict()
            began = thread_time()
            step()
            return 1e3 * (thread_time() - began)
        finally:
            torch.set_num_threads(threads)


def measure_costs(
    optimizer: str = "rowwise-adagrad", *, device: str = "cpu", minutes: float = 0.5, out: str | Path | None = None
) -> Costs:
    """Measure what parts of tables cost FBGEMM's operator, on one thread of this CPU or on a GPU.

    The result is for `SkirlPlanner(costs=...)`. Random combinations of tables are timed in some rounds, and costs are fitted
    to the least times.

    **Arguments**

    - `optimizer`: the row optimizer: "rowwise-adagrad", "sgd", "adagrad", or on a GPU "adam".
    - `device`: "cpu", or "cuda", which nobody has run yet.
    - `minutes`: time for all rounds together; two are always measured.
    - `out`: a file for the costs, which `skirl place --costs` takes too.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}: set it to cpu or cuda")
    if not 0 < minutes < float("inf"):
        raise ValueError(f"minutes is {minutes}: set it above 0")
    check_optimizers([optimizer], device)
    kernel = "fbgemm-cpu" if device == "cpu" else "fbgemm-cuda"
    path = None if out is None else Path(out)
    return measure_machine(kernel, [optimizer], minutes=minutes, out=path)
