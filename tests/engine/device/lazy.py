"""Streams that run their work as late, or in as odd an order, as events allow: stand-ins for those of CUDA, and CUDA's own,
which sleep before their work at random.

Work that is put on a stream does not run at once. It runs when somebody waits for an event after it, when the loop
needs a result, or at random; in the order of its stream, and after the events that the stream was told to wait for. A
copy that no event protects will sooner or later read overwritten data, or be read before it was made.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from skirl.engine.device.transfers import Stream, Streams, cuda_streams


class LazyEvent:
    """An event; it has passed once the stream has got there."""

    def __init__(self, stream: "LazyStream") -> None:
        self.stream = stream
        self.passed = False

    def synchronize(self) -> None:
        with self.stream.world.lock:
            self.stream.advance(self)


class LazyStream:
    stream = None

    def __init__(self, world: "World") -> None:
        self.world = world
        self.queue: deque[Callable[[], None] | tuple[str, LazyEvent]] = deque()

    def run(self, work: Callable[[], None]) -> None:
        self._put(work)

    def now(self, work: Callable[[], Any]) -> Any:
        with self.world.lock:
            while self.queue:
                self.step()
            result = work()
            self.world.stir()
            return result

    def record(self) -> LazyEvent:
        event = LazyEvent(self)
        self._put(("pass", event))
        return event

    def wait(self, event: LazyEvent) -> None:
        self._put(("wait", event))

    def keep(self, tensor: object) -> None:
        self._put(lambda: (tensor, None)[1])

    def _put(self, item: Any) -> None:
        with self.world.lock:
            self.queue.append(item)
            self.world.stir()

    def advance(self, event: LazyEvent) -> None:
        while not event.passed:
            self.step()

    def step(self) -> None:
        """Run one item, after whatever other streams have to do first."""
        item = self.queue[0]
        if isinstance(item, tuple):
            what, event = item
            if what == "wait":
                event.stream.advance(event)
            else:
                event.passed = True
            self.queue.popleft()
        else:
            self.queue.popleft()
            item()

    @property
    def blocked(self) -> bool:
        """True if there is nothing to run, or nothing that may run yet."""
        head = self.queue[0] if self.queue else None
        return head is None or (isinstance(head, tuple) and head[0] == "wait" and not head[1].passed)


class World:
    def __init__(self, seed: int, eager: float) -> None:
        """eager: the chance that some stream advances whenever something new is queued; 0: everything runs as late as
        possible.
        """
        self.lock = threading.RLock()
        self.eager = eager
        self.rng = np.random.default_rng([seed, 7])
        self.all = [LazyStream(self) for _ in range(3)]
        self._haste = np.ones(3) / 3
        self._stirring = False

    def streams(self) -> Streams:
        return Streams(*self.all)

    def stir(self) -> None:
        if self._stirring:
            return
        self._stirring = True
        try:
            while self.rng.random() < self.eager:
                if self.rng.random() < 0.1:  # now and then another stream becomes fast
                    self._haste = self.rng.dirichlet([0.2] * len(self.all))
                stream = self.all[self.rng.choice(len(self.all), p=self._haste)]
                if not stream.blocked:
                    stream.step()
        finally:
            self._stirring = False


LONGEST = 2_000_000
"""Clock cycles: about a millisecond."""


class DelayedStream(Stream):
    def __init__(self, stream: torch.cuda.Stream | None, rng: np.random.Generator, share: float) -> None:
        super().__init__(stream)
        self._rng = rng
        self._share = share

    def now(self, work: Callable[[], Any]) -> Any:
        self._hold_up()
        return super().now(work)

    def _hold_up(self) -> None:
        if self._rng.random() < self._share:
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(int(self._rng.integers(LONGEST)))


def delayed_streams(device: torch.device, seed: int, share: float) -> Streams:
    """share: the share of work that is delayed."""
    each = cuda_streams(device)
    plain = enumerate((each.compute, each.inward, each.outward))
    return Streams(*(DelayedStream(of.stream, np.random.default_rng([seed, i]), share) for i, of in plain))
