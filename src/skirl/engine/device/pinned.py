"""Buffers in pairs, one in pinned host memory and one on the device, used again and again.

What travels has its place on both sides from the beginning, so a copy is one call and no allocation; pinning memory anew for
each step would lock the device's driver each time. A block has owners, like those of `staging.py`;
what is more here is that an owner on the device may not be done when it lets go. So each block keeps the events of its last
copy and its last use, and whoever takes it makes his stream, never the loop, wait for them. Three blocks, for plans, fetched
and leaving rows, one ring each would be tighter, and one slow write-back would block its ring.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from skirl.engine.device.streams import Event
from skirl.engine.staging import rounded

SMALLEST = 1 << 12
ALWAYS = 1 << 16
"""Bytes that may wait for use however small the cache is: as much as its steps need."""


@dataclass(eq=False)
class Block:
    """One pair of buffers, of bytes."""

    host: torch.Tensor
    device: torch.Tensor
    owners: int = 1
    copied: Event | None = None
    """The last copy between the two."""
    used: Event | None = None
    """The last use of the device's side."""

    def on_host(self, rows: int, width: int, dtype: np.dtype) -> np.ndarray:
        """The host's side as an array."""
        return self.host.numpy()[: rows * width * dtype.itemsize].view(dtype).reshape(rows, width)

    def on_device(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The device's side as a tensor."""
        return self.device[: rows * width * dtype.itemsize].view(dtype).view(rows, width)


class Blocks:
    """Gives blocks out; in all threads.

    >>> from skirl.engine.device.streams import no_streams
    >>> blocks = Blocks(torch.device("cpu"), no_streams().here, most=1 << 20)
    >>> block = blocks.take(5000)
    >>> blocks.release(block)
    >>> blocks.take(5000) is block, blocks.nbytes
    (True, 5120)
    """

    def __init__(self, device: torch.device, here: Callable[[], Event], most: int, kept: int = 1 << 30) -> None:
        """here: gives an event of the stream that torch takes new memory for."""
        self.most = most
        """Bytes of all blocks: beyond that, none waits for use."""
        self.kept = kept
        """Blocks that wait for use, at most."""
        self._device = device
        self._here = here
        self._lock = threading.Lock()
        self._free: list[Block] = []
        self._used: set[Block] = set()
        self._size = 0

    @property
    def nbytes(self) -> int:
        """Memory of all blocks on one side, in use or free."""
        return self._size

    @property
    def in_use(self) -> int:
        """Blocks that have an owner."""
        return len(self._used)

    def take(self, nbytes: int) -> Block:
        """A block of at least so many bytes, whose events the caller has to wait for."""
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
                f"{size >> 10:,} KiB for rows on their way, or for a step's plan, are not free on {self._device}: set "
                "cache or prefetch to less, or make batches smaller"
            ) from error
        return Block(host, device, used=self._here())  # the memory may be another tensor's, whose work is not done yet

    def choose(self, fits: list[Block]) -> Block:
        """Of free blocks, from the one that is unused for longest: its events have most likely passed."""
        return fits[0]

    def retain(self, block: Block) -> None:
        """One more owner."""
        with self._lock:
            block.owners += 1

    def release(self, block: Block) -> None:
        """One owner less; the last one gives the block back."""
        with self._lock:
            if block not in self._used:  # forgotten by `reset`
                return
            block.owners -= 1
            if not block.owners:
                self._used.remove(block)
                self._free.append(block)
                self._shrink()

    def reset(self) -> None:
        """Forget all owners. Nothing may be on its way any more; blocks are not used again, for a thread may be stuck."""
        with self._lock:
            self._size -= sum(block.host.numel() for block in self._used)
            self._used.clear()

    def _shrink(self) -> None:
        while self._free and (self._size > max(self.most, ALWAYS) or len(self._free) > self.kept):
            block = self._free.pop(0)
            self._size -= block.host.numel()
            for event in (block.copied, block.used):
                if event is not None:
                    event.synchronize()  # torch may give the memory to another stream at once
