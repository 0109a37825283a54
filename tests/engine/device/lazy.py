"""Streams in the place of CUDA's that run what they are given as late, or in as odd an order, as the events allow.

Nothing runs when it is put on a stream. It runs when somebody waits for an event behind it, when the loop needs a result, or
when the dice say so; in the order of its stream, and after the events that the stream was told to wait for. A copy that no
event protects will sooner or later read what was overwritten, or be read before it was made.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from skirl.engine.device.streams import Streams
from tests.interpreter import quicken


class LazyEvent:
    """Passed once the stream has got there."""

    def __init__(self, stream: "LazyStream") -> None:
        self.stream = stream
        self.passed = False

    def synchronize(self) -> None:
        with self.stream.world.lock:
            self.stream.advance(self)


class LazyStream:
    """A queue of work, of events to pass and of events to wait for."""

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
        """Up to an event of this stream."""
        while not event.passed:
            self.step()

    def step(self) -> None:
        """One item, whatever other streams have to do first."""
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
        """Whether there is nothing to do, or nothing yet."""
        head = self.queue[0] if self.queue else None
        return head is None or (isinstance(head, tuple) and head[0] == "wait" and not head[1].passed)


class World:
    """Some streams and the dice."""

    def __init__(self, seed: int, eager: float, streams: int = 3) -> None:
        """eager: the chance that some stream gets on whenever there is something new; 0: all is as late as can be.

        streams: 4 where several trainers share rows.
        """
        quicken()
        self.lock = threading.RLock()
        self.eager = eager
        self.rng = np.random.default_rng([seed, 7])
        self.all = [LazyStream(self) for _ in range(streams)]
        self._haste = np.ones(streams) / streams
        self._stirring = False

    def streams(self) -> Streams:
        """For a Gpu."""
        return Streams(*self.all)

    def stir(self) -> None:
        if self._stirring:
            return
        self._stirring = True
        try:
            while self.rng.random() < self.eager:
                if self.rng.random() < 0.1:  # now one of them is quick, now another
                    self._haste = self.rng.dirichlet([0.2] * len(self.all))
                stream = self.all[self.rng.choice(len(self.all), p=self._haste)]
                if not stream.blocked:
                    stream.step()
        finally:
            self._stirring = False
