"""Text files: their lines and parts, the beginning and end of a line; and of MIND, each item shown is a sample."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.data import DataFlags
from skirl.data.files.find import BadRow
from skirl.data.files.schema import BUILT_IN, FileSchema
from skirl.data.files.text import MindFile, TextFile
from tests.cases import cases
from tests.data import logs
from tests.data.corpus import ROWS, TEXT
from tests.data.logs import CRITEO, INTS, ids_of, text

PAIRS = FileSchema.parse(
    '[[label]]\nname = "y"\n[[id]]\nname = "item"\n[file]\ncolumns = ["y", "item"]\nheader = "no"\n'
)
FIELD = st.text("ab é\u20ac7", max_size=9)


@given(
    rows=st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=40), end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(), packed=st.booleans(), part=st.integers(1, 90),
)  # fmt: skip
@cases(200)
def test_parts_of_any_size_are_the_lines_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], end: str, last: bool, packed: bool, part: int
) -> None:
    """A line belongs to the part with its first byte: each is read once, in order, and none is split."""
    data = end.join(",".join(row) for row in rows) + (end if last else "")
    path = tmp_path_factory.getbasetemp() / "lines"
    path.write_bytes(gzip.compress(data.encode(), 1) if packed else data.encode())
    file = TextFile(str(path), PAIRS, packed, part)
    found, number, places = [], 0, []
    while file.has(number):
        raw = file.read(number)
        assert raw.rows == file.rows(number) == len(raw.columns["y"]) and not raw.broken
        found += zip(raw.columns["y"].to_pylist(), raw.columns["item"].to_pylist())
        places += [raw.where(row) for row in range(raw.rows)]
        number += 1
    file.close()
    assert [(y or "", item or "") for y, item in found] == rows
    assert places == [f"line {n}" for n in range(1, len(rows) + 1)]


def test_what_looks_odd_and_is_right(tmp_path: Path) -> None:
    """A byte order mark, CRLF, no newline at the end, a header, odd numbers: all of these are read."""
    expected = [logs.criteo_sample(row, 1000) for row in ROWS]
    header = "\t".join(CRITEO).encode() + b"\n"
    crlf, members = text(ROWS, end="\r\n"), gzip.compress(text(ROWS[:2])) + gzip.compress(text(ROWS[2:]))
    for data in (crlf, TEXT[:-1], crlf[:-1], header + TEXT, b"\xef\xbb\xbf" + header + TEXT, members):
        path = tmp_path / "file"
        path.write_bytes(data)
        found = logs.samples_of(list(DataFlags(f"criteo:{path}", rows="1000").files()))
        assert [ids for _, _, ids in found] == [ids for _, _, ids in expected], data[:99]


def test_a_byte_order_mark_is_refused_in_any_line(tmp_path: Path) -> None:
    """Not only where a part happens to begin."""
    schema = INTS.replace('["y", "item"]', '["other", "y", "item"]')
    with pytest.raises(BadRow, match="line 2: the line begins with a byte order mark"):
        ids_of(tmp_path, b"a,1,7\n\xef\xbb\xbfa,1,7\na,1,7\n", schema)
    assert len(ids_of(tmp_path, b"\xef\xbb\xbfa,1,7\na,1,7\n", schema)) == 2


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
