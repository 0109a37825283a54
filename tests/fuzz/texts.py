"""Targets of text: Criteo plain and packed, Terabyte's days, Avazu, any CSV."""

import gzip
import re
import zlib
from pathlib import Path
from typing import Any

from skirl.data import DataFlags
from skirl.data.files.find import BadFile, BadRow, BadSchema
from skirl.data.files.schema import BUILT_IN, FileSchema
from tests.data.logs import criteo_rows
from tests.fuzz import plain
from tests.fuzz.loop import READ, Target, clean
from tests.fuzz.mutate import TEXTS, Draw, mutated, mutated_text

ERRORS = (BadFile, BadRow, BadSchema)
ROWS = 1000
CSV = """
time = "hour"
missing = ["", "NULL"]
nan_is_missing = true
[file]
columns = ["y", "hour", "x", "z", "item", "seen", "user", "ratio", "note"]
[[label]]
name = "y"
[[label]]
name = "hour"
kind = "number"
[[dense]]
name = "x"
transform = "log"
indicator = true
fill = 0.25
[[dense]]
name = "z"
[[dense]]
name = "clock"
column = "hour"
transform = "hour"
[[id]]
name = "item"
[[id]]
name = "seen"
type = "int"
list = true
separator = "|"
[[id]]
name = "names"
column = "note"
list = true
separator = ";"
table = "item"
[[id]]
name = "user"
type = "int"
encode = "row"
rows = 500
[[id]]
name = "ratio"
type = "float"
"""


def csv_text(draw: Draw, n: int, header: bool) -> bytes:
    """Return valid CSV text."""
    out = ["y,hour,x,z,item,seen,user,ratio,note"] if header else []
    for _ in range(n):
        seen = "|".join(str(draw.randrange(99)) for _ in range(draw.randrange(4)))
        x = draw.choice(["", "NULL", "3", "0.5", "1e3"])
        fields = [draw.randrange(2), 14102100 + draw.randrange(99), x, draw.random(), f"i{draw.randrange(50)}", seen]
        fields += [
            draw.randrange(500),
            draw.choice(["", "7", "12"]),
            ";".join(draw.choice("abc") for _ in range(draw.randrange(3))),
        ]
        out.append(",".join(map(str, fields)))
    return ("\n".join(out) + "\n").encode()


def avazu_text(draw: Draw, n: int, header: bool) -> bytes:
    """Return valid text in Avazu's layout."""
    schema = BUILT_IN["avazu"]
    out = [",".join(schema.text.columns)] if header else []
    whole = {column.name for column in schema.ids if column.type == "int"}
    for _ in range(n):
        fields = [str(draw.randrange(10**18)), str(draw.randrange(2)), str(14102100 + draw.randrange(24))]
        fields += [
            str(draw.randrange(-1, 2000)) if name in whole else f"{draw.getrandbits(32):08x}"
            for name in schema.text.columns[3:]
        ]
        out.append(",".join(fields))
    return ("\n".join(out) + "\n").encode()


def criteo_text(draw: Draw, n: int, header: bool) -> bytes:
    """Return valid text in Criteo's layout."""
    lines = ["\t".join(row) for row in criteo_rows(n, draw.randrange(1 << 30))]
    names = ["\t".join(BUILT_IN["criteo"].text.columns)] if header else []
    return ("\n".join(names + lines) + "\n").encode()


class Text(Target):
    """One text file. packed: compressed with gzip, before or after it is mutated."""

    def __init__(self, name: str, kind: str, made: Any, *, packed: bool = False, toml: str | None = None) -> None:
        self.name, self._kind, self._made, self._packed, self._toml = name, kind, made, packed, toml
        self._schema = FileSchema.parse(toml) if toml is not None else BUILT_IN[kind]
        self._delimiter = b"\t" if self._schema.text.delimiter == "tab" else b","

    def draw(self, draw: Draw, folder: Path) -> None:
        data = self._made(draw, draw.choice([1, 2, 6, 30]), draw.random() < 0.3)
        outer = self._packed and draw.random() < 0.5
        if not outer:
            change = draw.random()
            data = mutated_text(draw, data, self._delimiter) if change < 0.75 else mutated(draw, data)
        if self._packed:
            data = gzip.compress(data, draw.choice([0, 1, 9]))
            if outer:
                data = mutated(draw, data, [gzip.compress(b"7\t" * 20)])
        (folder / "file").write_bytes(data[: 1 << 19])
        (folder / "part").write_text(str(draw.choice([150, 300, 700, 1 << 21])))
        if self._toml is not None:
            (folder / "schema.toml").write_text(self._toml)

    def judge(self, folder: Path) -> str:
        data = (folder / "file").read_bytes()
        loose = packed = data[:2] == b"\x1f\x8b"  # packed files may be refused for any damage
        expected: plain.Reading | None = None
        rows = self._schema.rows_of(str(ROWS))
        try:
            text = gzip.decompress(data) if packed else data
            expected = plain.read_text(text, self._schema, rows, packed)
        except (plain.Refused, OSError, EOFError, zlib.error):
            pass
        return judged_text(f"{self._kind}:{folder / 'file'}", folder, expected, loose=loose)


def judged_text(
    data: str, folder: Path, expected: plain.Reading | None, *, loose: bool = False, one: bool = True
) -> str:
    """Read files twice, refusing malformed rows and skipping them, and compare with what is expected."""
    flags: dict[str, Any] = {"rows": str(ROWS), "batch": 7}
    if (folder / "schema.toml").exists():
        flags["schema"] = str(folder / "schema.toml")
    part = int((folder / "part").read_text())
    outcome = ""
    for bad_rows in ("refuse", "skip"):
        try:
            files = DataFlags(data, bad_rows=bad_rows, **flags).files(part)
            found = plain.samples_of(list(files))
        except ValueError as error:
            if "there are no rows left to read" not in str(error):
                clean(error, folder, *ERRORS)
            said, outcome = str(error), "refused"
            if expected is None or loose:
                continue
            if isinstance(error, BadRow):
                assert bad_rows == "refuse" and expected.first_bad is not None, f"a good row is refused: {said}"
                if one:
                    line = int(re.findall(r", line ([\d,]+): ", said)[0].replace(",", ""))
                    assert line == expected.first_bad + 1 + expected.before, f"row {expected.first_bad} is bad: {said}"
            else:
                left = expected.good if bad_rows == "skip" else expected.rows
                assert not left, f"a good file is refused: {said}"
            continue
        assert expected is not None, f"what no one can read was read: {len(found)} samples"
        assert bad_rows == "skip" or expected.first_bad is None, f"row {expected.first_bad} is malformed, and was read"
        plain.assert_equal(found, expected.good)
        assert files.bad_rows == len(expected.rows) - len(expected.good), "malformed rows are counted wrongly"
        outcome = READ
    return outcome


class Terabyte(Target):
    """Days of text, some packed, in numerical order."""

    name = "terabyte"

    def draw(self, draw: Draw, folder: Path) -> None:
        (folder / "days").mkdir()
        days = sorted(draw.sample(range(12), draw.randint(2, 4)))
        for day in days:
            data = criteo_text(draw, draw.choice([1, 5, 20]), draw.random() < 0.2)
            if draw.random() < 0.4:
                data = mutated_text(draw, data, b"\t")
            packed = draw.random() < 0.5
            path = folder / "days" / (f"day_{day}.gz" if packed else f"day_{day}")
            path.write_bytes(gzip.compress(data, 1) if packed else data)
        (folder / "part").write_text(str(draw.choice([300, 700, 1 << 21])))

    def judge(self, folder: Path) -> str:
        rows = BUILT_IN["criteo"].rows_of(str(ROWS))
        paths = sorted((folder / "days").iterdir(), key=lambda path: int(re.findall(r"\d+", path.name)[0]))
        whole: plain.Reading | None = plain.Reading([])
        for path in paths:
            data = path.read_bytes()
            packed = data[:2] == b"\x1f\x8b"
            try:
                text = gzip.decompress(data) if packed else data
                assert whole is not None
                whole.rows += plain.read_text(text, BUILT_IN["criteo"], rows, packed).rows
            except plain.Refused:
                whole = None
                break
        return judged_text(f"criteo:{folder / 'days'}", folder, whole, one=False)


class Quoted(Target):
    """Quoted CSV: lines with well-formed quotes must be read as Python's csv reads them."""

    name = "csv-in-quotes"

    def draw(self, draw: Draw, folder: Path) -> None:
        out = []
        for _ in range(draw.choice([1, 3, 9])):
            fields = [str(draw.randrange(2)), draw.choice(TEXTS).replace('"', ""), str(draw.randrange(9))]
            quoted = [f'"{x}"' if draw.random() < 0.5 and "\n" not in x else x for x in fields]
            out.append(",".join(quoted))
        data = "\n".join(out).encode() + b"\n"
        (folder / "file").write_bytes(mutated(draw, data) if draw.random() < 0.5 else data)
        (folder / "part").write_text(str(draw.choice([3, 37, 1 << 21])))
        (folder / "schema.toml").write_text(
            '[file]\ncolumns = ["y", "a", "b"]\nquotes = true\n[[label]]\nname = "y"\nkind = "number"\n'
            '[[id]]\nname = "a"\n[[id]]\nname = "b"\ntype = "int"\n'
        )

    def judge(self, folder: Path) -> str:
        import csv

        data = (folder / "file").read_bytes()
        lines = data.split(b"\n")[: -1 if data.endswith(b"\n") else None]
        field = rb'(?:"(?:[^"\r]|"")*"|[^",\r]*)'
        sure = all(re.fullmatch(field + rb"(?:," + field + rb")*", line) for line in lines) and data.isascii()
        expected = None
        schema = FileSchema.load(str(folder / "schema.toml"))
        if sure and data and b"\0" not in data:
            rows = []
            for line in lines:
                fields = next(csv.reader([line.decode()]), [""]) or [""]
                named = dict(zip(schema.text.columns, (x.encode() for x in fields)))
                rows.append(None if len(fields) != 3 else plain.read_row(named, schema, schema.rows_of(str(ROWS))))
            expected = plain.Reading(rows)
        if expected is None:
            return _sound(f"csv:{folder / 'file'}", folder)
        return judged_text(f"csv:{folder / 'file'}", folder, expected, loose=True)


def _sound(data: str, folder: Path) -> str:
    """Judge a file of unknown content: there must be a clean error, or batches with valid rows."""
    part = int((folder / "part").read_text())
    flags = DataFlags(data, rows=str(ROWS), schema=str(folder / "schema.toml"), bad_rows="skip", batch=7)
    try:
        for _, _, ids in plain.samples_of(list(flags.files(part))):
            assert all(0 <= row < ROWS for feature in ids for row in feature)
    except ValueError as error:
        return "refused" if "there are no rows left to read" in str(error) else clean(error, folder, *ERRORS)
    return READ


TARGETS: list[Target] = [
    Text("criteo", "criteo", criteo_text),
    Text("criteo-gz", "criteo", criteo_text, packed=True),
    Terabyte(),
    Text("avazu", "avazu", avazu_text),
    Text("csv", "csv", csv_text, toml=CSV),
    Quoted(),
]
