"""`skirl bench serve`: its counts and refusals. Times are not checked."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from skirl.measure.bench.serve import ServeSpeed
from skirl.measure.bench.serve_calls import Calls
from skirl.store.remote import started
from tests.store.remote.nodes import leave, served


def test_calls_are_measured_beside_the_floor():
    cores = os.sched_getaffinity(0)
    leave()
    with served(1) as nodes:
        found = Calls(nodes.spec, os.getpid(), rows=20, dim=4, held=100, calls=4, default=False, core=-1).measure()
    assert os.sched_getaffinity(0) == cores
    assert set(found) == {"floor", "get", "put", "idle_cpu_share"}
    for name in ("get", "put"):
        facts = found[name]
        assert 0 < facts["least_ms"] <= facts["p50_ms"] <= facts["p99_ms"] and facts["owner_cpu_ms"] > 0
        assert set(facts["calls_s"]) == {1, 4} and min(facts["calls_s"].values()) > 0
    measured = {"tcp": found, "default": found, "rows": 20, "dim": 4, "held": 100}
    lines = ServeSpeed(rows=20, dim=4, held=100).summary(json.loads(json.dumps(measured)))
    assert "times the floor" in lines["get over TCP"] and "at the node" in lines["idle over torch's default transports"]


def test_too_few_rows_for_four_calls_are_refused():
    with pytest.raises(ValueError, match="held is 70: four calls at a time need 80 or more"):
        ServeSpeed(rows=20, held=70)


def _sleeps() -> None:
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")
    time.sleep(60)


def test_a_family_is_a_process_and_all_that_it_has_started():
    process = multiprocessing.get_context("fork").Process(target=_sleeps)
    process.start()
    assert process.pid is not None
    while len(pids := started.family(process.pid)) < 2:
        time.sleep(0.01)
    assert pids[0] == process.pid and started.private_memory_of(pids[1]) > 0
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.join()
    assert started.private_memory_of(process.pid) == 0 and started.cpu_of([process.pid]) == 0


def test_a_node_that_ends_is_started_again_unless_it_is_held():
    words = ("-c", "import time; time.sleep(60)")
    nodes = started.StartedNodes(
        2, words=words, start=lambda words, log: subprocess.Popen([sys.executable, *words[:2]])
    )
    with nodes:
        first = [process.pid for process in nodes.processes]
        nodes.held.add(1)
        for node in range(2):
            assert nodes.send(node, signal.SIGKILL) == [first[node]]
        while nodes.processes[0].pid == first[0]:
            time.sleep(0.02)
        assert nodes.processes[1].pid == first[1]
    assert all(process.poll() is not None for process in nodes.processes)
