"""Processes that start in a tenth of a second: the fork server of multiprocessing, with skirl's kernels loaded.

`python.start(CODE, *args)` is `subprocess.Popen([sys.executable, "-c", CODE, *args])`, and `python.run` is `subprocess.run`.
"""

import atexit
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
COMMAND = "import sys; from skirl.cli import main; sys.exit(main())"
"""The code that `skirl` runs."""


class Stream:
    """A descriptor that goes along to a new process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream._received, (DupFd(self.number),)

    @staticmethod
    def _received(duplicate: Any) -> int:
        return duplicate.detach()


def alone() -> None:
    """Wait for joined threads to disappear, which takes the system a moment. A fork would lose any that still run."""
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < until, "threads are lost in a fork"
        time.sleep(0.01)


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
        self._readers: dict[IO[str], tuple[threading.Thread, list[str]]] = {}

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.returncode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait, and return what it still writes; empty for a stream that is not a pipe."""
        until = time.monotonic() + timeout
        for stream in filter(None, (self.stdout, self.stderr)):
            if stream not in self._readers:
                text: list[str] = []
                reader = threading.Thread(target=lambda s=stream, t=text: t.append(s.read()), daemon=True)
                reader.start()
                self._readers[stream] = reader, text
        for reader, _ in self._readers.values():
            reader.join(max(0.0, until - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        for stream in self._readers:
            stream.close()
        self.wait(max(0.0, until - time.monotonic()))
        texts = ("".join(self._readers[s][1]) if s else "" for s in (self.stdout, self.stderr))
        return next(texts), next(texts)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind:
            self.kill()
        self.wait()
        for stream in filter(None, (self.stdout, self.stderr)):
            stream.close()


class Python:
    """Starts processes."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preload"])

    def start(
        self,
        code: str,
        *args: str,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        pipes: list[IO[str] | None] = []
        handed, close = [], []
        for number, wanted in enumerate((stdin, stdout, stderr)):
            pipe = None
            if wanted == PIPE:
                reading, wanted = os.pipe()
                pipe = os.fdopen(reading)
                close.append(wanted)
            elif wanted == DEVNULL:
                wanted = os.open(os.devnull, os.O_RDWR)
                close.append(wanted)
            pipes.append(pipe)
            handed.append(Stream(number if wanted is None else wanted))
        folder, variables = str(cwd or os.getcwd()), {**(env or os.environ)}
        process = self._context.Process(target=become, args=(code, list(args), folder, variables, handed))
        process.start()
        for number in close:
            os.close(number)
        return Process(process, pipes[1], pipes[2])

    def start_module(self, module: str, *args: str, **more: Any) -> Process:
        """Start a module, like `subprocess.Popen` of `python -m MODULE ARGS`."""
        run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        return self.start(run, *args, **more)

    def run(self, code: str, *args: str, timeout: float = 250, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a process to its end, like `subprocess.run` with `capture_output=True` and `text=True`."""
        with self.start(code, *args, **{"stdout": PIPE, "stderr": PIPE} | more) as process:
            out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(args, process.wait(), out, err)


def interpreter(code: str, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a real interpreter, which takes seconds to import torch."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


@pytest.fixture(scope="session")
def python() -> Python:
    """Starts processes that have imported torch, and skirl with its kernels."""
    return Python()


@pytest.fixture
def forked_trainers(monkeypatch: pytest.MonkeyPatch, python: Python) -> None:
    """Fork the trainers of `skirl verify`, because interpreters take seconds to start."""
    from skirl.train import verify_trainers

    def start(command: list[str], *, env: Mapping[str, str], stderr: int, text: bool) -> Process:
        return python.start_module(command[2], *command[3:], env=env, stderr=stderr)

    monkeypatch.setattr(verify_trainers, "subprocess", SimpleNamespace(PIPE=PIPE, Popen=start))
