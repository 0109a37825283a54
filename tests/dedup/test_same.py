"""Sums of hashes are equal exactly if plain multisets of the rows are, and rows that differ are named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl import cli
from skirl.data.files.encoded import Encoded
from skirl.data.flags import DataFlags
from skirl.dedup import same as module
from skirl.dedup.row_hash import row_hashes
from skirl.dedup.same import RowSums, same
from tests.cases import cases
from tests.dedup.rows import Row, counted, schema, write

ROWS: list[Row] = [
    {"click": i % 2, "price": i / 4, "item": i, "seen": [i, 7, i][: i % 4], "bought": [9], "visit": i // 3, "when": i}
    for i in range(40)
]


def compared(folder: Path, one: list[Row], other: list[Row], group: int = 7) -> dict[str, Any]:
    sides = []
    for name, rows in (("one", one), ("other", other)):
        data = write(folder / f"{name}.parquet", rows, group)
        sides.append(DataFlags(data, schema=schema(folder)).files())
    return same(*sides, json=True, quiet=True)


def test_another_order_holds_the_same_rows(tmp_path: Path) -> None:
    found = compared(tmp_path, ROWS, ROWS[20:] + ROWS[:20][::-1])
    assert found["same"] and found["failed"] is None and found["hash"] == found["hash_as"]
    assert found["compared"] == ["click", "price", "item", "seen", "bought", "session", "time"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--as", "parquet:nope"), "nope: there is no such file or folder in {here}: set --as to one that exists"),
        (("--as", "nope"), "--as is 'nope': set it to synthetic:NAME"),
        (("--as", "csv:rows.csv"), "rows.csv: nothing says what its columns mean: set --as-schema to a TOML file"),
        (
            ("--as", "csv:rows.csv", "--as-schema", "no.toml"),
            "schema no.toml cannot be read (No such file or directory): set --as-schema to a",
        ),
    ],
)
def test_what_is_wrong_with_the_other_data_set_is_told_of_its_flags(flags, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("a,b\n1,2\n")
    data = write(tmp_path / "one.parquet", ROWS, 7)
    assert cli.main(["same", "--data", data, "--schema", schema(tmp_path), *flags]) in (1, 2)
    assert capsys.readouterr().err.startswith(f"skirl same: {said.format(here=tmp_path)}")


CHANGES = {
    "dropped": (ROWS[:5] + ROWS[6:], {"row 6 of row group 1": (1, 0)}),
    "doubled": ([*ROWS, ROWS[5]], {"row 6 of row group 6": (1, 2)}),
    "changed": (
        [*ROWS[:5], ROWS[5] | {"price": 1.5}, *ROWS[6:]],
        {"row 6 of row group 1": (1, 0), " row 6 of row group 1": (0, 1)},
    ),
    "swapped": (
        [*ROWS[:5], ROWS[5] | {"item": 6}, ROWS[6] | {"item": 5}, *ROWS[7:]],
        {"row 6 of row group 1": (1, 0), "row 7 of row group 1": (1, 0)},
    ),
    "moved between lists": ([ROWS[0] | {"seen": [9], "bought": []}, *ROWS[1:]], {"row 1 of row group 1": (1, 0)}),
    "another order in a list": (
        [*ROWS[:3], ROWS[3] | {"seen": [7, 3, 3]}, *ROWS[4:]],
        {"row 4 of row group 1": (1, 0)},
    ),
    "another session": ([ROWS[0] | {"visit": 77}, *ROWS[1:]], {"row 1 of row group 1": (1, 0)}),
    "another time": ([ROWS[0] | {"when": 77}, *ROWS[1:]], {"row 1 of row group 1": (1, 0)}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_row_that_differs_is_named(tmp_path: Path, what: str) -> None:
    other, named = CHANGES[what]
    found = compared(tmp_path, ROWS, other)
    assert not found["same"] and found["hash"] != found["hash_as"]
    rows = {
        (row["row"].partition(" of " + str(tmp_path))[0], row["times"], row["times_as"])
        for row in found["rows_that_differ"]
    }
    assert {(name.strip(), *times) for name, times in named.items()} <= rows
    assert "bucket" in found["failed"] and "row group" in found["failed"]


value = st.integers(-2, 2)
row = st.tuples(st.lists(value, max_size=3), st.lists(value, max_size=3), st.integers(0, 1), value)


@given(st.lists(row, max_size=5), st.lists(row, max_size=5))
@cases(200)
def test_sums_are_equal_where_the_multisets_are(one: list[Any], other: list[Any]) -> None:
    sums = []
    for rows in (one, other):
        lists = [[r[k] for r in rows] for k in range(2)]
        encoded = Encoded(
            np.array([[r[2]] for r in rows], np.float32).reshape(len(rows), 1),
            np.empty((len(rows), 0), np.float32),
            [np.array([v for bag in bags for v in bag], np.int64) for bags in lists],
            [np.array([len(bag) for bag in bags], np.int64) for bags in lists],
            np.arange(len(rows)),
            kept=[pa.array([r[3] for r in rows], pa.int64())],
        )
        total = RowSums()
        total.add(row_hashes(encoded, ["y"], [], ["a", "b"]))
        sums.append(total)
    assert (len(sums[0].other_than(sums[1])) == 0) == (counted_(one) == counted_(other))


def counted_(rows: list[Any]) -> Any:
    return counted([dict(enumerate(row)) for row in rows])  # type: ignore[arg-type]


def test_sums_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum has 128 bits; it is not two sums of 64."""
    sums = RowSums()
    sums.add(np.array([[3, 2**64 - 1], [4, 5]], np.uint64))
    assert module._total(sums) == (3 << 64) + 2**64 - 1 + (4 << 64) + 5


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, by = write(tmp_path / "a.parquet", ROWS), write(tmp_path / "b.parquet", ROWS[::-1]), schema(tmp_path)
    flags = ["--schema", by, "--as-schema", by, "--json"]
    assert cli.main(["same", "--data", one, "--as", other, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True
    other = write(tmp_path / "b.parquet", ROWS[1:])
    assert cli.main(["same", "--data", one, "--as", other, *flags]) == 1
    assert "row 1 of row group 1 of" in capsys.readouterr().err


def test_columns_that_differ_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, by = write(tmp_path / "a.parquet", ROWS), schema(tmp_path)
    fewer = tmp_path / "fewer.toml"
    fewer.write_text(Path(by).read_text().rpartition("[[id]]")[0])
    assert cli.main(["same", "--data", data, "--as", data, "--schema", by, "--as-schema", str(fewer)]) == 1
    assert capsys.readouterr().err == (
        "skirl same: --data has a column 'bought' and --as has none: give both a schema that names the same columns\n"
    )
