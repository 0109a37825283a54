"""`skirl train`, killed at any moment or told to stop, and resumed, has the bits of a run that was never stopped."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.loops import wait_for
from tests.warm import COMMAND, PIPE, Python

FLAGS = [
    "--data", "synthetic:tiny", "--model", "dlrm-tiny", "--dim", "4", "--batch", "32", "--threads", "1", "--cache", "400",
    "--quiet",
]  # fmt: skip


SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("store", "kills"), [("disk", 3), *(pytest.param(store, 50, marks=SLOW) for store in ("memory", "disk"))]
)
def test_killed_at_any_moment(python: Python, tmp_path: Path, store: str, kills: int, campaign_seed: int) -> None:
    code = "from tests.train_killed import main; main()"
    done = python.run(code, str(tmp_path / "run"), str(kills), str(campaign_seed), store, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    *kills_told, resumed, whole = done.stdout.splitlines()
    assert len(kills_told) == kills and resumed.startswith("resumed ") and whole.startswith("whole ")
    ours, theirs = json.loads(resumed.split(" ", 1)[1]), json.loads(whole.split(" ", 1)[1])
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(("number", "name", "code"), [(signal.SIGTERM, "SIGTERM", 0), (signal.SIGINT, "Ctrl-C", 130)])
def test_a_signal_saves_and_the_run_goes_on_with_the_same_bits(python: Python, tmp_path, as_json, number, name, code):
    saves = tmp_path / "saves"
    flags = ["--steps", "100000", "--save", str(saves), "--save-every", "10"]
    with python.start(COMMAND, "train", *FLAGS, "--json", *flags, stdout=PIPE, stderr=PIPE) as run:
        wait_for((saves / "checkpoint-000002.json").exists)
        run.send_signal(number)
        out, err = run.communicate(timeout=120)
    assert run.returncode == code, err
    stopped = json.loads(out)
    assert stopped["checkpoints"]["stopped_by"] == name
    assert 10 <= stopped["steps"] < 100_000
    steps = str(stopped["steps"] + 5)
    resumed = as_json("train", *FLAGS, "--steps", steps, "--save", str(saves), "--resume")
    assert resumed["begun_at"] == stopped["steps"]  # not from an earlier interval
    whole = as_json("train", *FLAGS, "--steps", steps)
    for name in ("loss", "auc", "samples"):
        assert resumed[name] == whole[name], name


def test_a_second_sigterm_ends_the_run_at_once(python: Python, tmp_path):
    saves = tmp_path / "saves"
    flags = ["--steps", "100000", "--save", str(saves)]
    slowly = """
import sys
from skirl.cli import main
from tests.store.links import behind_a_link
with behind_a_link("1kbit,100ms"):
    main()
"""
    with python.start(slowly, "train", *FLAGS, *flags, stdout=PIPE, stderr=PIPE) as run:
        wait_for((saves / "checkpoint-000001.json").exists)
        run.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert run.returncode == -signal.SIGTERM
