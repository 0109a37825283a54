"""Trainers, launchers, nodes and memory nodes are killed, stopped, cut off, lost and gained: each job ends by itself with
the bits of an undisturbed one. `make chaos RUNS=60` runs more of them."""

import os
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from skirl.cli.train import Train
from tests.chaos.job import ENVIRONMENT, Fault, Job, MemoryNodes, digests

FAULTS = (
    Fault("kill", "trainer", "saving"),
    Fault("kill", "memory", "training"),
    Fault("stop", "trainer", "training"),
    Fault("cut", "memory", "training"),
    Fault("kill", "rendezvous", "training"),
    Fault("lose", "memory", "training"),
    Fault("lose", "node", "training"),
    Fault("kill", "memory", "saving"),
    Fault("gain", "node", "restarting"),
    Fault("stop", "memory", "training"),
    Fault("kill", "launcher", "training"),
    Fault("lose", "memory", "saving"),
    Fault("cut", "node", "training"),
    Fault("kill", "memory", "restarting"),
    Fault("kill", "trainer", "restarting"),
    Fault("cut", "memory", "saving"),
    Fault("cut", "rendezvous", "saving"),
    Fault("lose", "memory", "restarting"),
    Fault("lose", "node", "saving"),
    Fault("stop", "memory", "saving"),
    Fault("gain", "node", "training"),
    Fault("kill", "rendezvous", "restarting"),
)
"""Runs take these in turn."""
RUNS = int(os.environ.get("SKIRL_CHAOS", "4"))


def flags_of(folder: Path) -> dict[str, Any]:
    return {
        "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 40, "optimizer": "adam",
        "cache": "900", "shards": 4, "threads": 1, "depth": 5, "placement": "mixed",
        "save": folder / "saves", "save_every": 6, "keep_last": 2, "run": str(folder / "run"), "log_every": 1, "quiet": True,
    }  # fmt: skip


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert not Train.of(**flags_of(folder)).run()["failed"]
    return digests(folder)


@pytest.mark.slow
@pytest.mark.timeout(0)  # a job that hangs says so itself
@pytest.mark.parametrize("number", range(RUNS))
def test_a_fault_changes_no_bit_and_loses_nothing(
    number: int, undisturbed: dict[str, Any], tmp_path: Path, campaign_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, rng = FAULTS[number % len(FAULTS)], random.Random(f"{campaign_seed} {number}")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        memory = None
        if fault.whom == "memory":
            (tmp_path / "nodes").mkdir()
            rows = rng.choice(("memory", f"disk:{tmp_path}/nodes/{{}}"))
            memory = MemoryNodes(rows, tmp_path)
            stack.callback(memory.end)
        job = Job(fault, rng, tmp_path, flags_of(tmp_path), memory)
        stack.callback(job.end)
        job.run()
    assert digests(tmp_path) == undisturbed | {"missing lines": 0}, fault
    assert job.ignored is None, f"{fault}: it went on from an older checkpoint than the newest whole one"
