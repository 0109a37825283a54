"""Copies between host and GPU: streams and events between them, pinned buffers, plans packed into one, rows on their
way."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from skirl.core.ids import BankIds
from skirl.engine.device import rounded
from skirl.engine.kernels.tree import TreePlan, stretches_of
from skirl.engine.work import Work
from skirl.oracle.route import Reads
from skirl.oracle.step import Step

T = TypeVar("T")


class Event:
    """A point in a stream. This one has passed."""

    def synchronize(self) -> None: ...


class Stream:
    """Runs work in the order in which it comes. Without a stream of CUDA, it does so at once: for Triton's interpreter."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream

    def run(self, work: Callable[[], None]) -> None:
        self.now(work)

    def now(self, work: Callable[[], T]) -> T:
        with torch.cuda.stream(self.stream):
            return work()

    def record(self) -> Any:
        if self.stream is None:
            return Event()
        event = torch.cuda.Event(blocking=True)  # a host thread that waits sleeps, instead of spinning on a core
        event.record(self.stream)
        return event

    def wait(self, event: Any) -> None:
        if self.stream is not None:
            self.stream.wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's memory until work here is done with it, even if its last owner releases it before."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


@dataclass
class Streams:
    compute: Stream = field(default_factory=Stream)
    """The training loop's own: the one that is current where it takes a batch, looks rows up or runs backward."""
    inward: Stream = field(default_factory=Stream)
    outward: Stream = field(default_factory=Stream)

    def begin(self) -> None:
        """Keep the order when the loop moves to another stream, for example to warm up a graph."""
        before = self.compute.stream
        if before is not None and (now := torch.cuda.current_stream(before.device)) != before:
            now.wait_stream(before)
            self.compute.stream = now

    def here(self) -> Any:
        before = self.compute.stream
        return (self.compute if before is None else Stream(torch.cuda.current_stream(before.device))).record()


def cuda_streams(device: torch.device) -> Streams:
    return Streams(*map(Stream, (torch.cuda.current_stream(device), *(torch.cuda.Stream(device) for _ in range(2)))))


ALIGNED = 16
"""Each array begins at a multiple of this many bytes, for wide loads."""
_TORCH = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64", "uint8", "bool")}


class Packed:
    """The places of several arrays in one buffer."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._at: dict[str, int] = {}
        self.nbytes = 0
        for name, array in arrays.items():
            self._at[name] = self.nbytes
            self.nbytes += -(-array.nbytes // ALIGNED) * ALIGNED

    def write(self, buffer: np.ndarray) -> None:
        for name, array in self._arrays.items():
            at = self._at[name]
            buffer[at : at + array.nbytes].view(array.dtype)[:] = array.reshape(-1)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: buffer[at : at + array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
            for (name, array), at in zip(self._arrays.items(), self._at.values(), strict=True)
        }


@dataclass(eq=False)
class Block:
    """One pair of buffers. Whoever takes it makes their stream wait for its two events."""

    host: torch.Tensor
    device: torch.Tensor
    owners: int = 1
    copied: Any = None
    used: Any = None
    """The last use of the device's side, which may come after its owner has released it."""

    def on_host(self, rows: int, width: int, dtype: np.dtype) -> np.ndarray:
        return self.host.numpy()[: rows * width * dtype.itemsize].view(dtype).reshape(rows, width)

    def on_device(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return self.device[: rows * width * dtype.itemsize].view(dtype).view(rows, width)


SMALLEST = 1 << 12
ALWAYS = 1 << 16
"""Bytes of all blocks beyond which free ones may be dropped, however small the cache is: its steps need these."""


class Blocks:
    """Pairs of buffers, of which the one unused for longest is taken: its events have most likely passed."""

    def __init__(self, device: torch.device, here: Callable[[], Any], most: int, kept: int = 1 << 30) -> None:
        self.most, self.kept = most, kept
        """Bytes in all blocks together, and number of free ones, beyond which free blocks are dropped."""
        self.nbytes = 0
        self._device, self._here = device, here
        self._lock = threading.Lock()
        self._free: list[Block] = []
        self._used: set[Block] = set()

    def take(self, nbytes: int) -> Block:
        """Return a block of at least this many bytes, with undefined contents."""
        with self._lock:
            block = next((b for b in self._free if nbytes <= b.host.nbytes <= max(2 * nbytes, SMALLEST)), None)
            if block is not None:
                self._free.remove(block)
                block.owners = 1
            else:
                size = rounded(nbytes, SMALLEST)
                self.nbytes += size
                self._shrink()
                block = self._make(size)
            self._used.add(block)
            return block

    def retain(self, block: Block) -> None:
        with self._lock:
            block.owners += 1

    def release(self, block: Block) -> None:
        """Remove an owner. The last one gives the block back."""
        with self._lock:
            if block not in self._used:  # forgotten by `reset`
                return
            block.owners -= 1
            if not block.owners:
                self._used.remove(block)
                self._free.append(block)
                self._shrink()

    def reset(self) -> None:
        """Forget all owners and their blocks: a stuck thread may still write to one. Nothing may be on its way."""
        with self._lock:
            self.nbytes -= sum(block.host.nbytes for block in self._used)
            self._used.clear()

    def _make(self, size: int) -> Block:
        pinned = self._device.type == "cuda"
        host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        device = torch.empty(size, dtype=torch.uint8, device=self._device)
        return Block(host, device, used=self._here())  # its memory may have been that of a tensor still in use

    def _shrink(self) -> None:
        while self._free and (self.nbytes > max(self.most, ALWAYS) or len(self._free) > self.kept):
            block = self._free.pop(0)
            self.nbytes -= block.host.nbytes
            for event in (block.copied, block.used):
                if event is not None:
                    event.synchronize()  # torch may give the memory to another stream


def laid_out(ids: BankIds) -> dict[str, np.ndarray]:
    """Lay out the bags of a bank for pooling and summing: by `offsets`, unless each row of the output has one id.

    If samples share some, all are pooled as they lie, one row of the output after the other, then bags are copied to
    samples. Gradients are summed in the same way, by bag.

    `begin`, `end`: the positions of each row of the output. `copy`, `copy_to`: the bag and the row of each sample and
    shared feature. `fold`: the rows of each bag's samples, ascending; `fold_begin`, [bags + 1]: where they begin.
    """
    if not ids.shares:
        return {} if ids.one_each else {"offsets": ids.offsets}
    begin, end = ids.of_rows
    copy = ids.bag.reshape(-1)
    copy_to = (ids.features * np.arange(ids.batch)[:, None] + ids.columns).astype(np.int32).reshape(-1)
    fold = copy_to[np.argsort(copy, kind="stable")]
    fold_begin = np.concatenate([[0], np.cumsum(np.bincount(copy, minlength=ids.begins[-1]))]).astype(np.int32)
    return {
        "begin": begin, "end": end, "copy": copy, "copy_to": copy_to, "fold": fold, "fold_begin": fold_begin,
    }  # fmt: skip


@dataclass(eq=False)
class Arrival:
    """The data that a step brings to one bank: its fetched rows and its plan."""

    work: Work
    rows: Block
    plan: Block
    packed: Packed
    forwards: list[tuple[int, int, int]]
    """For each step that rows are forwarded from: its number, and its first and end among the plan's forwarded rows."""
    tree: TreePlan | None
    came: Any = None
    views: dict[str, torch.Tensor] = field(default_factory=dict)


Departure = tuple[Block, int]
"""Rows that leave: where they are, and how many."""


class OnItsWay:
    def __init__(self, host: torch.Tensor, device: torch.Tensor, there: Any) -> None:
        self._host, self._device, self._there = host, device, there

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    def landed(self) -> np.ndarray:
        self._there.synchronize()
        return self._host.numpy()


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)


def by_step(forward_step: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Return the order of forwarded rows by the step that evicted them, and where each step's rows are in it."""
    order = np.argsort(forward_step, kind="stable")
    numbers, starts = np.unique(forward_step[order], return_index=True)
    ends = np.append(starts, len(order))
    return order, [(int(n), int(lo), int(hi)) for n, lo, hi in zip(numbers, ends[:-1], ends[1:])]


def plan_of(
    step: Step, ids: list[BankIds], scale: np.ndarray, order: np.ndarray, bags: np.ndarray, tree: TreePlan | None,
    reads: Reads | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Return what the device needs to know of a step: about 20 bytes an id."""
    arrays = {
        "slots": step.slots,
        "keys": step.keys,
        "rows": step.rows,
        "group_start": step.group_start,
        "group_pos": step.group_pos,
        "stretches": stretches_of(step.group_start) if tree is None else tree.stretches,
        "evict_slots": step.evict_slots,
        "fetch_slots": step.fetch_slots,
        "forward_index": step.forward_index[order],
        "forward_slots": step.forward_slots[order],
        "new_keys": step.new_keys,
        "new_slots": step.new_slots,
        "scale": scale,
        "bag_of": bags,
    }
    if reads is not None:
        arrays |= {"place": reads.place, "read_start": reads.group_start, "read_pos": reads.group_pos}
    if tree is not None:
        arrays["runs"] = tree.runs
    for micro, one in enumerate(ids):
        arrays |= {f"{name} {micro}": array for name, array in laid_out(one).items()}
    return arrays


def of_micro(views: Mapping[str, torch.Tensor], micro: int) -> dict[str, torch.Tensor]:
    """Return what `laid_out` has laid out of a micro-batch."""
    end = f" {micro}"
    return {name.removesuffix(end): view for name, view in views.items() if name.endswith(end)}
