"""Drafts a schema from the first rows of a file, with comments where a person should decide."""

import csv
import re
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from skirl.data.files import columns as arrow
from skirl.data.files.columnar import DAMAGED, SLICE, embedded_schema, short
from skirl.data.files.columns import is_date, is_list, is_text, one, pc, plain
from skirl.data.files.find import BadFile, BadSchema, find, kind_of, no_column
from skirl.data.files.hashing import BAD, GOOD
from skirl.data.files.schema import BUILT_IN, FileSchema, Id, Text, toml
from skirl.data.files.text import TextFile, UnpackedBytes

HEAD = 16 << 20
"""Bytes of a text file to look at; of a Parquet file, at most 65,536 rows."""
NULLS = ("NULL", "null", "NA", "N/A", "nan", "NaN", "None", "\\N")
LABEL = re.compile(r"label|target|click|^y$", re.IGNORECASE)
TIME = re.compile(r"time|date|hour|when|stamp|\bts$|_at$", re.IGNORECASE)
SESSION = re.compile(r"session|visit|impression", re.IGNORECASE)
ID = re.compile(r"ids?$|user|item|product|categor|code|type", re.IGNORECASE)
AMOUNT = re.compile(r"price|cost|amount|count|number|num_|\bage|score|total|duration|size", re.IGNORECASE)


@dataclass
class Column:
    name: str
    values: Any
    """One flat Arrow array without nulls: of lists, the ids in them."""
    kind: str
    """int, float (whole, maybe with a point), number, date, text, or why the column is left out."""
    list: bool = False
    separator: str = ""

    def numbers(self) -> np.ndarray:
        found, kinds = arrow.floats_of(self.values, True)
        return np.asarray(found[kinds == GOOD], np.float64)

    @property
    def whole(self) -> bool:
        return self.kind in ("int", "float")


def draft(data: str, label: str | None = None) -> str:
    """Return a schema for the files that `data` names, as TOML; a built-in or a stored one as it is."""
    kind, named, path = data.partition(":")
    path, *more = find(path if named else data)
    form = kind_of(path)
    stored = embedded_schema(path) if form == "parquet" else None
    if stored is not None or (named and kind in BUILT_IN):
        return stored or BUILT_IN[kind].toml()
    read, layout, whole = _of_parquet(path) if form == "parquet" else _of_text(path, form == "gzip")
    whole = whole and not more
    rows = len(next(iter(read.values()), ()))
    if not rows:
        raise BadFile(path, "has no rows", "draft the schema from a file that has some")
    texts = [plain(column, ()) for column in read.values() if is_text(column.type)]
    nulls = [null for null in NULLS if any(pc.any(pc.equal(column, null)).as_py() for column in texts)]
    columns = [_looked_at(name, column, ("", *nulls)) for name, column in read.items() if name]
    chosen = _label(columns, label, path)
    lines = [
        f"# Drafted from the {'' if whole else 'first '}{rows:,} rows of {path}. Read it over: each guess has a comment.",
        "# Ids get rows by hash, some the same one: rows is ten times the values in this file; set more if others come."
        if whole
        else '# "More to come": say with --rows or --vocab how many rows such a table has; 1,000,000 if you do not.',
        f"missing = {toml(('', *nulls))}",
    ]
    if any(pt.is_floating(c.values.type) and pc.any(pc.is_nan(c.values)).as_py() for c in columns):
        lines.append("nan_is_missing = true")
    body = _decided([column for column in columns if column is not chosen], lines, whole)
    if layout:
        lines += ["", "[file]", *(f"{name} = {toml(value)}" for name, value in layout.items() if value)]
    numbers = chosen.numbers()
    about = f"{numbers.mean():.3g} on average" + f", missing in {rows - len(numbers):,} rows" * (len(numbers) < rows)
    binary = "binary" if np.isin(numbers, (0, 1)).all() else "number"
    lines += _entry("label", {"name": chosen.name, "kind": binary}, about)
    written = "\n".join([*lines, *body, ""])
    if "\n[[id]]" not in written:
        raise BadSchema(
            f"{path}: no column looks like ids, and a model needs some: write them as whole numbers or texts"
        )
    return written


def _of_parquet(path: str) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """The columns of the first rows, the layout of text, and whether these rows are all."""
    try:
        with pq.ParquetFile(path) as file:
            batch = next(file.iter_batches(SLICE), None)
            whole = batch is None or len(batch) == file.metadata.num_rows
    except DAMAGED as error:
        raise BadFile(path, f"is damaged ({short(error)})", "get it again, or write it again") from None
    return {} if batch is None else dict(zip(batch.schema.names, batch.columns)), {}, whole


def _of_text(path: str, packed: bool) -> tuple[dict[str, Any], dict[str, Any], bool]:
    with closing((UnpackedBytes if packed else pa.OSFile)(path)) as file:
        head = file.read_at(1 << 16, 0).decode("utf-8-sig", "replace")
    lines, quotes = head.splitlines()[:100], '"' in head
    lines = lines[:-1] or lines  # the last may be cut off

    def split(delimiter: str) -> list[list[str]]:
        return list(csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE))

    delimiter = next((d for d in "\t,;|" if len(widths := {*map(len, split(d))}) == 1 and widths != {1}), None)
    if delimiter is None:
        found = "its lines do not have equally many columns, separated by tabs, commas, ; or |"
        raise BadFile(path, found, "write it so, or as Parquet")
    first = split(delimiter)[0]
    named = not any(re.fullmatch(r"[-+.\d]*\d[-+.\d]*", name) for name in first) and len({*first}) == len(first)
    names = first if named else [f"column_{n}" for n in range(1, len(first) + 1)]
    layout: dict[str, Any] = {"delimiter": "tab" if delimiter == "\t" else delimiter, "quotes": quotes}
    layout |= {"header": "yes"} if named else {"header": "no", "columns": tuple(names)}
    schema = FileSchema((), (), tuple(Id(name) for name in names if name), text=Text(**layout))
    with closing(TextFile(path, schema, packed, HEAD)) as file:
        return dict(file.read(0).columns), layout, not file.has(1)


def _looked_at(name: str, column: Any, nulls: tuple[str, ...]) -> Column:
    lists = is_list(one(column).type)
    values = plain(one(column).flatten() if lists else column, nulls).drop_null()
    number = pt.is_integer(values.type) or pt.is_floating(values.type) or pt.is_boolean(values.type)
    if not (number or is_text(values.type) or is_date(values.type) or pt.is_null(values.type)):
        return Column(name, values, f"it is of type {one(column).type}")
    if len(values.unique()) < 2:
        return Column(name, values, "its values are all the same" if len(values) else "it has no value")
    kind = _kind(values)
    if kind != "text" or lists:
        fraction = lists and kind == "number"
        return Column(name, values, "its lists hold numbers with a fraction" if fraction else kind, lists)
    for separator in "|;, ":
        if 10 * pc.sum(pc.match_substring(values, separator)).as_py() > len(values):
            items = pc.list_flatten(pc.split_pattern(values, separator))
            if separator in "|;" or pc.all(pc.match_substring_regex(items, r"^[A-Za-z]{0,2}\d+$")).as_py():
                return Column(name, items, kind if (kind := _kind(items)) != "number" else "text", True, separator)
    return Column(name, values, "text")


def _kind(values: Any) -> str:
    """How the readers take all of these values."""
    if is_date(values.type):
        return "date"
    for kind in ("int", "float"):
        if not (arrow.ints_of(values, True, kind == "float")[1] == BAD).any():
            return kind
    long = is_text(values.type) and pc.all(pc.match_substring_regex(values, r"^\d+$")).as_py()
    if not long and not (arrow.floats_of(values, True)[1] == BAD).any():
        return "number"
    if not is_text(values.type):
        return "it holds infinite numbers"
    dates = all(not (arrow.seconds_of(some)[1] == BAD).any() for some in (values.slice(0, 100), values))
    return "date" if dates else "text"


def _label(columns: list[Column], label: str | None, path: str) -> Column:
    numbers = {c.name: c for c in columns if (c.whole or c.kind == "number") and not c.list}
    if label is not None:
        if label not in (there := [column.name for column in columns]):
            raise BadSchema(f"{path} has {no_column(label, there)}: set label to another")
        if label not in numbers:
            found = f"column {label!r} does not hold different numbers"
            raise BadSchema(f"{path}: {found}: set label to one that does ({', '.join(numbers) or 'none'})")
        return numbers[label]
    binary = [column for column in numbers.values() if {*column.numbers()} == {0.0, 1.0}]
    found = [column for column in binary if LABEL.search(column.name)] or binary
    if len(found) == 1:
        return found[0]
    which = f"{len(found)} columns do ({', '.join(c.name for c in found)})" if found else "no column does"
    raise BadSchema(f"{path}: a label holds 0 and 1, and {which}: name the column to predict with --label")


def _decided(columns: list[Column], top: list[str], whole_file: bool) -> list[str]:
    """Return the lines of dense and id columns; those of session and time are added to `top`."""
    dense, ids, left_out = list[str](), list[Column](), list[str]()
    session = time = False
    for column in columns:
        name, whole, unit = toml(column.name), column.whole, _unit(column)
        if (column.kind == "date" or unit) and not (time or column.list):
            time = True
            top += [f"time = {name}", *([f"time_unit = {toml(unit)}"] if unit else [])]
            if unit in ("", "YYMMDDHH") and not pt.is_date(column.values.type):
                dense += _entry("dense", {"name": column.name, "transform": "hour"}, "the hour of the day")
        elif not whole and column.kind not in ("number", "text"):
            left_out.append(f"# {name} is left out: {'it is another time' if column.kind == 'date' else column.kind}")
        elif SESSION.search(column.name) and not (session or column.list):
            session = True
            top.append(f"session = {name}  # which rows belong together; training does not read it")
        elif not column.list and (column.kind == "number" or (whole and _is_amount(column))):
            numbers = column.numbers()
            log = {"transform": "log"} if numbers.min() >= 0 and numbers.max() > 10 else {}
            about = f"{numbers.min():g} to {numbers.max():g}" + "; or is it an id?" * whole
            dense += _entry("dense", {"name": column.name, **log}, about)
        else:
            ids.append(column)
    return [*dense, *_ids(ids, left_out, whole_file), "", *left_out]


def _unit(column: Column) -> str:
    """The unit of a column of times that are numbers; "" for any other."""
    if column.kind == "int" and TIME.search(column.name):
        for unit in ("YYMMDDHH", "seconds", "milliseconds", "microseconds"):
            seconds = arrow.since_1970(column.numbers(), unit)
            if ((seconds > 6e8) & (seconds < 3e9)).all():  # 1989 to 2065
                return unit
    return ""


def _is_amount(column: Column) -> bool:
    """Whether whole numbers rather count or measure something: by name, sign, or most of them far below the largest."""
    numbers = column.numbers()
    skewed = numbers.max() > 20 * max(1.0, float(np.median(numbers))) and len(np.unique(numbers)) > 50
    return not ID.search(column.name) and (bool(AMOUNT.search(column.name)) or numbers.min() < 0 or skewed)


def _ids(ids: list[Column], left_out: list[str], whole: bool) -> list[str]:
    """Return the lines of id columns. Of a whole file, tables get ten rows for each id: one in ten shares its row."""
    entries, ids_of = list[tuple[dict[str, Any], str]](), defaultdict[str, list[Any]](list)
    distinct = {column.name: pc.unique(column.values) for column in ids}
    for column in ids:
        found = distinct[column.name]
        if not column.list and len(found) >= max(100, len(column.values)):
            left_out.append(f"# {toml(column.name)} is left out: its {len(found):,} values are all different")
            continue
        fields: dict[str, Any] = {"name": column.name, "type": "string" if column.kind == "text" else column.kind}
        about = f"{len(found):,} values"
        if column.list:
            fields |= {"list": True} | ({"separator": column.separator} if column.separator else {})
            alike = [c for c in ids if not c.list and c.kind == column.kind and c.values.type == column.values.type]
            both = {c.name: pc.sum(pc.is_in(distinct[c.name], found)).as_py() for c in alike}
            shared = [name for name, count in both.items() if 2 * count > len(distinct[name])]
            if shared:  # of several, that which has the most of the values of either
                table = max(shared, key=lambda n: both[n] / (len(distinct[n]) + len(found) - both[n]))
                fields["table"] = table
                about += f", with most of {table}'s, so it has its rows"
        if not whole and 20 * len(found) > len(column.values):
            about += ", more to come"
        ids_of[fields.get("table", column.name)].append(found)
        entries.append((fields, about))
    if whole:
        for fields, _ in entries:
            of_table = pc.unique(pa.chunked_array(ids_of[fields.get("table", fields["name"])]))
            fields["rows"] = max(100, 10 * len(of_table))
    return [line for entry in entries for line in _entry("id", *entry)]


def _entry(kind: str, fields: dict[str, Any], about: str) -> list[str]:
    first, *rest = (f"{name} = {toml(value)}" for name, value in fields.items())
    return ["", f"[[{kind}]]", f"{first}  # {about}", *rest]
