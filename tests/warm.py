"""Processes that start in a tenth of a second: forks of one that has imported torch, and skirl with its kernels."""

import atexit
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, get_context
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

import pytest

PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
COMMAND = "from skirl.__main__ import run; run()"
"""The code that `skirl` runs."""
MODULE = "import runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
"""The code that `python -m MODULE ARGS` runs."""


class Stream:
    """A descriptor that goes along to a new process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return taken, (DupFd(self.number),)


def taken(duplicate: Any) -> int:
    return duplicate.detach()


def become(code: str, args: list[str], cwd: str, env: dict[str, str], streams: list[int]) -> None:
    """Make this fork look like a fresh interpreter, and run code in it."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c", *args]
    sys.path.insert(0, "")
    sys.modules["numba"].config.reload_config()  # it has read the server's environment
    tempfile.tempdir = None
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 as long as the process
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    raw = open(2, "wb", 0, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(raw, errors="backslashreplace", write_through=True)
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()


class Process:
    """The parts of `subprocess.Popen` that tests use."""

    def __init__(self, process: Any, stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self._process, self.pid, self.stdout, self.stderr = process, process.pid, stdout, stderr

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return what it still writes, empty for a stream that is not a pipe. Kill it if it takes longer."""
        late = threading.Timer(timeout, self.kill)
        late.start()
        with ThreadPoolExecutor(2) as pool:
            out, err = pool.map(lambda stream: stream.read() if stream else "", (self.stdout, self.stderr))
        self.wait()
        late.cancel()
        self.__exit__(None)
        return out, err

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind:
            self.kill()
        self.wait()
        for stream in filter(None, (self.stdout, self.stderr)):
            stream.close()


class Python:
    """`start(CODE, *args)` is `subprocess.Popen([sys.executable, "-c", CODE, *args])`, and `run` is `subprocess.run`."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preload"])
        forkserver.ensure_running()  # with this, whatever others ask for

    def start(
        self, code: str, *args: str, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, **streams: int
    ) -> Process:
        handed, given, pipes = [], [], {}
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = streams.get(name, number)
            if stream == PIPE:
                reading, stream = os.pipe()
                pipes[name] = os.fdopen(reading)
            elif stream == DEVNULL:
                stream = os.open(os.devnull, os.O_RDWR)
            handed.append(Stream(stream))
            given += [] if stream == streams.get(name, number) else [stream]
        of = (code, list(args), str(cwd or os.getcwd()), {**(env or os.environ)}, handed)
        process = self._context.Process(target=become, args=of)
        process.start()
        for number in given:
            os.close(number)
        return Process(process, pipes.get("stdout"), pipes.get("stderr"))

    def team(self, size: int, code: str, *args: str, env: Mapping[str, str] | None = None) -> list[Process]:
        """Start the ranks of a job as launchers do, each with pipes."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        job = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "job"}
        job |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)) | dict(env or {})
        ranks = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        return [self.start(code, *args, env=of, stdout=PIPE, stderr=PIPE) for of in ranks]

    def run(self, code: str, *args: str, timeout: float = 250, **more: Any) -> subprocess.CompletedProcess[str]:
        process = self.start(code, *args, **{"stdout": PIPE, "stderr": PIPE} | more)
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(args, process.wait(), out, err)


@pytest.fixture(scope="session")
def python() -> Python:
    return Python()
