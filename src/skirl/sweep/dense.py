"""Train the models of a sweep one after the other (a loop) or each in a thread (lanes), whichever is faster here.

Both make the same calls to torch, on the same numbers and with as many torch threads, so the choice changes no bit.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from queue import SimpleQueue
from statistics import median

import torch

from skirl.tools.interrupts import uninterrupted

LOOP, LANES = "loop", "lanes"
FORMS = ("auto", LOOP, LANES)
TRIES = 4
"""Rounds of each form that are timed before one is chosen; the first round is not timed."""
KEPT = 64
"""Rounds after which both are timed again; next time it takes four times as many, and so on."""


class JobThreads:
    """Threads that take jobs until none is left, the caller's among them. Each computes with one torch thread.

    **Arguments**

    - `count`: number of threads, including the caller's.

    >>> done, lanes = [], JobThreads(2)
    >>> lanes.run({n: lambda n=n: done.append(n) for n in range(5)})
    >>> lanes.close()
    >>> sorted(done)
    [0, 1, 2, 3, 4]
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._rounds: SimpleQueue[_Round | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._seconds: dict[Hashable, float] = {}
        """Seconds that each job took last time; the longest go first."""

    def run(self, jobs: Mapping[Hashable, Callable[[], None]]) -> None:
        """Do all jobs. When all have ended, raise the first error.

        **Arguments**

        - `jobs`: the jobs, by a key that stays the same from round to round.
        """
        if not self._threads:
            self._start()
        order = sorted(jobs, key=lambda name: -self._seconds.get(name, 0.0))
        mine = _Round(deque((name, jobs[name]) for name in order), self._seconds)
        with uninterrupted():  # an interrupted job could leave weights half updated
            for _ in self._threads[: max(0, len(jobs) - 1)]:  # more would find nothing to do
                self._rounds.put(mine)
            mine.work()
            mine.over.wait()
        for name in jobs:
            if name in mine.errors:
                raise mine.errors[name]

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._rounds.put(None)
        for thread in self._threads:
            thread.join(1.0)
        self._threads = []

    def _start(self) -> None:
        threads = torch.get_num_threads()
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name=f"skirl-lane-{n}") for n in range(1, self._count)
        ]
        for thread in self._threads:
            thread.start()
        torch.set_num_threads(threads)

    def _work(self) -> None:
        torch.set_num_threads(1)
        while (one := self._rounds.get()) is not None:
            one.work()


class _Round:
    """Jobs that threads take from."""

    def __init__(self, jobs: "deque[tuple[Hashable, Callable[[], None]]]", seconds: dict[Hashable, float]) -> None:
        self.jobs, self.seconds = jobs, seconds
        self.left = len(jobs)
        self.errors: dict[Hashable, BaseException] = {}
        self.over = threading.Event()
        self._lock = threading.Lock()
        if not jobs:
            self.over.set()

    def work(self) -> None:
        """Take jobs until none is left."""
        while True:
            try:
                name, job = self.jobs.popleft()
            except IndexError:
                return
            began = time.perf_counter()
            try:
                job()
            except BaseException as error:
                self.errors[name] = error
            self.seconds[name] = time.perf_counter() - began
            with self._lock:
                self.left -= 1
                if not self.left:
                    self.over.set()


class Choice:
    """Choose the form of a sweep: time some rounds of each, then keep the faster one.

    A round is a whole step including the wait for its batch, so that what lanes take from the pipeline counts as theirs.
    Now and then both are timed again, because the window grows and the load of the machine changes.

    **Arguments**

    - `form`: "loop" or "lanes"; "auto" takes the faster one.

    >>> choice = Choice("auto")
    >>> for number in range(12):
    ...     choice.took(choice.next(), 0.5 if choice.next() == "lanes" else 0.7)
    >>> choice.next(), choice.typical
    ('lanes', {'loop': 0.7, 'lanes': 0.5})
    >>> choice.anew()
    >>> choice.next()
    'loop'
    """

    def __init__(self, form: str = "auto") -> None:
        if form not in FORMS:
            raise ValueError(f"form is {form!r}: set it to one of {', '.join(map(repr, FORMS))}")
        self.form = form
        self.held = False
        """True while the loop is taken whatever is faster."""
        self.anew()

    def hold(self, on: bool) -> None:
        """Take the loop while other processes use the other cores, or choose again.

        **Arguments**

        - `on`: whether to take the loop.
        """
        self.held = on
        self.anew()

    @property
    def typical(self) -> dict[str, float]:
        """Median seconds of the timed rounds of each form."""
        return {form: median(seconds[1:]) for form, seconds in self._seconds.items() if len(seconds) > 1}

    def anew(self, until: int = KEPT) -> None:
        """Time both forms again, because variants have left or some rounds have passed.

        **Arguments**

        - `until`: number of rounds until the next time.
        """
        self._seconds: dict[str, list[float]] = {LOOP: [], LANES: []}
        self._kept, self._until = 0, until

    def next(self) -> str:
        """Return the form of the next round."""
        if self.held:
            return LOOP
        if self.form != "auto":
            return self.form
        for form in (LOOP, LANES):
            if len(self._seconds[form]) <= TRIES:
                return form
        return min(self.typical, key=lambda form: self.typical[form])

    def took(self, form: str, seconds: float) -> None:
        """Record how long a round of a form took."""
        if len(self._seconds[form]) <= TRIES:
            self._seconds[form].append(seconds)
            return
        self._kept += 1
        if self._kept == self._until:
            self.anew(4 * self._until)


def alike_in_threads() -> bool:
    """Return whether torch computes the same in another thread: some of its settings belong to one thread."""
    return torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
