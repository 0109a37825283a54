"""`skirl train`, killed by kill -9 at any moment and resumed, has the bits of a run that was never killed."""

import json
from pathlib import Path

import pytest

from tests.warm import Python


def killed(python: Python, folder: Path, kills: int, seed: int, store: str) -> None:
    code = "from tests.train_killed import main; main()"
    done = python.run(code, str(folder), str(kills), str(seed), store, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    *kills_told, resumed, whole = done.stdout.splitlines()
    assert len(kills_told) == kills and resumed.startswith("resumed ") and whole.startswith("whole ")
    ours, theirs = json.loads(resumed.split(" ", 1)[1]), json.loads(whole.split(" ", 1)[1])
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(("store", "kills"), [("disk", 3), pytest.param("memory", 3, marks=pytest.mark.slow)])
def test_a_few_kills(python: Python, tmp_path: Path, store: str, kills: int, campaign_seed: int) -> None:
    killed(python, tmp_path / "run", kills, campaign_seed, store)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_hundred_kills(python: Python, tmp_path: Path, store: str, campaign_seed: int) -> None:
    killed(python, tmp_path / "run", 50, campaign_seed, store)
