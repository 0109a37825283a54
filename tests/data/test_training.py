"""Training on files: from the command line, resumed, and with the bits of the plain reference."""

import json
from pathlib import Path
from typing import Any

import pytest

from skirl import cli
from tests.data import logs

SMALL = "--model dlrm-tiny --dim 4 --batch 64 --rows 500 --cache 3000 --threads 1 --quiet".split()  # noqa: SIM905


def run(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert cli.main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def tsv(tmp_path: Path) -> Path:
    return logs.write_tsv(tmp_path / "day_0.gz", logs.criteo_rows(1000), packed=True)


def test_a_run_goes_on_where_it_was_saved(tsv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "--data", f"criteo:{tsv}", *SMALL, "--shuffle", "200", "--epochs", "2", "--valid", "20%"]
    whole = run(capsys, *train)
    assert whole["steps"] == 2 * 13 and whole["samples"] == 1600
    saving = [*train, "--save", str(tmp_path / "saved")]
    run(capsys, *saving, "--steps", "17")
    resumed = run(capsys, *saving, "--resume")
    assert resumed["begun_at"] == 17 and resumed["steps"] == 26
    assert resumed["loss"] == whole["loss"]


def test_every_bit_is_the_plain_reference_s(tsv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--cache", "touched:40%", "--steps", "8", "--batch", "32"]
    result = run(capsys, "verify", "--data", f"criteo:{tsv}", *SMALL, *more)
    assert [one["difference"] for one in result["runs"]] == [None]


def test_skipped_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = logs.criteo_rows(200)
    rows[50][0] = "maybe"
    path = logs.write_tsv(tmp_path / "day_0", rows)
    result = run(capsys, "train", "--data", f"criteo:{path}", *SMALL, "--bad-rows", "skip")
    assert (result["samples"], result["bad_rows_skipped"]) == (199, 1)
    assert result["first_bad_row"] == f"line 51 of {path}"
    rows[20][0] = "perhaps"
    logs.write_tsv(path, rows)
    assert cli.main(["train", "--data", f"criteo:{path}", *SMALL, "--bad-rows", "skip"]) == 0
    assert f"2 malformed rows, the first: line 21 of {path}" in capsys.readouterr().out
    assert cli.main(["train", "--data", f"criteo:{path}", *SMALL]) == 1
    assert "line 21: label label is 'perhaps', expected 0 or 1" in capsys.readouterr().err
