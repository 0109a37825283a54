"""Columns of a file become what a batch is made of: labels, dense numbers, rows of tables.

Malformed rows are marked on the way; at the end the first is the error, or all are left out and counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from skirl.data.files.columns import (
    floats_of,
    hex_of,
    ints_of,
    is_list,
    is_text,
    kinds_of,
    one,
    pc,
    plain,
    texts_of,
    value_at,
)
from skirl.data.files.encoded import Encoded, taken
from skirl.data.files.errors import BadRow, BadSchema, shown
from skirl.data.files.hashing import BAD, BY_HASH, BY_OPEN, GOOD, NONE, hash_numbers, hash_texts, rows_by_hash, seed_of
from skirl.data.files.repeats import is_shared, is_views, shared_lists
from skirl.data.files.schema import Dense, FileSchema, Id, Label
from skirl.data.files.session_order import sessions_of
from skirl.data.files.times import (
    DATE,
    EXPECTED,
    NUMBER,
    Span,
    begins_with_dates,
    hours_of,
    is_date,
    seconds_of,
    since_1970,
)
from skirl.tools.jit import kernel, read_only

FITS = "a number that fits a float32"
"""What is expected of labels and dense values, which a model gets as float32."""
EACH = "a value in each row"
"""What is expected of sessions."""


@dataclass
class Raw:
    """A piece of a file as Arrow gives it."""

    columns: Mapping[str, Any]
    """Arrow arrays of n rows, by name."""
    rows: int
    """n."""
    file: str
    where: Callable[[int], str]
    """The place in the file of a row of the piece, as an error names it; malformed ones count."""
    broken: list[tuple[int, str, str]]
    """Rows that could not be split into columns: which of the piece, what was found, what was expected."""
    places: np.ndarray | None = None
    """int64 [n]: which rows of the piece these are; 0 to n - 1 if None."""
    nulls: bool = False
    """Texts that stand for nothing are nulls already."""

    def between(self, low: int, high: int | None) -> "Raw":
        """Only rows low <= row < high of the piece."""
        if low <= 0 and high is None:
            return self
        places = np.arange(self.rows) if self.places is None else self.places
        begin = int(np.searchsorted(places, low))
        end = len(places) if high is None else int(np.searchsorted(places, high))
        columns = {name: column.slice(begin, end - begin) for name, column in self.columns.items()}
        broken = [one for one in self.broken if low <= one[0] and (high is None or one[0] < high)]
        return Raw(columns, end - begin, self.file, self.where, broken, places[begin:end], self.nulls)

    def only(self, rows: np.ndarray) -> "Raw":
        """Some rows of a piece that has all of them: int64, ascending."""
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
            return self.between(int(rows[0]), int(rows[-1]) + 1)
        columns = {name: column.take(pa.array(rows)) for name, column in self.columns.items()}
        return Raw(columns, len(rows), self.file, self.where, self.broken, rows, self.nulls)


class RowsOf(Protocol):
    """Turns fingerprints of a table's values into its rows."""

    @property
    def described(self) -> str:
        """How; equal where the same fingerprints get the same rows, in tables of the same size."""
        ...

    def __call__(self, table: str, fingerprints: np.ndarray, kinds: np.ndarray) -> np.ndarray: ...


@dataclass
class ByHash:
    """Rows by hash."""

    rows: Mapping[str, int]

    @property
    def described(self) -> str:
        """How ids become rows."""
        return BY_HASH

    def __call__(self, table: str, fingerprints: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """Row 0 for what is missing, another one for what is not."""
        rows = self.rows[table]
        out = np.empty(len(fingerprints), np.int32 if rows < 1 << 31 else np.int64)
        rows_by_hash(fingerprints, kinds, rows, out)
        return out


@dataclass
class Fingerprints:
    """In the place of rows: the fingerprints themselves, as int64; 0 where a value is missing."""

    @property
    def described(self) -> str:
        """How ids become rows in training: only an open vocabulary resumes from a state with fingerprints."""
        return BY_OPEN

    def __call__(self, table: str, fingerprints: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """They themselves, unless one is missing: where they lie in a file's columns, nothing is copied."""
        if not kinds.any():
            return fingerprints.view(np.int64)
        return np.where(kinds == NONE, 0, fingerprints.view(np.int64))


@dataclass
class Marks:
    """What is malformed in a piece: the first reason of each row."""

    bad: np.ndarray
    first: BadRow | None = None
    at: int = -1

    def add(self, raw: Raw, wrong: np.ndarray, why: Callable[[int], tuple[str, str]]) -> None:
        """More malformed rows, a bool for each; why: what was found and what was expected in a row."""
        if not wrong.any():
            return
        i = int(np.argmax(wrong))
        self.note(raw, i if raw.places is None else int(raw.places[i]), lambda: why(i))
        self.bad |= wrong

    def note(self, raw: Raw, place: int, why: Callable[[], tuple[str, str]]) -> None:
        """A malformed row; the first of all is kept."""
        if self.first is None or place < self.at:
            self.first, self.at = BadRow(raw.file, "", *why()), place

    def refuse(self, raw: Raw) -> None:
        """Raise the first malformed row as an error, if there is one."""
        if self.first is not None:
            raise BadRow(raw.file, raw.where(self.at), self.first.found, self.first.expected)


@dataclass
class Encoder:
    """Encodes pieces of files by a schema; picklable, so that worker processes have it too."""

    schema: FileSchema
    rows_of: RowsOf
    rows: Mapping[str, int]
    means: Mapping[str, tuple[float, float]]
    """Mean and deviation of the columns to standardise."""
    skip: bool = False
    """Leave malformed rows out instead of raising."""
    keep: Span | None = None
    """Only rows whose time is in it."""
    kept: tuple[str, ...] = ()
    """Columns to keep as they are; a time that is text becomes a number."""
    all_there: bool = False
    """Whether a row is malformed that has nothing in a kept column, NaN, or a time that is none in its unit."""
    session: str | None = None
    """The column that says which rows belong together, where the order needs it."""

    def __call__(self, raw: Raw) -> Encoded:
        """The piece, encoded; raises `BadRow` unless malformed rows are to be left out."""
        schema = self.schema
        marks = Marks(np.zeros(raw.rows, bool))
        for at, found, expected in raw.broken:
            marks.note(raw, at, lambda found=found, expected=expected: (found, expected))
        seen: dict[str, pa.Array] = {}
        for name in schema.needed:
            column = raw.columns[name]
            of_lists = is_list(column.type) or is_shared(column)
            seen[name] = column if of_lists else plain(column, () if raw.nulls else schema.missing)
        labels = np.empty((raw.rows, len(schema.labels)), np.float32)
        for k, label in enumerate(schema.labels):
            self._label(raw, seen[label.name], label, labels[:, k], marks)
        dense = np.empty((raw.rows, schema.dense_features), np.float32)
        k = 0
        for column in schema.dense:
            k += self._dense(raw, seen[column.column or column.name], column, dense, k, marks)
        ids, lengths, inverses, starts = [], [], [], []
        for column in schema.ids:
            source, inverse, start = seen[column.column or column.name], None, None
            if column.list:
                source, inverse = shared_lists(source)
                values, sizes, start = self._lists(raw, source, column, marks, inverse)
            else:
                values, sizes = self._ids(raw, source, column, marks), None
            ids.append(values)
            lengths.append(sizes)
            inverses.append(inverse)
            starts.append(start)
        wanted = np.ones(raw.rows, bool)
        if self.keep is not None:
            wanted = self._in_time(raw, seen[self.keep.column], self.keep, marks)
        kept = [self._kept(raw, seen[name], name, marks) for name in self.kept]
        if self.all_there:
            for name, column in zip(self.kept, kept):
                self._check_there(raw, column, name, marks)
        sessions = None
        if self.session is not None:
            sessions, known = sessions_of(column := seen[self.session])
            marks.add(
                raw, known != GOOD, lambda i: (f"session column {self.session} is {shown(value_at(column, i))}", EACH)
            )
        if not self.skip:
            marks.refuse(raw)
        places = np.arange(raw.rows) if raw.places is None else raw.places
        bad = int(marks.bad.sum()) + len(raw.broken)
        done = Encoded(
            labels,
            dense,
            ids,
            lengths,
            places,
            bad,
            marks.at,
            kept=kept,
            inverses=inverses,
            starts=starts,
            sessions=sessions,
        )
        wanted &= ~marks.bad
        return done if wanted.all() else taken(done, np.flatnonzero(wanted))

    def _label(self, raw: Raw, column: pa.Array, label: Label, out: np.ndarray, marks: Marks) -> None:
        values, kinds = floats_of(column, False)
        wrong = kinds != GOOD
        if label.kind == "binary":
            wrong |= (values != 0) & (values != 1)
        expected = "0 or 1" if label.kind == "binary" else "a finite number"
        marks.add(raw, wrong, lambda i: (f"label {label.name} is {shown(value_at(column, i))}", expected))
        with np.errstate(all="ignore"):
            out[:] = values
        large = ~np.isfinite(out) & (kinds == GOOD)
        marks.add(raw, large, lambda i: (f"label {label.name} is {shown(value_at(column, i))}", FITS))

    def _dense(self, raw: Raw, column: pa.Array, dense: Dense, out: np.ndarray, k: int, marks: Marks) -> int:
        """Write a column's features; how many there are."""
        numbers_of = hours_of if dense.transform == "hour" else floats_of
        values, kinds = numbers_of(column, self.schema.nan_is_missing)
        marks.add(
            raw,
            kinds == BAD,
            lambda i: (f"column {dense.name} is {shown(value_at(column, i))}", "a finite number, or nothing"),
        )
        if dense.transform == "log":
            log_of(values, out[:, k])
        elif dense.transform == "standardise":
            mean, deviation = self.means[dense.name]
            with np.errstate(all="ignore"):  # of what stands where a value is missing
                out[:, k] = (values - mean) / deviation
        elif dense.transform == "hour":
            with np.errstate(all="ignore"):
                out[:, k] = np.mod(values, 100) / 24
        else:
            with np.errstate(all="ignore"):
                out[:, k] = values
        large = ~np.isfinite(out[:, k]) & (kinds == GOOD)  # of what the model gets, behind every transform
        behind = "" if dense.transform == "none" else f", {dense.transform} applied"
        marks.add(raw, large, lambda i: (f"column {dense.name} is {shown(value_at(column, i))}", f"{FITS}{behind}"))
        if kinds.any():
            out[kinds != GOOD, k] = dense.fill
        if dense.indicator:
            out[:, k + 1] = kinds != GOOD
        return 1 + dense.indicator

    def _ids(self, raw: Raw, column: pa.Array, spec: Id, marks: Marks) -> np.ndarray:
        values, kinds, wrong, why = self.rows_in(raw.file, column, spec)
        if wrong is not None:
            marks.add(raw, wrong, lambda i: _of_id(f"column {spec.name} is", value_at(column, i), why, spec))
        return values

    def _lists(
        self, raw: Raw, column: Any, spec: Id, marks: Marks, inverse: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Ids of all lists, the length of each, and where it begins if they lie over each other; a missing list is an empty
        one. inverse: which list each row has."""
        if not is_list(column.type) and not is_views(column.type):
            if not is_text(column.type) or not spec.separator:
                raise BadSchema(
                    f"{raw.file}: column {spec.name!r} holds no lists: set its separator in the schema, or list to false"
                )
            column = pc.split_pattern(column, spec.separator)
        column = one(column)
        starts = None
        if is_views(column.type):
            starts, sizes = (of.to_numpy().astype(np.int64) for of in (column.offsets, column.sizes))
            low, high = (int(starts.min()), int((starts + sizes).max())) if len(sizes) else (0, 0)
            starts -= low
            items = plain(column.values.slice(low, high - low), self.schema.missing)
        else:
            sizes = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
            items = plain(column.flatten(), self.schema.missing)
        values, kinds, wrong, why = self.rows_in(raw.file, items, spec)
        if wrong is not None and wrong.any():
            begins = np.cumsum(sizes) - sizes if starts is None else starts
            before = np.append(0, np.cumsum(wrong))
            rows = before[begins + sizes] > before[begins]
            of = np.arange(raw.rows) if inverse is None else inverse
            rows = rows[of]
            marks.add(
                raw,
                rows,
                lambda i: _of_id(
                    f"column {spec.name} has",
                    value_at(items, int(begins[of[i]] + np.argmax(wrong[begins[of[i]] :]))),
                    why,
                    spec,
                ),
            )
        return values, sizes, starts

    def rows_in(self, file: str, column: pa.Array, spec: Id) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, str]:
        """Rows of a column's values, what each value is, which are malformed if any, and what was expected."""
        table = spec.table or spec.name
        nan = self.schema.nan_is_missing
        if spec.type == "string" and is_text(column.type):
            kinds = kinds_of(column)
            fingerprints = np.empty(len(column), np.uint64)
            hash_texts(*texts_of(column), seed_of(table), fingerprints)
            return self.rows_of(table, fingerprints, kinds), kinds, None, ""
        if spec.type in ("string", "hex") and not is_text(column.type) and not pa.types.is_null(column.type):
            # 7 as a number and "7" as a text have other fingerprints, so other rows; and 10 is no 0x10.
            kind = "float" if pa.types.is_floating(column.type) else "int"
            texts = "texts" if spec.type == "string" else "texts of hexadecimal digits"
            raise BadSchema(
                f"{file}: column {spec.name!r} holds {column.type}, not {texts}: set its type to {kind} in the schema"
            )
        if spec.type == "hex" and is_text(column.type):
            values, kinds = hex_of(column)
            why = "1 to 16 hexadecimal digits, or nothing"
        else:
            values, kinds = ints_of(column, nan, points=spec.type == "float")
            why = "a whole number of at most 64 bits, or nothing"
        wrong = kinds == BAD if kinds.any() else None
        if spec.type == "fingerprint":
            fingerprints = values.astype(np.int64, copy=False).view(np.uint64)
            if _has_zero(fingerprints):
                kinds[fingerprints == 0] = NONE
            return self.rows_of(table, fingerprints, kinds), kinds, wrong, why
        if spec.encode == "row":
            rows = self.rows[table]
            if wrong is None and not kinds.any() and all_within(values, rows):
                return values, kinds, None, ""
            outside = (values < 0) | (values >= rows) | (kinds != GOOD)
            return np.where(outside, 0, values), kinds, outside, f"a row from 0 to {rows - 1}, as the schema sets rows"
        fingerprints = np.empty(len(column), np.uint64)
        hash_numbers(read_only(values), seed_of(table), fingerprints)
        return self.rows_of(table, fingerprints, kinds), kinds, wrong, why

    def _kept(self, raw: Raw, column: Any, name: str, marks: Marks) -> pa.Array:
        column = one(column)
        if name != self.schema.time or not is_text(column.type):
            return column
        dated = begins_with_dates(column)
        values, kinds = seconds_of(column) if dated else floats_of(column, False)
        expected = DATE if dated else NUMBER
        marks.add(raw, kinds == BAD, lambda i: (f"time column {name} is {shown(value_at(column, i))}", expected))
        if dated:
            return pa.array((values * 1e6).round().astype(np.int64), pa.timestamp("us"), mask=kinds != GOOD)
        return pa.array(np.asarray(values, np.float64), mask=kinds != GOOD)

    def _check_there(self, raw: Raw, column: Any, name: str, marks: Marks) -> None:
        column = plain(column, ())
        plain_numbers = not is_text(column.type) and not is_date(column.type)
        values, kinds = floats_of(column, False) if plain_numbers else (np.empty(0), kinds_of(column))
        what, expected = ("time", NUMBER) if name == self.schema.time else ("session", EACH)
        marks.add(raw, kinds != GOOD, lambda i: (f"{what} column {name} is {shown(value_at(column, i))}", expected))
        if what == "time" and plain_numbers and (unit := self.schema.time_unit):
            none = np.isnan(since_1970(values.astype(np.float64), unit)) & (kinds == GOOD)
            marks.add(raw, none, lambda i: (f"time column {name} is {shown(value_at(column, i))}", EXPECTED[unit]))

    def _in_time(self, raw: Raw, column: pa.Array, keep: Span, marks: Marks) -> np.ndarray:
        inside, kinds, expected = keep.has(raw.file, column)
        if not keep.dated and (kinds == BAD).any() and begins_with_dates(column):
            expected += " (to hold out by date, set valid to one, such as time>=2026-03-01)"
        marks.add(
            raw, kinds != GOOD, lambda i: (f"time column {keep.column} is {shown(value_at(column, i))}", expected)
        )
        return inside


def _of_id(found: str, value: Any, expected: str, spec: Id) -> tuple[str, str]:
    """What was found and what was expected of an id; of a number with a point, how it is read."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = np.nan
    if spec.type in ("int", "float") and np.isfinite(number) and b"." in str(value).encode():
        if number == int(number):
            expected += f' (write type = "float" at {spec.name} in the schema: it takes 7.0 for 7)'
        else:
            expected += f" (numbers with a fraction are no ids: is {spec.name} a [[dense]] column?)"
    return f"{found} {shown(value)}", expected


@kernel
def _has_zero(values):
    """Whether one is 0; without a branch, so that several are looked at at once."""
    found = False
    for i in range(values.size):
        found |= values[i] == 0
    return found


@kernel
def all_within(values, rows):
    """Whether all are rows of a table."""
    low = high = 0
    for i in range(values.size):
        low, high = min(low, values[i]), max(high, values[i])
    return low >= 0 and high < rows


@kernel
def log_of(values, out):
    """log(1 + max(x, 0)) as float32; most are small whole numbers, whose logarithms stand in a table."""
    for i in range(values.size):
        x = np.float64(values[i])
        if x <= 0:
            out[i] = 0
        elif x < LOGS.size and x == np.int64(x):
            out[i] = LOGS[np.int64(x)]
        else:
            out[i] = np.float32(np.log1p(x))


def _logs() -> np.ndarray:
    return np.log1p(np.arange(1024, dtype=np.float64)).astype(np.float32)


LOGS = _logs()
