"""Targets of text: Criteo plain and packed, any CSV."""

import gzip
from pathlib import Path
from typing import Any

from skirl.data.files.schema import BUILT_IN, FileSchema
from tests.data.logs import criteo_rows
from tests.fuzz.mutate import TEXTS, Draw, mutated, mutated_text
from tests.fuzz.samples import OfFile
from tests.fuzz.target import Target

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


QUOTED = """
file = { columns = ["y", "a", "b"], quotes = true }
[[label]]
name = "y"
kind = "number"
[[id]]
name = "a"
[[id]]
name = "b"
type = "int"
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


def criteo_text(draw: Draw, n: int, header: bool) -> bytes:
    """Return valid text in Criteo's layout."""
    lines = ["\t".join(row) for row in criteo_rows(n, draw.randrange(1 << 30))]
    names = ["\t".join(BUILT_IN["criteo"].text.columns)] if header else []
    return ("\n".join(names + lines) + "\n").encode()


def quoted_text(draw: Draw, n: int, header: bool) -> bytes:
    """Return CSV with values in quotes."""
    out = []
    for _ in range(n):
        fields = [str(draw.randrange(2)), draw.choice(TEXTS).replace('"', ""), str(draw.randrange(9))]
        out.append(",".join(f'"{x}"' if draw.random() < 0.5 and "\n" not in x else x for x in fields))
    return "\n".join(out).encode() + b"\n"


class Text(OfFile):
    """One text file. packed: compressed with gzip, before or after it is mutated."""

    def __init__(self, name: str, kind: str, made: Any, *, packed: bool = False, toml: str | None = None) -> None:
        self.name, self.kind, self._made, self._packed, self._toml = name, kind, made, packed, toml
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
        if self._toml is not None:
            (folder / "schema.toml").write_text(self._toml)


TARGETS: list[Target] = [
    Text("criteo", "criteo", criteo_text),
    Text("criteo-gz", "criteo", criteo_text, packed=True),
    Text("csv", "csv", csv_text, toml=CSV),
    Text("csv-in-quotes", "csv", quoted_text, toml=QUOTED),
]
