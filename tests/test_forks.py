"""Tests in processes that are forked from the one that collected them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.forks import groups, in_order
from tests.zygote import ROOT, Python

TESTS = """
import os, signal, time
import pytest

@pytest.fixture(scope="module")
def once(tmp_path_factory):
    path = tmp_path_factory.mktemp("once")
    yield path
    os.rmdir(path)

@pytest.mark.parametrize("n", range(40))
def test_equal(n, record_property, tmp_path):
    (tmp_path / "file").write_text("")
    time.sleep(0.01)
    record_property("pid", os.getpid())
    assert n != 7, "seven is not equal"

@pytest.mark.parametrize("n", range(5))
def test_share(n, once, record_property):
    record_property("shares", os.getpid())

def test_that_crashes():
    os._exit(3)

def test_that_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def test_prints():
    print("a line")
    assert False

@pytest.mark.timeout(900)
def test_that_may_take_long():
    pass

@pytest.mark.timeout(0.1)
def test_that_hangs():
    time.sleep(60)

@pytest.fixture
def broken():
    yield
    raise ValueError("at its end")

def test_whose_fixture_fails_when_it_ends(broken):
    pass
"""

SEEN = """
import pytest

PIDS, SHARE, BEGAN, LONG = set(), set(), [], "test_them.py::test_that_may_take_long"

def pytest_runtest_logstart(nodeid):
    BEGAN.append(nodeid)

def pytest_runtest_logreport(report):
    PIDS.update(value for name, value in report.user_properties if name == "pid")
    SHARE.update(value for name, value in report.user_properties if name == "shares")

def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"in {len(PIDS)} processes, {len(SHARE)} shares, long early: {LONG in BEGAN[:10]}")
"""

CODE = """
import sys
sys.path.insert(0, {root!r})
import pytest
options = "-W ignore::pytest.PytestAssertRewriteWarning -p tests.forks -p no:cacheprovider -c none.ini --rootdir ."
options = [*options.split(), "--timeout-method", "thread", "--forks"]
sys.exit(pytest.main([*options, *sys.argv[1:]]))
"""


def test_every_test_has_an_end(python: Python, tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(SEEN)
    (tmp_path / "none.ini").write_text("[pytest]")
    done = python.run(CODE.format(root=str(ROOT)), "2", cwd=tmp_path)
    out = done.stdout
    assert "5 failed, 46 passed, 1 error" in out, out + done.stderr
    assert done.returncode == 1
    assert "in 2 processes, 1 shares, long early: True" in out, out  # the other process begins others meanwhile
    for said in (
        "AssertionError: seven is not equal",
        "test_that_crashes: the process that ran it ended with 3",
        "test_that_is_killed: the process that ran it ended with -9",
        "a line",
        "test_that_hangs: the process that ran it ended with 1",
        "at its end",
    ):
        assert said in out, said


def test_it_stops_where_it_is_told_to(python: Python, tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "none.ini").write_text("[pytest]")
    done = python.run(CODE.format(root=str(ROOT)), "2", "-x", cwd=tmp_path)
    assert "stopping after 1 failures" in done.stdout
    assert done.returncode == 1 and "test_that_is_killed" not in done.stdout


def test_the_longest_begin_first_and_others_as_they_were_collected() -> None:
    assert in_order([[0], [1], [2], [3], [4]], [0.3, 5.0, 2.0, 300.0, 0.3]) == [[3], [1], [0], [2], [4]]
    assert in_order([[0], [1, 3], [2]], [0.3, 2.0, 3.0, 2.5]) == [[1, 3], [0], [2]]


def test_those_that_share_a_fixture_of_their_module_go_together() -> None:
    def item(path: str, *names: str) -> Any:
        made = {name: [SimpleNamespace(scope=name.partition("-")[0])] for name in names}
        return SimpleNamespace(path=Path(path), _fixtureinfo=SimpleNamespace(name2fixturedefs=made))

    items = [item("a", "module-x"), item("a"), item("a", "function-y"), item("a", "session-z", "module-x")]
    items += [item("b", "module-x"), item("b", "module-w"), item("b"), item("b", "module-w", "module-x")]
    assert groups(items) == [[0, 3], [1], [2], [4, 5, 7], [6]]
