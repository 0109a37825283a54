"""A sweep over files, whose end nobody knows before it is read, and of several epochs, ranked by samples held out."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skirl.checkpoint.folder import headers_with_steps
from skirl.cli.report import report
from skirl.cli.sweep import SweepCommand
from skirl.cli.train import Train
from skirl.sweep.checkpoint import HEADER
from skirl.sweep.entrant import Entrant
from skirl.sweep.sweep import Sweep
from skirl.tools.flags import flags_of
from skirl.train.loop import count_steps
from skirl.train.recipe import Recipe
from tests.killed import ended, forked
from tests.sweep.folders import kill_before, left_of, standing

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
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "whole": ({}, 10),
    "held out": ({"valid": LATE}, 8),
    "more steps than there are": ({"steps": 50, "valid": LATE}, 8),
    "epochs": ({"epochs": 2, "valid": LATE}, 16),
    "bad rows": ({"bad_rows": "skip", "valid": LATE}, 7),
    "epoch": ({"depth": "epoch", "valid": LATE}, 8),
}


def files(folder: Path, kind: str, name: str = "") -> dict[str, Any]:
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


@pytest.mark.parametrize(
    ("kind", "name"), [*(("csv", name) for name in CASES), ("parquet", "more steps than there are")]
)
def test_a_sweep_over_files_ends_as_its_runs_do(kind: str, name: str, tmp_path: Path):
    flags, steps = CASES[name]
    flags = FLAGS | files(tmp_path, kind, name) | flags
    command = SweepCommand.of(**flags, vary=("lr=0.02,0.5",), run=str(tmp_path / "run"), save=tmp_path / "saved")
    result = command.run()
    assert (result["failed"], result["steps"], result["saved_step"]) == (None, steps, steps)
    assert json.loads((tmp_path / "saved" / HEADER).read_text())["step"] == steps
    assert standing(tmp_path / "run")["step"] == steps
    assert "The best variant is lr=" in (tmp_path / "run" / "report.html").read_text()
    assert command.summary(result)["saved"].startswith(f"step {steps} in ")
    own, alone = result["by_variant"]["lr=0.5"], Train.of(**flags, lr=0.5, run=str(tmp_path / "0.5")).run()
    scores = ("test_logloss", "test_auc") if "valid" in flags else ()
    for key in ("steps", "loss", "auc", *scores):
        assert own[key] == alone[key], key
    assert headers_with_steps(tmp_path / "saved" / "lr=0.5")[0][0] == steps
    assert report(tmp_path / "run" / "lr=0.5")["result"]["steps"] == steps
    written = [(tmp_path / of / "metrics.jsonl").read_text().splitlines() for of in ("run/lr=0.5", "0.5")]
    ours, theirs = ([(line["kind"], line["step"]) for line in map(json.loads, lines)] for lines in written)
    assert ours == theirs and ours[-1][1] == steps


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rungs_in_shares_are_of_all_steps_of_a_file_and_a_resume_leaves_the_result(kind: str, tmp_path: Path):
    flags = FLAGS | files(tmp_path, kind) | {"vary": ("lr=0.01,0.1",), "rungs": "50%"}
    flags |= {"run": str(tmp_path / "run"), "save": tmp_path / "saved"}
    result = SweepCommand.of(**flags).run()
    assert [step for step, *_ in left_of(tmp_path / "run")] == [result["steps"] // 2] == [5]
    text = (tmp_path / "run" / "result.json").read_text()
    again = SweepCommand.of(**flags, resume=True)
    assert "nothing was left to train" in again.summary(again.run())["ended"]
    assert (tmp_path / "run" / "result.json").read_text() == text


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_steps_are_counted_as_they_come(kind: str, tmp_path: Path):
    """By what files tell of their rows, unless what is in a row decides if it counts."""
    for more in (*(more for more, _ in CASES.values()), {"valid": "20%"}, {"valid": "20%", "bad_rows": "skip"}):
        given = FLAGS | files(tmp_path, kind) | more | {"steps": None}
        recipe = Recipe.of(**{name: value for name, value in given.items() if name in flags_of(Recipe)})
        assert count_steps(recipe) == sum(1 for _ in recipe.stream())


EPOCHS, FIRST = 10, 8
"""Epochs, and the steps of the first."""
VARY = ("lr=0.005,0.02,0.1,0.5",)


def command(folder: Path, **more: Any) -> SweepCommand:
    flags = FLAGS | files(folder, "csv") | {"epochs": EPOCHS, "valid": LATE, "vary": VARY, "eval_every": FIRST}
    return SweepCommand.of(**flags | {"run": str(folder / "run"), "log_every": 1, **more})


def lowest(folder: Path, until: int = 1 << 30) -> dict[str, float]:
    """The lowest log loss on the samples held out up to a step, by variant, out of the folder of its run."""
    found = {}
    for path in (folder / "run").glob("*/metrics.jsonl"):
        lines = map(json.loads, path.read_text().splitlines())
        found[path.parent.name] = min(
            line["test_logloss"] for line in lines if line["kind"] == "eval" and line["step"] <= until
        )
    return found


def test_who_learns_the_samples_by_heart_does_not_win(tmp_path: Path):
    made = command(tmp_path)
    result = made.run()
    losses = lowest(tmp_path)
    by_heart = min(result["by_variant"], key=lambda name: result["by_variant"][name]["loss"]["last"])
    assert (result["failed"], result["steps"]) == (None, EPOCHS * FIRST)
    assert result["winner"] == min(losses, key=lambda name: losses[name]) != by_heart
    assert {place["variant"]: place["held_out"] for place in result["standing"]} == losses
    assert [place["held_out"] for place in result["standing"]] == sorted(losses.values())
    assert not left_of(tmp_path / "run")
    best = f"{result['winner']}, log loss {min(losses.values()):.5f} on the samples held out"
    assert made.summary(result)["winner"].startswith(best)
    text = Path(report(tmp_path / "run")["page"]).read_text()
    assert f"The best variant is {best}" in text


def test_rungs_of_later_epochs_are_by_samples_held_out(tmp_path: Path):
    """They wait for an evaluation, and drop those with the highest held-out losses."""
    result = command(tmp_path, rungs="20,42").run()
    left = left_of(tmp_path / "run")
    assert [(step, why.split()[0]) for step, _, why in left] == [(24, "dropped"), (24, "dropped"), (48, "dropped")]
    for step, names in ((24, 2), (48, 1)):
        ranks, gone = lowest(tmp_path, step), {name for at, name, _ in left if at == step}
        stay = ranks.keys() - {name for at, name, _ in left if at <= step}
        assert len(gone) == names and max(ranks[name] for name in stay) < min(ranks[name] for name in gone)
    assert result["winner"] == min(lowest(tmp_path), key=lambda name: lowest(tmp_path)[name])


def second(self: Sweep, name: str, *_: object) -> bool:
    return len(self) < len(self.variants)


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [
        (Sweep, "drop", second),
        pytest.param(Entrant, "after_step", lambda self, batches: batches.step == 9, marks=pytest.mark.slow),
    ],
    ids=["in a rung", "as an epoch ends"],
)
def test_killed_it_goes_on_as_if_it_had_not_stopped(owner: Any, name: str, when: Callable[..., bool], tmp_path: Path):
    def rungs(of: str, **more: Any) -> SweepCommand:
        saves = {"save": tmp_path / of, "save_every": 7}
        return command(tmp_path, epochs=4, rungs="10,18", run=str(tmp_path / "run"), **saves, **more)

    whole, last = rungs("whole").run(), standing(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")

    def child(begins: Callable[[], object]) -> None:
        kill_before(owner, name, when)
        begins()
        rungs("part").run()

    assert ended(*forked(child)) == -signal.SIGKILL
    part = rungs("part", resume=True).run()
    for name in ("winner", "standing", "variant_steps", "seed_noise", "steps"):
        assert part[name] == whole[name], name
    assert standing(tmp_path / "run") == last


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"valid": None, "eval_every": None},
            "epochs is 10, and losses from the second on are of samples trained on before: set valid",
        ),
        ({"rungs": "5%", "steps": 60, "eval_every": None}, "rungs is '5%' and epochs is 10, .*: set eval_every"),
    ],
)
def test_what_could_not_be_ranked_is_refused(more: dict[str, Any], says: str, tmp_path: Path):
    with pytest.raises(ValueError, match=says):
        command(tmp_path, **more)
