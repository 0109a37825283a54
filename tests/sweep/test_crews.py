"""A sweep in several processes leaves behind what it leaves behind in one, to the bit; and what ends it."""

import errno
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from skirl import cli
from skirl.cli.sweep import SweepCommand
from skirl.sweep import checkpoint
from skirl.sweep.crew import Crew, Entrant
from skirl.sweep.crews import CrewDied
from skirl.sweep.flags import KeepFlags
from skirl.tools.os_errors import NotWritten
from tests.sweep.folders import left_behind, same

FLAGS: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "steps": 24, "cache": "300", "valid": "10%",
    "quiet": True, "log_every": 4, "rungs": "25%,75%", "threads": 1,
}  # fmt: skip
VARY = ("lr=0.02,0.5", "dim=4,8", "seed=0,1")
DIVERGES = "dense-lr=0.001,1e30"


def command(folder: Path, processes: int, **more: Any) -> SweepCommand:
    where = {"run": str(folder / "run"), "save": folder / "saved", "store": f"disk:{folder / 'rows'}"}
    return SweepCommand.of(**FLAGS | {"vary": VARY, "processes": processes, **where, **more})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    result = command(folder, 1).run()
    assert result["processes_used"] == 1
    return left_behind(folder, result)


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_that_is_left_behind_is_that_of_one_process(processes: int, whole: dict[str, Any], tmp_path: Path):
    result = command(tmp_path, processes).run()
    assert result["processes_used"] == processes
    assert len(whole["rows"]) == 2 and min(rows.num_rows for rows in whole["rows"].values()) > 100
    same(left_behind(tmp_path, result), whole)


def test_it_goes_on_in_other_numbers_of_processes(whole: dict[str, Any], tmp_path: Path, monkeypatch):
    told = {5: signal.SIGINT, 17: signal.SIGTERM}  # each ends the sweep in the step after it, which has a rung

    def stopping(self: KeepFlags, step: int, seconds: float) -> bool:
        if step in told:
            os.kill(os.getpid(), told.pop(step))
        return step % 4 == 0

    monkeypatch.setattr(KeepFlags, "due", stopping)
    assert command(tmp_path, 2, save_every=4).run()["stopped_by"] == "Ctrl-C"
    stopped = command(tmp_path, 3, save_every=4, resume=True).run()
    assert stopped["stopped_by"] == "SIGTERM" and stopped["steps"] == 18
    result = command(tmp_path, 1, save_every=4, resume=True).run()
    same(left_behind(tmp_path, result), whole)


def test_variants_that_diverge_leave_and_a_process_without_variants_trains_no_more(tmp_path: Path):
    found = {}
    for processes in (1, 3):
        folder = tmp_path / str(processes)
        # Dealt by shape: with three processes one has none but those that diverge.
        result = command(folder, processes, vary=(DIVERGES, "dim=4,8"), rungs=None, valid=None).run()
        assert [of["left"] for of in result["by_variant"].values()].count(None) == 2
        found[processes] = left_behind(folder, result)
    same(found[3], found[1])


def test_a_process_that_is_killed_ends_the_sweep_which_can_go_on(whole: dict[str, Any], tmp_path: Path, monkeypatch):
    parent, step = os.getpid(), Crew.step

    def killed(self: Crew) -> Any:
        if self.batches.step == 9 and "seed=1" in "".join(self.racing) and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Crew, "step", killed)
        with pytest.raises(CrewDied, match=r"ended by itself \(exit code -9\): is there enough memory\?"):
            command(tmp_path, 2, save_every=4).run()
    result = command(tmp_path, 2, save_every=4, resume=True).run()
    same(left_behind(tmp_path, result), whole)


@pytest.mark.parametrize("cache", ["3", "2KiB"])
def test_a_cache_that_is_too_small_is_said_as_in_one(cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = f"sweep --data synthetic:tiny --model dlrm-tiny --steps 4 --quiet --vary lr=0.1,0.5 --cache {cache}".split()
    words += ["--save", str(tmp_path / "saved"), "--run", str(tmp_path / "run")]
    said = []
    for processes in ("1", "2"):
        assert cli.main([*words, "--processes", processes]) == 1
        said.append(capsys.readouterr().err)
        assert not (tmp_path / "saved" / checkpoint.HEADER).exists()
    assert len(said[1].splitlines()) == 1
    if cache == "3":
        assert said[0] == said[1]
        return
    assert "in one of 2 processes, which share the cache: set --cache to " in said[1]
    enough = [re.findall(r"'(\d+B)'", text)[-1] for text in said]
    assert int(enough[1][:-1]) in range(int(enough[0][:-1]), int(enough[0][:-1]) + 8)
    assert cli.main([*words, "--processes", "2", "--cache", enough[1]]) == 0


@pytest.mark.parametrize("at", [4, 8])
def test_an_error_after_the_losses_are_told_ends_all(at: int, tmp_path: Path, monkeypatch):
    """Also where a checkpoint is due next, whose own errors end no sweep."""
    step = Entrant.step

    def full(self: Entrant, batch: Any) -> None:
        step(self, batch)
        if "dim=8" in self.variant.name and self.meter.steps == at:
            raise NotWritten("the disk of the rows is full", errno.ENOSPC)

    monkeypatch.setattr(Entrant, "step", full)
    for processes in (1, 2):
        with pytest.raises(NotWritten, match="the disk of the rows is full"):
            command(
                tmp_path / str(processes), processes, vary=("dim=4,8",), rungs=None, valid=None, save_every=4, steps=8,
            ).run()  # fmt: skip
        saved = json.loads((tmp_path / str(processes) / "saved" / checkpoint.HEADER).read_text())
        assert saved["step"] < at
