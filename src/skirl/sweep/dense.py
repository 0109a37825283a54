"""Train the models of a sweep one after the other (a loop) or each in a thread (lanes), whichever is faster here.

Both make the same calls to torch, on the same numbers and with as many torch threads, so the choice changes no bit.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from skirl.tools.interrupts import uninterrupted

LOOP, LANES = "loop", "lanes"
FORMS = ("auto", LOOP, LANES)
TRIES = 4
"""Rounds of each form that are timed before one is chosen; the first round is not timed."""
KEPT = 64
"""Rounds after which both are timed again; next time it takes four times as many, and so on."""


class JobThreads:
    """Threads that take jobs until none is left, the caller's among them. Each computes with one torch thread.

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
        """Take the loop while other processes use the other cores, or choose again."""
        self.held = on
        self.anew()

    @property
    def typical(self) -> dict[str, float]:
        """Median seconds of the timed rounds of each form."""
        return {form: median(seconds[1:]) for form, seconds in self._seconds.items() if len(seconds) > 1}

    def anew(self, until: int = KEPT) -> None:
        """Time both forms again, because variants have left or some rounds have passed."""
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


def dropouts(model: Any) -> list[nn.Dropout]:
    """Return the modules of a model that are torch's own Dropout, unchanged."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules):
        return []
    return [module for module in modules if type(module) is nn.Dropout and "forward" not in vars(module)]


@contextmanager
def drawn_from(generator: torch.Generator, modules: Sequence[nn.Dropout]) -> Iterator[None]:
    """Let these modules draw from a generator in this block, instead of the process's own.

    >>> layer, own, x = nn.Dropout(0.5), torch.Generator().manual_seed(7), torch.ones(100)
    >>> with drawn_from(own, [layer]):
    ...     drawn = layer(x)
    >>> _ = torch.manual_seed(7)
    >>> torch.equal(drawn, layer(x))
    True
    """
    with _instead(modules, partial(_drop, generator)):
        yield


class Watched:
    """Find out whether only some Dropout modules drew from the process's generator."""

    def __init__(self, modules: Sequence[nn.Dropout]) -> None:
        self._modules = modules
        self._last = torch.empty(0)
        self.alone = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this block; afterwards `alone` has the answer."""
        self._last = torch.get_rng_state()
        with _instead(self._modules, self._forward):
            yield
        self._drawn_by_others()

    def _forward(self, module: nn.Dropout, values: Tensor) -> Tensor:
        self._drawn_by_others()
        out = nn.Dropout.forward(module, values)
        self._last = torch.get_rng_state()
        return out

    def _drawn_by_others(self) -> None:
        self.alone = self.alone and torch.equal(self._last, torch.get_rng_state())


@contextmanager
def _instead(modules: Sequence[nn.Dropout], forward: Any) -> Iterator[None]:
    for module in modules:
        vars(module)["forward"] = partial(forward, module)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]


def _drop(generator: torch.Generator, module: nn.Dropout, values: Tensor) -> Tensor:
    """The steps of torch's dropout on the CPU, which takes no generator (`_dropout_impl` in ATen's Dropout.cpp)."""
    if not module.training or not 0 < module.p < 1 or not values.numel():
        return nn.Dropout.forward(module, values)
    kept = torch.empty_like(values, requires_grad=False).bernoulli_(1 - module.p, generator=generator)
    kept.div_(1 - module.p)
    return values.mul_(kept) if module.inplace else values * kept
