"""Memory nodes for tests, on loopback: the nodes in a thread of the test's process, their parts in processes."""

import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from skirl.store import Record, open_store
from skirl.store.remote import connection, group, part, service
from skirl.store.remote.meeting import Meeting
from skirl.store.remote.node import Node
from skirl.store.remote.wire import Address, NodeError


class Nodes:
    """Some nodes that meet, and serve requests meanwhile."""

    def __init__(self, count: int, *, rows: str = "memory", patience: float = 20.0, limit: int | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = Address("127.0.0.1", free.getsockname()[1])
        self.errors: list[BaseException] = []
        meetings = [Meeting(self.address, keep=i == 0, seconds=patience) for i in range(count)]
        self.nodes = [
            Node(meeting, i, count, rows=rows, patience=patience, limit=limit, body=body)
            for i, meeting in enumerate(meetings)
        ]
        self._patience = patience
        self._start()

    @property
    def spec(self) -> str:
        return f"rpc://{self.address}"

    def _start(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def start_again(self, number: int) -> Node:
        """Serve a node anew, as if by another process, and return the node that served before."""
        self._stop.set()
        self._thread.join()
        before = self.nodes[number]
        meeting = Meeting(self.address, seconds=self._patience)
        self.nodes[number] = Node(meeting, number, len(self.nodes), patience=self._patience, body=body)
        self._start()
        return before

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.01):
                for node in self.nodes:
                    node.tick()
        except BaseException as error:
            self.errors.append(error)

    def pids(self, owner: int = 0) -> list[int]:
        """Return the process ids of an owner's parts."""
        return [node.served[owner].process.pid for node in self.nodes]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        for node in self.nodes:
            node.kill()
        assert not self.errors, self.errors


@contextmanager
def served(count: int, **more) -> Iterator[Nodes]:
    leave()
    nodes = Nodes(count, **more)
    try:
        yield nodes
    finally:
        leave()
        nodes.stop()


def leave() -> None:
    """Make this process leave all nodes."""
    for there in list(connection._connected.values()):
        there.end()
    connection._connected.clear()


def body(pipe, numbers, task) -> None:
    """Run a part whose system calls its owner can make fail."""
    part.run(pipe, numbers, task, (*service.FUNCTIONS, failing))


_real = {"fsync": os.fsync}


def failing(name: str | None) -> tuple[str, None]:
    """Make this system call of a part fail from now on; None: none fails."""
    for each, function in _real.items():
        setattr(os, each, _fails if each == name else function)
    return "ok", None


def _fails(*args, **more):
    raise OSError("disk full")


class Patch:
    """Acts like pytest's monkeypatch to make system calls fail, but on the nodes that hold this process's rows."""

    @contextmanager
    def context(self) -> Iterator["Patch"]:
        try:
            yield self
        finally:
            self._all(None)

    def setattr(self, name: str, value: object) -> None:
        self._all(name.removeprefix("os."))

    def _all(self, name: str | None) -> None:
        (there,) = connection._connected.values()
        for name_of_part in there.names:
            group.end(group.begin(name_of_part, failing, (name,), 20.0))


def in_process(nodes: Nodes, what: str, more: str) -> str:
    """Let another process open rows on these nodes and close them ("opened"), or die with them open ("killed")."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_other, args=(theirs, what, nodes.spec + more))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _other(pipe, what: str, spec: str) -> None:
    try:
        store = open_store(spec, {0: Record(4)})
        pipe.send(what if what == "killed" else f"{len(store)} rows")
        if what == "killed":
            os._exit(0)
        store.close()
    except NodeError as error:
        pipe.send(str(error))
