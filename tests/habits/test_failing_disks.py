"""A disk fails during a run: a sentence names what could not be logged or saved, and training goes on."""

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import skirl
import skirl.train.loop as loop
from skirl.cli import main
from skirl.cli.train import Train
from tests.habits.disks import Disk

SMALL: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 32, "steps": 24, "cache": "300", "threads": 1,
    "quiet": True, "log_every": 4,
}  # fmt: skip
TRAIN = ["train", "--quiet", *(f"--{n.replace('_', '-')}={v}" for n, v in SMALL.items() if v is not True)]
UGLY = ("Traceback", "Errno", "errno", ".part", ".tmp", "DiskFull(", "Error(")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    found = Disk(tmp_path / "disk")
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    return Train.of(**SMALL).run()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def at_steps(monkeypatch: pytest.MonkeyPatch, does: Mapping[int, Callable[[], Any]]) -> None:
    """Call a function after steps of the next run, before they are logged and saved."""
    real = loop.steps

    def steps(*args: Any) -> Iterator[Any]:
        for number, done in enumerate(real(*args), start=1):
            does.get(number, lambda: None)()
            yield done

    monkeypatch.setattr(loop, "steps", steps)


def written() -> None:
    """Wait until the checkpoint being written is done, or has failed."""
    for thread in threading.enumerate():
        if thread.name == "skirl checkpoint":
            thread.join()


def is_plain(*texts: str) -> bool:
    return not any(ugly in text for ugly in UGLY for text in texts)


def test_a_full_disk_under_the_run_folder(disk, undisturbed, monkeypatch, caplog, capfd):
    at_steps(monkeypatch, {4: disk.fill, 18: disk.free})
    folder = disk.path / "run"
    result = Train.of(**{**SMALL, "log_every": 1}, run=str(folder)).run()
    assert result["loss"] == undisturbed["loss"] and result["failed"] is None
    [warning] = warnings_of(caplog)
    assert warning.endswith(
        f"in {folder} could not be written, the disk is full. Training goes on, and its end says what is missing"
    )
    assert len(result["missing"]) == 2 and is_plain(warning, *result["missing"], capfd.readouterr().err)
    # Lines from before and after are whole, for us and for TensorBoard, and exactly what is missing is reported.
    steps = {
        "metrics.jsonl": [line["step"] for line in skirl.lines_of(folder)],
        "TensorBoard's events": steps_in_tensorboard(folder),
    }
    for (what, there), told in zip(steps.items(), result["missing"], strict=True):
        gone = sorted(set(range(1, 25)) - set(there))
        assert gone and gone[-1] == 17, "a file grows by pages: some lines still went into the last one"
        assert told == f"{what} lacks {len(gone)} lines, of steps {gone[0]} to 17: the disk is full"
    assert json.loads((folder / "result.json").read_text())["missing"] == result["missing"]
    assert main(["report", str(folder)]) == 0
    assert result["missing"][0] in capfd.readouterr().out


def steps_in_tensorboard(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars("train/loss")]


def test_a_run_folder_that_was_removed(tmp_path, undisturbed, monkeypatch, caplog):
    folder = tmp_path / "run"
    at_steps(monkeypatch, {6: lambda: shutil.rmtree(folder)})
    result = Train.of(**SMALL, run=str(folder)).run()
    assert result["loss"] == undisturbed["loss"] and result["failed"] is None and len(warnings_of(caplog)) == 1
    gone = "no such file or directory"
    assert result["missing"] == [
        f"metrics.jsonl lacks 5 lines, of steps 8 to 24: {gone}",
        f"TensorBoard's events lacks 5 lines, of steps 8 to 24: {gone}",
        f"result.json is missing: {gone}",
    ]
    assert not folder.exists()


def test_a_full_disk_under_one_checkpoint(disk, undisturbed, monkeypatch, caplog):
    at_steps(monkeypatch, {7: disk.fill, 13: lambda: (written(), disk.free())})
    result = Train.of(**SMALL, save=disk.path / "saved", save_every=8).run()
    assert result["loss"] == undisturbed["loss"] and result["failed"] is None
    [warning] = warnings_of(caplog)
    assert warning == (
        f"step 8 is not saved: {disk.path / 'saved'} got no new checkpoint, the disk is full; checkpoint 1 in it stays "
        "whole: free some room, and save again. Training goes on, and the next checkpoint is tried all the same"
    )
    assert result["checkpoints"]["count"] == 3 and result["checkpoints"]["failed"] == 1
    assert (
        "1 more could not be written: step 8 is not saved" in Train.of(**SMALL, save=disk.path).summary(result)["saved"]
    )
    resumed = Train.of(**{**SMALL, "steps": 30}, save=disk.path / "saved", resume=True).run()
    assert resumed["begun_at"] == 24 and resumed["loss"] == Train.of(**{**SMALL, "steps": 30}).run()["loss"]


def test_a_full_disk_up_to_the_end_is_exit_code_1_and_the_checkpoint_before_stays(disk, monkeypatch, capsys, as_json):
    saved = disk.path / "saved"
    with monkeypatch.context() as patch:
        at_steps(patch, {14: lambda: (written(), disk.fill())})
        assert main([*TRAIN, "--save", str(saved), "--save-every", "8"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"skirl train: step 24 is not saved: {saved} got no new checkpoint, the disk is full; ")
    assert last.endswith("and save again; the newest that is saved is step 8") and is_plain(last)
    disk.free()
    resumed = as_json(*TRAIN, "--save", str(saved), "--resume")
    assert resumed["begun_at"] == 8 and resumed["loss"] == Train.of(**SMALL).run()["loss"]


def test_a_folder_of_checkpoints_that_was_removed_gets_whole_ones_again(tmp_path, undisturbed, monkeypatch, caplog):
    """The files that the next checkpoint would build on are gone, so it has to hold all rows, not only changed ones."""
    at_steps(monkeypatch, {12: lambda: (written(), shutil.rmtree(tmp_path / "saved"))})
    result = Train.of(**SMALL, save=tmp_path / "saved", save_every=8).run()
    monkeypatch.undo()
    assert result["failed"] is None
    assert "has lost files that its last checkpoint wrote: all rows are written again" in warnings_of(caplog)[0]
    resumed = Train.of(**{**SMALL, "steps": 30}, save=tmp_path / "saved", resume=True).run()
    assert resumed["begun_at"] == 24 and resumed["loss"] == Train.of(**{**SMALL, "steps": 30}).run()["loss"]


def test_a_full_store_ends_training_for_its_rows_would_be_lost(disk, monkeypatch, capsys):
    monkeypatch.setenv("SKIRL_RUNS", "none")
    at_steps(monkeypatch, {6: disk.fill})
    assert main([*TRAIN, "--steps", "400", "--store", f"disk:{disk.path / 'rows'}"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"{disk.path / 'rows'} could not be written, the disk is full; " in line and is_plain(line)
    assert line.endswith(
        "the rows in it are intact: free some room or use a larger disk, then resume from a checkpoint"
    )


def test_a_full_temporary_folder_under_the_whole_epoch(monkeypatch, capsys):
    from skirl.oracle import epoch

    monkeypatch.setattr(epoch.tempfile, "TemporaryFile", lambda **how: open("/dev/full", "w+b", buffering=0))  # noqa: SIM115
    assert main([*TRAIN, "--depth", "epoch"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert (
        "could not take it, the disk is full" in line
        and "set TMPDIR to a folder with room, or use depth='auto'" in line
    )
    assert is_plain(line)


@pytest.mark.parametrize("command", ["vocab", "convert", "export"])
def test_a_command_that_writes_a_file_says_where_and_why_in_a_sentence(command, disk, tmp_path, capsys):
    schema, data = tmp_path / "schema.toml", tmp_path / "clicks.csv"
    schema.write_text('[[label]]\nname = "y"\n[[id]]\nname = "item"\ntype = "int"\nrows = 1000\n')
    ids = np.random.default_rng(0).integers(0, 1 << 40, 20_000).tolist()
    data.write_text("y,item\n" + "".join(f"{i % 2},{number}\n" for i, number in enumerate(ids)))
    rows = skirl.EmbeddingBagCollection([skirl.Table("item", 20_000, 8)], optimizer=skirl.SGD(lr=0.1), cache=20_000)
    if command == "export":
        rows(skirl.KeyedJagged.one_hot(["item"], torch.arange(20_000).reshape(-1, 1)))["item"].sum().backward()
        skirl.save(tmp_path / "saved", model=rows)
    out = disk.path / f"out.{'parquet' if command == 'convert' else 'safetensors'}"
    read = ["--data", f"csv:{data}", "--schema", str(schema), "--out", str(out), "--quiet"]
    args = {
        "vocab": ["vocab", *read, "--min-count", "1"],
        "convert": ["convert", *read],
        "export": ["export", str(tmp_path / "saved"), "--out", str(out)],
    }[command]
    disk.fill()
    assert main(args) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert (
        line == f"skirl {command}: {out} could not be written, the disk is full: free some room, or name another place"
    )
    assert [path.name for path in disk.path.iterdir()] == ["filler"]
    disk.free()
    assert main(args) == 0
