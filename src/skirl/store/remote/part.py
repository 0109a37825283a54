"""The part of one owner on a node, in a process: it joins the group of its owner's run, answers calls, and ends with it.

Its owner calls `call` and `alive`, which do not raise: an error comes back as ("error", result of `said`), so that no
traceback crosses the network.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
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
