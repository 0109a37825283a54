"""Evaluations and checkpoints in a sweep: to the bit those of each variant's lone run."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skirl.checkpoint import codec, folder
from skirl.checkpoint.codec import decode
from skirl.checkpoint.import_rows import opened
from skirl.cli.sweep import SweepCommand
from skirl.cli.train import Train
from skirl.sweep.checkpoint import HEADER
from skirl.sweep.race import Race
from skirl.sweep.run import SweepRun
from skirl.tools.sealed_json import CheckpointError
from tests.killed import ended, forked
from tests.sweep.folders import evaluations, kill_before, left_behind, left_of, rows_of, same

FLAGS: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "cache": "300", "valid": "5%", "quiet": True,
    "log_every": 5, "threads": 1, "steps": 40,
}  # fmt: skip
JUDGED: dict[str, Any] = {"eval_every": 4, "rungs": "14,22"}
VARY = ("lr=0.02,0.5", "dense-lr=0.003,0.1")
NAMES = ("lr=0.02,dense_lr=0.003", "lr=0.02,dense_lr=0.1", "lr=0.5,dense_lr=0.003", "lr=0.5,dense_lr=0.1")


def command(of: Path, **more: Any) -> SweepCommand:
    where = {"run": str(of / "run"), "save": of / "saved", "save_every": 6}
    return SweepCommand.of(**FLAGS | JUDGED | {"vary": VARY, **where, **more})


def same_dense(ours: Path, theirs: Path) -> None:
    """The dense weights of two checkpoints, and what they would draw next."""
    with opened(ours) as (_, mine, _, header), opened(theirs) as (_, other, _, at):
        assert mine.keys() == other.keys() and mine
        for name, value in mine.items():
            assert "embeddings" in name or value.equal(other[name]), name
        drawn = [
            decode(folder.read(h)["run"]["generators"], codec.read_dense(h.parent, folder.read(h)["dense"]))
            for h in (header, at)
        ]
        assert torch.equal(drawn[0]["torch"], drawn[1]["torch"])


def same_as_alone(name: str, of: Path, into: Path) -> None:
    """A variant of a sweep leaves behind what it leaves behind alone up to the step at which it is dropped."""
    own = json.loads((of / "run" / name / "config.json").read_text())["flags"]
    own |= {"run": str(into / "run"), "quiet": True, "save": into / "save", "save_every": 2, "keep_last": 40}
    alone = Train.of(**own).run()
    found = json.loads((of / "run" / name / "result.json").read_text())
    judged = [one for one in evaluations(into / "run") if one["step"] <= found["steps"]]
    assert evaluations(of / "run" / name) == judged and len(judged) > 2
    if found["left"] is None:
        assert all(found[key] == alone[key] for key in ("loss", "auc", "steps", "test_logloss", "test_auc", "samples"))
    ours = folder.headers_with_steps(of / "saved" / name)[0][1]
    theirs = dict(folder.headers_with_steps(into / "save"))[found["steps"]]
    assert rows_of(ours).num_rows > 300 and rows_of(ours) == rows_of(theirs)
    same_dense(ours, theirs)
    assert found["rows"]["cache"] == alone["rows"]["cache"] == 300


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    of = tmp_path_factory.mktemp("whole")
    return of, command(of).run()


@pytest.mark.parametrize(
    "name", [NAMES[2], *(pytest.param(name, marks=pytest.mark.slow) for name in (*NAMES[:2], NAMES[3]))]
)
def test_a_variant_is_evaluated_and_saved_as_alone(name: str, whole: tuple, tmp_path: Path):
    same_as_alone(name, whole[0], tmp_path)


def killed(of: Path) -> None:
    """Kill a sweep as it starts, and as variants stop."""
    kills: tuple[Callable[[], None], ...] = (
        lambda: kill_before(SweepRun, "begin", lambda self, *_: True),  # its start is noted, and nothing is saved
        lambda: kill_before(Race, "_drop", lambda self, *_: True),
    )
    for number, kill in enumerate(kills):

        def child(begins: Callable[[], object], kill: Callable[[], None] = kill, number: int = number) -> None:
            kill()
            begins()
            command(of, resume=number > 0).run()

        assert ended(*forked(child)) == -signal.SIGKILL
    header = json.loads((of / "saved" / HEADER).read_text())
    assert header["step"] >= 4 and len(header["also"]["race"]["held_out"]) == len(NAMES)


def test_killed_and_gone_on_with(whole: tuple, tmp_path: Path):
    killed(tmp_path)
    same(left_behind(tmp_path, command(tmp_path, resume=True).run()), left_behind(*whole))


def test_the_last_state_of_a_variant_that_is_dropped_outlives_the_save_before(tmp_path: Path):
    result = command(tmp_path, save_every=1, steps=10, rungs="4,8").run()
    for name, of in result["by_variant"].items():
        assert folder.headers_with_steps(tmp_path / "saved" / name)[0][0] == of["steps"]


def test_the_folder_of_a_sweep_is_taken_for_no_run(tmp_path: Path):
    save, flags = tmp_path / "grid", FLAGS | {"steps": 4, "run": "none", "valid": None}
    SweepCommand.of(**flags, vary=("lr=0.02,0.5",), save=save).run()
    held = sorted(save.rglob("*"))
    for resume in (False, True):
        with pytest.raises(
            ValueError, match=f"save is {save}, which holds a sweep: set it to another folder, or go on"
        ):
            Train.of(**flags, save=save, resume=resume).run()
    with pytest.raises(CheckpointError, match=f"{save} holds a sweep: name a variant, {save / 'NAME'}"):
        Train.of(**flags, from_=save).run()
    assert sorted(save.rglob("*")) == held
    assert Train.of(**flags, from_=save / "lr=0.5").run()["from"]["folder"] == str(save / "lr=0.5")


def test_a_variant_whose_predictions_are_not_finite_diverges(tmp_path: Path):
    flags = FLAGS | {
        "steps": 4,
        "eval_every": 1,
        "vary": ("dense-lr=0.001,1e30",),
        "run": str(tmp_path / "r"),
    }
    result = SweepCommand.of(**flags).run()
    why = "diverged at step 1: predictions for the samples held out are not finite"
    assert left_of(tmp_path / "r") == [(1, "dense_lr=1e+30", why)]
    assert (result["failed"], result["winner"]) == (None, "dense_lr=0.001")
    result = SweepCommand.of(**flags | {"vary": ("dense-lr=1e29,1e30",), "run": str(tmp_path / "all")}).run()
    says = f"all variants have diverged, dense_lr=1e+30 as the last one, which {why}"
    assert (result["failed"], result["winner"]) == (says, None)
    assert [step for step, *_ in left_of(tmp_path / "all")] == [1, 1]
    assert {place["state"] for place in result["standing"]} == {why}
