"""Training on files: from the command line, resumed, and with the bits of the plain reference."""

import json
from pathlib import Path
from typing import Any

import pytest

import skirl
from skirl import cli
from skirl.data import DataFlags
from skirl.data.files.schema import BUILT_IN
from skirl.models import DLRM
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
    result = run(
        capsys, "verify", "--data", f"criteo:{tsv}", *SMALL, "--cache", "touched:40%", "--steps", "8", "--batch", "32"
    )
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


def test_two_labels_are_refused_before_anything_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = tmp_path / "schema.toml"
    schema.write_text('[[label]]\nnames = ["click", "buy"]\n[[id]]\nname = "item"\n')
    (tmp_path / "log.csv").write_text("click,buy,item\n" + "1,0,a\n0,0,b\n" * 64)
    flags = f"--data csv:{tmp_path}/log.csv --schema {schema} {' '.join(SMALL)}".split()
    for command in ("train", "verify"):
        assert cli.main([command, *flags]) == 2
        said = capsys.readouterr().err
        assert "with 2 labels (click, buy), and dlrm-tiny predicts one: leave one [[label]]" in said
    sizing = "--model dlrm-tiny --dim 4 --batch 64 --rows 500 --quiet".split()  # noqa: SIM905
    assert cli.main(["size", f"csv:{tmp_path}/log.csv", *flags[2:4], *sizing]) == 0, "which looks at no label"
    stream = DataFlags(f"csv:{tmp_path}/log.csv", schema=str(schema), batch=64).stream()
    (batch, _) = stream
    assert batch.labels.shape == (64, 2) and stream.labels == ("click", "buy")
    rows = skirl.EmbeddingBagCollection(stream.tables(4), optimizer=skirl.SGD(lr=0.1), cache=100)
    with pytest.raises(
        ValueError,
        match=r"labels have shape \[64, 2\]: pass labels of shape \[64\]",
    ):
        DLRM.tiny(rows, dense_features=0).loss(batch)


def test_a_run_is_not_resumed_on_ids_read_otherwise(
    tsv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables of the same size, so that only the data's own state shows it. The checkpoint is not touched."""
    train = [
        "train",
        "--data",
        f"criteo:{tsv}",
        *SMALL,
        "--save",
        str(tmp_path / "saved"),
        "--run",
        str(tmp_path / "run"),
    ]
    run(capsys, *train, "--steps", "5")
    (tmp_path / "s.toml").write_text(BUILT_IN["criteo"].toml().replace('transform = "log"', 'transform = "none"'))

    def saved() -> list[str]:
        return sorted(path.name for path in (tmp_path / "saved").iterdir() if not path.name.startswith("start-"))

    before = saved()
    for flags, said in (
        (
            ["--schema", str(tmp_path / "s.toml")],
            "transform = 'log' for dense column 'I1', not 'none': set --schema to",
        ),
        (["--vocab", "open"], "ids become rows by hash, not by an open vocabulary: set --vocab to what it was"),
    ):
        assert cli.main([*train, *flags, "--resume"]) == 1
        assert said in capsys.readouterr().err
    assert saved() == before
    assert run(capsys, *train, "--resume")["begun_at"] == 5


@pytest.mark.parametrize(
    ("data", "flag"),
    [
        ("synthetic:tiny", {"vocab": "ids.vocab"}),
        ("synthetic:tiny", {"schema": "own.toml"}),
        ("synthetic:tiny", {"rows": "1000"}),
        ("synthetic:tiny", {"epochs": 2}),
        ("synthetic:tiny", {"workers": 2}),
        ("criteo:nofile", {"rows_scale": 0.5}),
        ("criteo:nofile", {"pooling_factor": 2}),
        ("criteo:nofile", {"stale": 5}),
        ("criteo:nofile", {"admit": 3, "vocab": "ids.vocab"}),
    ],
)
def test_a_flag_that_nothing_reads_is_refused(data: str, flag: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(flag))} is a flag of .*: (set vocab|leave it out)"):
        DataFlags(data, batch=64, **flag)
