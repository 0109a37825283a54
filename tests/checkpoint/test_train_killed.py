"""kill -9 at any moment of `skirl train` with checkpoints, then --resume: the bits of a run that was never killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def killed(folder: Path, kills: int, seed: int, store: str) -> None:
    command = [sys.executable, "-m", "tests.train_killed", str(folder), str(kills), str(seed), store]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *kills_told, resumed, whole = done.stdout.splitlines()
    assert len(kills_told) == kills and resumed.startswith("resumed ") and whole.startswith("whole ")
    ours, theirs = json.loads(resumed.split(" ", 1)[1]), json.loads(whole.split(" ", 1)[1])
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(("store", "kills"), [("memory", 3), ("disk", 2)])
def test_a_few_kills(tmp_path: Path, store: str, kills: int, campaign_seed: int) -> None:
    killed(tmp_path / "run", kills, campaign_seed, store)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_hundred_kills(tmp_path: Path, store: str, campaign_seed: int) -> None:
    killed(tmp_path / "run", 50, campaign_seed, store)
