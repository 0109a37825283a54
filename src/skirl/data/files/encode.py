"""Encodes the columns of a file as the parts of a batch: labels, dense numbers, rows of tables.

Malformed rows are marked on the way. At the end, the first one is raised, or all are left out and counted.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from skirl.data.files import columns as arrow
from skirl.data.files.column import Column, Encoded, numbered, offsets_of
from skirl.data.files.columns import Span, is_list, is_text, kinds_of, one, pc, plain, value_at
from skirl.data.files.find import BadRow, BadSchema, WrongTime, shown
from skirl.data.files.hashing import BAD, BY_HASH, BY_OPEN, GOOD, NONE, hash_numbers, hash_texts, rows_by_hash, seed_of
from skirl.data.files.schema import Dense, FileSchema, Id, Label
from skirl.tools.jit import kernel, read_only

FITS, EACH = "a number that fits a float32", "a value in each row"
"""The expected form of labels and dense values, which a model gets as float32, and of sessions, for error messages."""


@dataclass
class Raw:
    """A piece of a file as Arrow reads it."""

    columns: Mapping[str, Any]
    """Arrow arrays of n rows, by name."""
    places: np.ndarray
    """int64 [n]: the index of each row in the piece."""
    file: str
    where: Callable[[int], str]
    """Returns the location of a row of the piece in the file, as an error names it; malformed rows count."""
    broken: list[tuple[int, str, str]]
    """Rows that could not be split into columns: the row of the piece, what was found, what was expected."""
    nulls: bool = False
    """True if texts that mean no value are nulls already."""

    @property
    def rows(self) -> int:
        return len(self.places)

    def only(self, low: int, high: int | None) -> "Raw":
        """Rows `low` to before `high`, or to the last, of the piece, malformed ones counted."""
        end = self.rows + len(self.broken) if high is None else high
        places = self.places[(self.places >= low) & (self.places < end)]
        begin = int(np.searchsorted(self.places, low))
        columns = {name: column.slice(begin, len(places)) for name, column in self.columns.items()}
        broken = [each for each in self.broken if low <= each[0] < end]
        return replace(self, columns=columns, broken=broken, places=places)


class RowsOf(Protocol):
    """Maps fingerprints of a table to its rows; 0 is a missing value."""

    @property
    def described(self) -> str:
        """Equal if the same fingerprints get the same rows, in tables of the same size."""
        ...

    def __call__(self, table: str, fingerprints: np.ndarray) -> np.ndarray: ...


@dataclass
class ByHash:
    """Maps missing values to row 0, and all others to a row from 1 on by hash."""

    rows: Mapping[str, int]
    described: str = BY_HASH

    def __call__(self, table: str, fingerprints: np.ndarray) -> np.ndarray:
        rows = self.rows[table]
        out = np.empty(len(fingerprints), np.int32 if rows < 1 << 31 else np.int64)
        rows_by_hash(read_only(fingerprints), rows, out)
        return out


@dataclass
class Fingerprints:
    """Keeps the fingerprints themselves in place of rows, as int64."""

    described: str = BY_OPEN
    """In training, only an open vocabulary resumes from a state of fingerprints."""

    def __call__(self, table: str, fingerprints: np.ndarray) -> np.ndarray:
        return fingerprints.view(np.int64)


class Marks:
    """The malformed rows of a piece, and the reason for the first of them."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self.bad = np.zeros(raw.rows, bool)
        self.at, *self._first = min(raw.broken, default=(-1, "", ""))
        """The index in the part of the first malformed row, -1 if there is none; what was found there, and expected."""

    def add(self, wrong: np.ndarray, why: Callable[[int], tuple[str, str]]) -> None:
        """Mark rows as malformed. wrong: a bool for each row; why: returns what was found and expected in a row."""
        if wrong.any():
            i = int(np.argmax(wrong))
            self.bad |= wrong
            if self.at < 0 or self._raw.places[i] < self.at:
                self.at, *self._first = int(self._raw.places[i]), *why(i)

    def add_values(self, what: str, column: pa.Array, wrong: np.ndarray, expected: str) -> None:
        """Mark rows with a malformed value. what: the column, as an error names it."""
        self.add(wrong, lambda i: (f"{what} is {shown(value_at(column, i))}", expected))

    def refuse(self) -> None:
        if self.at >= 0:
            raise BadRow(self._raw.file, self._raw.where(self.at), *self._first)


@dataclass
class Encoder:
    """Encodes pieces of files by a schema; picklable, so that worker processes can use it too."""

    schema: FileSchema
    rows_of: RowsOf
    rows: Mapping[str, int]
    skip: bool = False
    """Leave malformed rows out instead of raising."""
    keep: Span | None = None
    all_there: bool = False
    """Treat a row as malformed if a column that the schema keeps is missing or NaN, or is no valid time in its unit."""

    def __call__(self, raw: Raw) -> Encoded:
        schema = self.schema
        marks = Marks(raw)
        seen: dict[str, pa.Array] = {}
        for name in schema.needed:
            column = raw.columns[name]
            of_lists = is_list(column.type) or is_shared(column)
            seen[name] = column if of_lists else plain(column, () if raw.nulls else schema.missing)
        labels = np.empty((raw.rows, len(schema.labels)), np.float32)
        for k, label in enumerate(schema.labels):
            self._label(seen[label.name], label, labels[:, k], marks)
        dense = np.empty((raw.rows, schema.dense_features), np.float32)
        k = 0
        for column in schema.dense:
            k += self._dense(seen[column.column or column.name], column, dense, k, marks)
        ids = []
        for column in schema.ids:
            read = self._lists if column.list else self._ids
            ids.append(read(raw, seen[column.column or column.name], column, marks))
        wanted = np.ones(raw.rows, bool)
        if self.keep is not None:
            wanted = self._in_time(raw.file, seen[self.keep.column], self.keep, marks)
        kept = [self._kept(seen[name], name, marks) for name in schema.also]
        if self.all_there:
            for name, column in zip(schema.also, kept):
                self._check_there(column, name, marks)
        if not self.skip:
            marks.refuse()
        broken = len(raw.broken)
        bad = int(marks.bad.sum()) + broken
        done = Encoded(labels, dense, ids, raw.places, raw.rows + broken, bad, kept)
        wanted &= ~marks.bad
        return done if wanted.all() else done.take(np.flatnonzero(wanted))

    def _label(self, column: pa.Array, label: Label, out: np.ndarray, marks: Marks) -> None:
        values, kinds = arrow.floats_of(column, False)
        what, wrong, expected = f"label {label.name}", kinds != GOOD, "a finite number"
        if label.kind == "binary":
            wrong, expected = wrong | (values != 0) & (values != 1), "0 or 1"
        marks.add_values(what, column, wrong, expected)
        with np.errstate(all="ignore"):
            out[:] = values
        marks.add_values(what, column, ~np.isfinite(out) & (kinds == GOOD), FITS)

    def _dense(self, column: pa.Array, dense: Dense, out: np.ndarray, k: int, marks: Marks) -> int:
        """Write a column's dense features from column `k` of `out` on, and return how many there are."""
        numbers_of = arrow.hours_of if dense.transform == "hour" else arrow.floats_of
        values, kinds = numbers_of(column, self.schema.nan_is_missing)
        expected = f"{arrow.DATE}, a number as YYMMDDHH" if dense.transform == "hour" else arrow.NUMBER
        marks.add_values(f"column {dense.name}", column, kinds == BAD, f"{expected}, or nothing")
        with np.errstate(all="ignore"):  # the slot of a missing value may hold anything
            if dense.transform == "log":
                log_of(values, out[:, k])
            else:
                out[:, k] = np.mod(values, 100) / 24 if dense.transform == "hour" else values
        large = ~np.isfinite(out[:, k]) & (kinds == GOOD)  # check what the model gets, after the transform
        behind = "" if dense.transform == "none" else f", {dense.transform} applied"
        marks.add_values(f"column {dense.name}", column, large, f"{FITS}{behind}")
        if kinds.any():
            out[kinds != GOOD, k] = dense.fill
        if dense.indicator:
            out[:, k + 1] = kinds != GOOD
        return 1 + dense.indicator

    def _ids(self, raw: Raw, column: pa.Array, spec: Id, marks: Marks) -> Column:
        values, wrong, why = self.rows_in(raw.file, column, spec)
        if wrong is not None:
            marks.add(wrong, lambda i: _of_id(f"column {spec.name} is", value_at(column, i), why, spec))
        return Column(values)

    def _lists(self, raw: Raw, column: Any, spec: Id, marks: Marks) -> Column:
        """A missing list is an empty one."""
        column, inverse = shared_lists(column)
        if not is_list(column.type):
            if not is_text(column.type) or not spec.separator:
                raise BadSchema(
                    f"{raw.file}: column {spec.name!r} holds no lists: set its separator in the schema, or list to false"
                )
            column = pc.split_pattern(column, spec.separator)
        column = one(column)
        sizes = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        items = plain(column.flatten(), self.schema.missing)
        values, wrong, why = self.rows_in(raw.file, items, spec)
        offsets = offsets_of(sizes)
        if wrong is not None and wrong.any():
            before = np.append(0, np.cumsum(wrong))
            rows = before[offsets[1:]] > before[offsets[:-1]]
            of = np.arange(raw.rows) if inverse is None else inverse

            def why_not(i: int) -> tuple[str, str]:
                begin = int(offsets[of[i]])
                value = value_at(items, begin + int(np.argmax(wrong[begin:])))
                return _of_id(f"column {spec.name} has", value, why, spec)

            marks.add(rows[of], why_not)
        return Column(values, offsets, inverse)

    def rows_in(self, file: str, column: pa.Array, spec: Id) -> tuple[np.ndarray, np.ndarray | None, str]:
        """The row of each value, a mask of malformed ones (None if there are none), and what was expected of them."""
        table = spec.table or spec.name
        if spec.type == "string" and is_text(column.type):
            fingerprints = np.empty(len(column), np.uint64)
            hash_texts(*arrow.texts_of(column), seed_of(table), fingerprints)
            if column.null_count:
                fingerprints[kinds_of(column) == NONE] = 0
            return self.rows_of(table, fingerprints), None, ""
        if spec.type in ("string", "hex") and not is_text(column.type) and not pa.types.is_null(column.type):
            # The number 7 and the text "7" have different fingerprints, so different rows; and 10 is not 0x10.
            kind = "float" if pa.types.is_floating(column.type) else "int"
            texts = "texts" if spec.type == "string" else "texts of hexadecimal digits"
            raise BadSchema(
                f"{file}: column {spec.name!r} holds {column.type}, not {texts}: set its type to {kind} in the schema"
            )
        if spec.type == "hex" and is_text(column.type):
            values, kinds = arrow.hex_of(column)
            why = "1 to 16 hexadecimal digits, or nothing"
        else:
            values, kinds = arrow.ints_of(column, self.schema.nan_is_missing, spec.type == "float")
            why = "a whole number of at most 64 bits, or nothing"
        odd: np.ndarray | None = kinds if kinds.any() else None
        wrong = None if odd is None else odd == BAD
        if spec.type == "fingerprint":
            fingerprints = values.astype(np.int64, copy=False).view(np.uint64)
            if odd is not None:
                fingerprints = np.where(odd == NONE, np.uint64(0), fingerprints)
            return self.rows_of(table, fingerprints), wrong, why
        if spec.encode == "row":
            rows = self.rows[table]
            if odd is None and (not len(values) or (values.min() >= 0 and values.max() < rows)):
                return values, None, ""
            outside = (values < 0) | (values >= rows)
            if odd is not None:
                outside |= odd != GOOD
            return np.where(outside, 0, values), outside, f"a row from 0 to {rows - 1}, as the schema sets rows"
        fingerprints = np.empty(len(column), np.uint64)
        hash_numbers(read_only(values), seed_of(table), fingerprints)
        if odd is not None:
            fingerprints[odd == NONE] = 0
        return self.rows_of(table, fingerprints), wrong, why

    def _kept(self, column: Any, name: str, marks: Marks) -> pa.Array:
        """A column unchanged, except that a time in text becomes a timestamp or a number."""
        column = one(column)
        if name != self.schema.time or not is_text(column.type):
            return column
        dated = arrow.begins_with_dates(column)
        values, kinds = arrow.seconds_of(column) if dated else arrow.floats_of(column, False)
        marks.add_values(f"time column {name}", column, kinds == BAD, arrow.DATE if dated else arrow.NUMBER)
        if dated:
            return pa.array((values * 1e6).round().astype(np.int64), pa.timestamp("us"), mask=kinds != GOOD)
        return pa.array(np.asarray(values, np.float64), mask=kinds != GOOD)

    def _check_there(self, column: Any, name: str, marks: Marks) -> None:
        column = plain(column, ())
        plain_numbers = not is_text(column.type) and not arrow.is_date(column.type)
        values, kinds = arrow.floats_of(column, False) if plain_numbers else (np.empty(0), kinds_of(column))
        number = arrow.NUMBER if plain_numbers else arrow.DATE
        what, expected = ("time", number) if name == self.schema.time else ("session", EACH)
        marks.add_values(f"{what} column {name}", column, kinds != GOOD, expected)
        if what == "time" and plain_numbers and (unit := self.schema.time_unit):
            none = np.isnan(arrow.since_1970(values.astype(np.float64), unit)) & (kinds == GOOD)
            marks.add_values(f"time column {name}", column, none, f"{unit} since 1970, as time_unit says")

    def _in_time(self, file: str, column: pa.Array, keep: Span, marks: Marks) -> np.ndarray:
        """bool [n]: whether each time is in a span."""
        dates, what = arrow.is_date(column.type), f"time column {keep.column}"
        if dates and not keep.dated:
            raise WrongTime(
                f"{file}: time column {keep.column!r} holds dates: set valid to one, such as time>=2026-03-01"
            )
        if keep.dated and not dates and not is_text(column.type):
            found = f"time column {keep.column!r} holds numbers ({column.type}), and valid names a date"
            raise WrongTime(f"{file}: {found}: set valid to time>=NUMBER")
        values, kinds = arrow.seconds_of(column) if keep.dated else arrow.floats_of(column, False)
        expected = arrow.DATE if keep.dated else arrow.NUMBER
        marks.add_values(what, column, kinds != GOOD, expected)
        return (values >= keep.low) & (values < keep.high)


def is_shared(column: Any) -> bool:
    """Whether a column stores each list once for all rows that share it."""
    return pa.types.is_dictionary(column.type) and is_list(column.type.value_type)


def shared_lists(column: Any) -> tuple[Any, np.ndarray | None]:
    """The lists that some row uses, and the list of each row (int64); for any other column, the column and None."""
    if not is_shared(column):
        return column, None
    kept, inverse = numbered(column.indices.to_numpy())
    return column.dictionary.take(pa.array(kept)), inverse.astype(np.int64)


def _of_id(found: str, value: Any, expected: str, spec: Id) -> tuple[str, str]:
    number = float("nan")
    with suppress(TypeError, ValueError):
        number = float(value)
    if spec.type in ("int", "float") and np.isfinite(number) and "." in str(value):
        hint = f"numbers with a fraction are not ids: is {spec.name} a [[dense]] column?"
        if number == int(number):
            hint = f'write type = "float" at {spec.name} in the schema: it takes 7.0 for 7'
        expected += f" ({hint})"
    return f"{found} {shown(value)}", expected


@kernel
def log_of(values, out):
    """Fill `out` with log(1 + max(x, 0)) as float32. Most values are small whole numbers, with logarithms in a table."""
    for i in range(values.size):
        x = np.float64(values[i])
        if x <= 0:
            out[i] = 0
        elif x < LOGS.size and x == np.int64(x):
            out[i] = LOGS[np.int64(x)]
        else:
            out[i] = np.float32(np.log1p(x))


LOGS = np.log1p(np.arange(1024, dtype=np.float64)).astype(np.float32)
