"""A pytest plugin: `--forks N` runs the tests in N processes, forked from this one once it has collected them.

Each fork inherits this process's imports and gets processes of tests/zygote.py that are ready; a fresh interpreter
would take half a minute to get there. Tests that share a module fixture run in one process, so that it is made once.
Long tests begin first, by tests/seconds.txt; the rest is handed out in shares that get smaller and smaller.
"""

import gc
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import zygote
from tests.seconds import BRIEF, recorded
from tests.zygote import Nest

SHARE = 8
"""A process gets 1 / SHARE of its fair share of the tests left, so that shares shrink and all processes end together."""

LONG = 300.0
"""Default limit on the seconds of a test."""

FIRST = 4.0
"""Tests, or groups of them, that take at least this many seconds begin before all others."""

GARBAGE = (5000, 20, 20)
"""Thresholds of Python's garbage collector: its default of 700 new objects takes 4% of the tests' time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("skirl")
    group.addoption("--forks", type=int, default=0, metavar="N", help="run tests in N processes; 0 is this one alone")
    group.addoption("--warm", action="store_true", help="with --forks: load kernels first, that most tests use")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--forks") > 0 and not config.getoption("collectonly"):
        config.pluginmanager.register(Forks(config.getoption("--forks")), "skirl-forks")


@dataclass(eq=False)
class Worker:
    """A forked process, as seen by its parent."""

    number: int
    pid: int
    ended: int
    """A descriptor that becomes readable when the process has ended."""
    link: Connection
    left: deque[int] = field(default_factory=deque)
    """Indices of the tests that it was given and has not finished; the first may be running."""
    runs: bool = False


class Forks:
    """The loop over all tests, in the process that collected them."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._nest: Nest | None = None
        self._workers: list[Worker] = []
        self._todo: deque[list[int]] = deque()
        """Groups of tests still to run, as indices."""
        self._costs: list[float] = []
        """Seconds of each test, as far as known."""

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if self._nest is None and "python" in getattr(item, "fixturenames", ()):
            self._nest = Nest()  # it imports while we collect

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None  # pytest's own loop reports this case
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        terminal.showfspath = False  # files interleave
        self._costs = costs(session.items, recorded())
        self._todo.extend(in_order(groups(session.items), self._costs))
        if session.config.getoption("--warm"):
            from tests.compile import compile_kernels

            if failed := compile_kernels():
                terminal.write_line(f"not all kernels were compiled: {failed}")
        # Python does not know about pyarrow's threads, which stop for a fork and start again.
        assert threading.active_count() == 1, f"threads are lost in a fork: {threading.enumerate()}"
        gc.collect()
        gc.freeze()  # forks need not scan objects that exist now, and share their memory
        gc.set_threshold(*GARBAGE)
        try:
            for number in range(min(self._processes, len(session.items))):
                self._workers.append(self._fork(session, number))
            while self._workers:
                self._listen(session)
        finally:
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        return True

    def _listen(self, session: pytest.Session) -> None:
        """Wait for messages of the processes, and handle them."""
        ready = wait([*(worker.link for worker in self._workers), *(worker.ended for worker in self._workers)])
        for worker in list(self._workers):
            if worker.link in ready or worker.ended in ready:
                over = worker.ended in ready
                try:
                    while worker.link.poll():
                        self._hear(session, worker, *worker.link.recv())
                except (EOFError, ConnectionResetError):
                    over = True
                if over:
                    self._end(session, worker)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)

    def _hear(self, session: pytest.Session, worker: Worker, word: str, more: Any = None) -> None:
        hook, items = session.config.hook, session.items
        if word == "more":
            tests = self._share(items)
            worker.left.extend(tests)
            worker.link.send(tests)
        elif word == "begins":
            worker.runs = True
            item = items[worker.left[0]]
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif word == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=more)
            hook.pytest_runtest_logreport(report=report)
        elif word == "warning":
            session.config.pluginmanager.get_plugin("terminalreporter").write_line(f"\n{more}", yellow=True)
        elif word == "ends":
            worker.runs = False
            item = items[worker.left.popleft()]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _share(self, items: list[pytest.Item]) -> list[int]:
        """Return the next tests for a process. Short tests of one file stay together."""
        left = [self._cost(group) for group in self._todo]
        if left and left[0] >= FIRST:
            return self._todo.popleft()
        share = sum(left) / (SHARE * self._processes)
        tests, taken = [], 0.0
        while self._todo and (not tests or taken < 2 * share):
            if taken >= share and items[tests[-1]].path != items[self._todo[0][0]].path:
                break
            taken += self._cost(self._todo[0])
            tests += self._todo.popleft()
        return tests

    def _cost(self, group: Sequence[int]) -> float:
        return sum(self._costs[at] for at in group)

    def _end(self, session: pytest.Session, worker: Worker) -> None:
        """Handle the end of a process: fail the test that it was running, if any, and leave its other tests to a new
        process."""
        self._workers.remove(worker)
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        worker.link.close()
        os.close(worker.ended)
        if worker.runs:
            item = session.items[worker.left.popleft()]
            said = f"{item.nodeid}: the process that ran it ended with {code}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
            session.config.hook.pytest_runtest_logreport(report=report)
        elif code:
            raise RuntimeError(f"a process of tests ended with {code} between two tests")
        if worker.left:
            self._todo.appendleft([*worker.left])
        if self._todo:
            self._workers.append(self._fork(session, worker.number))

    def _fork(self, session: pytest.Session, number: int) -> Worker:
        ours, theirs = Pipe()
        given = self._nest.hatch() if self._nest else []
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            theirs.close()
            for talk in given:
                talk.close()
            return Worker(number, pid, os.pidfd_open(pid), ours)
        code = 1
        try:
            ours.close()
            for worker in self._workers:
                worker.link.close()
                os.close(worker.ended)
            zygote.GIVEN[:] = given
            work(session, theirs, number)
            code = 0
        except KeyboardInterrupt:
            code = 2
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # handlers at interpreter exit belong to the parent
        raise AssertionError


def costs(items: Sequence[pytest.Item], known: Mapping[str, float]) -> list[float]:
    """Return the seconds of each test: as recorded, or else guessed. A test with a longer timeout counts as long."""
    return [known.get(item.nodeid, LONG if takes_long(item) else BRIEF) for item in items]


def groups(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Return groups of tests, as indices: tests that share a module fixture are in one group, any other test in its own."""
    found: dict[int, list[int]] = {}
    first: dict[tuple[Path, str], int] = {}
    """The group of each fixture, named by its first test."""
    for at, item in enumerate(items):
        names = [(item.path, name) for name in shared_fixtures(item)]
        joined = {first[name] for name in names if name in first}
        to = min(joined, default=at)
        found[to] = sorted([at, *(each for group in joined for each in found.pop(group))])
        first |= dict.fromkeys([*names, *(name for name, group in first.items() if group in joined)], to)
    return [found[to] for to in sorted(found)]


def shared_fixtures(item: pytest.Item) -> list[str]:
    """Return the names of a test's fixtures that have module scope."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return [name for name, [*_, made] in definitions.items() if made.scope == "module"]


def in_order(groups: Sequence[list[int]], costs: Sequence[float]) -> list[list[int]]:
    """Return the groups in starting order: long ones by their seconds, then the others as collected."""
    of = [sum(costs[at] for at in group) for group in groups]
    return [groups[n] for n in sorted(range(len(of)), key=lambda n: (-of[n] if of[n] >= FIRST else 0.0, n))]


def takes_long(item: pytest.Item) -> bool:
    """Return whether a test has a longer timeout than others."""
    mark = item.get_closest_marker("timeout")
    return mark is not None and bool(mark.args) and not 0 < mark.args[0] <= LONG


def work(session: pytest.Session, link: Connection, number: int) -> None:
    """Run tests in a fork as the parent hands them out, and report their results."""
    config = session.config
    reporter: Any = config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(SimpleNamespace(_tw=reporter._tw), "terminalreporter")  # pytest-timeout writes to it
    config.pluginmanager.register(Tell(config, link))
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()  # its files are the parent's
    capture.start_global_capturing()
    capture.suspend_global_capture()
    factory: Any = config._tmp_path_factory  # pyright: ignore[reportAttributeAccessIssue]
    factory._basetemp = factory.getbasetemp() / f"fork{number}-{os.getpid()}"
    factory._basetemp.mkdir(mode=0o700)
    left: deque[int] = deque()

    def more() -> None:
        link.send(("more",))
        left.extend(link.recv())

    more()
    while left:
        item = session.items[left.popleft()]
        if not left:
            more()  # ask before the last test runs, so that fixtures the next one needs are kept
        link.send(("begins",))
        config.hook.pytest_runtest_protocol(item=item, nextitem=session.items[left[0]] if left else None)
        link.send(("ends",))


class Tell:
    """Forwards to the parent, from a fork, what pytest would write."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config = config
        self._link = link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", data))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str) -> None:
        if when == "runtest":  # the parent knows what came before the fork
            self._link.send(("warning", f"{nodeid}: {warning_message}"))
