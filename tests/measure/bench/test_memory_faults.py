"""Faults in memory nodes: the seed decides which and when, and every run ends with the bits of the undisturbed one."""

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from skirl.measure.bench.faults import Fault, Faults
from skirl.measure.bench.helpers import made_folder
from skirl.measure.bench.memory_faults import FAULTS, NodeFaults, OverNodes, _line
from skirl.store.remote.started import StartedNodes
from skirl.tools.os_errors import NotWritten
from tests.warm import COMMAND, Python


class Sleeping(OverNodes):
    """A run without trainers."""

    def _add(self) -> None:
        pass


@pytest.fixture
def nodes(tmp_path: Path):
    start = lambda words, log: subprocess.Popen(["sleep", "60"])  # noqa: E731
    with StartedNodes(3, start=start, watched=False) as found:
        yield found


def state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "gone"


@pytest.mark.parametrize("fault", FAULTS, ids=" ".join)
def test_one_node_is_hit_and_comes_back(fault: Fault, nodes: StartedNodes, tmp_path: Path):
    for node in range(3):
        (tmp_path / "nodes" / str(node)).mkdir(parents=True)
    pids = [process.pid for process in nodes.processes]
    run = Sleeping(Faults(patience=0.1), fault, random.Random(1), tmp_path, {}, nodes, 0)
    run._hit(fault)
    stays = fault.what in ("stop", "cut")
    while not (found := [n for n in range(3) if state(pids[n]) == "T" or nodes.processes[n].poll() is not None]):
        time.sleep(0.005)
    (hit,) = found
    lost = [n for n in range(3) if not (tmp_path / "nodes" / str(n)).exists()]
    assert lost == ([hit] if fault.what == "lose" else [])
    assert run._stopped == ([pids[hit]] if fault.what == "cut" else [])
    if fault.what == "cut":
        os.kill(pids[hit], signal.SIGCONT)
    while state(nodes.processes[hit].pid) not in "SR":
        run._tick()
    assert (nodes.processes[hit].pid == pids[hit]) == stays and run.hit == 1
    assert [nodes.processes[n].pid for n in range(3) if n != hit] == [pid for n, pid in enumerate(pids) if n != hit]


def test_a_line_says_what_befell_a_run():
    run = {"number": 3, "fault": ["cut", "node", "saving"], "at_step": 7, "trainers": 2, "rows": "disk", "wrong": None}
    said = _line(run | {"recovery_s": 4.5, "lost_steps": 2})
    assert said.endswith("at step 7, 2 trainers, rows in disk: same bits, recovered in 4.5 s, 2 steps lost")
    assert _line(run | {"recovery_s": None, "lost_steps": 0}).endswith("same bits, went on")
    assert _line(run | {"wrong": "rows differ", "recovery_s": None, "lost_steps": 0}).endswith(": rows differ")


@pytest.mark.slow
@pytest.mark.timeout(3600)  # it waits for patience to run out, again and again, using little CPU
def test_thirty_faults(python: Python):
    done = python.run(COMMAND, "bench", "node-faults", "--json", "--runs", "30", timeout=3500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["same_bits"], found["failed"]) == (30, None)


def test_a_folder_that_is_absent_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def begun(self: Faults, folder: Path) -> None:
        raise InterruptedError(folder)

    monkeypatch.setattr(Faults, "_warm", begun)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for bench in (NodeFaults, Faults):
        with pytest.raises(InterruptedError, match=bench.__name__):
            bench(folder=tmp_path / bench.__name__ / "new").run()
    (tmp_path / "file").touch()
    with pytest.raises(NotWritten, match="file could not be written"):
        made_folder(tmp_path / "file")
