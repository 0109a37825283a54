"""The threads around the oracle and how they stop, the times and the timeline of what they do, and rows that a loop without
close leaves in the store."""

import json
import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from math import inf
from pathlib import Path
from typing import Any

from skirl.engine.engine import Engine
from skirl.tools.interrupts import Hold
from skirl.tools.os_errors import why

log = logging.getLogger("skirl")

LOOP = "loop"
LANES = ("plan", "fetch", LOOP, "write", "write 2")
"""From top to bottom, in the order that a batch passes them."""


class Timeline:
    """Writes what every thread does as a file for https://ui.perfetto.dev or chrome://tracing: `read`, `wait`, `load` and
    `compute` in the lane of the training loop, the rest in that of a stage. Arrows join the events of one step. A fetch
    under the compute of earlier steps is hidden; a `wait` shows what was not. Any thread may add an event."""

    def __init__(self, path: str | Path | None = None) -> None:
        """None writes nothing."""
        self._path = path
        self.first = 0
        """Steps before the pass whose events are added: in a pass they count from 0, in the file from 1."""
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._file: FileIO | None = None if path is None else Path(path).open("wb", buffering=0)  # noqa: SIM115
        """None once it has ended."""
        self._write("[")
        self._put(name="process_name", ph="M", args={"name": "skirl"})
        for number, lane in enumerate(LANES):
            self._put(name="thread_name", ph="M", tid=number, args={"name": lane})
            self._put(name="thread_sort_index", ph="M", tid=number, args={"sort_index": number})

    def add(
        self, lane: str, what: str, step: int, began: float, ended: float, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Add an event. Steps count from 0 in each pass."""
        if self._file is None:
            return
        step += self.first + 1
        with self._lock:
            when = {"ts": round(1e6 * (began - self._began), 1), "dur": round(1e6 * (ended - began), 1)}
            flow = {"bind_id": str(step), "flow_in": True, "flow_out": True}
            self._put(name=what, ph="X", tid=LANES.index(lane), **when, **flow, args={"step": step, **(facts or {})})

    def close(self) -> None:
        with self._lock:
            self._write('{"name":"process_sort_index","ph":"M","pid":1,"args":{"sort_index":0}}]')  # no comma
            if self._file is not None:
                self._file.close()
                self._file = None

    # Under the lock.

    def _put(self, **event: Any) -> None:
        self._write(json.dumps({"pid": 1, **event}, separators=(",", ":")) + ",\n")

    def _write(self, text: str) -> None:
        """Write to the file. If that fails, end the timeline: it must not end the run."""
        if self._file is None:
            return
        rest, file = memoryview(text.encode()), self._file
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            log.warning("the timeline %s ends here: %s. Training goes on without it", self._path, why(error))
            file.close()
            self._file = None


def keep_rows(engines: Sequence[Engine], torn: bool, *, whole: bool, hold: Hold) -> None:
    """Write the resident rows of all engines, so that stores on disk have all rows as after the last step. Rows that
    are not all of one step are left as a kill leaves them, with a warning."""
    hold.most = hold.count + 1
    for engine in engines:
        if not engine.store.durable:
            continue
        if not any(pack.steps.any() for pack in engine.packs):
            continue  # nothing was trained
        reason = engine.damage
        if torn:
            reason = reason or "the last step had updated the rows of only some collections when the loop ended"
        elif not whole:
            reason = reason or "the loop ended with an error, and other trainers may be at another step"
        if reason is not None:
            if any(len(cache.unwritten) for cache in engine.caches):
                log.warning("rows in the cache are not written to %r: %s", engine.store, reason)
            continue
        try:
            engine.flush()
        except KeyboardInterrupt:
            log.warning("rows in the cache are not all in stores on disk: Ctrl-C came while they were being written")
            raise


StageHook = Callable[[str, int], None]

SLICE = 0.1
"""Seconds that the loop waits before it checks for an interrupt."""
POLL = 1.0
"""Seconds that a stage waits before it checks whether it was abandoned."""
GRACE = 5.0
"""Seconds that closing continues after a Ctrl-C."""


@dataclass
class Times:
    """Seconds of each stage, and of the training loop waiting for them."""

    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("plan", "fetch", "write", "load"), 0.0))
    stall: float = 0.0
    blame: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("plan", "fetch", "write"), 0.0))
    """For each stage: seconds that it worked while the loop waited."""
    read: float = 0.0
    timeline: Timeline = field(default_factory=Timeline)

    def restart(self) -> None:
        """Forget the first step, in which kernels are compiled."""
        self.busy, self.blame = dict.fromkeys(self.busy, 0.0), dict.fromkeys(self.blame, 0.0)
        self.stall = self.read = 0.0

    @property
    def hidden(self) -> float:
        """Share of the movement that the loop did not wait for."""
        total = sum(self.busy.values())
        return max(0.0, 1.0 - (self.stall + self.busy["load"]) / total) if total else 1.0


class StageStuck(RuntimeError): ...


class Stages:
    def __init__(self, names: tuple[str, ...], *, timeout: float, hook: StageHook | None, times: Times) -> None:
        self.lock = threading.RLock()
        self.times = times
        self.failure: BaseException | None = None
        self.closing = False
        self._timeout = timeout
        self._hook = hook
        self._wakes = {name: threading.Condition(self.lock) for name in (*names, LOOP)}
        self._busy: dict[str, tuple[int, float] | None] = dict.fromkeys(names)
        self._waiting: float | None = None
        """Since when the loop has been waiting."""
        self._until: dict[str, Callable[[], object]] = {}
        """The condition that each stage, and the loop, waits for now."""
        self._moved = time.monotonic()
        self._threads: dict[str, threading.Thread] = {}

    def start(self, jobs: dict[str, Callable[[], None]]) -> None:
        try:
            for name, job in jobs.items():
                thread = threading.Thread(target=self._guard, args=(name, job), name=f"skirl-{name}", daemon=True)
                thread.start()
                self._threads[name] = thread
        except BaseException:
            self.abandon()
            raise

    # A stage's side.

    @property
    def stopping(self) -> bool:
        return self.closing or self.failure is not None

    def pause(self, name: str, until: Callable[[], object]) -> None:
        """Wait in a stage, which holds the lock. `until` must be true when stopping."""
        if until():
            return
        self._until[name] = until
        while not until():
            self._wakes[name].wait(POLL)
        del self._until[name]

    def wake(self, *names: str) -> None:
        """Wake those stages whose condition has become true. The caller holds the lock. Others are not woken: 2 of 5
        wakes in a step were for nothing, and each took the GIL twice."""
        for name in names:
            until = self._until.get(name)
            if until is not None and until():
                self._wakes[name].notify()

    def _wake_all(self) -> None:
        for condition in self._wakes.values():
            condition.notify()

    @contextmanager
    def working(self, name: str, number: int, what: str | None = None) -> Iterator[dict[str, int]]:
        """Time a stage's work on step `number`. The timeline shows it with the facts that the stage adds, if it adds any."""
        started = self._moved = time.monotonic()
        self._busy[name] = number, started
        facts = dict[str, int]()
        try:
            self.call_hook(name, number)
            yield facts
        finally:
            self._moved = ended = time.monotonic()
            with self.lock:
                self._busy[name] = None
                self.times.busy[_kind(name)] += ended - started
                if self._waiting is not None:
                    self.times.blame[_kind(name)] += ended - max(started, self._waiting)
            if facts:
                self.times.timeline.add(name, what or _kind(name), number, started, ended, facts)

    def call_hook(self, name: str, number: int) -> None:
        if self._hook is not None:
            self._hook(_kind(name), number)

    def all_wait(self, but: Container[str]) -> bool:
        """Return whether the loop ("load") and the stages that have not ended wait, apart from these."""
        with self.lock:
            alive = [LOOP, *(name for name, thread in [*self._threads.items()] if thread.is_alive())]
            awaited = [self._until.get(name) for name in alive if ("load" if name == LOOP else _kind(name)) not in but]
            return self.stopping or all(until is not None and not until() for until in awaited)

    def _guard(self, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            with self.lock:
                if self.failure is None:
                    self.failure = error
                self._wake_all()

    # The loop's side.

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closing:
            raise RuntimeError(
                "this pass over the lookahead has ended: iterate over the lookahead again, or make a new one"
            )

    def wait(self, hold: Hold, until: Callable[[], object], what: str, step: int = 0) -> None:
        """Wait in the loop, which does not hold the lock. Raise if a stage fails or an interrupt comes."""
        began: float | None = None
        while True:
            with self.lock:
                self.check()
                if until():
                    if began is not None:
                        self._waited(began, what, step)
                    return
                if began is None:
                    began = self._waiting = time.monotonic()
                self._until[LOOP] = until
                self._wakes[LOOP].wait(min(SLICE, self._timeout))
                del self._until[LOOP]
            hold.check()
            idle = time.monotonic() - max(began, self._moved)
            if idle > self._timeout:
                raise StageStuck(
                    f"no stage made progress for {seconds(idle)} while the loop waited for {what}: {self.what_is_busy()}. "
                    "If the store is only slow, raise lookahead(timeout=...)"
                )

    def _waited(self, began: float, what: str, step: int) -> None:
        now, self._waiting = time.monotonic(), None
        self.times.stall += now - began
        for name, entry in self._busy.items():
            if entry is not None:
                self.times.blame[_kind(name)] += now - max(entry[1], began)
        self.times.timeline.add(LOOP, "wait", step, began, now, {"for": what})

    def close(self) -> None:
        with self.lock:
            self.closing = True
            self._wake_all()

    def abandon(self) -> None:
        """Close without the lock, so the garbage collector may call it anywhere. Stages notice within a second."""
        self.closing = True

    def join(self, hold: Hold) -> list[str]:
        """Wait for the threads to end. Return the stages that are stuck, or that a Ctrl-C gave up on: the first one
        leaves them a few seconds to write what is left."""
        began, last_word, told = time.monotonic(), inf, False
        while alive := [name for name, thread in self._threads.items() if thread.is_alive()]:
            self._threads[alive[0]].join(SLICE)
            now = time.monotonic()
            if hold.count:
                last_word = min(last_word, now + GRACE)
            if not told and now - began > 2:
                told = True
                log.warning("closing: %s", self.what_is_busy())
            since = [began if (busy := self._busy[name]) is None else busy[1] for name in alive]
            if hold.count > 1 or now > last_word or now - max(since) > self._timeout:
                return list(dict.fromkeys(map(_kind, alive)))
        return []

    def what_is_busy(self) -> str:
        now = time.monotonic()
        # A stage may end its work while we look, so read each entry only once.
        busy = [(name, *entry) for name in self._busy if (entry := self._busy[name]) is not None]
        return (
            ", ".join(f"the {_kind(n)} stage is at step {k} for {seconds(now - t)}" for n, k, t in busy)
            or "no stage is at work"
        )


def _kind(name: str) -> str:
    return name.partition(" ")[0]


def seconds(time: float) -> str:
    return f"{time:.0f} s" if time >= 10 else f"{time:.1f} s"
