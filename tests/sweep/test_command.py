"""`skirl sweep`: who leaves, what a disk that refuses a checkpoint costs, and what it refuses."""

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest

from skirl.cli.sweep import SweepCommand
from skirl.sweep import checkpoint
from tests.sweep.folders import left_of, standing

FLAGS: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "steps": 40, "cache": "20%", "valid": "10%",
    "quiet": True, "log_every": 10,
}  # fmt: skip
VARY = ("lr=0.02,0.5", "model=dlrm-tiny,dcnv2-tiny", "dense-lr=0.001,1e30")


def test_what_diverges_leaves_and_so_do_those_below_the_rung(tmp_path: Path):
    result = SweepCommand.of(**FLAGS, vary=VARY, rungs="25%,50%", keep=2, run=str(tmp_path)).run()
    assert result["failed"] is None
    left = {name: (step, why) for step, name, why in left_of(tmp_path)}
    assert len(left) == 6
    for name, (step, why) in left.items():
        assert why.startswith("diverged") == ("1e+30" in name)
        of = result["by_variant"][name]
        assert of["left"] == why
        assert of["steps"] == step - why.startswith("diverged")
    assert result["variant_steps"] == sum(left[n][0] if n in left else 40 for n in result["by_variant"])
    assert standing(tmp_path)["step"] == 40
    [stayed, _] = (name for name in result["by_variant"] if name not in left)
    config = json.loads((tmp_path / stayed / "config.json").read_text())
    assert config["flags"]["threads"] == json.loads((tmp_path / "sweep.json").read_text())["flags"]["threads"] == 1


def test_rows_in_several_stores_are_those_of_one(tmp_path: Path):
    flags = {n: v for n, v in FLAGS.items() if n not in ("valid", "rungs")} | {"steps": 12, "run": "none"}
    told = ("standing", "winner", "variant_steps")
    flags |= {"vary": ("lr=0.02,0.5", "optimizer=sgd,adagrad")}
    one = SweepCommand.of(**flags).run()
    listed = SweepCommand.of(**flags, store=f"disk:{tmp_path / 'rows'},memory").run()
    assert {name: one[name] for name in told} == {name: listed[name] for name in told}
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["sweep-0"]


def saved_step(folder: Path) -> int:
    return json.loads((folder / "sweep-checkpoint.json").read_bytes())["step"]


def test_a_disk_that_refuses_a_checkpoint_ends_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write, steps = checkpoint.put_whole, []

    def full(path: Path, body: bytes, mark: str) -> None:
        steps.append(json.loads(body)["step"])
        if steps[-1] in (2, 4):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, body, mark)

    monkeypatch.setattr(checkpoint, "put_whole", full)
    flags = FLAGS | {"steps": 6, "valid": None, "run": "none"}
    result = SweepCommand.of(**flags, vary=("lr=0.1,0.2",), save=tmp_path, save_every=2).run()
    assert steps == [2, 4, 6] and result["failed"] is None and saved_step(tmp_path) == 6
    assert [len(list((tmp_path / name).glob("checkpoint-*"))) for name in ("lr=0.1", "lr=0.2")] == [1, 1]
    result = SweepCommand.of(
        **flags | {"steps": 8}, vary=("lr=0.1,0.2",), save=tmp_path, save_every=2, resume=True
    ).run()
    assert result["failed"] is None and saved_step(tmp_path) == 8
    again = {**flags, "vary": ("lr=0.1,0.2",), "save": tmp_path, "resume": True}
    for other, says in (
        (
            {"seed": 1},
            "--seed is 1, the run was saved with 0: go on with that, or begin another sweep in another --save",
        ),
        ({"dense_lr": 0.5}, "--dense-lr is 0.5, the run was saved with"),
        ({"rungs": "50%"}, "--rungs is 50%, the run was saved with not set"),
        ({"keep": 2}, "--keep is 2, the run was saved with 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            SweepCommand.of(**again | other).run()
    steps.clear()
    result = SweepCommand.of(**flags | {"steps": 4}, vary=("lr=0.1,0.2",), save=tmp_path / "new", save_every=2).run()
    assert "step 4 is not saved" in result["failed"] and "the disk is full" in result["failed"]
    assert not (tmp_path / "new" / "sweep-checkpoint.json").exists()
