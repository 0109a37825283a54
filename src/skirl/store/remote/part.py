"""The process of one part of a node: it joins the group of its owner's run, answers calls, and ends when the owner does."""

import os
import resource
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from skirl.store.base import Layout, Store
from skirl.store.disk.store import DiskStore
from skirl.store.memory.store import MemoryStore
from skirl.store.remote import group, service, wire
from skirl.store.remote.meeting import Meeting
from skirl.store.remote.wire import Address, NodeError

LOOK = 5.0
"""Seconds between two checks that the owner is alive."""
LINGER = 0.5
"""Most seconds that a part waits for its owner to leave first."""
ROWS, GETS, PUTS, ROWS_OUT, ROWS_IN, BYTES_OUT, BYTES_IN, OWN, OTHERS = range(9)
"""Indices in the array of numbers that a part shares with its node: counts, and bytes of memory of this part and of all
other parts of the node."""
NUMBERS = 9


@dataclass(frozen=True)
class PartFacts:
    """The facts that the process of a part is given."""

    address: Address
    """The meeting point at which the owner's group was formed."""
    group: int
    """The run that formed it there."""
    rank: int
    """The part's own rank in that group."""
    node: int
    nodes: int
    run: int
    owner: int
    rows: str
    limit: int | None
    patience: float

    def make(self, place: int, layout: Layout, rows: dict[int, int] | None) -> Store:
        """Open one of the owner's stores."""
        if self.rows == "memory":
            return MemoryStore(layout)
        name = f"node-{self.node}-of-{self.nodes}/rank-{self.owner}"
        folder = Path(self.rows.removeprefix("disk:")) / name / f"rows-{place}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        return DiskStore(folder, layout, rows=rows)


def owner_name(owner: int, run: int) -> str:
    """Return an owner's name in the group of its run. It has no hyphens or commas, at which a dynamic group splits names."""
    return f"owner_{owner}_run_{run}"


def part_name(rank: int, run: int) -> str:
    """Return the name of a part in the group of a run."""
    return f"part_{rank}_run_{run}"


def memory() -> int:
    """Return the bytes of memory that are this process's own, without mapped files."""
    with suppress(OSError), Path("/proc/self/status").open("rb") as status:
        for line in status:
            if line.startswith(b"RssAnon"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class MemoryLimit:
    """Refuses rows for which the node has no memory left."""

    def __init__(self, limit: int | None, numbers: Any, node: str) -> None:
        self._limit, self._numbers, self._node = limit, numbers, node
        self._free = 0
        self._lock = threading.Lock()

    def __call__(self, more: int) -> None:
        """Raise a NodeError if `more` further bytes do not fit. Memory is measured only once every 32 MB of rows."""
        if self._limit is None:
            return
        with self._lock:
            self._free -= more
            if self._free >= 0:
                return
            own, others = memory(), self._numbers[OTHERS]
            left = self._limit - own - others - more
            if left < 0:
                raise NodeError(
                    f"{self._node} has {self._limit:,} bytes for rows, {own + others:,} are taken and {more:,} more do not "
                    "fit: start it with a higher --memory, or start more nodes"
                )
            self._free = min(left, 32 << 20)


def run(pipe: Connection, numbers: Any, task: PartFacts, functions: tuple[Any, ...] = service.FUNCTIONS) -> None:
    """Run the process of a part, and report to its node over the pipe."""
    import torch

    for number in (signal.SIGINT, signal.SIGTERM):  # parts ignore these: their node ends them
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    name = f"node {task.node}"
    part = service.OwnedPart(task.run, name, task.make, MemoryLimit(task.limit, numbers, name))
    service.serve(part)
    wire.only(functions)
    try:
        meeting = Meeting(task.address, seconds=task.patience)
        name = part_name(task.rank, task.group)
        group.join(meeting.group(task.group), task.address, name, task.rank, task.patience)
        pipe.send(("joined", None))
        _watch(pipe, numbers, task, part)
        pipe.send(("ended", None))
    except (NodeError, group.Failed, OSError, EOFError, ValueError) as error:
        with suppress(OSError):
            pipe.send(("failed", str(error)))
    finally:
        os._exit(0)  # whatever other threads do: the stores are closed, or their owner is gone


def _watch(pipe: Connection, numbers: Any, task: PartFacts, part: service.OwnedPart) -> None:
    """Answer the node until the owner leaves or is gone."""
    looked = heard = time.monotonic()
    while not part.left.wait(0.05):
        _tell(numbers, part)
        if pipe.poll():
            asked = pipe.recv()
            if asked == "drain":
                break
            pipe.send(("owner", _owner_answers(task, asked)))
        if time.monotonic() - looked > LOOK:
            looked = time.monotonic()
            answers = _owner_answers(task, LOOK)
            heard = time.monotonic() if answers else heard
            if answers is False or time.monotonic() - heard > task.patience:
                return  # without a flush, so that stores stay at their last durable point
    part.drain()
    until = time.monotonic() + LINGER
    while time.monotonic() < until and _owner_answers(task, LINGER):  # so that the owner still gets the last answers
        time.sleep(0.02)


def _owner_answers(task: PartFacts, seconds: float) -> bool | None:
    """Return whether the owner is alive, or None if it does not answer in time."""
    try:
        group.end(group.begin(owner_name(task.owner, task.group), service.alive, (), seconds))
        return True
    except group.Failed as error:
        return None if group.timed_out(error) else False


def _tell(numbers: Any, part: service.OwnedPart) -> None:
    counts = part.counts
    numbers[GETS], numbers[PUTS] = counts.gets, counts.puts
    numbers[ROWS_OUT], numbers[ROWS_IN] = counts.rows_out, counts.rows_in
    numbers[BYTES_OUT], numbers[BYTES_IN] = counts.bytes_out, counts.bytes_in
    numbers[ROWS], numbers[OWN] = part.rows, memory()
