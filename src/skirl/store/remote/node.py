"""A memory node: at the request of owners, it runs a process for the part of each, and ends it."""

import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from skirl.store.remote import part as parts
from skirl.store.remote.meeting import VERSION, Meeting
from skirl.store.remote.part import PartFacts
from skirl.store.remote.wire import Address, NodeError

log = logging.getLogger("skirl")

TICK = 0.05
"""Seconds between two looks for requests."""
PROBE = 2.0
"""Seconds that an owner has to show that it is alive, once another run requests its part, and to leave a request's note."""
GRACE = 30.0
"""Seconds that all parts together have to close their stores."""

HELD = 3600.0
"""Seconds that old notes stay at the meeting point: longer than anyone looks for them."""


class Replaced(NodeError):
    """Another process has taken this node's place."""


@dataclass
class Served:
    """The part of one owner."""

    task: PartFacts
    process: Any
    pipe: Any
    numbers: Any
    joined: bool = False
    waiting: list[dict[str, Any]] = field(default_factory=list)
    """Requests of other runs for the same part, kept until it is known whether its owner is alive."""
    asked: float = 0.0


class Node:
    """One of the nodes that meet at a meeting point. Call its methods from one thread only."""

    def __init__(
        self,
        meeting: Meeting,
        number: int,
        nodes: int,
        *,
        rows: str = "memory",
        limit: int | None = None,
        patience: float = 60.0,
        body: Callable[..., None] = parts.run,
    ) -> None:
        self.number, self.nodes = number, nodes
        self.served: dict[int, Served] = {}
        """The part of each owner."""
        self._meeting, self._rows, self._limit, self._patience, self._body = meeting, rows, limit, patience, body
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["skirl.store.remote.warm"])
        about = {"version": VERSION, "nodes": nodes}
        if number == 0:
            meeting.tell("about", about)
        else:
            self._check(meeting, about)
        self._starts = meeting.count(f"node/{number}/starts", 1)
        self._asks = meeting.count(f"node/{number}/heard")
        self._untold: dict[int, float] = {}
        """Requests that were counted but have no note yet, and since when."""
        self._over: deque[tuple[float, Callable[[], None]]] = deque()
        """Functions that remove old notes from the meeting point, and when these became old."""
        for key in meeting.notes():  # left by the previous process of this node
            if key.startswith(f"node/{number}/ask/") or (key.startswith("answer/") and key.endswith(f"/{number}")):
                self._forget_later(partial(meeting.forget, key))
        meeting.tell(f"node/{number}", {"rows": rows.partition(":")[0], "start": self._starts})

    def _check(self, meeting: Meeting, about: dict[str, int]) -> None:
        """Raise if the other nodes have another version, or another number of nodes."""
        began = time.monotonic()
        while (found := meeting.note("about")) is None:
            if time.monotonic() - began > self._patience:
                raise NodeError(f"node 0 has not said at {meeting.address} how many nodes there are: start it again")
            time.sleep(TICK)
        if found["version"] != VERSION:
            raise NodeError(f"{meeting.address} is of another version of skirl: install the same one on all machines")
        if found["nodes"] != self.nodes or self.number >= self.nodes:
            raise NodeError(
                f"{meeting.address} is for {found['nodes']} nodes, and this is node {self.number} of {self.nodes}: "
                "give all of them the same --nodes"
            )

    def tick(self) -> None:
        """Handle new requests, and parts that have joined or ended."""
        meeting, number = self._meeting, self.number
        if meeting.count(f"node/{number}/starts") != self._starts:
            raise Replaced(f"another process serves as node {number} at {meeting.address}: this one ends")
        self._hear()
        while self._over and time.monotonic() - self._over[0][0] > HELD:
            self._over.popleft()[1]()
        for served in list(self.served.values()):
            self._look(served)

    def _hear(self) -> None:
        """Handle new requests. Do not wait long for an owner that counted one but left no note: it may have been killed."""
        meeting, now = self._meeting, time.monotonic()
        for ask, since in list(self._untold.items()):
            if ask <= self._asks and (self._told(ask) or now - since > self._patience):
                del self._untold[ask]
        while self._asks < meeting.count(f"node/{self.number}/asks"):
            ask = self._asks + 1
            if self._told(ask):
                self._untold.pop(ask, None)
            elif now - self._untold.setdefault(ask, now) < PROBE:
                break
            self._asks = meeting.count(f"node/{self.number}/heard", 1)

    def _told(self, number: int) -> bool:
        key = f"node/{self.number}/ask/{number}"
        if (ask := self._meeting.note(key)) is None:
            return False
        self._meeting.forget(key)
        self._asked(ask)
        return True

    def _asked(self, ask: dict[str, Any]) -> None:
        if (there := self.served.get(ask["owner"])) is None:
            self._start(ask)
            return
        there.waiting.append(ask)
        if not there.asked:
            there.asked = time.monotonic()
            with suppress(OSError):
                there.pipe.send(PROBE)

    def _start(self, ask: dict[str, Any]) -> None:
        """Start a new part, in a process of its own."""
        numbers = self._context.RawArray("q", parts.NUMBERS)
        ours, theirs = self._context.Pipe()
        task = PartFacts(
            address=Address.meeting(ask["meet"]),
            group=ask["group"],
            rank=ask["rank"],
            node=self.number,
            nodes=self.nodes,
            run=ask["run"],
            owner=ask["owner"],
            rows=self._rows,
            limit=self._limit,
            patience=self._patience,
        )
        process = self._context.Process(
            target=self._body, args=(theirs, numbers, task), name=f"skirl part of owner {task.owner}"
        )
        process.start()
        theirs.close()
        self.served[task.owner] = Served(task, process, ours, numbers)
        log.info("node %d serves owner %d in run %d", self.number, task.owner, task.run)

    def _look(self, served: Served) -> None:
        """Handle what a part has sent, and end it if its process has ended or does not answer."""
        total = sum(other.numbers[parts.OWN] for other in self.served.values())
        served.numbers[parts.OTHERS] = total - served.numbers[parts.OWN]
        gone = False
        try:
            while served.pipe.poll():
                what, of = served.pipe.recv()
                if what == "joined":
                    served.joined = True
                    self._answer(served.task.run, {"joined": True})
                elif what == "failed":
                    self._answer(served.task.run, {"failed": of})
                    log.warning("node %d: owner %d has no part: %s", self.number, served.task.owner, of)
                elif what == "owner":
                    self._judge(served, of)
                    return
        except (OSError, EOFError):
            gone = True
        if gone or not served.process.is_alive():
            self._end(served)
        elif (
            served.asked and time.monotonic() - served.asked > PROBE + 1
        ):  # it does not even say whether its owner is alive
            self._judge(served, None)

    def _judge(self, served: Served, answers: bool | None) -> None:
        """Decide which run gets a part that several requested: the present one if its owner answers, else the newest."""
        served.asked = 0.0
        if not answers:
            self._end(served)
            return
        task = served.task
        for ask in served.waiting:
            self._answer(
                ask["run"],
                {
                    "refused": f"the rows of trainer {task.owner} at {self._meeting.address} belong to run {task.run}, "
                    "which is alive: end it first, or name another meeting point"
                },
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
        del self.served[served.task.owner]
        self._left(served.task.run)
        log.info("node %d has ended the part of owner %d in run %d", self.number, served.task.owner, served.task.run)
        if served.waiting:
            *older, newest = sorted(served.waiting, key=lambda ask: ask["run"])
            for ask in older:
                self._answer(ask["run"], {"refused": f"run {newest['run']} is newer: end this one"})
            self._start(newest)

    def _answer(self, run: int, answer: dict[str, Any]) -> None:
        key = f"answer/{run}/{self.number}"
        self._meeting.tell(key, answer)
        self._forget_later(partial(self._meeting.forget, key))
        if "joined" not in answer:
            self._left(run)

    def _left(self, run: int) -> None:
        """Note that a run has no part here, or no longer. Node 0 later removes the store of the run's group."""
        if self.number == 0:
            self._forget_later(partial(self._meeting.forget_group, run))

    def _forget_later(self, forget: Callable[[], None]) -> None:
        self._over.append((time.monotonic(), forget))

    def drain(self) -> None:
        """Have all parts finish calls in progress and close their stores."""
        for served in self.served.values():
            with suppress(OSError):
                served.pipe.send("drain")
        until = time.monotonic() + GRACE
        for served in list(self.served.values()):
            served.process.join(max(0.0, until - time.monotonic()))
            served.waiting = []
            self._end(served)

    def kill(self) -> None:
        """Kill all parts immediately."""
        for served in list(self.served.values()):
            served.process.kill()
            served.waiting = []
            self._end(served)
