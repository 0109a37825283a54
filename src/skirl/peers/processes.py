"""What the operating system knows of ranks: whether a process has ended, and the connections that groups have opened."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

LEAVING = 30.0
"""Seconds that a launcher has to end, at least: it takes long where a machine is busy."""
OF_TORCHRUN = 300.0
"""Seconds that torchrun waits for the launchers of other machines, when its own trainers are through."""
BEGINS_AGAIN = 75
"""The exit code of a trainer that was stopped before the end, where launchers of several machines watch: success would end
the job on machines that nobody has stopped.
"""
WATCH = """
import pathlib, select, signal, sys
end, pid, patience = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
if not select.select([end], [], [], patience)[0]:
    began_again = any(task.joinpath("children").read_text() for task in pathlib.Path("/proc", pid, "task").iterdir())
    if not began_again:
        print(f"the launcher waits for others, for more than {patience:g} s: it is ended; start it again",
              file=sys.stderr)
        signal.pidfd_send_signal(end, signal.SIGKILL)
"""
"""It is killed, for while it waits there it hears of no other signal."""


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


def launchers_elsewhere() -> bool:
    """Whether launchers of other machines watch trainers of the same job: they begin again when one of these fails."""
    return launched_here() and os.environ.get("GROUP_WORLD_SIZE", "1") != "1"


def die_with_launcher() -> None:
    """End when the launcher does, however it does: a trainer whose launcher is gone is nobody's. Linux has this.

    To be called early: a launcher that has ended before tells nobody, and is noticed only where a reaper has its place.
    """
    if not launched_here() or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal, parent = 1, os.getppid()
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent or reaps(parent):  # it ended in between, or before
        os.kill(os.getpid(), signal.SIGKILL)


def reaps(pid: int) -> bool:
    """Whether a process takes in those whose parents have ended: then it is nobody's launcher.

    That is process 1, and a user's systemd. A launcher may be process 1 of a container; launchers are Python.

    **Arguments**

    - `pid`: of the process.

    >>> reaps(os.getpid())
    False
    """
    try:
        name = Path(os.readlink(f"/proc/{pid}/exe")).name
    except PermissionError:  # of another user
        return pid == 1
    except OSError:
        return False
    return name == "systemd" or (pid == 1 and not name.startswith(("python", "pypy")))


def watch_launcher(patience: float, least: float = LEAVING) -> None:
    """See to it that this process's launcher, if it is one of several, does not outlive it for longer than patience.

    A launcher whose trainers are through waits until those of the others are. If one of them has begun again meanwhile, as a
    machine has joined or a trainer was killed, the two wait for each other: torchrun for five minutes. Whoever has started
    the launcher starts it again then, and a run that is whole ends at once.

    **Arguments**

    - `patience`: seconds that it may wait,
    - `least`: and that it has in any case.
    """
    patience = max(patience, least)
    several = launchers_elsewhere() and os.environ.get("LOCAL_RANK") == "0"
    if several and patience < OF_TORCHRUN and sys.platform.startswith("linux"):
        with suppress(OSError):
            launcher = os.getppid()
            end = os.pidfd_open(launcher)
            words = [sys.executable, "-I", "-S", "-c", WATCH, str(end), str(launcher), str(patience)]
            nowhere = subprocess.DEVNULL
            watch = subprocess.Popen(words, stdin=nowhere, stdout=nowhere, start_new_session=True, pass_fds=[end])
            watch.returncode = 0  # nobody waits for it
            os.close(end)


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
