"""Processes that start in a tenth of a second, because they are forked from one that has imported torch.

`python.start(CODE, *args)` is `subprocess.Popen([sys.executable, "-c", CODE, *args])`, and `python.run` is
`subprocess.run`: a separate process with its own folder, environment, streams and signals, that ends as an interpreter
ends. Tests that depend on how an interpreter starts use a real one.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import IO, Any

import pytest

import skirl

ROOT = Path(__file__).parents[1]
PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
SERVE = "from tests import serve; serve.serve()()"
WARM = f"from tests import serve; serve.warm(); {SERVE}"
COMMAND = "import sys; from skirl.cli import main; sys.exit(main())"
"""The code that `skirl` runs."""


def readable(ends: Iterable[Any], timeout: float | None) -> list[Any]:
    """As select(), which takes no descriptor from 1024 on."""
    poll = select.poll()
    of = {end if isinstance(end, int) else end.fileno(): end for end in ends}
    for number in of:
        poll.register(number, select.POLLIN)
    return [of[number] for number, _ in poll.poll(None if timeout is None else timeout * 1000)]


class Process:
    """The parts of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, ends: int, stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None
        self._ends = ends
        """A pipe that reports the exit status."""

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not readable([self._ends], timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            told = os.read(self._ends, 32)
            os.close(self._ends)
            assert told, "the zygote has died"
            self.returncode = os.waitstatus_to_exitcode(int(told))
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait, and return what it still writes; empty for a stream that is not a pipe."""
        until, parts = time.monotonic() + timeout, {s: b"" for s in (self.stdout, self.stderr) if s and not s.closed}
        left = set(parts)
        while left:
            ready = readable(left, max(0, until - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            for stream in ready:
                piece = os.read(stream.fileno(), 1 << 16)
                parts[stream] += piece
                left -= set() if piece else {stream}
        self.wait(max(0, until - time.monotonic()))
        for stream in parts:
            stream.close()
        out, err = (parts.get(stream, b"").decode() if stream else "" for stream in (self.stdout, self.stderr))
        return out, err

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if kind:
            self.kill()
        for stream in (self.stdout, self.stderr):
            if stream:
                stream.close()
        self.wait()


class Python:
    """Starts processes, which are forked by the server at the other end of a socket."""

    def __init__(self, talk: socket.socket) -> None:
        self._talk = talk

    def start(self, code: str, *args: str, **more: Any) -> Process:
        """Start a process, like `subprocess.Popen` of `python -c CODE ARGS` in text mode."""
        return self.order(code, *args, **more)()

    def start_module(self, module: str, *args: str, **more: Any) -> Process:
        """Start a module, like `subprocess.Popen` of `python -m MODULE ARGS`."""
        run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        return self.start(run, *args, **more)

    def order(
        self,
        code: str,
        *args: str,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Callable[[], Process]:
        """Order a process, like `start`, but wait only when the result is called: the server may not be up yet."""
        ours: list[IO[str] | None] = []
        theirs, close = [], []
        for given, own in ((stdin, 0), (stdout, 1), (stderr, 2)):
            mine = None
            if given == PIPE:
                reading, writing = os.pipe()
                mine = os.fdopen(reading)
                given = writing
                close.append(writing)
            elif given == DEVNULL:
                given = os.open(os.devnull, os.O_RDWR)
                close.append(given)
            ours.append(mine)
            theirs.append(own if given is None else given)
        ends, tells = os.pipe()
        wanted = {"args": ["-c", *args], "code": code, "cwd": str(cwd or os.getcwd()), "env": {**(env or os.environ)}}
        text = json.dumps(wanted).encode()
        # The length comes first, in fixed size: a stream of bytes has no boundaries.
        socket.send_fds(self._talk, [len(text).to_bytes(4)], [*theirs, tells])
        self._talk.sendall(text)
        for file in (*close, tells):
            os.close(file)

        def answer() -> Process:
            pid = int.from_bytes(self._talk.recv(4, socket.MSG_WAITALL))
            assert pid, "the zygote has died"
            return Process(pid, ends, ours[1], ours[2])

        return answer

    def run(self, code: str, *args: str, timeout: float = 250, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a process to its end, like `subprocess.run` with `capture_output=True` and `text=True`."""
        with self.start(code, *args, **{"stdout": PIPE, "stderr": PIPE} | more) as process:
            out, err = process.communicate(timeout)
        assert process.returncode is not None
        return subprocess.CompletedProcess(args, process.returncode, out, err)


def interpreter(stdin: socket.socket) -> subprocess.Popen[bytes]:
    """Start an interpreter that serves the other end of a socket, and ends with it."""
    source = str(Path(skirl.__file__).parents[1])
    path = os.pathsep.join([source, str(ROOT), os.environ.get("PYTHONPATH", "")])
    code = f"from tests import serve; serve.prepare(); {SERVE}"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stdin=stdin)


@pytest.fixture(scope="session")
def python() -> Iterator[Python]:
    """Starts processes that have imported torch and Numba, but nothing of skirl's."""
    if GIVEN:
        yield Python(GIVEN[0])
        return
    ours, theirs = socket.socketpair()
    with theirs, interpreter(theirs), ours:  # the server ends with its socket
        theirs.close()
        yield Python(ours)


@pytest.fixture(scope="session")
def warm_python(python: Python) -> Iterator[Python]:
    """Starts processes that have also loaded skirl's kernels."""
    if GIVEN:
        yield Python(GIVEN[1])
        return
    ours, theirs = socket.socketpair()
    with theirs, python.start(WARM, stdin=theirs.fileno()), ours:
        theirs.close()
        yield Python(ours)


@pytest.fixture
def forked_trainers(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Fork the trainers of `skirl verify` here, because interpreters take seconds to start; those of the campaign's
    cases too."""
    from skirl.train import verify_trainers

    def start(command: list[str], *, env: Mapping[str, str], stderr: int, text: bool) -> Process:
        interpreter, how, name, *args = command
        assert (interpreter, how, text) == (sys.executable, "-m", True)
        return request.getfixturevalue("warm_python").start_module(name, *args, env=env, stderr=stderr)

    monkeypatch.setattr(verify_trainers, "subprocess", SimpleNamespace(PIPE=PIPE, Popen=start))


GIVEN: list[socket.socket] = []
"""In a process of tests/forks.py: the sockets whose servers back `python` and `warm_python`."""


class Nest:
    """Makes one server of each kind, and copies of them for each process of tests/forks.py."""

    def __init__(self) -> None:
        """Begin without waiting."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._interpreter = interpreter(theirs)
        self._python = Python(ours)
        warm, theirs = socket.socketpair()
        with theirs:
            self._began = self._python.order(WARM, stdin=theirs.fileno())
        self._warm = Python(warm)
        self._kept: list[Process] = []

    def hatch(self) -> list[socket.socket]:
        """Return new sockets for a process's `GIVEN`."""
        if not self._kept:
            self._kept.append(self._began())
        given = []
        for python in (self._python, self._warm):
            ours, theirs = socket.socketpair()
            with theirs:
                self._kept.append(python.start(SERVE, stdin=theirs.fileno()))
            given.append(ours)
        return given
