"""Memory nodes that a process starts for itself on this machine. Each is a `skirl serve`, restarted when it ends."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from skirl.peers.processes import die_with_parent
from skirl.store.remote.wire import Address


class StartedNodes:
    """Some nodes, each at an address, kept running as by a supervisor."""

    def __init__(
        self,
        count: int,
        *,
        host: str = "127.0.0.1",
        rows: str = "memory",
        patience: float = 60.0,
        log: Path | None = None,
    ) -> None:
        self.addresses = [Address(host, free_port() if host == "127.0.0.1" else 29400 + i) for i in range(count)]
        self.held: set[int] = set()
        """Nodes that are not restarted."""
        self._rows, self._patience, self._log = rows, patience, log
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.processes = [self._begin(node) for node in range(count)]
        self._watch = threading.Thread(target=self._supervise, daemon=True)
        self._watch.start()

    @property
    def spec(self) -> str:
        """The value of a trainer's `store` that names these nodes."""
        return ",".join(f"rpc://{address}" for address in self.addresses)

    def _begin(self, node: int) -> Any:
        words = ["-m", "skirl", "serve", str(self.addresses[node])]
        words += ["--rows", self._rows.replace("{}", str(node)), "--patience", f"{self._patience:g}"]
        out = None if self._log is None else (self._log / f"node-{node}.log").open("ab")
        try:
            return subprocess.Popen([sys.executable, *words], stdout=out or 2, stderr=out, preexec_fn=die_with_parent)
        finally:
            if out is not None:
                out.close()

    def _supervise(self) -> None:
        while not self._over.wait(0.1):
            self.tick()

    def tick(self) -> None:
        """Restart nodes that have ended, except those in `held`."""
        with self._lock:
            for node, process in enumerate(self.processes):
                if process.poll() is not None and node not in self.held and not self._over.is_set():
                    self.processes[node] = self._begin(node)

    def family(self, node: int) -> list[int]:
        """Return the ids of a node's process and all its descendants."""
        return family(self.processes[node].pid)

    def send(self, node: int, number: int) -> list[int]:
        """Send a signal to all processes of a node, and return their ids."""
        with self._lock:
            pids = self.family(node)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        return pids

    def end(self) -> None:
        """Kill all nodes, and wait for them."""
        self._over.set()
        self._watch.join()
        for node, process in enumerate(self.processes):
            pids = self.family(node) if process.poll() is None else []
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def family(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants, itself first.

    >>> os.getpid() in family(os.getpid())
    True
    """
    children = _children()
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def _children() -> Mapping[int, list[int]]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(name))
    return children
