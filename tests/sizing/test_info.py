"""What `skirl info` says about things it does not know, and of when; tests/habits/test_commands.py covers the rest."""

from pathlib import Path

import pytest

from skirl import cli
from tests.dedup.rows import Row, schema, write


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("x.parquet", b"PAR1 and no more", "is a Parquet file, damaged or cut off"),
        ("x.safetensors", b"\2\0\0\0\0\0\0\0{}", "is not what skirl recognises"),
        ("x.bin", b"a\0b", "is not what skirl recognises"),
        ("nowhere", None, "does not exist"),
        (".", None, "is not what skirl recognises"),
    ],
)
def test_the_unknown_is_one_sentence(name: str, content: bytes | None, said: str, tmp_path: Path, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert cli.main(["info", str(tmp_path / name)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skirl info: ") and said in line


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
