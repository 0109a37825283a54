"""`--config`: repeat a run from the files it left, with some flags changed."""

import json
from pathlib import Path
from typing import Any

import pytest

from skirl.cli import main

FLAGS = "--data synthetic:tiny --model dcnv2-tiny --deep 9 5 --dim 4 --batch 32 --steps 12 --valid 25% --eval-every 5"
SEED = "--seed 3 --lr 0.1 --cache touched:50% --optimizer adam --schedule linear --threads 1 --quiet --json"


def result(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(args) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path / "first"
    writes = ["--run", str(folder), "--save", str(tmp_path / "saved"), "--save-every", "5"]
    return folder, result(capsys, "train", *FLAGS.split(), *SEED.split(), *writes)


def test_a_run_and_its_repetition_have_the_same_bits(run, capsys):
    folder, first = run
    for path in (folder, folder / "config.json"):
        again = result(capsys, "train", "--config", str(path), "--quiet", "--json")
        for what in ("loss", "auc", "test_logloss", "counters", "rows"):
            assert again[what] == first[what]
        assert again["save"] is None and again["run"] is None  # tests set SKIRL_RUNS=none


def test_toml_is_read_and_verify_and_size_pass_over_flags_of_training_alone(run, tmp_path, capsys):
    _, first = run
    file = tmp_path / "run.toml"
    file.write_text(
        'data = "synthetic:tiny"\nmodel = "dcnv2-tiny"\ndeep = [9, 5]\ndim = 4\nbatch = 32\nsteps = 12\nvalid = "25%"\n'
        'eval-every = 5\nseed = 3\nlr = 0.1\ncache = "touched:50%"\noptimizer = "adam"\nschedule = "linear"\nthreads = 1\n'
        "quiet = true\n"
    )
    told = ["--config", str(file), "--quiet", "--json"]
    assert result(capsys, "train", *told)["loss"] == first["loss"]
    verified = result(capsys, "verify", *told)
    assert (verified["dim"], verified["runs"][0]["losses"], verified["failed"]) == (4, 12, None)
    sized = result(capsys, "size", *told)
    assert (sized["dim"], sized["steps"], sized["touched"]) == (4, 12, first["rows"]["touched"])
