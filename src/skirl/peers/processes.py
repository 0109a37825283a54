"""What the operating system knows of ranks: whether a process has ended, and the connections that groups have opened."""

import os
import signal
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any


def this_process() -> list[Any]:
    """This process, as others on its machine find it; empty where that is not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid"), os.getpid(), _began(os.getpid())]
    return []


def is_gone(process: list[Any]) -> bool:
    """Whether a process of this machine has ended; False of one elsewhere.

    **Arguments**

    - `process`: what `this_process` said there.

    >>> is_gone(this_process()), is_gone(this_process()[:2] + [2**22 + 1, "5"])
    (False, True)
    """
    mine = this_process()
    return bool(mine) and process[:2] == mine[:2] and _began(process[2]) != process[3]


def end(process: list[Any]) -> None:
    """End a process of this machine at once, if it is still there; one elsewhere stays.

    **Arguments**

    - `process`: what `this_process` said there.
    """
    mine = this_process()
    if mine and process[:2] == mine[:2] and not is_gone(process):
        with suppress(OSError):
            os.kill(process[2], signal.SIGKILL)


def launched_here() -> bool:
    """Whether a launcher watches this process, which ends all of a job's when one has ended."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _began(pid: int) -> str:
    """When a process of this machine began; empty when it has ended."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


class Connections:
    """The sockets that were opened in a with-block.

    A group of gloo cannot be stopped: a call waits for its peer, and so does the end of the process. It ends when its
    connections do.
    """

    def __init__(self) -> None:
        self._opened: dict[int, str] = {}

    def __enter__(self) -> "Connections":
        self._before = _sockets()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened = {file: name for file, name in _sockets().items() if self._before.get(file) != name}

    def cut(self, spare: Collection[int] = ()) -> None:
        """End them, those of some ports excepted.

        **Arguments**

        - `spare`: ports at either end of what is left alone.
        """
        opened, self._opened = self._opened, {}
        for file, name in opened.items():
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{file}") != name:
                    continue
                with socket.socket(fileno=os.dup(file)) as one:
                    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] in spare:
                        continue
                    if one.getpeername()[1] in spare:  # an error, where it only listens
                        continue
                    one.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """The sockets of this process: file descriptors, and what they are."""
    found = {}
    with suppress(OSError):
        for file in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if (name := os.readlink(f"/proc/self/fd/{file}")).startswith("socket:"):
                    found[int(file)] = name
    return found
