"""Memory nodes that a process starts for itself, on this machine: each a `skirl serve`, started again when it ends."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from skirl.store.remote.address import Address

SERVE = ("-m", "skirl", "serve")
Start = Callable[[list[str], Path | None], Any]
"""Begins a process by the words behind `python` and a file for what it says; it has what `subprocess.Popen` has."""


class StartedNodes:
    """Some nodes, as a supervisor would keep them.

    **Arguments**

    - `count`: how many.
    - `host`: where they meet; loopback, so that no other machine joins.
    - `rows`: of each, as `skirl serve --rows` takes it; {} is replaced by the node's number.
    - `patience`: seconds that a call may take.
    - `log`: a folder for what they say; None: the standard error.
    - `start`: begins a process.
    - `within`: words of a command that each runs within, such as those of a network namespace.
    - `words`: what runs a node, behind `python`.
    - `watched`: by a thread, or by calls of `tick`: a process that forks has no threads.
    """

    def __init__(
        self,
        count: int,
        *,
        host: str = "127.0.0.1",
        rows: str = "memory",
        patience: float = 60.0,
        log: Path | None = None,
        start: Start | None = None,
        within: Sequence[str] = (),
        words: Sequence[str] = SERVE,
        watched: bool = True,
    ) -> None:
        self.count = count
        self.address = Address(host, free_port() if host == "127.0.0.1" else 29400)
        self.held: set[int] = set()
        """Nodes that are not started again."""
        self._rows, self._patience, self._log, self._within, self._words = rows, patience, log, within, words
        self._start = start or self._popen
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.processes = [self._begin(node) for node in range(count)]
        self._watch = threading.Thread(target=self._supervise, daemon=True) if watched else None
        if self._watch is not None:
            self._watch.start()

    @property
    def spec(self) -> str:
        """What a trainer's `store` names."""
        return f"rpc://{self.address}"

    def _begin(self, node: int) -> Any:
        words = [*self._words, str(self.address), "--nodes", str(self.count), "--node", str(node)]
        words += ["--rows", self._rows.replace("{}", str(node)), "--patience", f"{self._patience:g}"]
        return self._start(words, None if self._log is None else self._log / f"node-{node}.log")

    def _popen(self, words: list[str], log: Path | None) -> Any:
        out = None if log is None else log.open("ab")
        try:
            return subprocess.Popen(
                [*self._within, sys.executable, *words], stdout=out or 2, stderr=out, preexec_fn=_die_with_parent
            )
        finally:
            if out is not None:
                out.close()

    def _supervise(self) -> None:
        while not self._over.wait(0.1):
            self.tick()

    def tick(self) -> None:
        """Start again what has ended."""
        with self._lock:
            for node, process in enumerate(self.processes):
                if process.poll() is not None and node not in self.held and not self._over.is_set():
                    self.processes[node] = self._begin(node)

    def family(self, node: int) -> list[int]:
        """The node's process and all that it has started."""
        return family(self.processes[node].pid)

    def send(self, node: int, number: int) -> list[int]:
        """Send a signal to all processes of a node; which they were."""
        with self._lock:
            pids = self.family(node)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        return pids

    def end(self) -> None:
        """End all of them."""
        self._over.set()
        if self._watch is not None:
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


def _die_with_parent() -> None:
    """Whoever started the node supervises it, and none stays behind."""
    with suppress(AttributeError, OSError):  # not on Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def family(pid: int) -> list[int]:
    """A process and all that it has started, itself first.

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


def cpu_of(pids: Sequence[int]) -> float:
    """Seconds of CPU that some processes have used, all threads of theirs.

    >>> 0 < cpu_of([os.getpid()]) < 1e9
    True
    """
    total = 0
    for pid in pids:
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError, ValueError):
                    total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total / 1e9


def private_memory_of(pid: int) -> int:
    """Bytes of memory that a process has and no file has; 0 where it is gone."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) << 10
    return 0
