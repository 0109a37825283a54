"""The streams that a GPU's cache needs, and the events between them. Tests replace them with streams of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed it."""


class Stream(Protocol):
    """Runs work in the order in which it comes."""

    def run(self, work: Callable[[], None]) -> None:
        """Put work on the stream."""

    def now(self, work: Callable[[], T]) -> T:
        """Call `work` now, with this stream as the current one, and return what it returns."""
        ...

    def record(self) -> Event:
        """Return an event after all work so far."""
        ...

    def wait(self, event: Event) -> None:
        """Let work from here on run after the event."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's memory until work here is done with it, even if its last owner releases it before."""


@dataclass
class Streams:
    """The streams of one engine."""

    compute: Stream
    """The training loop's own: the one that is current where it takes a batch, looks rows up or runs backward."""
    inward: Stream
    """From host to device: fetched rows and plans."""
    outward: Stream
    """From device to host: rows that leave."""

    def begin(self) -> None:
        """Prepare for the loop to use rows on the stream that is current there."""

    def here(self) -> Event:
        """Return an event at the end of the calling thread's current stream."""
        return self.compute.record()


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def now(self, work: Callable[[], T]) -> T:
        with torch.cuda.stream(self.stream):
            return work()

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # a host thread that waits sleeps, instead of spinning on a core
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.stream)


class CudaStreams(Streams):
    """The streams on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._loop = CudaStream(torch.cuda.current_stream(device))
        super().__init__(self._loop, *(CudaStream(torch.cuda.Stream(device)) for _ in range(2)))
        self._device = device

    def begin(self) -> None:
        """Keep the order when the loop moves to another stream, for example to warm up a graph."""
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
    """No stream: work is done at once."""

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
    """Return the streams for Triton's interpreter."""
    return Streams(Immediate(), Immediate(), Immediate())
