"""A pytest plugin: `--forks N` runs the tests in N processes, forked from this one when it has collected them.

Each has what this one has imported, and processes of tests/zygote.py that are ready: an interpreter of its own would take
half a minute to get there. Tests that share a fixture of their module go together, so that it is made once. What takes long
begins first, by tests/seconds.txt; of the rest a process gets a share, smaller and smaller ones, and tells of them.
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
"""A process gets its share of what is left, divided by this, at a time: few at the end, where all have to end together."""

LONG = 300.0
"""Seconds that any test may take."""

FIRST = 4.0
"""Tests, or groups of them, of so many seconds begin before all others."""

GARBAGE = (5000, 20, 20)
"""How many new objects Python looks for garbage after: at its own 700 that takes 4% of the tests' time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("skirl")
    group.addoption("--forks", type=int, default=0, metavar="N", help="run tests in N processes; 0 is this one alone")
    group.addoption("--warm", action="store_true", help="with --forks: load kernels first, that most tests use")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--forks") > 0 and not config.getoption("collectonly"):
        config.pluginmanager.register(Forks(config.getoption("--forks")), "skirl-forks")


@dataclass(eq=False)
class Worker:
    """A forked process, as the one that forked it sees it."""

    number: int
    pid: int
    ended: int
    """A descriptor that can be read when the process has ended."""
    link: Connection
    left: deque[int] = field(default_factory=deque)
    """Tests that it was given and has not ended, by their places; the first may be running."""
    runs: bool = False


class Forks:
    """The loop over all tests, in the process that collected them."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._nest: Nest | None = None
        self._workers: list[Worker] = []
        self._todo: deque[list[int]] = deque()
        """Places of tests that go together."""
        self._costs: list[float] = []
        """Seconds of each test, as far as they are known."""

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if self._nest is None and "python" in getattr(item, "fixturenames", ()):
            self._nest = Nest()  # it imports beside us

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None  # pytest's own loop says so
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        terminal.showfspath = False  # files take turns
        self._costs = costs(session.items, recorded())
        self._todo.extend(in_order(groups(session.items), self._costs))
        if session.config.getoption("--warm"):
            from tests.compile import compile_kernels

            if failed := compile_kernels():
                terminal.write_line(f"not all kernels were compiled: {failed}")
        # Those of pyarrow, which Python does not know, stop for a fork and start again.
        assert threading.active_count() == 1, f"threads are lost in a fork: {threading.enumerate()}"
        gc.collect()
        gc.freeze()  # what is here stays: forks need not look at it, and share its memory
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
        """Until something is said: hear it."""
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
        """The next tests for a process; those of one file stay together where they do not take long."""
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
        """A process has ended: its last test has failed if it ran one, and another process takes what it leaves."""
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
            os._exit(code)  # what runs at the end of an interpreter is for the one that forked
        raise AssertionError


def costs(items: Sequence[pytest.Item], known: Mapping[str, float]) -> list[float]:
    """Seconds of each test: those recorded, or a guess, by which one that asks for more time than others takes long."""
    return [known.get(item.nodeid, LONG if takes_long(item) else BRIEF) for item in items]


def groups(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Places of tests: in one list those that share a fixture of their module, any other test in one of its own."""
    found: dict[int, list[int]] = {}
    first: dict[tuple[Path, str], int] = {}
    """The group of each fixture, by its first test."""
    for at, item in enumerate(items):
        names = [(item.path, name) for name in shared_fixtures(item)]
        joined = {first[name] for name in names if name in first}
        to = min(joined, default=at)
        found[to] = sorted([at, *(each for group in joined for each in found.pop(group))])
        first |= dict.fromkeys([*names, *(name for name, group in first.items() if group in joined)], to)
    return [found[to] for to in sorted(found)]


def shared_fixtures(item: pytest.Item) -> list[str]:
    """The fixtures of a test that are made once for its module."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return [name for name, [*_, made] in definitions.items() if made.scope == "module"]


def in_order(groups: Sequence[list[int]], costs: Sequence[float]) -> list[list[int]]:
    """Groups as they begin: those that take long by their seconds, then the others as they were collected."""
    of = [sum(costs[at] for at in group) for group in groups]
    return [groups[n] for n in sorted(range(len(of)), key=lambda n: (-of[n] if of[n] >= FIRST else 0.0, n))]


def takes_long(item: pytest.Item) -> bool:
    """Whether a test was given more time than others."""
    mark = item.get_closest_marker("timeout")
    return mark is not None and bool(mark.args) and not 0 < mark.args[0] <= LONG


def work(session: pytest.Session, link: Connection, number: int) -> None:
    """In a fork: run the tests that are asked for, and tell what came of them."""
    config = session.config
    reporter: Any = config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(SimpleNamespace(_tw=reporter._tw), "terminalreporter")  # a timeout writes to it
    config.pluginmanager.register(Tell(config, link))
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()  # its files are those of the process that forked
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
            more()  # before it runs: what the next one needs is not taken down
        link.send(("begins",))
        config.hook.pytest_runtest_protocol(item=item, nextitem=session.items[left[0]] if left else None)
        link.send(("ends",))


class Tell:
    """In a fork: hands on what pytest would write."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config = config
        self._link = link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", data))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str) -> None:
        if when == "runtest":  # what came before the fork is known
            self._link.send(("warning", f"{nodeid}: {warning_message}"))
