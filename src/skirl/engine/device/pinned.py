"""Reusable buffers in pairs, one in pinned host memory and one on the device."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from skirl.engine.device.streams import Event
from skirl.engine.staging import rounded

SMALLEST = 1 << 12
"""Bytes of the smallest buffer."""
ALWAYS = 1 << 16
"""Bytes of blocks beyond which free ones may be dropped, however small the cache is: its steps need these."""


@dataclass(eq=False)
class Block:
    """One pair of buffers, of bytes. Whoever takes it makes their stream wait for its two events."""

    host: torch.Tensor
    device: torch.Tensor
    owners: int = 1
    copied: Event | None = None
    """The last copy between the two sides."""
    used: Event | None = None
    """The last use of the device's side, which may come after its owner has released it."""

    def on_host(self, rows: int, width: int, dtype: np.dtype) -> np.ndarray:
        """Return the host's side as an array."""
        return self.host.numpy()[: rows * width * dtype.itemsize].view(dtype).reshape(rows, width)

    def on_device(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the device's side as a tensor."""
        return self.device[: rows * width * dtype.itemsize].view(dtype).view(rows, width)


class Blocks:
    """Gives out blocks, to any thread.

    >>> from skirl.engine.device.streams import no_streams
    >>> blocks = Blocks(torch.device("cpu"), no_streams().here, most=1 << 20)
    >>> block = blocks.take(5000)
    >>> blocks.release(block)
    >>> blocks.take(5000) is block, blocks.nbytes
    (True, 5120)
    """

    def __init__(self, device: torch.device, here: Callable[[], Event], most: int, kept: int = 1 << 30) -> None:
        self.most = most
        self.kept = kept
        self._device = device
        self._here = here
        self._lock = threading.Lock()
        self._free: list[Block] = []
        self._used: set[Block] = set()
        self._size = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, used or free, on one side."""
        return self._size

    @property
    def in_use(self) -> int:
        """Number of blocks that have an owner."""
        return len(self._used)

    def take(self, nbytes: int) -> Block:
        """Return a block of at least this many bytes. The caller has to wait for its events."""
        with self._lock:
            fits = [b for b in self._free if nbytes <= b.host.numel() <= max(2 * nbytes, SMALLEST)]
            if fits:
                block = self.choose(fits)
                self._free.remove(block)
                block.owners = 1
            else:
                size = rounded(nbytes, SMALLEST)
                self._size += size
                self._shrink()
                block = self._made(size)
            self._used.add(block)
            return block

    def _made(self, size: int) -> Block:
        pinned = self._device.type == "cuda"
        host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        try:
            device = torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"could not allocate {size >> 10:,} KiB on {self._device} for rows on their way or a step's plan: set cache "
                "or prefetch to less, or use smaller batches"
            ) from error
        return Block(host, device, used=self._here())  # its memory may have been that of a tensor still in use

    def choose(self, fits: list[Block]) -> Block:
        """Return the free block that has been unused for longest: its events have most likely passed."""
        return fits[0]

    def retain(self, block: Block) -> None:
        """Add an owner."""
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
            self._size -= sum(block.host.numel() for block in self._used)
            self._used.clear()

    def _shrink(self) -> None:
        while self._free and (self._size > max(self.most, ALWAYS) or len(self._free) > self.kept):
            block = self._free.pop(0)
            self._size -= block.host.numel()
            for event in (block.copied, block.used):
                if event is not None:
                    event.synchronize()  # torch may give the memory to another stream
