"""What `skirl info` says about things it does not know, and of when; tests/habits/test_commands.py covers the rest."""

import json
from pathlib import Path
from typing import Any

import pytest

from skirl import cli
from skirl.sweep.command import SweepCommand
from tests.dedup.rows import Row, schema, write


@pytest.mark.parametrize("layout", ["rows", "once"])
def test_the_layout_of_converted_files_is_told(layout: str, tmp_path: Path, capsys):
    rows: list[Row] = [
        {"click": i % 2, "price": 1.0, "item": i, "seen": list(range(i // 2, i // 2 + 30)), "bought": [9], "visit": i // 20,
         "when": i}
        for i in range(200)
    ]  # fmt: skip
    data = write(tmp_path / "in.parquet", rows, 50)
    words = ["--by", "session", "--layout", layout, "--schema", schema(tmp_path)]
    assert cli.main(["convert", "--data", data, "--out", str(tmp_path / "out"), *words, "--quiet"]) == 0
    capsys.readouterr()
    assert told(tmp_path / "out", capsys)["layout"] == layout
    assert cli.main(["info", str(tmp_path / "out")]) == 0
    assert f" {layout}: " in capsys.readouterr().out


def told(path: Path, capsys, *words: str, code: int = 0) -> dict[str, Any]:
    assert cli.main(["info", str(path), "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


FLAGS: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "steps": 6, "cache": "300", "quiet": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("info")
    where = {"run": str(folder / "run"), "save": folder / "saved"}
    SweepCommand.of(**FLAGS, vary=("lr=0.1,0.2,0.3",), rungs="3", **where).run()
    return folder


def test_checkpoints_of_a_sweep(folder: Path, capsys: pytest.CaptureFixture[str]):
    found = told(folder / "saved", capsys, "--check")
    assert (found["kind"], found["step"], found["whole"], found["checked"]) == (
        "checkpoint of a sweep",
        6,
        True,
        "checksums",
    )
    assert sorted(found["variants"]) == ["lr=0.1", "lr=0.2", "lr=0.3"]
    left = "dropped at step 3 by loss, saved at step 3"
    assert sorted(found["variants"].values()) == [left, "in the race", "in the race"]
    same = told(folder / "saved" / "sweep-checkpoint.json", capsys)
    assert same["variants"] == found["variants"] and same["checked"] == "sizes"


def test_a_variant_whose_checkpoint_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]):
    [name] = [name for name, state in told(folder / "saved", capsys)["variants"].items() if "race" in state][:1]
    [header] = (folder / "saved" / name).glob("checkpoint-*.json")
    whole = header.read_bytes()
    header.write_bytes(whole[:-40])
    found = told(folder / "saved", capsys, code=1)
    header.write_bytes(whole)
    assert found["variants"][name] == "damaged" and not found["whole"] and str(header) in found["failed"]
