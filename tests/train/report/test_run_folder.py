"""The folder of a run that is started again while an older start may still write to it; and what a resumed run writes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from skirl.checkpoint.folder import Superseded
from skirl.cli.train import Train
from skirl.train.report import run_folder
from skirl.train.report.run_folder import METRICS, RunFolder, lines_of


def started(folder: Path, at: int, check: Callable[[], None] = lambda: None) -> RunFolder:
    run = RunFolder(str(folder), name="run", flags={}, resume=at > 0)
    run.begun_at, run._check = at, check
    return run


def lines(run: RunFolder, *steps: int) -> None:
    for step in steps:
        run.write({"kind": "train", "step": step, "of": run.begun_at})


def overtaken() -> None:
    raise Superseded("it belongs to another one")


@pytest.mark.parametrize("full", [False, True])
def test_an_older_start_writes_no_lines_into_the_newer_ones(tmp_path, monkeypatch, full):
    with started(tmp_path, 0) as older:
        lines(older, 1, 2, 3, 4, 5)
        with monkeypatch.context() as patch:
            if full:
                patch.setattr(run_folder, "put_whole", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
            newer = started(tmp_path, 3)
            newer.__enter__()
        lines(newer, 4)
        if not full:
            lines(older, 6)
    newer.__exit__(None, None, None)
    assert [(line["step"], line["of"]) for line in lines_of(tmp_path)] == [(1, 0), (2, 0), (3, 0), (4, 3)]
    assert full or older.missing[0].startswith("metrics.jsonl lacks the line of step 6: ")
    with pytest.raises(Superseded):
        started(tmp_path, 2, overtaken).__enter__()
    assert len(lines_of(tmp_path)) == 4


def test_lines_are_on_disk_when_a_checkpoint_is_made(tmp_path, monkeypatch):
    synced = []
    with started(tmp_path, 0) as run:
        lines(run, 1)
        monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
        run.state_dict()
    assert synced == [(tmp_path / METRICS).stat().st_ino]


@pytest.mark.parametrize("run", ["auto", "named", "there"])
def test_a_run_refused_at_its_first_batch_takes_its_new_folder_back(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SKIRL_RUNS", str(tmp_path / "runs"))
    (tmp_path / "there").mkdir()
    flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 2, "quiet": True}
    with pytest.raises(ValueError, match="batch 0 needs"):
        Train.of(**flags, cache=2, run=run if run == "auto" else str(tmp_path / run)).run()
    left = {path.name for path in tmp_path.rglob("*") if path.is_dir()}
    assert left == {"auto": {"runs", "there"}, "named": {"there"}, "there": {"there"}}[run]
    assert not (tmp_path / "there" / "config.json").exists()
