"""A memory node: it answers the asks of owners with a process for each one's part, and ends them."""

import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from skirl.store.remote import part as parts
from skirl.store.remote.errors import NodeError
from skirl.store.remote.meeting import VERSION, Meeting
from skirl.store.remote.part import Task

log = logging.getLogger("skirl")

TICK = 0.05
"""Seconds between two looks for asks."""
PROBE = 2.0
"""Seconds that an owner has to say that it lives, once another run asks for its part, and to tell what it asks for."""
GRACE = 30.0
"""Seconds that a part has to close its stores."""

HELD = 3600.0
"""Seconds that what is over stays at the meeting point: longer than anyone looks for it."""


class Replaced(NodeError):
    """Another process serves as this node now."""


@dataclass
class Served:
    """The part of one owner."""

    task: Task
    process: Any
    pipe: Any
    numbers: Any
    joined: bool = False
    waiting: list[dict[str, Any]] = field(default_factory=list)
    """Asks of other runs for the same part, until it is known whether its owner lives."""
    asked: float = 0.0


class Node:
    """One of the nodes that meet somewhere. All calls are for one thread.

    **Arguments**

    - `meeting`: where they meet.
    - `number`, `nodes`: which node of how many.
    - `rows`: where rows live: memory, or disk:FOLDER.
    - `limit`: bytes of memory for the rows of all owners; None: as many as there are.
    - `patience`: seconds that a call may take.
    - `body`: what the process of a part runs, as `part.run` does; tests put something in between.
    - `begun`: how processes of parts begin; those of the default come from one that has no threads.
    """

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
        begun: Literal["forkserver", "fork"] = "forkserver",
    ) -> None:
        self.number, self.nodes = number, nodes
        self.served: dict[int, Served] = {}
        """By owner."""
        self._meeting, self._rows, self._limit, self._patience, self._body = meeting, rows, limit, patience, body
        self._context: Any = multiprocessing.get_context(begun)
        self._context.set_forkserver_preload(
            ["skirl.store.remote.warm" if rows == "memory" else "skirl.store.remote.warm_disk"]
        )
        about = {"version": VERSION, "nodes": nodes}
        if number == 0:
            meeting.tell("about", about)
        else:
            self._check(meeting, about)
        self._starts = meeting.count(f"node/{number}/starts", 1)
        self._asks = meeting.count(f"node/{number}/heard")
        self._untold: dict[int, float] = {}
        """Asks that were counted and have no note yet: since when."""
        self._over: deque[tuple[float, Callable[[], None]]] = deque()
        """What is removed from the meeting point, and when it was over."""
        for key in meeting.notes():  # of the process that was this node before
            if key.startswith(f"node/{number}/ask/") or (key.startswith("answer/") and key.endswith(f"/{number}")):
                self._forget_later(partial(meeting.forget, key))
        meeting.tell(f"node/{number}", {"rows": rows.partition(":")[0], "start": self._starts})

    def _check(self, meeting: Meeting, about: dict[str, int]) -> None:
        """Refuse to be a node among others that count differently."""
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
        """Do what there is to do: new asks, parts that have joined or ended."""
        meeting, number = self._meeting, self.number
        if meeting.count(f"node/{number}/starts") != self._starts:
            raise Replaced(f"another process serves as node {number} at {meeting.address}: this one ends")
        self._hear()
        while self._over and time.monotonic() - self._over[0][0] > HELD:
            self._over.popleft()[1]()
        for served in list(self.served.values()):
            self._look(served)

    def _hear(self) -> None:
        """New asks. An owner that has counted and told nothing was killed in between, or is late: the others do not wait."""
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
        """A new part, in a process of its own."""
        numbers = self._context.RawArray("q", parts.NUMBERS)
        ours, theirs = self._context.Pipe()
        task = Task(
            self._meeting.address,
            self.number,
            self.nodes,
            ask["run"],
            ask["owner"],
            self._rows,
            self._limit,
            self._patience,
        )
        process = self._context.Process(
            target=self._body, args=(theirs, numbers, task), name=f"skirl part of owner {task.owner}"
        )
        process.start()
        theirs.close()
        self.served[task.owner] = Served(task, process, ours, numbers)
        log.info("node %d serves owner %d in run %d", self.number, task.owner, task.run)

    def _look(self, served: Served) -> None:
        """What a part has said; whether it has ended."""
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
        ):  # it does not even say whether its owner lives
            self._judge(served, None)

    def _judge(self, served: Served, answers: bool | None) -> None:
        """Whose a part is that several runs have asked for: the one whose owner answers, else the newest."""
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
        """End a part; the newest run that waits for it gets a new one."""
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
        """A run has no part here, or none any more; where its group was formed is for the first node to remove."""
        if self.number == 0:
            self._forget_later(partial(self._meeting.forget_group, run))

    def _forget_later(self, forget: Callable[[], None]) -> None:
        self._over.append((time.monotonic(), forget))

    def drain(self) -> None:
        """Have all parts finish what they do and close their stores."""
        for served in self.served.values():
            with suppress(OSError):
                served.pipe.send("drain")
        until = time.monotonic() + GRACE
        for served in list(self.served.values()):
            served.process.join(max(0.0, until - time.monotonic()))
            served.waiting = []
            self._end(served)

    def kill(self) -> None:
        """End all parts at once."""
        for served in list(self.served.values()):
            served.process.kill()
            served.waiting = []
            self._end(served)
