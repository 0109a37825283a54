"""A memory node: at the request of owners, it runs a process for the part of each, and ends it."""

import logging
import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from skirl.store.remote import part as parts
from skirl.store.remote.meeting import Address, Meeting
from skirl.store.remote.part import PROBE, PartFacts

log = logging.getLogger("skirl")

TICK = 0.05
"""Seconds between two looks for requests."""
GRACE = 30.0
"""Seconds that all parts together have to close their stores."""


@dataclass
class Served:
    task: PartFacts
    process: Any
    pipe: Any
    waiting: dict[str, Any] | None = None
    """The newest request of another run for the same part, kept until it is known whether its owner is alive."""
    probed: float = 0.0
    """When its part was told that one waits: it ends, unless its owner answers."""


class Node:
    """The node that keeps a meeting point. Call its methods from one thread only."""

    def __init__(self, meeting: Meeting, *, rows: str, timeout: float, body: Callable[..., None] = parts.run) -> None:
        self.served: dict[int, Served] = {}
        self._meeting, self._rows, self._timeout, self._body = meeting, rows, timeout, body
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([parts.__name__])

    def tick(self) -> None:
        """Handle new requests, and parts that have joined or ended."""
        for key in self._meeting.asks():
            if (ask := self._meeting.take(key)) is not None:
                self._heard(ask)
        for served in list(self.served.values()):
            self._look(served)

    def _heard(self, ask: dict[str, Any]) -> None:
        if ask["version"] != parts.VERSION:
            self._answer(ask["run"], f"{self._meeting.address} is of another version of skirl: install the same one")
        elif (there := self.served.get(ask["owner"])) is None:
            self._start(ask)
        else:
            if there.waiting is not None:
                older, ask = sorted([there.waiting, ask], key=lambda one: one["run"])
                self._answer(older["run"], f"run {ask['run']} is newer: end this one")
            else:
                there.probed = time.monotonic()
                with suppress(OSError):
                    there.pipe.send("probe")
            there.waiting = ask

    def _start(self, ask: dict[str, Any]) -> None:
        pipe, other_end = self._context.Pipe()
        numbers = {name: ask[name] for name in ("group", "rank", "run", "owner")}
        node, meet = self._meeting.address, Address.meeting(ask["meet"])
        task = PartFacts(node=node, address=meet, rows=self._rows, timeout=self._timeout, **numbers)
        name = f"skirl part of owner {task.owner}"
        process = self._context.Process(target=self._body, args=(other_end, task), name=name)
        process.start()
        other_end.close()
        self.served[task.owner] = Served(task, process, pipe)
        log.info("%s serves owner %d in run %d", self._meeting.address, task.owner, task.run)

    def _look(self, served: Served) -> None:
        """Handle what a part has sent, and end it if its process has ended or does not answer."""
        gone = False
        try:
            while served.pipe.poll():
                what, of = served.pipe.recv()
                if what == "joined":
                    self._answer(served.task.run, None)
                elif what == "failed":
                    self._answer(served.task.run, f"{self._meeting.address} has no part for this run: {of}")
                    log.warning("%s: owner %d has no part: %s", self._meeting.address, served.task.owner, of)
                elif what == "alive" and served.waiting is not None:
                    refusal = (
                        f"the rows of trainer {served.task.owner} at {self._meeting.address} belong to run "
                        f"{served.task.run}, which is alive: end it first, or name another node"
                    )
                    self._answer(served.waiting["run"], refusal)
                    served.waiting = None
        except (OSError, EOFError):
            gone = True
        late = served.waiting and time.monotonic() - served.probed > PROBE + 1  # it does not say if its owner lives
        if gone or late or not served.process.is_alive():
            self._end(served)

    def _end(self, served: Served) -> None:
        """End a part. A run that waits for it gets a new one."""
        with suppress(OSError):
            served.pipe.close()
        served.process.join(0.2)
        if served.process.is_alive():
            served.process.kill()
            served.process.join()
        task = served.task
        del self.served[task.owner]
        log.info("%s has ended the part of owner %d in run %d", self._meeting.address, task.owner, task.run)
        if served.waiting is not None:
            self._start(served.waiting)

    def _answer(self, run: int, refusal: str | None) -> None:
        self._meeting.leave(f"answer/{run}", {"refused": refusal})

    def drain(self) -> None:
        for served in self.served.values():
            with suppress(OSError):
                served.pipe.send("drain")
        until = time.monotonic() + GRACE
        for served in list(self.served.values()):
            served.process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for served in list(self.served.values()):
            served.process.kill()
            served.waiting = None
            self._end(served)
