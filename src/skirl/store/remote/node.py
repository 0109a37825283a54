"""A memory node: at the request of owners, it runs a process for the part of each, and ends it. A part joins the group of
its owner's run, answers calls, and ends with it.

An owner calls `call` and `alive`, which do not raise: an error comes back as ("error", result of `said`), so that no
traceback crosses the network."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from skirl.core.placement import Shard
from skirl.store.base import Facts, Frozen, FrozenPart, Layout, SavedRows, Store
from skirl.store.disk.store import DiskStore
from skirl.store.memory import MemoryStore
from skirl.store.remote import rpc
from skirl.store.remote.meeting import Address, Meeting, NodeError
from skirl.store.remote.rpc import said

VERSION = 8
"""Version of the protocol between nodes and owners."""
LOOK = 5.0
"""Seconds between two checks that the owner is alive."""
PROBE = 2.0
"""Seconds that an owner has to show that it is alive, once another run requests its part."""
LINGER = 0.5
"""Most seconds that a part waits for its owner to leave first."""
Answer = tuple[str, Any]


@dataclass(frozen=True)
class PartFacts:
    node: Address
    address: Address
    """The meeting point at which the owner's group was formed."""
    group: int
    """The run that formed it there."""
    rank: int
    run: int
    owner: int
    rows: str
    timeout: float


def owner_name(owner: int, run: int) -> str:
    """Return an owner's name in the group of its run. It has no hyphens or commas, at which a dynamic group splits names."""
    return f"owner_{owner}_run_{run}"


def part_name(rank: int, run: int) -> str:
    return f"part_{rank}_run_{run}"


@dataclass
class Held:
    """A store of a part, with the frozen state and the walk over keys that its owner has begun."""

    store: Store
    frozen: Frozen | None = None
    walk: Iterator[NDArray[np.int64]] = field(default_factory=lambda: iter(()))


class Part:
    def __init__(self, task: PartFacts) -> None:
        self._task, self._node = task, str(task.node)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._held: dict[int, Held] = {}
        self._calls = 0
        self._quiet = threading.Condition(self._lock)
        self.draining = False
        self.left = threading.Event()
        """Set once the owner needs nothing more."""

    def _of(self, number: int) -> Held:
        with self._lock:
            return self._held[number]

    # What the owner may call

    def open(self, layout: list[Any], rows: dict[int, int] | None, cut: str) -> Facts:
        """Open a store under the lowest free number. `cut`: as in `Address`."""
        records = Layout.from_facts(layout)
        with self._opening:
            with self._lock:
                place = next(n for n in range(len(self._held) + 1) if n not in self._held)
            if self._task.rows == "memory":
                store: Store = MemoryStore(records)
            else:
                own = f"rank-{self._task.owner}" + (f"-{int(cut, 16):08x}" if cut else "")
                folder = Path(self._task.rows.removeprefix("disk:")) / own / f"rows-{place}"
                folder.parent.mkdir(parents=True, exist_ok=True)
                store = DiskStore(folder, records, rows=rows)
            with self._lock:
                self._held[place] = Held(store)
        return {"store": place, "about": dict(store.about), "durable": store.durable} | _point(store)

    def close(self, number: int) -> None:
        held = self._of(number)
        self.release(number)
        held.store.close()
        with self._lock:
            del self._held[number]

    def get(self, number: int, kind: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows that are held, in the order of `keys`, and a mask of the keys that are."""
        store = self._of(number).store
        record = store.layout.kinds[kind]
        rows = torch.empty((len(keys), record.width), dtype=getattr(torch, record.dtype))
        held = torch.from_numpy(store.read(keys.numpy(), rows.numpy()))
        return rows if held.all() else rows[held], held

    def put(self, number: int, keys: torch.Tensor, rows: torch.Tensor) -> None:
        self._of(number).store.write(keys.numpy(), rows.numpy())

    def describe(self, number: int, about: dict[str, str] | None = None) -> Facts:
        store = self._of(number).store
        return {"rows": store.describe(about)} | _point(store)

    def held(self, number: int, anew: bool) -> torch.Tensor | None:
        """Return the next keys of a walk over all, or None at its end. `anew`: begin another walk, which ends the last."""
        held = self._of(number)
        held.walk = held.store.held() if anew else held.walk
        keys = next(held.walk, None)
        return None if keys is None else torch.from_numpy(keys)

    def freeze(self, number: int, folder: str, since: Any) -> Facts:
        held = self._of(number)
        held.frozen = held.store.freeze(Path(folder), since)
        return _point(held.store)

    def write(self, number: int) -> Facts:
        frozen = self._of(number).frozen
        assert frozen is not None
        return frozen.write()

    def release(self, number: int) -> None:
        held = self._of(number)
        frozen, held.frozen = held.frozen, None
        if frozen is not None:
            frozen.release()

    def thaw(self, number: int, folder: str, parts: list[tuple[Facts, Any]], identity: str, generation: int) -> Facts:
        """Each part comes with what `Shard.of` takes, which says which of its rows to take."""
        held = self._of(number)
        saved = [FrozenPart(facts, Shard.of(shard)) for facts, shard in parts]
        held.store.thaw(SavedRows(Path(folder), saved, identity, generation))
        return _point(held.store)

    def bye(self) -> None:
        self.left.set()

    # For its process

    def answer(self, method: str, args: tuple[Any, ...]) -> Answer:
        """Make a call. Return ("ok", result) or ("error", result of `said`)."""
        try:
            with self._lock:
                if self.draining:
                    raise NodeError(
                        "this node was told to end: start it again, and resume the run from its last checkpoint"
                    )
                self._calls += 1
            try:
                return "ok", getattr(self, method)(*args)
            finally:
                with self._lock:
                    self._calls -= 1
                    self._quiet.notify_all()
        except Exception as error:
            return "error", said(error)

    def drain(self) -> None:
        """Accept no more calls, finish those in progress, and close the stores."""
        with self._lock:
            self.draining = True
            self._quiet.wait_for(lambda: self._calls == 0)
            held = list(self._held.values())
            self._held.clear()
        for each in held:
            if each.frozen is not None:
                each.frozen.release()
            each.store.close()


def _point(store: Store) -> Facts:
    return {"identity": store.identity, "generation": store.generation}


METHODS = ("open", "close", "get", "put", "describe", "held", "freeze", "write", "release", "thaw", "bye")
_part: Part | None = None


def call(method: str, *args: Any) -> Answer:
    if _part is None or method not in METHODS:
        return "error", said(NodeError(f"this process serves no {method!r}: install the same version of skirl"))
    return _part.answer(method, args)


def alive() -> bool:
    return True


FUNCTIONS = (call, alive)
"""All functions that one process may call in another."""


def run(pipe: Connection, task: PartFacts, functions: tuple[Any, ...] = FUNCTIONS) -> None:
    global _part
    for number in (signal.SIGINT, signal.SIGTERM):  # parts ignore these: their node ends them
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    _part = Part(task)
    rpc.only(functions)
    try:
        meeting = Meeting(task.address, seconds=task.timeout)
        name = part_name(task.rank, task.group)
        rpc.join(meeting.group(task.group), task.address, name, task.rank, task.timeout)
        pipe.send(("joined", None))
        _watch(pipe, task, _part)
    except (NodeError, rpc.Failed, OSError, EOFError, ValueError) as error:
        with suppress(OSError):
            pipe.send(("failed", str(error)))
    finally:
        os._exit(0)  # whatever other threads do: the stores are closed, or their owner is gone


def _watch(pipe: Connection, task: PartFacts, part: Part) -> None:
    """Answer the node until the owner leaves or is gone."""
    looked = heard = time.monotonic()
    while not part.left.wait(0.05):
        if pipe.poll():
            if pipe.recv() == "drain":
                break
            if not _owner_answers(task, PROBE):
                return
            pipe.send(("alive", None))
        if time.monotonic() - looked > LOOK:
            looked = time.monotonic()
            answers = _owner_answers(task, LOOK)
            heard = time.monotonic() if answers else heard
            if answers is False or time.monotonic() - heard > task.timeout:
                return  # without a flush, so that stores stay at their last durable point
    part.drain()
    until = time.monotonic() + LINGER
    while time.monotonic() < until and _owner_answers(task, LINGER):  # so that the owner still gets the last answers
        time.sleep(0.02)


def _owner_answers(task: PartFacts, seconds: float) -> bool | None:
    """Return whether the owner is alive, or None if it does not answer in time."""
    try:
        rpc.end(rpc.begin(owner_name(task.owner, task.group), alive, (), seconds))
        return True
    except rpc.Failed as error:
        return None if str(error) == rpc.LATE else False


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

    def __init__(self, meeting: Meeting, *, rows: str, timeout: float, body: Callable[..., None] = run) -> None:
        self.served: dict[int, Served] = {}
        self._meeting, self._rows, self._timeout, self._body = meeting, rows, timeout, body
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def tick(self) -> None:
        """Handle new requests, and parts that have joined or ended."""
        for key in self._meeting.asks():
            if (ask := self._meeting.take(key)) is not None:
                self._heard(ask)
        for served in list(self.served.values()):
            self._look(served)

    def _heard(self, ask: dict[str, Any]) -> None:
        if ask["version"] != VERSION:
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
        node, meet = self._meeting.address, Address.parse(ask["meet"], "")
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
