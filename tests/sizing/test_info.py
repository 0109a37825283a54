"""What `skirl info` says about things it does not know, and of when; tests/habits/test_commands.py covers the rest."""

from pathlib import Path

import pytest
import torch

import skirl
from skirl import cli
from skirl.cli.sweep import SweepCommand
from tests.dedup.rows import Row, schema, write


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("x.parquet", b"PAR1 and no more", "is a Parquet file, damaged or cut off"),
        ("x.json", b"{}", "is not a file that skirl recognises"),
        ("x.bin", b"a\0b", "is not a file that skirl recognises"),
        ("x.pt", b"PK\3\4\0", "is not a file that skirl recognises"),
        ("nowhere", None, "does not exist"),
        (".", None, "is a folder that skirl does not recognise"),
    ],
)
def test_the_unknown_is_one_sentence(name: str, content: bytes | None, said: str, tmp_path: Path, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert cli.main(["info", str(tmp_path / name)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skirl info: ") and said in line


def test_text_is_told_by_its_first_line(tmp_path: Path, as_json):
    (tmp_path / "clicks.csv").write_text("click,user\n0,1\n")
    assert as_json("info", str(tmp_path / "clicks.csv"))["begins"] == "click,user"


@pytest.mark.parametrize("layout", ["rows", "once"])
def test_the_layout_of_converted_files_is_told(layout: str, tmp_path: Path, capsys, as_json):
    rows: list[Row] = [
        {"click": i % 2, "price": 1.0, "item": i, "seen": list(range(i // 2, i // 2 + 30)), "bought": [9], "visit": i // 20,
         "when": i}
        for i in range(200)
    ]  # fmt: skip
    data = write(tmp_path / "in.parquet", rows, 50)
    words = ["--by", "session", "--layout", layout, "--schema", schema(tmp_path)]
    assert cli.main(["convert", "--data", data, "--out", str(tmp_path / "out"), *words, "--quiet"]) == 0
    capsys.readouterr()
    assert as_json("info", str(tmp_path / "out"))["layout"] == layout


def test_checkpoints_of_a_sweep_are_those_of_its_variants(tmp_path: Path, as_json):
    flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 16, "steps": 6, "cache": "300"}
    where = {"run": str(tmp_path / "run"), "save": tmp_path / "saved"}
    SweepCommand.of(**flags, quiet=True, vary=("lr=0.1,0.2",), **where).run()
    for path in (tmp_path / "saved", tmp_path / "saved" / "sweep-checkpoint.json"):
        found = as_json("info", str(path))
        assert (found["kind"], found["variants"]) == ("checkpoints of a sweep", ["lr=0.1", "lr=0.2"])
    assert as_json("info", str(tmp_path / "saved" / "lr=0.2"), "--check")["whole"]
    found = as_json("info", str(tmp_path / "run"))  # which is left to its report
    assert (found["kind"], found["shown_by"]) == ("folder of a sweep", f"skirl report {tmp_path / 'run'}")


def test_rows_of_several_trainers_are_told_as_one(tmp_path: Path, as_json):
    for rank, ids in enumerate(([1, 2, 3], [4])):
        rows = skirl.EmbeddingBagCollection(
            [skirl.Table("item", 10, 2)], optimizer=skirl.SGD(), cache=8, store=f"disk:{tmp_path}/rank-{rank}/rows-0"
        )
        rows(skirl.KeyedJagged.one_hot(["item"], torch.tensor(ids)[:, None]))["item"].sum().backward()
        rows.close()
    for path, held in ((tmp_path, 4), (tmp_path / "rank-0", 3)):
        found = as_json("info", str(path))
        assert (found["kind"], [table["held"] for table in found["tables"]]) == ("rows of trainers", [held])
    found = as_json("info", f"disk:{tmp_path}/rank-1/rows-0")
    assert (found["kind"], found["tables"][0]["held"]) == ("disk store", 1)
