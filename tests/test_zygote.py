"""A process from the zygote behaves as tests expect of a process."""

import os
import signal
import subprocess
import sys

import pytest

from tests.zygote import PIPE, Python

SAYS = """
import os, signal, sys, threading
print(sys.argv[1:], os.getcwd(), os.environ.get("MINE"), sorted(os.environ))
print(sys.stdin.read(), threading.active_count(), threading.current_thread() is threading.main_thread())
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)])
print(sorted(os.listdir("/proc/self/fd"))[:4], sys.stdout.line_buffering, file=sys.stderr)
print(__name__, sys.stdout.encoding, sys.stderr.errors)
"""


def test_it_begins_as_an_interpreter_does(warm_python: Python, tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "1")
    (tmp_path / "in").write_text("given")
    told = []
    for start in (warm_python.run, plain):
        with open(tmp_path / "in") as given:
            told.append(start(SAYS, "a", "b", stdin=given.fileno(), cwd=tmp_path))
    ours, theirs = told
    assert ours.stdout.split() == theirs.stdout.split()
    assert (ours.returncode, ours.stderr) == (theirs.returncode, theirs.stderr)


@pytest.fixture(autouse=True)
def buffered(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def plain(code: str, *args: str, **more) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env={**os.environ}, capture_output=True, text=True, check=False, **more)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('words')", 1),
        ("raise ValueError('words')", 1),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import atexit; atexit.register(print, 'at exit'); print('before')", 0),
        ("import threading; threading.Timer(0.1, print, ['of a thread']).start()", 0),
        ("import os; print('lost'); os.close(1)", 120),
    ],
)
def test_it_ends_as_an_interpreter_does(warm_python: Python, code: str, status: int):
    ours, theirs = warm_python.run(code), plain(code)
    assert ours.returncode == theirs.returncode == status
    assert ours.stdout == theirs.stdout
    assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]


def test_it_is_waited_for_signalled_and_killed(warm_python: Python):
    with warm_python.start("import time; print('up', flush=True); time.sleep(100)", stdout=PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        assert process.poll() is None and process.pid != os.getpid()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL == process.poll()
        process.kill()  # nobody answers any more
    with pytest.raises(KeyError), warm_python.start("import time; time.sleep(100)") as process:
        raise KeyError
    assert process.returncode == -signal.SIGKILL


def test_one_leaves_nothing_to_the_next(warm_python: Python):
    dirty = "import os, torch, skirl.cli, sys; os.chdir('/'); torch.manual_seed(5); skirl.cli.COMMANDS.clear()"
    clean = "import os, torch, skirl.cli; print(os.getcwd(), torch.initial_seed(), len(skirl.cli.COMMANDS))"
    before = warm_python.run(clean).stdout
    assert warm_python.run(dirty).returncode == 0
    assert warm_python.run(clean).stdout == before


def test_skirl_is_not_there_where_it_is_to_be_imported_anew(python: Python):
    code = "import sys; print([m for m in sys.modules if m.split('.')[0] == 'skirl'], 'torch' in sys.modules)"
    assert python.run(code).stdout == "[] True\n"
