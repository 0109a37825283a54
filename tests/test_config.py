"""Flags from a file: what is accepted, and what is refused in one sentence."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from skirl.cli.command_line import read_config
from skirl.tools.flags import Flag, flags_of


@dataclass
class Flags:
    batch: int = 1
    rate: float | None = None
    depth: int | Literal["auto", "epoch"] = "auto"
    layers: tuple[int, ...] = ()
    out: Path | None = None
    quiet: bool = False
    name_of_run: str = ""


FLAGS = flags_of(Flags)
TRAIN = {name: Flag(name, str, "", "", group) for name, group in (("lr", ""), ("from_", "save"), ("out", "save"))}


def read(path: Path, text: str) -> dict[str, object]:
    path.write_text(text)
    return read_config(path, "train", FLAGS, TRAIN)


def test_toml_and_json_give_the_same_flags(tmp_path):
    toml = (
        'batch = 8\nrate = 1\ndepth = "epoch"\nlayers = [4, 2]\nout = "x"\nquiet = true\nname-of-run = "a"\nlr = 3.0\n'
    )
    flags = {"batch": 8, "rate": 1, "depth": "epoch", "layers": [4, 2], "out": "x", "quiet": True}
    flags |= {"name_of_run": "a", "lr": 3.0}
    expected = {"batch": 8, "rate": 1.0, "depth": "epoch", "layers": (4, 2), "out": Path("x"), "quiet": True}
    expected["name_of_run"] = "a"
    assert read(tmp_path / "a.toml", toml) == read(tmp_path / "a.json", json.dumps(flags)) == expected


def test_of_a_run_folder_it_takes_what_does_not_belong_to_that_run_alone(tmp_path):
    of_run = json.dumps({"command": "train", "flags": {"batch": 8, "rate": None, "out": "x"}, "begun_at": 0})
    assert read(tmp_path / "config.json", of_run) == {"batch": 8, "rate": None}
    assert read_config(tmp_path, "train", FLAGS, TRAIN) == {"batch": 8, "rate": None}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("batch = 8.0", "batch is 8.0: set it to a whole number"),
        ("batch = true", "batch is true: set it to a whole number"),
        ('rate = "fast"', 'rate is "fast": set it to a number'),
        ('depth = "all"', 'depth is "all": set it to a whole number, "auto" or "epoch"'),
        ("layers = [4, 2.5]", "layers is [4, 2.5]: set it to a list, each a whole number"),
        ("out = 3", "out is 3: set it to a path"),
        ("quiet = 1", "quiet is 1: set it to true or false"),
        ("name-of-run = 1000", 'name-of-run is 1000: set it to text, such as "1000"'),
        ("name-of-run = 2024-01-01", 'name-of-run is "2024-01-01": set it to text'),
        ("[model]\ndim = 8", "[model] is a table: write flags at the top of the file"),
        ("batch 8", "this is not valid TOML (Expected '=' after a key"),
    ],
)
def test_anything_else_is_refused_by_file_and_key(tmp_path, line, said):
    with pytest.raises(ValueError) as error:
        read(tmp_path / "run.toml", line)
    assert str(error.value).startswith(f"{tmp_path / 'run.toml'}: {said}")
    assert "\n" not in str(error.value)
