"""`skirl bench place`: its lines tell the seed, the machine, and how much repeats differ."""

import json
from typing import Any

import pytest

from skirl.cli import main
from skirl.placement import bench, bench_exchange
from skirl.placement.tables import bench_search, bench_tables
from skirl.placement.torchrec import theirs

COUNTED = ("exchange", "optimum", "tight")
"""Parts that time nothing."""


def small(monkeypatch: Any) -> None:
    """Make parts small, and leave out runs of other processes and what has tests of its own."""
    for where, name, value in (
        (bench_exchange, "TRAINERS", (2,)), (bench_exchange, "TABLES", 3), (bench_exchange, "BATCH", 64),
        (bench_exchange, "BATCHES", 1), (bench_search, "ANYWHERE", 1), (bench_search, "SIZES", ((6, 2, 0.1),)),
        (theirs, "there", lambda: False), (bench, "killed", lambda *args: True), (bench_tables, "_SECONDS", 0.1),
    ):  # fmt: skip
        monkeypatch.setattr(where, name, value)
    of = {"ran_trainers": 2, "vectors_sent": 1, "vectors_counted": 1}
    monkeypatch.setattr(bench_exchange, "ran", lambda seed: of)


FLAGS = ["--tasks", "1", "--seed", "7", "--json", "--sites", "2", "--steps", "12", "--batch", "16"]
FLAGS += ["--rows-scale", "0.0005", "--link-ms", "0.1"]


@pytest.mark.parametrize("part", ["loads", "exchange", "optimum", "tight", "time"])
def test_noise_seed_and_machine_are_in_the_line_of_each_part(monkeypatch, capsys, part):
    small(monkeypatch)
    assert main(["bench", "place", "--part", part, *FLAGS]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["seed"] == 7 and {"cores", "processor", "torch"} <= line["machine"].keys()
    assert line["noise"] == 0 if part in COUNTED else line["noise"] > 0


@pytest.mark.parametrize(("noise", "told"), [(0.0, "none, since nothing is timed"), (0.034, "repeats differ by 3.4%")])
def test_noise_and_seed_are_printed(monkeypatch, noise, told):
    result = {"part": "optimum", "noise": noise, "seed": 7, "over_optimum_mean": 1, "over_optimum_max": 1, "tasks": 1}
    lines = bench.PlaceBench(part="optimum").summary(result | {"with_splits": 0, "cuts_anywhere_mean": 1.0})
    assert lines["noise"] == told and lines["seed"] == "7"
