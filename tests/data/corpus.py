"""Malformed files, each made by a few lines of Python, and the errors they give."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

from tests.data.logs import CRITEO, criteo_rows, text

ROWS = criteo_rows(6, seed=3)
TEXT = text(ROWS)
SCHEMA = """
[[label]]
name = "y"
[[dense]]
name = "x"
[[id]]
name = "item"
type = "int"
[[id]]
name = "tags"
type = "int"
list = true
"""
CSV = """
[[label]]
name = "y"
[[dense]]
name = "x"
[[id]]
name = "item"
type = "int"
[file]
columns = ["y", "x", "item"]
"""


@dataclass
class Case:
    name: str
    make: Callable[[Path], Any]
    words: tuple[str, ...]
    kind: str = "criteo"
    schema: str | None = None
    skipped: int | None = None
    """Rows that are left out on request; None: the file is refused even then."""
    flags: dict[str, Any] = field(default_factory=dict)
    rows: int | None = None
    """Rows of the file, including malformed ones; by default, as many as usual for its kind."""

    @property
    def left(self) -> int:
        """Return how many rows are read if the malformed ones are left out."""
        assert self.skipped is not None
        usual = {"criteo": len(ROWS), "parquet": 4, "csv": 2}[self.kind]
        return (usual if self.rows is None else self.rows) - self.skipped


def raw(data: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(data)


def line(number: int, data: bytes) -> Callable[[Path], Any]:
    lines = TEXT.splitlines(keepends=True)
    lines[number] = data
    return raw(b"".join(lines))


def parquet(**columns: Any) -> Callable[[Path], Any]:
    """Return a function that writes a Parquet file of SCHEMA with some columns replaced; None leaves a column out."""
    n = 4
    whole = {"y": [0, 1, 0, 1], "x": [0.5] * n, "item": [1, 2, 3, 4], "tags": [[1], [], [2, 3], None]}
    table = {name: values for name, values in {**whole, **columns}.items() if values is not None}
    return lambda path: pq.write_table(pa.table(table), path, row_group_size=2)


def cut(make: Callable[[Path], Any], keep: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    def made(path: Path) -> None:
        make(path)
        path.write_bytes(keep(path.read_bytes()))

    return made


def arrow(path: Path) -> None:
    feather.write_feather(pa.table({"y": [0, 1]}), path)


def packed(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=1)


MEND = "fix it, or skip such rows with --bad-rows skip"
MANY = text(criteo_rows(3000))


def value(name: str, row: int, column: str, found: str, *words: str) -> Case:
    """Return a case of Criteo text with one malformed value."""
    rows = [list(one) for one in ROWS]
    rows[row][CRITEO.index(column)] = found
    return Case(name, raw(text(rows)), (f"line {row + 1}: ", column, *words, MEND), skipped=1)


NUMBER = "expected a finite number, or nothing"
HEX = "expected 1 to 16 hexadecimal digits, or nothing"
LABEL = "expected 0 or 1"
OURS, PLAIN = ("parquet", SCHEMA), ("csv", CSV)
NUMBERS = SCHEMA.replace('"y"', '"y"\nkind = "number"')
ROW = ("parquet", SCHEMA.replace('name = "item"', 'name = "item"\nencode = "row"\nrows = 100'))
CASES = [
    # Values of text.
    value("label-negative", 1, "label", "-1", "'-1'", LABEL),
    value("label-missing", 2, "label", "", "label label is nothing", LABEL),
    value("dense-overflow", 3, "I13", "1e400", "'1e400'", NUMBER),
    value("dense-hex", 5, "I8", "0x1f", "'0x1f'", NUMBER),
    Case("not-utf8", line(4, text(ROWS[4:5]).replace(b"\t", b"\xff\t", 1)),
         ("line 5: byte 2 of the line is 0xff", "expected UTF-8 text"), skipped=1),
    value("id-not-hex", 0, "C1", "xyz", "'xyz'", HEX),
    value("id-long", 5, "C6", "f" * 500, "...", HEX),
    # Lines.
    Case("too-few-columns", line(2, b"0\t1\t2\n"), ("line 3: the line has 3 columns", "expected 40", MEND), skipped=1),
    Case("last-line-cut", raw(TEXT[:-100]), ("line 6: the line has ", "expected 40"), skipped=1),
    Case("return-inside", line(3, text(ROWS[3:4]).replace(b"\t", b"\r", 1)), ("is a carriage return",), skipped=1),
    Case("old-mac", raw(text(ROWS, end="\r")), ("line 1: ",), skipped=1, rows=1),
    Case("no-line-end", raw(b"0\t" * (1 << 20)), ("a line is longer than 1 MiB", "is it a text file")),
    Case("test-set-without-label", raw(text([row[1:] for row in ROWS])), ("line 1: the line has 39 columns",), skipped=6),
    Case("bom-twice", raw(b"\xef\xbb\xbf" * 2 + TEXT), ("line 1: the line begins with a byte order mark",), skipped=1),
    # Files.
    Case("only-bom", raw(b"\xef\xbb\xbf"), ("there are no rows left to read",)),
    Case("utf-16", raw(TEXT.decode().encode("utf-16")), ("is not text", "text in UTF-8")),
    Case("xz", raw(b"\xfd7zXZ\0" + bytes(100)), ("is not text", "packed with gzip")),
    Case("arrow", arrow, ("is not text", "Parquet files")),
    Case("folder-of-others", lambda path: (path.mkdir(), (path / "README.md").write_text("x")), ("holds no data files",)),
    # gzip.
    Case("gzip-checksum", raw(packed(MANY)[:-8] + bytes(8)), ("is damaged", "incorrect data check")),
    Case("gzip-junk-after", raw(packed(TEXT) + b"junk" * 10), ("is damaged",)),
    Case("gzip-of-nothing", raw(packed(b"")), ("is empty",)),
    Case("gzip-bomb", raw(packed(b"0" * (40 << 20))), ("a line is longer than 1 MiB",)),
    # Parquet.
    Case("parquet-footer-size", cut(parquet(), lambda b: b[:-8] + b"\xff\xff\xff\x7f" + b[-4:]), ("is damaged",), *OURS),
    Case("parquet-page", cut(parquet(), lambda b: b[:4] + bytes(60) + b[64:]), ("row group 1 cannot be read",), *OURS),
    Case("parquet-nan", parquet(x=[0.5, float("nan"), 1, 2]), ("row 2 of row group 1: column x is nan", NUMBER), *OURS, 1),
    Case("parquet-label-null", parquet(y=[0, None, 1, 1]), ("label y is nothing",), *OURS, 1),
    Case("parquet-word-id", parquet(item=["1", "2", "x", "4"]), ("row 1 of row group 2: column item is 'x'",), *OURS, 1),
    Case("parquet-word-in-list", parquet(tags=[["1"], ["2", "b"], [], None]),
         ("row 2 of row group 1: column tags has 'b'",), *OURS, 1),
    Case("parquet-id-2**80", parquet(item=["1", str(2**80), "3", "4"]),
         ("column item is '1208925819614629174706176'",), *OURS, 1),
    Case("parquet-struct", parquet(item=[{"a": 1}] * 4), ("column 'item' is of type struct",), *OURS),
    Case("parquet-list-of-lists", parquet(tags=[[[1]], [[2]], [], None]), ("column 'tags' is of type list",), *OURS),
    Case("parquet-no-list", parquet(tags=[1, 2, 3, 4]), ("column 'tags' holds no lists",), *OURS),
    Case("parquet-no-rows", parquet(y=[], x=[], item=pa.array([], pa.int64()), tags=pa.array([], pa.list_(pa.int64()))),
         ("no rows left",), *OURS),
    Case("parquet-large-float", parquet(x=[1e300, 0.0, 0.0, 0.0]), ("column x is 1e+300", "fits a float32"), *OURS, 1),
    Case("parquet-large-label", parquet(y=[0.0, 1.0, -1e39, 3.0]),
         ("row 1 of row group 2: label y is -1e+39", "fits a float32", MEND), "parquet", NUMBERS, 1),
    Case("parquet-row-beyond", parquet(item=[1, 2, 100, 4]), ("column item is 100", "a row from 0 to 99"), *ROW, 1),
    # CSV with a schema, and headers.
    Case("csv-header-without-column", raw(b"y,x,thing\n0,1,2\n"), ("line 1: label y is 'y'", LABEL), *PLAIN, 1),
    Case("csv-header-twice", raw(b"y,x,item,item\n0,1,2,3\n"), ("names column 'item' twice",), *PLAIN),
    Case("csv-open-quote", raw(b'y,x,item\n0,1,2\n1,1,"3\n0,1,"4"\n1,1,5\n'),
         ("line 3: a quote is not closed in its line", "expected quotes in pairs", MEND),
         "csv", CSV + "quotes = true", 1, rows=4),
    Case("csv-header-wanted", raw(b"0,1,2\n"), ("its header has no column 'y'",), "csv", CSV + 'header = "yes"'),
    # Held out, time.
    Case("too-few-rows", raw(text(ROWS[:1])), ("there are 1 rows: too few to hold some out",), flags={"valid": "20%"}),
]  # fmt: skip


YA = '[[label]]\nname = "y"\n[[id]]\nname = "a"\n'
SCHEMAS = {
    "a unit of no time": (f'time_unit = "seconds"\n{YA}', "time_unit is 'seconds', and there is no time"),
    "another unit": (f'time = "t"\ntime_unit = "days"\n{YA}', "time_unit is 'days', set it to"),
    "no id": ('[[label]]\nname = "a"', "names no id column"),
    "unknown table": ('[[labels]]\nname = "a"', "there is no 'labels', did you mean 'label'?"),
    "wrong kind": ('[[label]]\nname = 3', "name is 3, set it to text"),
    "no table": ('label = "y"', "write [[label]] above its name"),
    "name misspelt": ("[[label]]\nnam = 'y'", "[[label]]: there is no 'nam', did you mean 'name'?"),
    "no name": ("[[label]]\nkind = 'binary'", "needs either name or names"),
    "twice": ('[[label]]\nname = "y"\n[[id]]\nnames = ["a", "a"]', "id column 'a' is named twice"),
    "rows": ('[[label]]\nname = "y"\n[[id]]\nname = "a"\nrows = 1', "rows is 1, set it between 2 and 2**48"),
    "row of text": ('[[label]]\nname = "y"\n[[id]]\nname = "a"\nencode = "row"\nrows = 9', "row and type is string"),
    "row without rows": (f'{YA}type = "int"\nencode = "row"', "say how many there are: rows = NUMBER"),
    "delimiter": ('[[label]]\nname = "y"\n[[id]]\nname = "a"\n[file]\ndelimiter = "ab"', "set it to one character"),
    "fill": ('[[label]]\nname = "y"\n[[dense]]\nname = "x"\nfill = nan\n[[id]]\nname = "a"', "fill is nan"),
    "of a text": ('[[label]]\nname = "y"\n[[id]]\nname = "a"\nof = "hex"', "of is for fingerprints, its type is string"),
    "large fill": ('[[label]]\nname = "y"\n[[dense]]\nname = "x"\nfill = 1e39\n[[id]]\nname = "a"', "fill is 1e+39"),
    "not among": ('[[label]]\nname = "y"\n[[id]]\nname = "a"\n[file]\ncolumns = ["y"]', "'a' is not among the columns"),
    "tables differ": ('[[label]]\nname = "y"\n[[id]]\nnames = ["a", "b"]\ntable = "t"\n'
                      '[[id]]\nname = "c"\ntable = "t"\nrows = 9',
                      "have different rows"),
}  # fmt: skip
"""Schema files that are refused, with the expected error."""
