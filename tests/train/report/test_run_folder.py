"""The run folder: each file, and what resuming, killing and naming do to it."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from skirl.train.commands import Train
from skirl.train.report.run_folder import METRICS, RunFolder, lines_of
from tests.train.test_schedule import cut

SMALL: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 8, "batch": 64, "steps": 40, "cache": "600", "valid": "20%",
    "quiet": True, "log_every": 6, "eval_every": 10,
}  # fmt: skip
FIELDS = {
    "kind", "step", "samples", "seconds", "samples_per_second", "loss", "auc", "logloss", "ne", "calibration", "fetched",
    "new", "written", "forwarded", "touched", "filled", "hidden", "stall", "read", "busy", "blame", "lr",
    "dense_lr", "window",
}  # fmt: skip


def train(folder: Path | str, **flags: Any) -> dict[str, Any]:
    return Train.of(**{**SMALL, "run": str(folder), **flags}).run()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "a"
    return folder, train(folder)


def test_lines_say_how_the_run_went(run):
    folder, result = run
    lines = lines_of(folder)
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == [6, 12, 18, 24, 30, 36, 40]
    assert all(line.keys() == FIELDS for line in trained)
    assert trained[-1]["samples"] == 40 * 64 == result["samples"]
    for name in ("fetched", "new", "written", "forwarded"):
        assert trained[-1][name] == result["counters"][name]
        assert [line[name] for line in trained] == sorted(line[name] for line in trained)
    steps_of = [line["step"] - before for line, before in zip(trained, [0, *(line["step"] for line in trained)])]
    mean = sum(line["loss"] * n for line, n in zip(trained, steps_of)) / 40
    assert mean == pytest.approx(result["loss"]["mean"], rel=1e-12)
    for name in ("auc", "logloss", "ne", "calibration"):
        assert trained[-1][name] == result[name]
    assert trained[-1]["touched"] == result["rows"]["touched"] and 0 < trained[-1]["filled"] <= 1
    for stage in ("plan", "fetch", "write", "load"):
        total = sum(line["busy"][stage] for line in trained)
        assert 0 < total <= result["movement"]["busy"][stage] + 1e-9
    assert trained[0]["lr"] == 0.02 and trained[0]["dense_lr"] == 0.001


def test_lines_of_evaluations_stand_between(run):
    folder, result = run
    lines = lines_of(folder)
    evals = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evals] == [10, 20, 30, 40]
    assert {"kind", "step", "seconds", "best_step", "test_samples", "test_auc", "test_logloss"} <= evals[0].keys()
    for name in ("test_auc", "test_logloss", "test_ne", "test_calibration", "test_samples"):
        assert evals[-1][name] == result[name]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)


def test_config_and_result_say_what_the_run_was_and_how_it_ended(run):
    folder, result = run
    config = json.loads((folder / "config.json").read_text())
    assert config["flags"]["dim"] == 8 and config["flags"]["optimizer"] == "rowwise-adagrad" and config["begun_at"] == 0
    assert {"python", "skirl", "torch", "numpy", "numba"} <= config["versions"].keys()
    assert config["started"].endswith("+00:00")
    assert json.loads((folder / "result.json").read_text()) == json.loads(json.dumps(result))
    assert result["run"] == str(folder)
    assert (
        Train.of(**{**config["flags"], "run": "none"}).run()["loss"] == result["loss"]
    )  # all that it takes to repeat it


def test_tensorboard_reads_the_same_numbers(run):
    folder, _ = run
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "train/auc", "test/auc", "rows/fetched", "time/stall", "busy/fetch", "rate/lr"} <= set(tags)
    lines = [line for line in lines_of(folder) if line["kind"] == "train"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in lines
    ]


def test_a_folder_that_holds_a_run_is_refused(run):
    with pytest.raises(ValueError, match="already holds a run: set run to another folder, or go on with that one"):
        train(run[0])


def test_a_killed_run_goes_on_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SKIRL_RUNS", str(tmp_path / "runs"))
    flags = {"save": tmp_path / "saved", "save_every": 15}
    cut(Train.of(**{**SMALL, **flags}), 18)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("dlrm-tiny-synthetic-") and not (folder / "result.json").exists()
    with (folder / METRICS).open("a") as file:
        file.write('{"kind": "train", "st')  # what a kill in a write leaves
    assert [line["step"] for line in lines_of(folder)] == [6, 10, 12, 18]
    resumed = train("auto", **flags, resume=True)
    assert resumed["begun_at"] == 15 and resumed["run"] == str(folder)
    assert [line["step"] for line in lines_of(folder)] == [6, 10, 12, 18, 20, 24, 30, 30, 36, 40, 40]
    whole = train("auto")
    assert whole["run"] != str(folder)
    exact = ("loss", "auc", "ne", "samples", "fetched", "new", "test_auc", "test_logloss")
    for found, expected in zip(lines_of(folder)[4:], lines_of(whole["run"])[4:], strict=True):
        for name in exact:
            assert found.get(name) == expected.get(name) or name == "fetched", (name, found["step"])


def test_none_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SKIRL_RUNS")
    assert train("none")["run"] is None
    assert not list(tmp_path.iterdir())
    assert Path(train("auto")["run"]).parent == Path("runs")
    first, second = (Path(train("auto", steps=1)["run"]) for _ in range(2))
    assert first != second


def test_weights_and_biases_gets_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb is set, and the package is not there: pip install wandb"):
        train(tmp_path / "a", wandb="clicks")
    logged: list[tuple[int, dict[str, float]]] = []
    ended: list[bool] = []
    fake = SimpleNamespace(log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: ended.append(True))
    begun: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **how: (begun.update(how), fake)[1]))
    train("none", wandb="clicks", steps=12)
    assert begun["project"] == "clicks" and begun["config"]["dim"] == 8
    assert [step for step, _ in logged] == [6, 10, 12, 12] and ended == [True]
    assert "train/loss" in logged[0][1] and "test/auc" in logged[1][1]


def test_a_step_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="log_every is 0: set it to 1 or more steps"):
        Train.of(**{**SMALL, "log_every": 0})
    with pytest.raises(ValueError, match="run is empty"):
        Train.of(**SMALL, run="")


def test_a_run_that_fails_closes_its_files(tmp_path):
    with pytest.raises(ZeroDivisionError), RunFolder(str(tmp_path / "a"), name="x", flags={}) as run:
        run.write({"kind": "train", "step": 1, "loss": 0.5})
        raise ZeroDivisionError
    assert len(lines_of(tmp_path / "a")) == 1


def test_a_run_that_failed_at_once_leaves_its_folder_to_the_next(tmp_path):
    folder = str(tmp_path / "a")
    with pytest.raises(ZeroDivisionError), RunFolder(folder, name="x", flags={}):
        raise ZeroDivisionError
    with RunFolder(folder, name="x", flags={}):
        pass
    with pytest.raises(ValueError, match="already holds a run"):
        RunFolder(folder, name="x", flags={})
    stopped = str(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt), RunFolder(stopped, name="x", flags={}):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="already holds a run"):  # whoever stopped it may have saved it
        RunFolder(stopped, name="x", flags={})
