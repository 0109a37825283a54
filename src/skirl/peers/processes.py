"""Facts about ranks from the operating system: whether a process has ended, and which connections groups have opened."""

import ctypes
import json
import os
import signal
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

_SET_PARENT_DEATH_SIGNAL = 1
BEGINS_AGAIN = 75
"""Exit code of a trainer that was stopped early, if launchers of several machines watch the job: a success would end the
job on machines where nobody stopped it."""


NOTES, COMMAND_LINE = "SKIRL_NOTES", "SKIRL_COMMAND"
"""What `skirl launch` sets for its trainers: a folder for their last notes, and how its command line began."""
STOPPED = "stopped"


def this_process() -> list[Any]:
    """Return what identifies this process to others on its machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.readlink("/proc/self/ns/pid"), os.getpid(), _began(os.getpid())]


def is_gone(process: list[Any]) -> bool:
    """Return whether a process on this machine has ended. Always False for one on another machine."""
    mine = this_process()
    return process[:2] == mine[:2] and _began(process[2]) != process[3]


def launched_here() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def leave_note(step: int | None, lost: bool) -> None:
    """Tell `skirl launch` that this trainer failed and has said why: at which step, and whether only another was lost."""
    if (folder := os.environ.get(NOTES)) is not None:
        with suppress(OSError):
            Path(folder, os.environ["RANK"]).write_text(json.dumps({"step": step, "lost": lost}))


def leave_stop() -> None:
    """Tell `skirl launch` that this trainer is done, or has saved what a signal has ended."""
    if (folder := os.environ.get(NOTES)) is not None:
        Path(folder, STOPPED).touch()


def says_first(text: str) -> bool:
    """Return whether no other trainer of this launcher has said the same."""
    if (folder := os.environ.get(NOTES)) is None:
        return True
    try:
        os.close(os.open(Path(folder, f"said-{crc32(text.encode())}"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def launchers_elsewhere() -> bool:
    """Return whether launchers on other machines watch trainers of the same job. These restart when one of ours fails."""
    return launched_here() and os.environ.get("GROUP_WORLD_SIZE", "1") != "1"


def die_with_parent(parent: int | None = None) -> None:
    """Have the system kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_launcher() -> None:
    """Have the system kill this trainer when its launcher ends in any way; call it early."""
    if not launched_here():
        return
    parent = os.getppid()
    die_with_parent(parent)
    if reaps(parent):  # the launcher ended before
        os.kill(os.getpid(), signal.SIGKILL)


def reaps(pid: int) -> bool:
    """Return whether a process adopts orphans, as process 1 and a user's systemd do. A launcher, even as 1, is Python."""
    try:
        name = Path(os.readlink(f"/proc/{pid}/exe")).name
    except PermissionError:  # another user's
        return pid == 1
    except OSError:
        return False
    return name == "systemd" or (pid == 1 and not name.startswith(("python", "pypy")))


def _began(pid: int) -> str:
    """Return when a process on this machine began, or an empty string if it has ended."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


class Connections:
    """The sockets opened in a with-block. A gloo group cannot be stopped, but shutting these down ends its calls."""

    def __init__(self) -> None:
        self._opened: dict[int, str] = {}

    def __enter__(self) -> "Connections":
        self._before = _sockets()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened = {file: name for file, name in _sockets().items() if self._before.get(file) != name}

    def cut(self, spare: Collection[int] = ()) -> None:
        opened, self._opened = self._opened, {}
        for file, name in opened.items():
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{file}") != name:
                    continue
                with socket.socket(fileno=os.dup(file)) as one:
                    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] in spare:
                        continue
                    if one.getpeername()[1] in spare:  # raises if it only listens
                        continue
                    one.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    found = {}
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed by now
            if (name := os.readlink(f"/proc/self/fd/{file}")).startswith("socket:"):
                found[int(file)] = name
    return found
