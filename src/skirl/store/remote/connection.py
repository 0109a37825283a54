"""An owner's connection to its nodes: it requests a part on each, forms the group of its run, and makes calls."""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from skirl.store.remote import group, service
from skirl.store.remote.meeting import VERSION, Meeting
from skirl.store.remote.part import owner_name, part_name
from skirl.store.remote.wire import Address, NodeError, raised
from skirl.tools.units import patience_of

log = logging.getLogger("skirl")

PATIENCE = 60.0
"""Seconds that a call may take, unless SKIRL_PATIENCE is set."""


@dataclass
class Joined:
    """The group that this process has joined, with the parts of all its connections."""

    address: Address
    run: int
    ranks: int = 1
    connections: int = 0


_joined: list[Joined] = []
"""At most one: PyTorch RPC has one group in a process."""


class Connection:
    """The parts of one owner, one on each node that meets at an address, for the length of this run."""

    def __init__(self, address: Address, patience: float) -> None:
        self.address, self.patience = address, patience
        self.failure: str | None = None
        """Why no more calls are made, or None while they are."""
        self.closed = False
        meeting = Meeting(address, seconds=patience)
        about = self._waited(lambda: meeting.note("about"), "node 0", time.monotonic())
        if about["version"] != VERSION:
            raise NodeError(f"{address} is of another version of skirl: install the same one on all machines")
        self.nodes: int = about["nodes"]
        self.run = meeting.count("runs", 1)
        self.names: list[str] = []
        self._shared: Joined | None = None
        if address.owner == 0 and not _loopback(address):
            log.warning(
                "rows go to %s by PyTorch RPC, without passwords or encryption: use networks that you trust", address
            )
        try:
            if not _joined:
                group.join(meeting.group(self.run), address, owner_name(address.owner, self.run), 0, patience)
                _joined.append(Joined(address, self.run))
            self._shared = shared = _joined[0]
            shared.connections += 1
            ranks = range(shared.ranks, shared.ranks + self.nodes)
            shared.ranks += self.nodes
            self.names = [part_name(rank, shared.run) for rank in ranks]
            began, of = time.monotonic(), {"run": self.run, "owner": address.owner}
            for node, rank in enumerate(ranks):
                ask = of | {"meet": str(shared.address), "group": shared.run, "rank": rank}
                meeting.tell(f"node/{node}/ask/{meeting.count(f'node/{node}/asks', 1)}", ask)
            for node in range(self.nodes):
                told = self._waited(lambda node=node: meeting.note(f"answer/{self.run}/{node}"), f"node {node}", began)
                if "joined" not in told:
                    raise NodeError(
                        told.get("refused") or f"node {node} has no part for this run: {told.get('failed')}"
                    )
        except group.Failed as error:
            self.end()
            raise NodeError(f"no group for rows is formed at {address}: {error}") from None
        except BaseException:
            self.end()
            raise

    def _waited(self, look: Callable[[], Any], node: str, began: float) -> Any:
        while (found := look()) is None:
            waited = time.monotonic() - began
            if waited > self.patience:
                raise NodeError(
                    f"{node} has not answered at {self.address} within {waited:.0f} s: start it, `skirl serve --meet "
                    f"{self.address} --node {node.removeprefix('node ')}`, or start it again"
                )
            time.sleep(0.02)
        return found

    def end(self) -> None:
        """Let the parts that still answer close their stores. The last connection leaves the group."""
        if self.closed:
            return
        self.closed = True
        with suppress(group.Failed):
            if self.failure is None:
                for future in [
                    group.begin(name, service.call, ("bye",), min(self.patience, 5.0)) for name in self.names
                ]:
                    group.end(future)
        if self._shared is not None:
            self._shared.connections -= 1
        if not any(of.connections for of in _joined):
            _joined.clear()
            group.leave()

    # Calls

    def call(self, node: int, method: str, *args: Any) -> Any:
        """Call a method of a part, and return its result."""
        return self.answer(node, method, self.begin(node, method, *args), time.monotonic())

    def of_all(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of all parts at once, and return the result of each."""
        return self.answers([(node, method, each) for node, each in enumerate(args)])

    def answers(self, calls: Iterable[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        """Make several calls at once, wait for all of them even if one fails, and return their results."""
        began, found, wrong = time.monotonic(), list[Any](), None
        begun = [(node, method, self.begin(node, method, *args)) for node, method, args in calls]
        for node, method, future in begun:
            try:
                found.append(self.answer(node, method, future, began))
            except Exception as error:
                wrong = wrong or error
        if wrong is not None:
            raise wrong
        return found

    def job_of_all(self, what: str, stores: Sequence[int | None], args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Have all parts do a job that may take long, by calls that are short. Return the result of each."""
        jobs = self.of_all("begin", [(s, what, a) for s, a in zip(stores, args, strict=True)])
        found: list[Any] = []
        wrong: Exception | None = None
        for node, job in enumerate(jobs):
            while (outcome := self.call(node, "outcome", job, 0.5)) is None:
                pass
            if outcome[0] == "error":
                wrong = wrong or raised(outcome[1], f"node {node}")
            found.append(outcome[1])
        if wrong is not None:
            raise wrong
        return found

    def begin(self, node: int, method: str, *args: Any) -> Any:
        """Begin a call, for which `answer` waits."""
        if self.failure is not None:
            raise NodeError(self.failure)
        if self.closed:
            raise NodeError(f"this process has left the nodes at {self.address}: make new embeddings")
        try:
            return group.begin(self.names[node], service.call, (method, *args), self.patience)
        except group.Failed as error:
            raise self._failed(node, method, error, 0.0) from None

    def answer(self, node: int, method: str, future: Any, began: float) -> Any:
        """Wait for a call and return its result. Raise the error that the node reported, or a NodeError if none came."""
        try:
            kind, value = group.end(future)
        except group.Failed as error:
            raise self._failed(node, method, error, time.monotonic() - began) from None
        if kind == "error":
            raise raised(value, f"node {node}")
        return value

    def _failed(self, node: int, method: str, error: group.Failed, seconds: float) -> NodeError:
        """Make every later call fail, because it is unknown what the node has done. Return the error to raise."""
        text = (
            f"node {node} failed in `{method}` for the part of trainer {self.address.owner} at {self.address} "
            f"after {seconds:.1f} s ({error}; limit {self.patience:g} s): see the last lines that the node printed, and "
            "resume this run from its last checkpoint"
        )
        if self.failure is None:
            self.failure = text
        return NodeError(self.failure)


def _loopback(address: Address) -> bool:
    return address.host in ("localhost", "::1") or address.host.startswith("127.")


_lock = threading.Lock()
_connected: dict[str, Connection] = {}


def connection(address: Address) -> Connection:
    """Return this process's connection to the nodes at an address. Make a new one if there is none or it was lost."""
    with _lock:
        if any(there.failure is not None or there.closed for there in _connected.values()):
            for there in _connected.values():  # all of them: nobody can join a group with a member that is gone
                there.end()
            _connected.clear()
        for there in _connected.values():
            if there.address.owner != address.owner:
                raise ValueError(
                    f"this process has rows of trainer {there.address.owner} at {there.address}, and was told to open those "
                    f"of trainer {address.owner}: let each process be one trainer"
                )
        key = f"{address}/{address.owner}"
        if key not in _connected:
            _connected[key] = Connection(address, patience_of(os.environ, PATIENCE))
        return _connected[key]


@atexit.register
def _leave() -> None:
    for there in _connected.values():
        with suppress(Exception):
            there.end()
