"""What `skirl info` says about things it does not know, and of when; tests/habits/test_commands.py covers the rest."""

import os
from pathlib import Path

import pytest

from skirl import cli
from skirl.measure.info.look import made
from skirl.train import origin


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("x.parquet", b"PAR1 and no more", "is a Parquet file, damaged or cut off"),
        ("x.json", b"{}", "is a JSON file that skirl does not recognise"),
        ("x.bin", b"a\0b", "is not a file that skirl recognises"),
        ("x.pt", b"PK\3\4", "is a damaged or unfinished file of torch.save"),
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


def test_a_folder_is_as_new_as_its_newest_file(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (0, 1000))
    (tmp_path / "nowhere").symlink_to("gone")
    os.utime(tmp_path, (0, 2000))
    assert made(tmp_path / "a") == "1970-01-01T00:16:40+00:00" and made(tmp_path) == "1970-01-01T00:33:20+00:00"
    (tmp_path / "b").write_text("rewritten in place")
    os.utime(tmp_path / "b", (0, 3000))
    assert made(tmp_path) == made(tmp_path / "b") == "1970-01-01T00:50:00+00:00"


def test_a_run_that_began_from_another_and_saved_nothing(tmp_path: Path, capsys):
    header = tmp_path / "other" / "checkpoint-000003.json"
    header.parent.mkdir()
    header.write_text("{}")
    origin.note(tmp_path / "run", origin.Origin.of("other", header))
    assert cli.main(["info", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "run before its first checkpoint" in said and str(header) in said
    (tmp_path / "run" / origin.NAME).write_text("{}")
    assert cli.main(["info", str(tmp_path / "run")]) == 1
    assert "is damaged" in capsys.readouterr().err
