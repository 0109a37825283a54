"""The folder of a run, which is started again while an older start may still write to it; and `skirl report` on it."""

import json
import os
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from skirl.checkpoint.folder import Superseded
from skirl.cli import main
from skirl.cli.report import Report, report
from skirl.cli.show import svg
from skirl.cli.train import Train
from skirl.train import run_folder
from skirl.train.run_folder import METRICS, RunFolder, lines_of


def started(folder: Path, at: int, check: Callable[[], None] = lambda: None) -> RunFolder:
    run = RunFolder(str(folder), name="run", flags={}, resume=at > 0)
    run.begun_at, run._check = at, check
    run.open()
    return run


def lines(run: RunFolder, *steps: int) -> None:
    for step in steps:
        run.write({"kind": "train", "step": step, "of": run.begun_at})


def overtaken() -> None:
    raise Superseded("it belongs to another one")


@pytest.mark.parametrize("full", [False, True])
def test_an_older_start_writes_no_lines_into_the_newer_ones(tmp_path, monkeypatch, full):
    with closing(started(tmp_path, 0)) as older:
        lines(older, 1, 2, 3, 4, 5)
        with monkeypatch.context() as patch:
            if full:
                patch.setattr(run_folder, "put_whole", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
            newer = started(tmp_path, 3)
        lines(newer, 4)
        if not full:
            lines(older, 6)
    newer.close()
    assert [(line["step"], line["of"]) for line in lines_of(tmp_path)] == [(1, 0), (2, 0), (3, 0), (4, 3)]
    assert full or older.missing[0].startswith("metrics.jsonl lacks the line of step 6: ")
    with pytest.raises(Superseded):
        started(tmp_path, 2, overtaken)
    assert len(lines_of(tmp_path)) == 4


def test_lines_are_on_disk_when_a_checkpoint_is_made(tmp_path, monkeypatch):
    synced = []
    with closing(started(tmp_path, 0)) as run:
        lines(run, 1)
        monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
        run.state_dict()
    assert synced == [(tmp_path / METRICS).stat().st_ino]


@pytest.mark.parametrize("run", ["auto", "named", "there"])
def test_a_run_refused_at_its_first_batch_leaves_no_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SKIRL_RUNS", str(tmp_path / "runs"))
    (tmp_path / "there").mkdir()
    flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 2, "quiet": True}
    with pytest.raises(ValueError, match="batch 0 needs"):
        Train.of(**flags, cache=2, run=run if run == "auto" else str(tmp_path / run)).run()
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]
    with pytest.raises(ValueError, match="batch 0 needs"):
        Train.of(**flags, cache=2, run=run, save=str(tmp_path / "there")).run()
    assert not [*tmp_path.glob("runs/*")]


def test_a_run_that_fails_after_a_step_keeps_its_folder(tmp_path, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a step fails")

    monkeypatch.setattr("skirl.train.loop.RunFolder.after_step", fail)
    flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 2, "quiet": True}
    with pytest.raises(RuntimeError, match="a step fails"):
        Train.of(**flags, run=str(tmp_path / "run")).run()
    assert (tmp_path / "run" / "config.json").is_file()


FLAGS = [
    "--data", "synthetic:tiny", "--model", "dlrm-tiny", "--dim", "4", "--batch", "64", "--steps", "60", "--valid", "10%",
    "--eval-every", "20", "--log-every", "10", "--cache", "touched:20%", "--quiet", "--schedule", "linear",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one & only"
    assert main(["train", *FLAGS, "--run", str(folder), "--json"]) == 0
    return folder


def test_numbers_are_those_of_the_result(run):
    found, result = report(run), json.loads((run / "result.json").read_text())
    assert found["result"] == result and found["lines"]["steps"].startswith(f"60, {result['samples']:,} samples")
    evaluations = [line["test_logloss"] for line in lines_of(run) if line["kind"] == "eval"]
    assert result["best_logloss"] == min(result["test_logloss"], *evaluations)


def test_a_run_that_was_killed(run, tmp_path, capsys, as_json):
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "config.json").write_text((run / "config.json").read_text())
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    assert main(["report", str(killed)]) == 0
    assert "still going on, killed, or failed" in capsys.readouterr().out
    (killed / "metrics.jsonl").write_text("")
    assert as_json("report", str(killed))["result"] == {}
    assert main(["report", str(killed)]) == 0
    assert "none yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("metrics.jsonl", '{"kind": "train", "step": 1}\n', "damaged file"),
        ("metrics.jsonl", '{"step": 1}\n', "line 1 is not a line of metrics .kind is missing"),
        ("metrics.jsonl", "\ufffd\n[1]\n", "line 1 is not a line of metrics"),
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "[" * 100_000, "config.json is damaged"),
        ("result.json", '{"checkpoints": 3}', "damaged file"),
    ],
)
def test_a_damaged_folder_is_refused(run, tmp_path, name, text, words):
    """Found by fuzzing: each of these gave a traceback."""
    for other in ("config.json", "metrics.jsonl", "result.json"):
        (tmp_path / other).write_bytes((run / other).read_bytes())
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        Report(tmp_path).run()
    assert str(tmp_path) in str(caught.value)


def test_what_diverged_is_reported(run, tmp_path):
    """A loss that is not a number is valid content of a line."""
    for other in ("config.json", "result.json"):
        (tmp_path / other).write_bytes((run / other).read_bytes())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[2]["loss"], lines[4]["loss"] = float("nan"), float("inf")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = Report(tmp_path)
    shown.summary(shown.run())
    assert "nan" not in re.sub(r"<[^>]*>", " ", (tmp_path / "report.html").read_text()).lower().split()


def test_charts_show_the_best_and_not_the_height_of_early_losers():
    lines = {f"v{n}": [(s / 1000, 0.5 + 0.01 * n + (9.0 if s < 2 else 0.0)) for s in range(40)] for n in range(3)}
    picture = svg("log loss", lines | {"lost": [(0.01, 50.0), (0.02, 90.0)]})
    assert "0.50" in picture and ">20<" not in picture and ">8<" not in picture


def test_a_resumed_run_is_reported_whole_and_its_result_stays(tmp_path):
    flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "cache": "100%", "log_every": 10}
    where = {"save": tmp_path / "s", "run": str(tmp_path / "run")}
    Train.of(**flags, **where, steps=12).run()
    result = Train.of(**flags, **where, steps=25, resume=True).run()  # 20 is the last line of metrics but one
    found = report(tmp_path / "run")["result"]
    for name in ("steps", "samples", "auc", "logloss", "calibration", "loss"):
        assert found[name] == result[name], name
    text = (tmp_path / "run" / "result.json").read_text()
    again = Train.of(**flags, **where, steps=25, resume=True)
    assert "at step 25: nothing was left to train" in again.summary(again.run())["ended"]
    assert (tmp_path / "run" / "result.json").read_text() == text
