"""Each malformed file gives its own error: where, what was found, what was expected, what to do. Or its rows are skipped."""

from pathlib import Path
from typing import Any

import pytest

from skirl import cli
from skirl.data import DataFlags
from skirl.data.files.find import BadRow
from skirl.data.files.stream import Files
from tests.data import logs
from tests.data.corpus import CASES, Case
from tests.data.logs import text


def opened(case: Case, folder: Path, **flags: Any) -> Files:
    """Open the case's file, making it if it does not exist."""
    path = folder / "file"
    if not path.exists():
        case.make(path)
    if case.schema is not None:
        (folder / "schema.toml").write_text(case.schema)
        flags["schema"] = str(folder / "schema.toml")
    return DataFlags(f"{case.kind}:{path}", batch=64, **case.flags, **flags).files()


def samples_in(files: Files) -> int:
    return sum(len(batch.labels) for batch in files)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_malformed_file_is_refused_in_its_words(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        samples_in(opened(case, tmp_path))
    said = str(caught.value)
    assert all(word in said for word in case.words), said
    assert str(tmp_path / "file") in said or case.kind == "parquet" or case.flags, said
    if case.skipped is None:
        with pytest.raises(ValueError):
            samples_in(opened(case, tmp_path, bad_rows="skip"))
        return
    files = opened(case, tmp_path, bad_rows="skip")
    if case.left:
        assert samples_in(files) == case.left
    else:
        said = rf" \(left out: {case.skipped} malformed\)" if case.skipped else ""
        with pytest.raises(ValueError, match=f"there are no rows left to read{said}: give other files"):
            samples_in(files)
    assert files.bad_rows == case.skipped


def test_skipped_rows_leave_the_others_as_they_are(tmp_path: Path) -> None:
    rows = logs.criteo_rows(500, seed=1)
    bad = {7: "x", 8: "nan", 130: "1e999", 499: "--"}
    for row, value in bad.items():
        rows[row][3] = value
    lines = text(rows).splitlines(keepends=True)
    lines[250] = b"too\tfew\n"
    (tmp_path / "file").write_bytes(b"".join(lines))
    good = [row for number, row in enumerate(rows) if number not in bad and number != 250]
    expected = [logs.criteo_sample(row, 1000)[2] for row in good]
    for workers in (0, 2):
        flags = DataFlags(f"criteo:{tmp_path / 'file'}", rows="1000", bad_rows="skip", epochs=2, workers=workers)
        files = flags.files(10_000)
        found = [ids for _, _, ids in logs.samples_of(list(files))]
        assert found == expected * 2 and files.bad_rows == 5
    held = DataFlags(f"criteo:{tmp_path / 'file'}", rows="1000", bad_rows="skip", valid="50%").files(10_000).held_out
    assert held is not None and len(next(iter(held)).labels) == 250 - 2, "rows are counted as they stand in the file"


def test_the_first_malformed_row_is_the_one_that_is_named(tmp_path: Path) -> None:
    rows = logs.criteo_rows(900, seed=1)
    rows[800][20], rows[805][2] = "zz", "x"
    (tmp_path / "file").write_bytes(text(rows))
    for workers in (0, 3):
        with pytest.raises(BadRow, match=r"line 801: column C7 is 'zz'") as caught:
            list(DataFlags(f"criteo:{tmp_path / 'file'}", workers=workers).files(10_000))
        assert caught.value.args[1] == "line 801"


SMALL = "--model dlrm-tiny --dim 4 --batch 64 --rows 500 --cache 3000 --threads 1 --quiet".split()  # noqa: SIM905


def test_skipped_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: Any) -> None:
    rows = logs.criteo_rows(200)
    rows[50][0] = "maybe"
    path = logs.write_tsv(tmp_path / "day_0", rows)
    train = ["train", "--data", f"criteo:{path}", *SMALL]
    result = as_json(*train, "--bad-rows", "skip")
    assert (result["samples"], result["bad_rows_skipped"]) == (199, 1)
    rows[20][0] = "perhaps"
    logs.write_tsv(path, rows)
    assert cli.main([*train, "--bad-rows", "skip"]) == 0
    assert "2 malformed rows" in capsys.readouterr().out
    assert cli.main(train) == 1
    assert "line 21: label label is 'perhaps', expected 0 or 1" in capsys.readouterr().err
