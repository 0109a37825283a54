"""Text files: lines, parts, and the beginning and end of a line."""

import gzip
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.data import DataFlags
from skirl.data.files.find import BadFile, BadRow
from skirl.data.files.schema import FileSchema
from skirl.data.files.text import TextFile
from tests.cases import cases
from tests.data import logs
from tests.data.corpus import CRITEO, ROWS, text
from tests.data.files.read import INTS, ids_of

PAIRS = FileSchema.parse(
    '[[label]]\nname = "y"\n[[id]]\nname = "item"\n[file]\ncolumns = ["y", "item"]\nheader = "no"\n'
)
FIELD = st.text("ab é\u20ac7", max_size=9)


@given(
    rows=st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=40),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    packed=st.booleans(),
    part=st.integers(1, 90),
)
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
    forms = {
        "bom": b"\xef\xbb\xbf" + text(),
        "crlf": text(end="\r\n"),
        "no end": text()[:-1],
        "crlf, no end": text(end="\r\n")[:-1],
        "header": header + text(),
        "bom and header": b"\xef\xbb\xbf" + header + text(),
        "members": gzip.compress(text(ROWS[:2])) + gzip.compress(text(ROWS[2:])),
    }
    for name, data in forms.items():
        path = tmp_path / "file"
        path.write_bytes(data)
        found = logs.samples_of(list(DataFlags(f"criteo:{path}", rows="1000").files()))
        assert [ids for _, _, ids in found] == [ids for _, _, ids in expected], name


GOOD_TEXT = text()


@given(at=st.integers(0, len(GOOD_TEXT)), cut=st.integers(0, 200), put=st.binary(max_size=40), packed=st.booleans())
@cases(60)
def test_mutated_text(tmp_path_factory: pytest.TempPathFactory, at: int, cut: int, put: bytes, packed: bool) -> None:
    data = GOOD_TEXT[:at] + put + GOOD_TEXT[at + cut :]
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    try:
        batches = list(DataFlags(f"criteo:{path}", rows="100", bad_rows="skip").files(700))
    except ValueError as error:
        assert isinstance(error, BadFile) or "there are no rows left to read" in str(error)
    else:
        assert sum(len(batch.labels) for batch in batches) == plain_count(data)


def plain_count(data: bytes) -> int:
    """Count the valid lines of Criteo text with plain Python."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    lines = data.split(b"\n")
    if lines[-1] in (b"", b"\r"):
        lines.pop()
    if set(lines[0].rstrip(b"\r").split(b"\t")) >= {name.encode() for name in CRITEO}:
        lines = lines[1:]
    return sum(map(is_right, lines))


def is_right(line: bytes) -> bool:
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != 40 or b"\r" in line.removesuffix(b"\r") or fields[0] == b"":
        return False
    try:
        numbers = [float(field.decode("ascii")) for field in fields[:14] if field]
    except ValueError:
        return False
    if not is_utf8(line):
        return False
    plain = not any(set(field) & set(b" _\x0b\x0c\x1c\x1d\x1e\x1f") for field in fields[:14])
    hexes = all(len(f) <= 16 and set(f) <= set(b"0123456789abcdefABCDEF") for f in fields[14:])
    return plain and hexes and all(map(math.isfinite, numbers)) and float(fields[0]) in (0, 1)


def is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_byte_order_mark_is_refused_in_any_line(tmp_path: Path) -> None:
    """Not only where a part happens to begin."""
    schema = INTS.replace('["y", "item"]', '["other", "y", "item"]')
    with pytest.raises(BadRow, match="line 2: the line begins with a byte order mark"):
        ids_of(tmp_path, b"a,1,7\n\xef\xbb\xbfa,1,7\na,1,7\n", schema)
    assert len(ids_of(tmp_path, b"\xef\xbb\xbfa,1,7\na,1,7\n", schema)) == 2
