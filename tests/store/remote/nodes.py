"""Memory nodes for tests, on loopback: the nodes in a thread of the test's process, their parts in processes."""

import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from skirl.store import Record, open_store
from skirl.store.remote import rpc
from skirl.store.remote.meeting import Address, Meeting, NodeError
from skirl.store.remote.node import FUNCTIONS, Node, run
from skirl.store.remote.store import _connected, leave


class Nodes:
    """Some nodes, each at an address, that serve requests meanwhile."""

    def __init__(self, count: int, rows: str = "memory") -> None:
        self.errors: list[BaseException] = []
        self.addresses = [Address("127.0.0.1", port) for port in free_ports(count)]
        self.nodes = [
            Node(Meeting(at, keep=True, seconds=20.0), rows=rows.replace("{}", str(i)), timeout=20.0, body=body)
            for i, at in enumerate(self.addresses)
        ]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def spec(self) -> str:
        return ",".join(f"rpc://{address}" for address in self.addresses)

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.01):
                for node in self.nodes:
                    node.tick()
        except BaseException as error:
            self.errors.append(error)

    def pids(self, owner: int = 0) -> list[int]:
        return [node.served[owner].process.pid for node in self.nodes]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        for node in self.nodes:
            node.kill()
        assert not self.errors, self.errors


def free_ports(count: int) -> list[int]:
    """Return ports of this machine on which nothing listens."""
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in free]


@contextmanager
def served(count: int, rows: str = "memory") -> Iterator[Nodes]:
    leave()
    nodes = Nodes(count, rows)
    try:
        yield nodes
    finally:
        leave()
        nodes.stop()


def body(pipe, task) -> None:
    """A part in which tests may make fsync fail."""
    run(pipe, task, (*FUNCTIONS, failing))


_fsync = os.fsync


def failing(on: bool) -> tuple[str, None]:
    """Make each fsync of a part fail from now on, or none."""
    os.fsync = _fails if on else _fsync
    return "ok", None


def _fails(*args, **more):
    raise OSError("disk full")


class Patch:
    """Acts like pytest's monkeypatch to make fsync fail, but on the nodes that hold this process's rows."""

    @contextmanager
    def context(self) -> Iterator["Patch"]:
        try:
            yield self
        finally:
            self._all(False)

    def setattr(self, name: str, value: object) -> None:
        self._all(True)

    def _all(self, on: bool) -> None:
        for there in _connected.values():
            rpc.end(rpc.begin(there.name, failing, (on,), 20.0))


def in_process(nodes: Nodes, what: str, more: str) -> str:
    """Let another process open rows on these nodes and close them ("opened"), or die with them open ("killed")."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_other, args=(theirs, what, f"rpc://{nodes.addresses[0]}{more}"))
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
