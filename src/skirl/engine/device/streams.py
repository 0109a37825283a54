"""The three streams that a GPU's cache needs, and the events between them.

Work that is put on one stream runs in order, later; between streams only an event orders anything. All that the cache asks
of CUDA is in these few methods, so tests put streams of their own in their place, which run everything as late, and in as
odd an order, as the events allow: a hazard without an event shows on any machine. To find one on a real GPU takes luck:
TorchRec's rows were read while another stream still wrote them, and most runs were right.

    compute   the training loop's own stream: whatever is current where it takes a batch, looks rows up or comes back
    inward    host to device: fetched rows and plans
    outward   device to host: rows that leave
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Wait, in the calling thread, until the stream has passed it."""


class Stream(Protocol):
    """Runs work in the order in which it came."""

    def run(self, work: Callable[[], None]) -> None:
        """Put work on the stream."""

    def now(self, work: Callable[[], T]) -> T:
        """The same, of the loop's stream: the caller's own work comes after it."""
        ...

    def record(self) -> Event:
        """An event behind all work so far."""
        ...

    def wait(self, event: Event) -> None:
        """Work from here on runs after the event."""

    def keep(self, tensor: torch.Tensor) -> None:
        """The tensor is used here, and may be let go of before that is done."""


@dataclass
class Streams:
    """Those of one engine."""

    compute: Stream
    inward: Stream
    outward: Stream

    def begin(self) -> None:
        """The loop uses rows, on whatever stream is current there."""

    def here(self) -> Event:
        """Where the calling thread's current stream is."""
        return self.compute.record()


class CudaStream:
    """A stream of our own."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def now(self, work: Callable[[], T]) -> T:
        with torch.cuda.stream(self.stream):
            return work()

    def record(self) -> Event:
        event = torch.cuda.Event(
            blocking=True
        )  # who waits for it on the host sleeps: writers would spin on a core each
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.stream)


class CudaStreams(Streams):
    """On a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._loop = CudaStream(torch.cuda.current_stream(device))
        super().__init__(self._loop, *(CudaStream(torch.cuda.Stream(device)) for _ in range(2)))
        self._device = device

    def begin(self) -> None:
        """Who goes on on another stream, to warm a graph up say, finds rows, outputs and gradients in order."""
        stream = torch.cuda.current_stream(self._device)
        if stream != self._loop.stream:
            stream.wait_stream(self._loop.stream)
            self._loop.stream = stream

    def here(self) -> Event:
        return CudaStream(torch.cuda.current_stream(self._device)).record()


class _Passed:
    def synchronize(self) -> None:
        pass


class Immediate:
    """No stream at all: work is done when it is put there."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def now(self, work: Callable[[], T]) -> T:
        return work()

    def record(self) -> Event:
        return _Passed()

    def wait(self, event: Event) -> None:
        pass

    def keep(self, tensor: torch.Tensor) -> None:
        pass


def no_streams() -> Streams:
    """In the interpreter."""
    return Streams(Immediate(), Immediate(), Immediate())
