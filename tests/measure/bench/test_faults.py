"""Nodes of a job lose processes, and each other, at random moments: they end by themselves, with the same bits."""

import json

import pytest

from skirl.checkpoint.without_model import opened
from skirl.measure.bench.faults import FAULTS, Faults
from skirl.measure.bench.filled import fill
from skirl.nn.collection import collections_of
from skirl.train.commands import Train
from tests.warm import COMMAND, Python

FLAGS = ["bench", "faults", "--json", "--limit", "200", "--patience", "8"]


def check(result, runs: int) -> None:
    assert result["failed"] is None, result["failed"]
    assert result["same_bits"] == runs and result["faults"] >= runs
    assert result["lost_steps"] <= 2 * result["every"]
    assert {run["fault"][0] for run in result["of_each"]} == {what for what, *_ in FAULTS[:runs]}


@pytest.mark.timeout(900)  # it waits for patience to run out, again and again, using little CPU
def test_five_faults_change_no_bit(python: Python, tmp_path):
    flags = [*FLAGS, "--runs", "5", "--steps", "16", "--every", "4", "--batch", "32", "--at-once", "5"]
    flags += ["--silence", "12", "--folder", str(tmp_path)]
    done = python.run(COMMAND, *flags, timeout=890)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    check(result, 5)
    assert not list(tmp_path.iterdir())
    assert "5 of 5 runs" in Faults(runs=5).summary(result)["same bits"]


@pytest.mark.slow  # an hour: launchers and trainers start as they do for users
@pytest.mark.timeout(0)
def test_sixty_faults_change_no_bit(python: Python, tmp_path, campaign_seed):
    flags = [*FLAGS, "--runs", "60", "--seed", str(campaign_seed), "--folder", str(tmp_path), "--cold"]
    done = python.run(COMMAND, *flags, timeout=4 * 3600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    check(result, 60)
    what = [run["fault"][0] for run in result["of_each"]]
    assert what.count("lose") >= 10 and what.count("gain") >= 10


def test_bad_flags_are_refused():
    with pytest.raises(ValueError, match="runs is 0: set it to 1 or more"):
        Faults(runs=0)


def test_runs_begin_with_as_many_bytes_of_rows_as_they_are_told(tmp_path):
    flags = {
        "data": "synthetic:tiny",
        "model": "dlrm-tiny",
        "dim": 16,
        "optimizer": "adam",
        "cache": "10",
        "quiet": True,
    }
    more = fill(flags, 0.02, tmp_path)
    with opened(more["from_"]) as found:
        (collection,) = collections_of(found.rows).values()
        rows, engine = len(collection.engine.store), collection.engine
    assert rows * engine.widths[0] * engine.dtype.itemsize == pytest.approx(0.02e9, rel=0.01)
    assert sum(table.rows for table in Train.of(**flags | more).recipe.tables()) == rows
