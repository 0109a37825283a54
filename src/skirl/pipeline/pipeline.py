"""The stages around the oracle: plan, fetch and write back, each in its own thread, alongside the training loop."""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from skirl.core.ids import Ids
from skirl.engine.engine import Engine, Leaving
from skirl.engine.window import Window
from skirl.engine.work import Work
from skirl.oracle.step import Step
from skirl.pipeline.reader import Reader
from skirl.pipeline.stages import LOOP, StageHook, Stages, StageStuck, Times
from skirl.tools.interrupts import Hold
from skirl.tools.os_errors import why

STAGES = ("plan", "fetch", "write", "write 2")
BACKLOG = 4
"""Most batches that wait for the planner."""


class Pipeline:
    """Runs one pass over a stream of batches; keeps neither the reader nor a batch, as a loader may hold the lookahead.

    loop: reads ->  plan  -> planned ->  fetch  -> ready -> loop: makes the rows resident
                                           ^                        |
                                       the store  <-  write  <- writes
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        window: Window,
        prefetch: int,
        *,
        timeout: float,
        hook: StageHook | None,
        times: Times,
    ) -> None:
        self.times = times
        self.done = 0
        self._engines = engines
        self._prefetch = prefetch
        self.window = window
        self.stages = Stages(STAGES, timeout=timeout, hook=hook, times=times)
        self._lock = self.stages.lock
        self._inbox: deque[list[Ids]] = deque()
        self._ended = False
        self._planned: deque[list[Work]] = deque()
        self._all_planned = False
        self._credits = prefetch
        self._ready: deque[list[Work]] = deque()
        self._all_ready = False
        self._writes: deque[tuple[int, list[Leaving]]] = deque()
        self._writing: list[int] = []
        self._write_failure: BaseException | None = None
        self._stopped = self._renews = False
        """Whether the planner waits for caches that are split anew, and whether it is to."""
        banks = sum(len(engine.schema.banks) for engine in engines)
        self._fetched_rows, self._unwritten_rows = np.zeros((2, banks), np.int64)
        self._closed = False
        self._pid = os.getpid()
        writers = (lambda: self._write_all("write"), lambda: self._write_all("write 2"))
        self.stages.start(dict(zip(STAGES, (self._plan_all, self._fetch_all, *writers))))

    @property
    def _written(self) -> int:
        """The last step whose evicted rows, and those of all steps before it, are in the store."""
        return min([*self._writing, *(number for number, _ in self._writes), self.done]) - 1

    # The training loop's side. All of it runs with interrupts held back.

    def next(self, hold: Hold, reader: Reader) -> list[Work] | None:
        """Return the next step, with its rows resident; None if all steps are done. Read what the planner needs for it."""
        with self._lock:
            self._credits += 1
            self.stages.wake("fetch")
        while True:
            self.stages.wait(
                hold,
                lambda: self._is_ready() or self._is_hungry() or self._waits_for_split(),
                f"rows of step {self.done}",
                self.done,
            )
            if self._waits_for_split():
                self._split_anew(hold)
            elif self._is_ready():
                break
            else:
                self._pull(hold, reader)
        if not self._ready:
            return None
        works = self._ready[0]
        number, steps = works[0].number, _steps(works)
        leaving = [len(step.evict_keys) for step in steps]
        self.stages.wait(hold, lambda: self._fits(self._unwritten_rows, leaving), "write-backs", self.done)
        self.stages.call_hook("load", number)
        started = time.monotonic()
        with self._lock:
            self._ready.popleft()
            self._fetched_rows -= [len(step.fetch_keys) for step in steps]
            self.stages.wake("fetch")
        with self._losing(f"step {number} failed while its rows were being moved"):
            left = [engine.load(work) for engine, work in zip(self._engines, works, strict=True)]
        with self._lock:
            self.done = number + 1
            self._writes.append((number, left))
            self._unwritten_rows += leaving
            self.stages.wake("write", "write 2")
        for engine, work in zip(self._engines, works, strict=True):
            engine.rows.gather(engine, work)
        ended = time.monotonic()
        self.times.busy["load"] += ended - started
        self.times.timeline.add(LOOP, "load", number, started, ended)
        while self._hungry():  # the planner has work while this step computes
            self._pull(hold, reader)
        return works

    def _hungry(self) -> bool:
        with self._lock:
            self.stages.check()
            return self._is_hungry()

    def _pull(self, hold: Hold, reader: Reader) -> None:
        batches = reader.pull(hold)
        with self._lock:
            self.stages.check()
            if batches:
                self._inbox.append(batches)
            self._ended = self._ended or len(batches) < reader.micros
            self.stages.wake("plan")

    @contextmanager
    def _losing(self, what: str) -> Iterator[None]:
        """Record in all engines that rows are lost: one has lost some, and the others are a step ahead of it or behind."""
        try:
            yield
        except BaseException as error:
            for engine in self._engines:
                engine.lose(f"{what}: {why(error)}", error)
            raise

    def _split_anew(self, hold: Hold) -> None:
        """Write all rows to the store, and let the window split the caches anew."""
        self.stages.wait(hold, lambda: self._written == self.done - 1, "write-backs", self.done - 1)
        with self._losing("splitting the cache again failed"):
            for engine in self._engines:
                engine.drop_caches()
        with self._lock:
            self._stopped = self._renews = False
            self.stages.wake("plan")

    def renew(self) -> None:
        """Have the caches dropped, and split anew, once all that is planned is executed."""
        with self._lock:
            self._renews = not self._all_planned
            self.stages.wake("plan")

    def drain(self) -> None:
        """Wait until all rows that have left the cache are in the store. This counts as no stall: training does not wait."""
        stall, blame = self.times.stall, dict(self.times.blame)
        with Hold() as hold:
            self.stages.wait(hold, lambda: self._written == self.done - 1, "write-backs", self.done - 1)
        self.times.stall = stall
        self.times.blame.update(blame)

    def close(self) -> None:
        """Stop all stages. What was executed stays; what was only planned never happened."""
        if self._closed or os.getpid() != self._pid:  # in a forked child the threads are its parent's
            return
        with Hold() as hold:
            self._closed = True
            self.stages.close()
            stuck = self.stages.join(hold)
            if "write" in stuck or "plan" in stuck:
                lost = f"the {' and '.join(stuck)} stage did not stop ({self.stages.what_is_busy()}): rows may be lost"
                for engine in self._engines:
                    engine.lose(lost)
            if "plan" not in stuck:
                self.window.rollback(self.done)
            for engine in self._engines:
                engine.forget_moves()
            if stuck and not hold.count:
                raise StageStuck(
                    self._engines[0].damage
                    or f"the fetch stage did not stop ({self.stages.what_is_busy()}): no row is lost"
                )
            if self._write_failure is not None:
                raise self._write_failure

    def _is_ready(self) -> bool:
        return bool(self._ready) or self._all_ready

    def _is_hungry(self) -> bool:
        waiting = len(self._planned) + len(self._ready)
        return not self._ended and len(self._inbox) < BACKLOG and waiting <= self._prefetch

    def _waits_for_split(self) -> bool:
        return self._stopped and self.done == self.window.next_number

    def _fits(self, taken: np.ndarray, more: list[int]) -> bool:
        """Return whether staging has room in one of its halves. A step too large for it goes alone."""
        halves = [half for engine in self._engines for half in engine.capacity.halves]
        return all(not t or t + m <= most for t, m, most in zip(taken.tolist(), more, halves, strict=True))

    # The stages, each in its own thread.

    def _plan_all(self) -> None:
        """Let batches enter, and plan every step whose window is full. If the loop ends first, tell other trainers."""
        self._plan_until_the_end()
        if self.stages.failure is None:
            self.window.leave()

    def _plan_until_the_end(self) -> None:
        stages, window = self.stages, self.window
        while True:
            with self._lock:
                stages.pause("plan", self._may_plan)
                if stages.stopping:
                    return
                renews = self._renews
                batches = self._inbox.popleft() if self._inbox and not renews else None
                stages.wake(LOOP)
            if renews:
                if not self._begins_anew():
                    return
                continue
            with stages.working("plan", window.entered, "enter") as facts:
                if batches is None:
                    window.end()
                else:
                    facts["batches"] = len(batches)
                    window.enter(batches)
            while True:
                with stages.working("plan", window.next_number) as facts:
                    if (works := window.next()) is not None:
                        steps = _steps(works)
                        facts["fetched"] = sum(step.fetches for step in steps)
                        facts["new"] = sum(len(step.new_keys) for step in steps)
                        facts["leaving"] = sum(len(step.evict_keys) for step in steps)
                if works is None and window.stopped:
                    if not self._begins_anew():
                        return
                    continue
                if works is None:
                    break
                with self._lock:
                    self._planned.append(works)
                    stages.wake("fetch", LOOP)
                    stages.pause("plan", self._may_plan_more)
                    if stages.stopping:
                        return
                    done, renews = self.done, self._renews
                if not renews:
                    window.executed(done)
                elif not self._begins_anew():
                    return
            if batches is None or window.over:
                with self._lock:
                    self._ended = self._all_planned = True
                    stages.wake("fetch", LOOP)
                return

    def _begins_anew(self) -> bool:
        """Let the loop execute all that is planned and drop the caches, then begin with the rest. False if all stops."""
        with self._lock:
            self._stopped = True
            self.stages.wake(LOOP)
            self.stages.pause("plan", lambda: self.stages.stopping or not self._stopped)
            if self.stages.stopping:
                return False
        self.window.begin_anew()
        return True

    def _may_plan(self) -> bool:
        return self.stages.stopping or self._renews or (bool(self._inbox or self._ended) and self._may_plan_more())

    def _may_plan_more(self) -> bool:
        return self.stages.stopping or self._renews or len(self._planned) <= self._prefetch

    def _fetch_all(self) -> None:
        stages = self.stages
        while True:
            with self._lock:
                stages.pause("fetch", self._may_fetch)
                if stages.stopping:
                    return
                if not self._planned:
                    self._all_ready = True
                    stages.wake(LOOP)
                    return
                self._credits -= 1
                works = self._planned.popleft()
                stages.wake("plan", LOOP)
                steps = _steps(works)
                rows = [len(step.fetch_keys) for step in steps]
                after = max(step.fetch_after for step in steps)
                stages.pause("fetch", lambda r=rows, a=after: stages.stopping or self._may_read(r, a))
                if stages.stopping:
                    return
                self._fetched_rows += rows
            with stages.working("fetch", works[0].number) as facts:
                facts["rows"] = sum(rows)
                for engine, work in zip(self._engines, works, strict=True):
                    engine.fetch(work)
            with self._lock:
                self._ready.append(works)
                stages.wake(LOOP)

    def _may_fetch(self) -> bool:
        if self.stages.stopping:
            return True
        return bool(self._credits) if self._planned else self._all_planned

    def _may_read(self, rows: list[int], after: int) -> bool:
        return self._written >= after and self._fits(self._fetched_rows, rows)

    def _write_all(self, name: str) -> None:
        """Write evicted rows, in order. Go on after a failure elsewhere: the loop may be moving rows at that moment."""
        stages = self.stages
        while True:
            with self._lock:
                stages.pause(name, self._may_write)
                if not self._writes or self._write_failure is not None:
                    return
                number, left = self._writes.popleft()
                self._writing.append(number)
                stages.wake("write", "write 2")  # the other may take the step after this one
            with stages.working(name, number) as facts:
                rows = [len(keys) for leaving in left for keys, _ in leaving]
                facts["rows"] = sum(rows)
                try:
                    with self._losing("rows that left another collection's cache could not be written"):
                        for engine, leaving in zip(self._engines, left, strict=True):
                            engine.write(leaving)
                except BaseException as error:
                    with self._lock:
                        self._write_failure = self._write_failure or error
                    raise
            with self._lock:
                self._writing.remove(number)
                self._unwritten_rows -= rows
                stages.wake("write", "write 2", "fetch", LOOP)

    def _may_write(self) -> bool:
        if self._write_failure is not None:
            return True
        if not self._writes:
            return self.stages.closing
        return all(number == self._writes[0][0] - 1 for number in self._writing)


def _steps(works: list[Work]) -> list[Step]:
    return [step for work in works for step in work.steps]
