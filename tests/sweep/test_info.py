"""What `skirl info` says of a sweep: of its checkpoints, and of the folder of its runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from skirl import cli
from skirl.sweep.command import SweepCommand

FLAGS: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "steps": 6, "cache": "300", "quiet": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("info")
    where = {"run": str(folder / "run"), "save": folder / "saved"}
    SweepCommand.of(**FLAGS, vary=("lr=0.1,0.2,0.3",), rungs="3", alpha=0.0, **where).run()
    return folder


def told(capsys: pytest.CaptureFixture[str], path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    assert cli.main(["info", str(path), "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


def test_checkpoints_of_a_sweep(folder: Path, capsys: pytest.CaptureFixture[str]):
    found = told(capsys, folder / "saved", "--check")
    assert (found["kind"], found["step"], found["whole"], found["checked"]) == (
        "checkpoint of a sweep",
        6,
        True,
        "checksums",
    )
    assert sorted(found["variants"]) == ["lr=0.1", "lr=0.2", "lr=0.3"]
    left = "below the rung at step 3, saved at step 3"
    assert sorted(found["variants"].values()) == [left, "in the race", "in the race"]
    same = told(capsys, folder / "saved" / "sweep-checkpoint.json")
    assert same["variants"] == found["variants"] and same["checked"] == "sizes"


def test_the_folder_of_its_runs(folder: Path, capsys: pytest.CaptureFixture[str]):
    found = told(capsys, folder / "run")
    assert (found["kind"], found["finished"], found["data"]) == ("folder of a sweep", True, "synthetic:tiny")
    result = json.loads((folder / "run" / "result.json").read_text())
    assert found["winner"] == result["winner"] and found["variants"][result["winner"]] == "trained to the end"
    assert cli.main(["info", str(folder / "run")]) == 0
    assert f"{result['winner']}: trained to the end" in capsys.readouterr().out


def test_a_variant_whose_checkpoint_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]):
    [name] = [name for name, state in told(capsys, folder / "saved")["variants"].items() if "race" in state][:1]
    [header] = (folder / "saved" / name).glob("checkpoint-*.json")
    whole = header.read_bytes()
    header.write_bytes(whole[:-40])
    found = told(capsys, folder / "saved", code=1)
    header.write_bytes(whole)
    assert found["variants"][name] == "damaged" and not found["whole"] and str(header) in found["failed"]


def test_a_damaged_folder_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "sweep.json").write_text("{")
    assert cli.main(["info", str(tmp_path)]) == 1
    assert "is the folder of a sweep with a damaged file" in capsys.readouterr().err
