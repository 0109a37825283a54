"""The schema: which columns to read from a file and what they mean. README.md here describes its TOML format."""

import difflib
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

from skirl.core.tables import MAX_ROWS, Table
from skirl.data.files.find import BadSchema
from skirl.tools.flags import read_as

DEFAULT_ROWS = 1_000_000
LARGEST_FILE = 1 << 20  # bytes of a schema file; a larger file is something else
LARGEST_FLOAT = 3.4028234663852886e38  # the largest float32


@dataclass(frozen=True)
class Label:
    """A column to predict: 0 or 1 only if it is binary, else any finite number."""

    name: str
    kind: Literal["binary", "number"] = "binary"


@dataclass(frozen=True)
class Dense:
    name: str
    column: str = ""
    transform: Literal["none", "log", "hour"] = "none"
    """none; log: log(1 + max(x, 0)); hour: the hour of YYMMDDHH or of a date, divided by 24."""
    fill: float = 0.0
    """Replaces a missing value, after the transform."""
    indicator: bool = False
    """Add a dense feature that is 1 where the value is missing, else 0."""


@dataclass(frozen=True)
class Id:
    name: str
    column: str = ""
    type: Literal["string", "hex", "int", "float", "fingerprint"] = "string"
    """How values are read. A float must be a whole number; a fingerprint is one that `skirl convert` wrote."""
    of: Literal["", "texts", "hex", "numbers"] = ""
    encode: Literal["hash", "row"] = "hash"
    """hash: hash the value to a row, or look it up in --vocab; row: the value is the row, from 0 to rows - 1."""
    rows: int | None = None
    table: str = ""
    list: bool = False
    separator: str = ""
    pooling: Literal["sum", "mean"] = "sum"
    run: str = ""
    """For lists that are left out (null) where they equal the row above's: the column that says how many rows above each
    row's list is stored."""

    @property
    def kind(self) -> str:
        """How its values are read, which decides their fingerprints: texts, hex, numbers, or "" if unknown."""
        return self.of if self.type == "fingerprint" else {"string": "texts", "hex": "hex"}.get(self.type, "numbers")


@dataclass(frozen=True)
class Text:
    delimiter: str = ","
    columns: tuple[str, ...] = ()
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line names the columns; auto: if it contains the names of all needed columns."""
    quotes: bool = False
    samples: Literal["lines", "shown"] = "lines"


@dataclass(frozen=True)
class FileSchema:
    labels: tuple[Label, ...]
    """Empty for predictions on files without labels; a schema file always has some."""
    dense: tuple[Dense, ...]
    ids: tuple[Id, ...]
    session: str | None = None
    time: str | None = None
    time_unit: Literal["", "seconds", "milliseconds", "microseconds", "YYMMDDHH"] = ""
    missing: tuple[str, ...] = ("",)
    nan_is_missing: bool = False
    text: Text = field(default_factory=Text)
    also: tuple[str, ...] = ()
    """Further columns to read and keep unchanged; a schema file cannot name any."""

    KINDS: ClassVar[dict[str, type]] = {"label": Label, "dense": Dense, "id": Id}

    def __post_init__(self) -> None:
        if not self.ids:
            raise BadSchema("the schema names no id column: add [[id]] with its name")
        if self.time_unit and self.time is None:
            raise BadSchema(f'time_unit is {self.time_unit!r}, and there is no time: write time = "COLUMN" above it')
        _refuse_twice("label", [label.name for label in self.labels])
        _refuse_twice("dense column", [dense.name for dense in self.dense])
        _refuse_twice("id column", [column.name for column in self.ids])
        delimiter = self.text.delimiter
        if delimiter != "tab" and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '\r\n"'):
            raise BadSchema(f"delimiter is {delimiter!r}: set it to one character, such as ',', or to 'tab'")
        _refuse_twice("column of the file", list(self.text.columns))
        absent = [name for name in self.needed if self.text.columns and name not in self.text.columns]
        if absent:
            raise BadSchema(f"column {absent[0]!r} is not among the columns of [file]: add it there in its place")
        for dense in self.dense:
            if abs(dense.fill) > LARGEST_FLOAT:
                raise BadSchema(
                    f"dense column {dense.name!r}: fill is {dense.fill:g}, set it to one that fits a float32"
                )
        for column in self.ids:
            if (wrong := _wrong_in(column)) is not None:
                raise BadSchema(f"id column {column.name!r}: {wrong}")
        for table in {column.table or column.name for column in self.ids}:
            users = [column for column in self.ids if (column.table or column.name) == table]
            for what in ("rows", "encode", "pooling"):
                if len({getattr(column, what) for column in users}) > 1:
                    raise BadSchema(f"table {table!r}: its columns have different {what}, set one for all of them")

    @property
    def kinds(self) -> dict[str, str]:
        """How values are read, for each table that maps ids to rows; "" if a converted file does not say."""
        return {c.table or c.name: c.kind for c in self.ids if c.encode == "hash"}

    @property
    def needed(self) -> tuple[str, ...]:
        named = [label.name for label in self.labels]
        named += [column.column or column.name for column in (*self.dense, *self.ids)]
        named += [self.time] if self.time is not None else []
        named += [column.run for column in self.ids if column.run]
        named += self.also
        return tuple(dict.fromkeys(named))

    @property
    def dense_names(self) -> list[str]:
        """Of a model's dense features. In a converted file, indicators are columns of their own."""
        names = [(column.name, f"{column.name} is missing")[: 1 + column.indicator] for column in self.dense]
        return [name for some in names for name in some]

    @property
    def dense_features(self) -> int:
        return len(self.dense_names)

    def rows_of(self, rows: str | None) -> dict[str, int]:
        """Rows of each table: from --rows, else the schema, else the default. Ids that are rows keep the schema's."""
        numbers, general = {column.table or column.name: column.rows for column in self.ids}, DEFAULT_ROWS
        for part in sorted([] if rows is None else rows.split(","), key=lambda part: "=" in part):
            name, named, number = map(str.strip, part.rpartition("="))
            if not number.isdigit() or not 2 <= int(number) <= MAX_ROWS:
                raise ValueError(f"rows is {rows!r}: set it to a number from 2 to 2**48, or to 100000,C3=2000000")
            if not named and not self.kinds:
                raise ValueError(f"rows is {rows!r}: every id column holds rows already: leave rows out")
            if not named:
                general, numbers = int(number), numbers | dict.fromkeys(self.kinds)
            elif name not in numbers:
                raise ValueError(f"rows is {rows!r}: there is no table {name!r}, name one of {', '.join(numbers)}")
            elif any((c.table or c.name) == name and c.encode == "row" for c in self.ids):
                wrong = f"ids of table {name!r} are rows already (encode is row)"
                raise ValueError(f"rows is {rows!r}: {wrong}: set rows in the schema")
            else:
                numbers[name] = int(number)
        return {name: number or general for name, number in numbers.items()}

    def tables(self, dim: int, rows: Mapping[str, int]) -> list[Table]:
        users = {name: [column for column in self.ids if (column.table or column.name) == name] for name in rows}
        return [
            Table(name, rows=rows[name], dim=dim, features=tuple(c.name for c in of), pooling=of[0].pooling)
            for name, of in users.items()
        ]

    @classmethod
    def load(cls, path: str) -> "FileSchema":
        try:
            with Path(path).open("rb") as file:
                raw = file.read(LARGEST_FILE + 1)
        except OSError as error:
            raise BadSchema(f"schema {path} cannot be read ({error.strerror}): set schema to a TOML file") from None
        if len(raw) > LARGEST_FILE:
            raise BadSchema(f"schema {path} is larger than 1 MiB: set schema to a TOML file, not to the data")
        try:
            return cls.parse(raw.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise BadSchema(f"schema {path} is not UTF-8 text: set schema to a TOML file") from None
        except BadSchema as error:
            raise BadSchema(f"schema {path}{' ' if str(error).startswith('is ') else ': '}{error}") from None

    @classmethod
    @lru_cache(maxsize=16)  # the files of a folder mostly have the same
    def parse(cls, text: str) -> "FileSchema":
        try:
            read = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise BadSchema(f"is not valid TOML ({error}): fix it; docs/data.md has an example") from None
        layout = read.pop("file", {})
        columns = {kind: _columns(kind, read.pop(kind, [])) for kind in FileSchema.KINDS}
        top = {name: read.pop(name) for name in _TOP if name in read}
        if read:
            raise BadSchema(_unknown(next(iter(read)), [*FileSchema.KINDS, "file", *_TOP]))
        if not columns["label"]:
            raise BadSchema("the schema names no label: add [[label]] with the name of its column")
        parts = {"labels": columns["label"], "dense": columns["dense"], "ids": columns["id"]}
        return cls(**parts, text=Text(**_checked(Text, "[file]", layout)), **_checked(cls, "schema", top))

    def toml(self) -> str:
        lines = [f"{name} = {toml(value)}" for name in _TOP[:3] if (value := getattr(self, name))]
        lines += [f"missing = {toml(self.missing)}", f"nan_is_missing = {toml(self.nan_is_missing)}"]
        parts = [("[file]", self.text), *(("[[label]]", of) for of in self.labels)]
        parts += [*(("[[dense]]", of) for of in self.dense), *(("[[id]]", of) for of in self.ids)]
        for title, part in parts:
            of = {f.name: value for f in fields(part) if (value := getattr(part, f.name)) is not None}
            lines += [title, *(f"{name} = {toml(value)}" for name, value in of.items())]
        return "\n".join(lines) + "\n"


_TOP = ("session", "time", "time_unit", "missing", "nan_is_missing")


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    return repr(value)


def _columns(kind: str, entries: Any) -> tuple[Any, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadSchema(f"{kind} has to be one or more tables: write [[{kind}]] above its name")
    made: list[Any] = []
    of = FileSchema.KINDS[kind]
    for entry in entries:
        names = entry.pop("names", None)
        if (names is None) == ("name" not in entry):
            _checked(of, f"[[{kind}]]", entry)  # which says whether the name is misspelt
            raise BadSchema(f"[[{kind}]] needs either name or names, not both")
        for name in [entry["name"]] if names is None else names if isinstance(names, list) else [names]:
            made.append(of(**_checked(of, f"[[{kind}]] {name!r}", entry | {"name": name})))
    return tuple(made)


def _checked(kind: type, where: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise BadSchema(f"{where} has to be a table of fields")
    hints, read = get_type_hints(kind), {}
    for name, value in values.items():
        if name not in hints:
            raise BadSchema(f"{where}: {_unknown(name, list(hints))}")
        try:
            read[name] = read_as(hints[name], value)
            if value != value:  # a NaN
                raise TypeError("a finite number")
        except (TypeError, OverflowError) as wanted:
            raise BadSchema(f"{where}: {name} is {value!r}, set it to {wanted}") from None
    return read


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"there is no {name!r}" + (f", did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}")


def _wrong_in(column: Id) -> str | None:
    if column.rows is not None and not 2 <= column.rows <= MAX_ROWS:
        return f"rows is {column.rows}, set it between 2 and 2**48"
    if column.encode == "row" and column.type not in ("int", "float"):
        return f"encode is row and type is {column.type}: set type to int, or encode to hash"
    if column.of and column.type != "fingerprint":
        return f"of is for fingerprints, its type is {column.type}: leave it out"
    if column.encode == "row" and column.rows is None:
        return "encode is row, so say how many there are: rows = NUMBER"
    if column.run and (not column.list or column.separator):
        return "run is for list columns, without a separator: leave it out"
    if column.separator and not column.list:
        return "it has a separator, so write list = true"
    if len(column.separator) > 1:
        return f"separator is {column.separator!r}, set it to one character"
    return None


def _refuse_twice(what: str, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if not name:
            raise BadSchema(f"a {what} has an empty name: set name")
        if count > 1:
            raise BadSchema(f"{what} {name!r} is named twice: give one another name")


_CRITEO = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
_AVAZU = (
    "id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain",
    "app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type",
    *(f"C{i}" for i in range(14, 22)),
)  # fmt: skip
_AVAZU_INTS = {"C1", "banner_pos", "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22))}

BUILT_IN = {
    "criteo": FileSchema(
        labels=(Label("label"),),
        dense=tuple(Dense(name, transform="log") for name in _CRITEO[1:14]),
        ids=tuple(Id(name, type="hex") for name in _CRITEO[14:]),
        text=Text("tab", _CRITEO),
    ),
    "avazu": FileSchema(
        labels=(Label("click"),),
        dense=(Dense("hour", transform="hour"),),
        ids=tuple(Id(name, type="int" if name in _AVAZU_INTS else "hex") for name in _AVAZU[3:]),
        time="hour",
        time_unit="YYMMDDHH",
        text=Text(",", _AVAZU),
    ),
    "mind": FileSchema(
        labels=(Label("click"),),
        dense=(),
        ids=(Id("user"), Id("item"), Id("history", table="item", list=True, separator=" ")),
        session="impression",
        time="time",
        text=Text("tab", ("impression", "user", "time", "history", "item", "click"), "no", samples="shown"),
    ),
}
"""Criteo (both Kaggle's and Terabyte) as text or Parquet; Avazu as CSV, with or without its header; MIND's
behaviors.tsv."""
