"""A memory node: at the request of owners, it runs a process for the part of each, and ends it."""

import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from skirl.store.remote import part as parts
from skirl.store.remote.meeting import Meeting
from skirl.store.remote.part import PartFacts
from skirl.store.remote.wire import Address

log = logging.getLogger("skirl")

TICK = 0.05
"""Seconds between two looks for requests."""
PROBE = 2.0
"""Seconds that an owner has to show that it is alive, once another run requests its part."""
GRACE = 30.0
"""Seconds that all parts together have to close their stores."""
HELD = 3600.0
"""Seconds that what a run left at the meeting point stays there: longer than anyone looks for it."""
METRICS = (
    ("rows", parts.ROWS, "gauge", "rows held"),
    ("memory_bytes", parts.MEMORY, "gauge", "memory of the process of a part"),
    ("gets_total", parts.GETS, "counter", "calls that read rows"),
    ("puts_total", parts.PUTS, "counter", "calls that wrote rows"),
    ("rows_read_total", parts.ROWS_OUT, "counter", "rows read"),
    ("rows_written_total", parts.ROWS_IN, "counter", "rows written"),
    ("bytes_read_total", parts.BYTES_OUT, "counter", "bytes of rows read"),
    ("bytes_written_total", parts.BYTES_IN, "counter", "bytes of rows written"),
)


@dataclass
class Served:
    """The part of one owner."""

    task: PartFacts
    process: Any
    pipe: Any
    numbers: Any
    waiting: list[dict[str, Any]] = field(default_factory=list)
    """Requests of other runs for the same part, kept until it is known whether its owner is alive."""
    probed: float = 0.0
    """When its owner was asked whether it is alive; 0: nobody waits for an answer."""


class Node:
    """The node that keeps a meeting point. Call its methods from one thread only."""

    def __init__(
        self,
        meeting: Meeting,
        *,
        rows: str = "memory",
        limit: int | None = None,
        patience: float = 60.0,
        body: Callable[..., None] = parts.run,
    ) -> None:
        self.served: dict[int, Served] = {}
        """The part of each owner."""
        self._meeting, self._rows, self._limit, self._patience, self._body = meeting, rows, limit, patience, body
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["skirl.store.remote.warm"])
        self._over: deque[tuple[float, int]] = deque()
        """When runs ended, and their numbers."""

    def tick(self) -> None:
        """Handle new requests, and parts that have joined or ended."""
        for key in sorted(self._meeting.asks(), key=lambda key: int(key.rpartition("/")[2])):
            if (ask := self._meeting.take(key)) is not None:
                self._heard(ask)
        while self._over and time.monotonic() - self._over[0][0] > HELD:
            self._meeting.forget(self._over.popleft()[1])
        for served in list(self.served.values()):
            self._look(served)

    def _heard(self, ask: dict[str, Any]) -> None:
        if ask["version"] != parts.VERSION:
            self._answer(ask["run"], f"{self._meeting.address} is of another version of skirl: install the same one")
        elif (there := self.served.get(ask["owner"])) is None:
            self._start(ask)
        else:
            there.waiting.append(ask)
            if not there.probed:
                there.probed = time.monotonic()
                with suppress(OSError):
                    there.pipe.send(PROBE)

    def _start(self, ask: dict[str, Any]) -> None:
        """Start a new part, in a process of its own."""
        numbers = self._context.RawArray("q", parts.NUMBERS)
        pipe, other_end = self._context.Pipe()
        task = PartFacts(
            node=self._meeting.address,
            address=Address.meeting(ask["meet"]),
            group=ask["group"],
            rank=ask["rank"],
            run=ask["run"],
            owner=ask["owner"],
            rows=self._rows,
            limit=self._limit,
            patience=self._patience,
        )
        process = self._context.Process(
            target=self._body, args=(other_end, numbers, task), name=f"skirl part of owner {task.owner}"
        )
        process.start()
        other_end.close()
        self.served[task.owner] = Served(task, process, pipe, numbers)
        log.info("%s serves owner %d in run %d", self._meeting.address, task.owner, task.run)

    def _look(self, served: Served) -> None:
        """Handle what a part has sent, and end it if its process has ended or does not answer."""
        total = sum(other.numbers[parts.MEMORY] for other in self.served.values())
        served.numbers[parts.OTHERS] = total - served.numbers[parts.MEMORY]
        gone = False
        try:
            while served.pipe.poll():
                what, of = served.pipe.recv()
                if what == "joined":
                    self._answer(served.task.run, None)
                elif what == "failed":
                    self._answer(served.task.run, f"{self._meeting.address} has no part for this run: {of}")
                    log.warning("%s: owner %d has no part: %s", self._meeting.address, served.task.owner, of)
                elif what == "owner":
                    self._judge(served, of)
                    return
        except (OSError, EOFError):
            gone = True
        if gone or not served.process.is_alive():
            self._end(served)
        elif served.probed and time.monotonic() - served.probed > PROBE + 1:
            self._judge(served, None)  # it does not even say whether its owner is alive

    def _judge(self, served: Served, answers: bool | None) -> None:
        """Decide which run gets a part that several requested: the present one if its owner answers, else the newest."""
        served.probed = 0.0
        if not answers:
            self._end(served)
            return
        task = served.task
        for ask in served.waiting:
            self._answer(
                ask["run"],
                f"the rows of trainer {task.owner} at {self._meeting.address} belong to run {task.run}, which is alive: "
                "end it first, or name another node",
            )
        served.waiting = []

    def _end(self, served: Served) -> None:
        """End a part. The newest run that waits for it gets a new one."""
        with suppress(OSError):
            served.pipe.close()
        served.process.join(0.2)
        if served.process.is_alive():
            served.process.kill()
            served.process.join()
        task = served.task
        del self.served[task.owner]
        self._over.append((time.monotonic(), task.run))
        log.info("%s has ended the part of owner %d in run %d", self._meeting.address, task.owner, task.run)
        if served.waiting:
            *older, newest = sorted(served.waiting, key=lambda ask: ask["run"])
            for ask in older:
                self._answer(ask["run"], f"run {newest['run']} is newer: end this one")
            self._start(newest)

    def _answer(self, run: int, refusal: str | None) -> None:
        self._meeting.leave(f"answer/{run}", {"refused": refusal})
        if refusal is not None:
            self._over.append((time.monotonic(), run))

    def metrics(self) -> str:
        """Return all metrics, by owner, in the format of Prometheus."""
        served = sorted(self.served.copy().values(), key=lambda each: each.task.owner)
        lines = []
        for name, at, kind, meaning in METRICS:
            lines += [f"# HELP skirl_node_{name} {meaning}", f"# TYPE skirl_node_{name} {kind}"]
            lines += [
                f'skirl_node_{name}{{owner="{each.task.owner}",run="{each.task.run}"}} {each.numbers[at]}'
                for each in served
            ]
        return "\n".join([*lines, "# TYPE skirl_node_parts gauge", f"skirl_node_parts {len(served)}", ""])

    def drain(self) -> None:
        """Have all parts finish calls in progress and close their stores."""
        for served in self.served.values():
            with suppress(OSError):
                served.pipe.send("drain")
        until = time.monotonic() + GRACE
        for served in list(self.served.values()):
            served.process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill all parts immediately."""
        for served in list(self.served.values()):
            served.process.kill()
            served.waiting = []
            self._end(served)
