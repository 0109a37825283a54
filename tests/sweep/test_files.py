"""A sweep over files, whose end nobody knows before it is read: evaluated, saved and drawn to its last step, as runs are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skirl.checkpoint.folder import headers_with_steps
from skirl.cli.sweep import SweepCommand
from skirl.cli.train import Train
from skirl.sweep.checkpoint import HEADER
from tests.sweep.folders import race_lines

ROWS, BATCH = 150, 16
SCHEMA = """
time = "time"
[[label]]
name = "label"
[[id]]
name = "user"
type = "int"
[[id]]
name = "item"
type = "int"
[file]
columns = ["label", "user", "item", "time"]
"""
FLAGS: dict[str, Any] = {
    "model": "dlrm-tiny", "dim": 4, "batch": BATCH, "cache": "100%", "threads": 1, "quiet": True, "rows": "300",
    "log_every": 4,
}  # fmt: skip
LATE = "time>=120"
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "whole": ({}, 10),
    "held out": ({"valid": LATE}, 8),
    "steps and held out": ({"steps": 5, "valid": LATE}, 5),
    "more steps than there are": ({"steps": 50, "valid": LATE}, 8),
    "epochs": ({"epochs": 2, "valid": LATE}, 16),
    "bad rows": ({"bad_rows": "skip", "valid": LATE}, 7),
    "epoch": ({"depth": "epoch", "valid": LATE}, 8),
}


def files(folder: Path, kind: str, name: str = "") -> dict[str, Any]:
    """Write a file of samples, and return the flags that name it."""
    draw = np.random.default_rng(3)
    columns = {
        "label": draw.integers(0, 2, ROWS), "user": draw.integers(0, 90, ROWS), "item": draw.integers(0, 90, ROWS),
        "time": np.arange(ROWS),
    }  # fmt: skip
    (folder / "s.toml").write_text(SCHEMA if kind == "csv" else SCHEMA.partition("[file]")[0])
    path = folder / f"clicks.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        lines = [",".join(map(str, line)) for line in zip(*columns.values(), strict=True)]
        if name == "bad rows":  # 16 fewer samples, so that a step less is left
            lines[:BATCH] = [line.replace(",", ",x", 1) for line in lines[:BATCH]]
        path.write_text("\n".join(lines) + "\n")
    return {"data": f"{kind}:{path}", "schema": str(folder / "s.toml")}


def check_end(folder: Path, kind: str, name: str) -> None:
    """The end of a sweep over files, beside those of single runs."""
    flags, steps = CASES[name]
    flags = FLAGS | files(folder, kind, name) | flags
    command = SweepCommand.of(**flags, vary=("lr=0.02,0.5",), run=str(folder / "run"), save=folder / "saved")
    result = command.run()
    assert (result["failed"], result["steps"], result["saved_step"]) == (None, steps, steps)
    assert json.loads((folder / "saved" / HEADER).read_text())["step"] == steps
    lines = race_lines(folder / "run")
    assert (lines[-1]["event"], lines[-1]["step"]) == ("standing", steps)
    assert "The best of 2 variants is lr=" in (folder / "run" / "report.html").read_text()
    assert command.summary(result)["saved"].startswith(f"step {steps} in ")
    own, alone = result["by_variant"]["lr=0.5"], Train.of(**flags, lr=0.5, run=str(folder / "0.5")).run()
    scores = ("test_logloss", "test_auc") if "valid" in flags else ()
    for key in ("steps", "loss", "auc", *scores):
        assert own[key] == alone[key], key
    assert headers_with_steps(folder / "saved" / "lr=0.5")[0][0] == steps
    written = [(folder / of / "metrics.jsonl").read_text().splitlines() for of in ("run/lr=0.5", "0.5")]
    ours, theirs = ([(line["kind"], line["step"]) for line in map(json.loads, lines)] for lines in written)
    assert ours == theirs and ours[-1][1] == steps


@pytest.mark.parametrize("name", CASES)
def test_a_sweep_over_lines_ends_as_its_runs_do(name: str, tmp_path: Path):
    check_end(tmp_path, "csv", name)


def test_a_sweep_over_parquet_ends_as_its_runs_do(tmp_path: Path):
    check_end(tmp_path, "parquet", "more steps than there are")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rungs_in_shares_are_of_all_steps_of_a_file_and_a_resume_leaves_the_result(kind: str, tmp_path: Path):
    flags = FLAGS | files(tmp_path, kind) | {"vary": ("lr=0.01,0.1",), "rungs": "50%"}
    flags |= {"run": str(tmp_path / "run"), "save": tmp_path / "saved"}
    result = SweepCommand.of(**flags).run()
    assert [line["step"] for line in race_lines(tmp_path / "run", "left")] == [result["steps"] // 2] == [5]
    text = (tmp_path / "run" / "result.json").read_text()
    again = SweepCommand.of(**flags, resume=True)
    assert "nothing was left to train" in again.summary(again.run())["ended"]
    assert (tmp_path / "run" / "result.json").read_text() == text
