"""The models of a sweep train one after the other (a loop), or each in a thread (lanes): whichever is faster here.

Both make the same calls of torch, on the same numbers, with as many torch threads: no bit depends on the choice.
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
"""Rounds of each form that are timed before one is chosen, after one that is not."""
KEPT = 64
"""Rounds after which both are timed again; then four times as many, and so on."""


class Lanes:
    """Threads that take jobs until none is left; the caller's is one of them. Each computes with one torch thread.

    **Arguments**

    - `count`: how many, the caller's included.

    >>> done, lanes = [], Lanes(2)
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
        """What each job took last: the longest go first."""

    def run(self, jobs: Mapping[Hashable, Callable[[], None]]) -> None:
        """Do all jobs; when all have ended, the error of the first one that failed is raised.

        **Arguments**

        - `jobs`: by what they are known by from round to round.
        """
        if not self._threads:
            self._start()
        order = sorted(jobs, key=lambda name: -self._seconds.get(name, 0.0))
        mine = _Round(deque((name, jobs[name]) for name in order), self._seconds)
        with uninterrupted():  # a job that still runs changes weights
            for _ in self._threads[: max(0, len(jobs) - 1)]:  # more would find nothing to do
                self._rounds.put(mine)
            mine.work()
            mine.over.wait()
        for name in jobs:
            if name in mine.errors:
                raise mine.errors[name]

    def close(self) -> None:
        """Let the threads end."""
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
    """Which form a sweep takes: each is timed some rounds, one form after the other; the one that takes less is kept.

    A round is a whole step, with the wait for its batch: what lanes take from the pipeline counts as theirs. Now and then
    both are timed again, for the window grows, and what else the machine does changes.

    **Arguments**

    - `form`: "loop" or "lanes"; "auto": the faster.

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
        """Whether it is the loop for now, whatever is faster."""
        self.anew()

    def hold(self, on: bool) -> None:
        """Take the loop for now, because other processes use the other cores; or choose again.

        **Arguments**

        - `on`: whether to take the loop.
        """
        self.held = on
        self.anew()

    @property
    def typical(self) -> dict[str, float]:
        """Seconds of a round of each form, the median of those that were timed."""
        return {form: median(seconds[1:]) for form, seconds in self._seconds.items() if len(seconds) > 1}

    def anew(self, until: int = KEPT) -> None:
        """Time again: there are other variants now, or it is time to.

        **Arguments**

        - `until`: so many rounds after which that is so once more.
        """
        self._seconds: dict[str, list[float]] = {LOOP: [], LANES: []}
        self._kept, self._until = 0, until

    def next(self) -> str:
        """The form of the next round."""
        if self.held:
            return LOOP
        if self.form != "auto":
            return self.form
        for form in (LOOP, LANES):
            if len(self._seconds[form]) <= TRIES:
                return form
        return min(self.typical, key=lambda form: self.typical[form])

    def took(self, form: str, seconds: float) -> None:
        """A round of a form took so long."""
        if len(self._seconds[form]) <= TRIES:
            self._seconds[form].append(seconds)
            return
        self._kept += 1
        if self._kept == self._until:
            self.anew(4 * self._until)


def alike_in_threads() -> bool:
    """Return whether torch computes the same in another thread: some of its settings are those of one thread."""
    return torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
