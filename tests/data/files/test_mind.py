"""MIND's impressions: each item shown in a line is a sample."""

from dataclasses import replace
from pathlib import Path

import pytest

from skirl.data.files.find import BadRow
from skirl.data.files.schema import BUILT_IN
from skirl.data.files.text import MindFile
from skirl.data.flags import DataFlags

LINES = [
    "1\tU1\t11/13/2019 8:36:57 AM\tN1 N2\tN7-1 N8-0\n",
    "2\tU2\t11/13/2019 12:00:01 PM\t\tN9-0\n",
    "3\tU1\t11/14/2019 12:00:01 AM\tN1 N2 N7\tN8-0 N-9-1 N1-0\n",
]


def test_a_sample_a_shown_item(tmp_path: Path) -> None:
    path = tmp_path / "behaviors.tsv"
    path.write_text("".join(LINES))
    found, again = [], []
    file = MindFile(str(path), replace(BUILT_IN["mind"], also=("impression",)), False, part=60)
    for part in range(3):
        raw = file.read(part)
        assert raw.rows == file.rows(part)
        names = ("impression", "user", "item", "click", "history", "time")
        rows = list(zip(*(raw.columns[name].to_pylist() for name in names)))
        found += [(*row[:5], str(row[5])) for row in rows]
        some = raw.only(1, raw.rows)
        again += rows[:1] + list(zip(*(some.columns[name].to_pylist() for name in names)))
    file.close()
    assert found == [
        ("1", "U1", "N7", "1", "N1 N2", "2019-11-13 08:36:57"),
        ("1", "U1", "N8", "0", "N1 N2", "2019-11-13 08:36:57"),
        ("2", "U2", "N9", "0", None, "2019-11-13 12:00:01"),
        ("3", "U1", "N8", "0", "N1 N2 N7", "2019-11-14 00:00:01"),
        ("3", "U1", "N-9", "1", "N1 N2 N7", "2019-11-14 00:00:01"),
        ("3", "U1", "N1", "0", "N1 N2 N7", "2019-11-14 00:00:01"),
    ]
    assert [(*row[:5], str(row[5])) for row in again] == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("4\tU3\t11/14/2019 1:00:00 PM\tN1\tN7-1 N8\n", "line 4: label click is nothing"),
        ("4\tU3\t11/14/2019 1:00:00 PM\tN1\t\n", "line 4: label click is nothing"),
        ("4\tU3\t11/14/2019 1:00:00 PM\tN1\n", "line 4: the line has 4 columns"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: str, found: str) -> None:
    path = tmp_path / "behaviors.tsv"
    path.write_text("".join([*LINES, line, LINES[0]]))
    with pytest.raises(BadRow, match=found):
        list(DataFlags(f"mind:{path}", batch=4).files().pieces())
    files = DataFlags(f"mind:{path}", batch=4, bad_rows="skip").files()
    rows = sum(len(piece) for piece in files.pieces())
    assert rows == 8 + ("N7-1 N8" in line) and files.bad_rows == 1
