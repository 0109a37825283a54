"""A job on several nodes, all on this machine: each has a launcher that a loop restarts, and can be hit by faults."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MEETING = {"join_timeout": 60, "last_call_timeout": 1, "keep_alive_interval": 1}
"""Rendezvous settings of the launchers; torchrun's defaults wait half a minute for more nodes."""
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or a restarted group reads the addresses of the previous one
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "SKIRL_RUNS": "none",
    "LOGLEVEL": "INFO",
}
LOOP = "while ! {command}; do sleep 0.2\ndone"
"""The shell loop that supervises a node's launcher."""


class BenchNode:
    """A node: a supervisor, its launcher, the launcher's trainers.

    **Arguments**

    - `flags`: those of `skirl train`.
    - `port`: the loopback port where launchers meet; the first of them serves it.
    - `log`: the file that all processes of the node write to.
    - `silence`: seconds of silence after which launchers take a node for lost, which a live one on a busy machine may be.
    - `warm`: fork launchers and trainers from this process, which must have imported everything and run no other thread.
      Otherwise a shell starts torchrun.
    """

    def __init__(self, flags: Mapping[str, Any], port: int, log: Path, warm: bool, silence: int = 30) -> None:
        self.log, self.port, self.lost = log, port, False
        """lost: the node is gone for good."""
        self._ended: int | None = None
        if warm:
            self._shell = None
            self.supervisor = forked(lambda: _supervise(lambda: _launch(flags, port, log.parent, silence)), log)
        else:
            with log.open("ab") as out:
                command = shlex.join([sys.executable, *_words(flags, port, silence)])
                self._shell = subprocess.Popen(
                    ["sh", "-c", LOOP.format(command=command)], stdout=out, stderr=out, env=os.environ | ENVIRONMENT
                )
            self.supervisor = self._shell.pid

    @property
    def launcher(self) -> int | None:
        """The launcher's process id; None if there is none at the moment."""
        return next((pid for pid in children(self.supervisor) if self._shell is None or _is_python(pid)), None)

    @property
    def trainers(self) -> list[int]:
        """The process ids of its trainers."""
        launcher = self.launcher
        return [] if launcher is None else children(launcher)

    @property
    def processes(self) -> list[int]:
        """The process ids of trainers and launcher."""
        launcher = self.launcher
        return [] if launcher is None else [*children(launcher), launcher]

    @property
    def serves(self) -> bool:
        """True if this node's launcher serves the port where launchers meet."""
        launcher = self.launcher
        return launcher is not None and _listens(launcher, self.port)

    @property
    def over(self) -> bool:
        """True if its supervisor has ended."""
        if self._ended is None:
            pid, status = os.waitpid(self.supervisor, os.WNOHANG)
            self._ended = os.waitstatus_to_exitcode(status) if pid else None
        return self._ended is not None

    def lose(self) -> None:
        """Kill all its processes, for good."""
        pids = [self.supervisor, *self.processes]
        self.lost = True
        for pid in pids:
            send(pid, signal.SIGKILL)
        while not self.over:
            time.sleep(0.01)

    def end(self) -> None:
        """Kill whatever still runs."""
        if not self.over:
            self.lose()


def send(pid: int | None, number: int) -> None:
    """Send a signal to a process, which may be None or gone."""
    with suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, number)


def children(pid: int) -> list[int]:
    """Return the ids of the live child processes of a process."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return [child for child in found if _lives(child)]


def forked(work: Callable[[], int], log: Path | None) -> int:
    """Fork a process that does `work` and exits with its return value. Its output goes to `log` if given. Return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            if log is not None:
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(out, 1)
                os.dup2(out, 2)
                sys.stdout, sys.stderr = (os.fdopen(end, "w", buffering=1, closefd=False) for end in (1, 2))
            os.environ.update(ENVIRONMENT)
            code = work()
        except BaseException as error:
            print(f"{error!r}", file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def threads() -> int:
    """Return the number of threads of this process, including those of the BLAS library, which handles forks."""
    return len(os.listdir("/proc/self/task"))


def alone(besides: int) -> None:
    """Wait until ended threads are gone: the system drops them a moment after they are joined. Raise if others still run,
    which a fork would lose.

    **Arguments**

    - `besides`: the number of threads that there were before.
    """
    until = time.monotonic() + 10
    while threads() > besides:
        if time.monotonic() > until:
            raise RuntimeError(f"{threads() - besides} threads run, which a fork would lose")
        time.sleep(0.01)


def _supervise(launch: Callable[[], int]) -> int:
    """Do what `LOOP` does in a shell: launch again until it succeeds."""
    while os.waitpid(forked(launch, None), 0)[1]:
        time.sleep(0.2)
    return 0


def _meeting(silence: int) -> dict[str, int]:
    return MEETING | {"keep_alive_max_attempt": silence // MEETING["keep_alive_interval"]}


def _launch(flags: Mapping[str, Any], port: int, folder: Path, silence: int) -> int:
    """Do what torchrun does, but fork the trainers. Return the exit code."""
    from tempfile import mkdtemp

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Otherwise a launcher reads the sources of its whole stack twice a turn, to name a method in a log that nobody reads.
    dynamic_rendezvous.get_method_name = lambda depth=2: "unnamed"
    logs = mkdtemp(prefix="launcher-", dir=folder)
    config = LaunchConfig(
        min_nodes=1, max_nodes=4, nproc_per_node=1, run_id="faults", rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}", rdzv_configs=_meeting(silence), max_restarts=100, monitor_interval=0.1,
        start_method="fork", local_addr="127.0.0.1", logs_specs=DefaultLogsSpecs(log_dir=logs),
    )  # fmt: skip
    try:
        elastic_launch(config, _train)(dict(flags))
    except ChildFailedError:
        return 1
    return 0


def _train(flags: dict[str, Any]) -> None:
    """Run a trainer."""
    from multiprocessing.synchronize import Event

    from skirl.peers.job import fail, leave
    from skirl.peers.processes import BEGINS_AGAIN, die_with_launcher
    from skirl.train.commands import Train

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it has inherited the launcher's handler
    # A function that torchrun forks waits at its end until the launcher has read its result. If it is told to end or
    # killed there, that takes half a minute, or forever; a command does not wait.
    Event.wait = lambda self, timeout=None: True
    die_with_launcher()
    try:
        found = Train.of(**flags).run()
        leave(whole=not (found["failed"] or found["begins_again"]))
    except Exception as error:
        print(f"rank {os.environ.get('RANK')}: {error}", file=sys.stderr, flush=True)
        fail(error)
        os._exit(1)
    if found["failed"] or found["begins_again"]:
        os._exit(1 if found["failed"] else BEGINS_AGAIN)


def _words(flags: Mapping[str, Any], port: int, silence: int) -> list[str]:
    """Return torchrun's command line, without the leading `python`."""
    meeting = ",".join(f"{name}={value}" for name, value in _meeting(silence).items())
    words = ["-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1", "--rdzv-backend=c10d",
             f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={meeting}", "--rdzv-id=faults", "--max-restarts=100",
             "--monitor-interval=0.2", "--local-addr=127.0.0.1", "-m", "--", "skirl", "train"]  # fmt: skip
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def _is_python(pid: int) -> bool:
    with suppress(OSError):
        return b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _listens(pid: int, port: int) -> bool:
    """Return whether a process listens on a port."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [row.split() for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
            inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    with suppress(OSError):
        for file in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{file}")[8:-1] in inodes:
                    return True
    return False
