"""The processes of a job on one machine: whether one has ended, which connections groups have opened, and `skirl launch`,
which has torchrun start and watch several trainers."""

import atexit
import ctypes
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

_SET_PARENT_DEATH_SIGNAL = 1
BEGINS_AGAIN = 75
"""Exit code of a trainer that was stopped early, if launchers of several machines watch the job: a success would end the
job on machines where nobody stopped it."""


NOTES, LAUNCHER = "SKIRL_NOTES", "SKIRL_LAUNCHER"
"""What `skirl launch` sets for its trainers: a folder for their last notes, and its process."""
_LOGGERS = "torch.distributed.elastic", "torch.multiprocessing"
AFTER = 1.0
"""Seconds by which a trainer that failed ends later than one that was killed, so that the launcher tells of that one."""
STOPPED = "stopped"
LOOPBACK = "127.0.0.1"
SETTINGS = {
    # Otherwise the trainers' store would be the launcher's, which listens on all networks.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # The bits of a run depend on its number of threads, so that must not depend on the number of trainers.
    "OMP_NUM_THREADS": "1",
}
"""Environment variables of trainers, unless the user has set them."""


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
    """Have the system kill this trainer when its launcher ends in any way; call it early. `skirl launch` says who it is, so
    that a trainer whose launcher has ended before it could look ends as well."""
    if launched_here():
        die_with_parent(int(os.environ.get(LAUNCHER, os.getppid())))


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


def launch(
    command: Callable[[list[str]], int], words: list[str], trainers: int, restarts: int
) -> tuple[int, str | None, bool]:
    """Start trainers of a script, or forks that run a command, and wait. Return the exit code, how the job ended if not
    well, and whether it may go on from there."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    for begun in range(1, restarts + 1):
        code, how, resumes = _job(command, words, trainers)
        if not code or not resumes:
            return code, how, resumes
        print(f"skirl launch: {how}; all start again, restart {begun} of {restarts}", file=sys.stderr, flush=True)
    return _job(command, words, trainers)


def _job(command: Callable[[list[str]], int], words: list[str], trainers: int) -> tuple[int, str | None, bool]:
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if name.startswith(_LOGGERS)]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the end is told here, in one line
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    script = words[0].endswith(".py")
    if script or torch.cuda.is_available():  # CUDA does not survive a fork
        entry, *arguments = [sys.executable, "-u", *(words if script else ("-m", "skirl", *words))]
    else:
        entry, *arguments = [_run_fork, command, words, told]
        torch.optim.SGD([torch.zeros(())])  # imports what takes longest, once for all
        gc.freeze()
    with tempfile.TemporaryDirectory(prefix="skirl-launch-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=trainers,
            run_id="skirl",
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "rendezvous"),  # a file, because others could reach a port
            rdzv_configs={"store_type": "file"},
            local_addr=LOOPBACK,
            max_restarts=0,
            monitor_interval=0.1,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "logs")),
        )
        os.environ |= {NOTES: folder, LAUNCHER: str(os.getpid())}
        try:
            elastic_launch(config, entry)(*arguments)
        except ChildFailedError as failed:
            codes = {int(path.name[5:]): int(path.read_text()) for path in Path(folder).glob("code-*")}
            return _why(codes | {rank: of.exitcode for rank, of in failed.failures.items()}, Path(folder))
        except SignalException as came:
            if Path(folder, STOPPED).exists():
                return 130 if came.sigval is signal.SIGINT else 0, None, False
            return 128 + came.sigval, f"stopped by {came.sigval.name}, and all trainers with it", False
        finally:
            signal.set_wakeup_fd(-1)
            os.close(told)
            os.close(tell)
    return 0, None, False


def _run_fork(command: Callable[[list[str]], int], words: list[str], told: int) -> None:
    """Run a command as a fresh interpreter would. told: is read from once a signal has told the launcher to end."""
    import torch

    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if (threads := os.environ["OMP_NUM_THREADS"]).isdecimal() and int(threads):  # torch may not have seen it
        torch.set_num_threads(int(threads))
    try:
        code = command(words)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    if code:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Path(os.environ[NOTES], f"code-{os.environ['RANK']}").write_text(str(code))
        time.sleep(AFTER)
        sys.exit(code)
    threading.Thread(target=_leave, args=(told,), daemon=True).start()  # else this waits until the launcher takes note


def _leave(told: int) -> None:
    select.select([told], [], [])
    os._exit(0)


def _why(codes: Mapping[int, int], folder: Path) -> tuple[int, str, bool]:
    """Return the exit code of the trainer that has the reason, and how it ended; others have only lost it. Also whether it
    was not refused at once."""
    notes = {int(path.name): json.loads(path.read_bytes()) for path in folder.iterdir() if path.name.isdecimal()}
    silent = [rank for rank in codes if rank not in notes and codes[rank] != -signal.SIGTERM]  # the launcher's
    killed = [rank for rank in silent if codes[rank] < 0]
    said = [rank for rank, note in notes.items() if not note["lost"]]
    rank = [*killed, *said, *silent, *codes][0]
    code = max(codes.get(rank, 1), 1) if rank in said else codes.get(rank, 1)  # the launcher ends who has said why
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    step = max((note["step"] for note in notes.values() if note["step"] is not None), default=None)
    at = "" if step is None else f" in step {step:,}"
    text = f"rank {rank} {how}{at}" + "; it said why above" * (rank in said)
    return 128 - code if code < 0 else code, text, step is not None or rank not in said
