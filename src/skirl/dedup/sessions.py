"""Which rows are a session: what a user asks for, rows with their sort keys, and where sessions begin in rows in order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow.types import is_dictionary

from skirl.data.convert import converted, keeping, table_of
from skirl.data.files.columns import is_date, plain, since_1970
from skirl.data.files.encode import Fingerprints
from skirl.data.files.find import BadSchema
from skirl.data.files.hashing import hash_numbers, seed_of
from skirl.data.files.schema import FileSchema
from skirl.data.files.stream import Files
from skirl.dedup.row_hash import session_hashes, time_bits
from skirl.tools.flags import parsed
from skirl.tools.units import parse_seconds

KEYS = ("~partition", "~session", "~time", "~row")
"""Columns that rows are ordered by: partition of time, hash of the session or the user, time, and place in the data."""
ROWS = 4096
"""Rows to decode, and to write out in full, at once: lists may be long, and a file may store each once for many rows."""


class CannotSort(RuntimeError):
    """DuckDB or Spark cannot sort the rows; the message says why, and what to do."""


@dataclass(frozen=True)
class Sessions:
    """A request for files by session. Each field is the flag of `skirl convert`, but `as_rows`: with --rows or --vocab."""

    session: str | None = None
    user: str | None = None
    gap: str | None = None
    partition: str | None = None
    layout: str = "once"
    compression: str = "none"
    as_rows: bool = False

    def __post_init__(self) -> None:
        if self.user is not None and self.session is not None:
            raise ValueError("session and user are both set: leave one of them out")
        if self.user is None and self.gap is not None:
            raise ValueError(f"gap is {self.gap!r}, and no user is named: set user to a column, or leave gap out")
        if self.user is not None and self.gap is None:
            raise ValueError(f"user is {self.user!r}, and no gap: set gap to a length of time such as 30m")
        _ = self.seconds("gap"), self.seconds("partition")

    def seconds(self, name: str) -> float | None:
        """Return a length of time, "gap" or "partition"; None if it is not set."""
        text = getattr(self, name)
        return None if text is None else parsed(name, text, parse_seconds, "a length of time such as 30m or 1d")


@dataclass(frozen=True)
class Columns:
    """Which columns to write, and how rows become sessions."""

    request: Sessions
    schema: FileSchema
    """Schema of the files, before lists are left out."""
    kept: Mapping[str, str]
    """Columns that are written unchanged: the name in the source by the name in the file."""
    read: tuple[str, ...]
    """Further columns to read: that of the session or the user, and that of the time."""
    time: str | None
    named: str
    """The session column to add if only users are known; "" if there is one already."""

    def starts(self) -> "SessionStarts":
        return SessionStarts(self.request.seconds("gap"))


def shaped(files: Files, request: Sessions) -> tuple[Files, Columns]:
    """Return the files with the session and time columns kept, and what to write of them."""
    schema = files.encoder.schema
    session = request.session or (None if request.user else schema.session)
    if session is None and request.user is None:
        raise BadSchema(
            "nothing says which rows are a session: set session to the column that does, or set user and gap, or write "
            'session = "COLUMN" at the top of the schema'
        )
    needs = "a gap" if request.user else "a partition" if request.partition else None
    if needs and schema.time is None:
        raise BadSchema(f'{needs} needs times, and the schema names none: write time = "COLUMN" at its top')
    unit = schema.time_unit or ("seconds" if needs else "")
    schema = replace(schema, session=session)
    written, kept = converted(schema, files.encoder.rows if request.as_rows else None)
    rows_of = files.encoder.rows_of if request.as_rows else Fingerprints()
    files = replace(files, encoder=replace(files.encoder, schema=replace(schema, time_unit=unit), rows_of=rows_of))
    named = ""
    if request.user:
        taken = {c.name for c in (*written.labels, *written.dense, *written.ids)} | {*kept}
        named = next(name for name in ("session", "session_", "session of user") if name not in taken)
        written = replace(written, session=named)
    read = tuple(dict.fromkeys(c for c in (request.user or session, schema.time) if c is not None))
    files = keeping(files, read, all_there=True)
    files = replace(files, dataset=replace(files.dataset, slice_rows=ROWS))
    return files, Columns(request, written, kept, read, schema.time, named)


def keyed(files: Files, columns: Columns, first: int = 0, schema: pa.Schema | None = None) -> Iterator[pa.Table]:
    """Yield the rows of shaped files with their sort keys, as tables of one schema. first: number of the first row."""
    length = columns.request.seconds("partition")
    for whole in files.pieces():
        for low in range(0, len(whole), ROWS):
            piece = whole.slice(low, min(low + ROWS, len(whole)))
            kept = dict(zip(columns.read, piece.kept, strict=True))
            times = np.zeros(len(piece))
            if columns.time is not None:
                times = _seconds(kept[columns.time], files.encoder.schema.time_unit)
            kept = {name: of.dictionary_decode() if is_dictionary(of.type) else of for name, of in kept.items()}
            written = replace(piece, kept=[kept[column] for column in columns.kept.values()])
            table = table_of(written, columns.schema, list(columns.kept))
            table = with_keys(table, session_hashes(piece.kept[0]), times, length, first)
            first += len(piece)
            schema = schema or table.schema
            yield table if table.schema == schema else table.cast(schema)


def with_keys(table: Any, hashes: np.ndarray, times: np.ndarray, partition: float | None = None, first: int = 0) -> Any:
    """Return a table of rows with their sort keys, given hashes of sessions or users (uint64) and times."""
    parts = np.zeros(len(times), np.int64) if partition is None else np.floor(times / partition).astype(np.int64)
    keys = parts, hashes.view(np.int64), times, np.arange(first, first + len(times))
    for name, key in zip(KEYS, keys, strict=True):
        table = table.append_column(name, pa.array(key))
    return table


def _seconds(column: Any, unit: str) -> np.ndarray:
    """Return the times that rows are ordered by (float64): seconds if the unit is known or the column holds dates."""
    column = plain(column, ())
    times = time_bits(column).view(np.float64)
    return times if is_date(column.type) else since_1970(times, unit)


def physical(table: pa.Table) -> pa.Table:
    """Return a table of floats, whole numbers, texts and lists of numbers, which any engine moves unchanged."""
    return pa.table({name: _physical(table.column(name)) for name in table.column_names})


def _physical(column: Any) -> Any:
    kind = column.type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_temporal(kind) or pa.types.is_unsigned_integer(kind) or pa.types.is_float16(kind):
        as_int = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[kind.bit_width]
        return pa.chunked_array([chunk.view(as_int) for chunk in column.chunks], as_int)
    return column


def restored(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Undo `physical`: return the table with the columns of a schema."""
    columns = []
    for field in schema:
        column = table.column(field.name)
        if pa.types.is_integer(column.type) and column.type != field.type:
            column = pa.chunked_array([chunk.view(field.type) for chunk in column.chunks], field.type)
        columns.append(column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema)


class SessionStarts:
    """Finds where sessions begin in rows in order, which arrive in pieces, and counts them.

    gap: seconds without a row that end a user's session; None if hashes are those of sessions.
    """

    def __init__(self, gap: float | None = None) -> None:
        self._gap = np.inf if gap is None else gap
        self._last: list[np.ndarray] | None = None
        self._name = np.zeros(1, np.int64)
        self.count = 0
        """Number of sessions so far."""

    def begun(self, keys: list[np.ndarray]) -> np.ndarray:
        """Return where sessions begin (bool [n]), given sort keys in order."""
        before = [key[:1] for key in keys] if self._last is None else self._last
        partition, session, time, _ = (np.concatenate([last, key]) for last, key in zip(before, keys, strict=True))
        new = (np.diff(partition) != 0) | (session[1:] != session[:-1]) | (np.diff(time) > self._gap)
        new[0] |= self._last is None
        self._last = [key[-1:] for key in keys]
        self.count += int(new.sum())
        return new

    def named(self, keys: list[np.ndarray], new: np.ndarray) -> np.ndarray:
        """Return a number for the session of each row (int64 [n]), where only users are known."""
        first = np.flatnonzero(new)
        mixed = np.empty(len(first), np.uint64)
        hash_numbers(keys[2][first].view(np.int64), seed_of("session of user"), mixed)
        names = ((mixed ^ keys[1][first].view(np.uint64)) >> np.uint64(1)).view(np.int64)
        names = np.concatenate([self._name, names])
        self._name = names[-1:]
        return np.repeat(names, np.diff(first, prepend=0, append=len(new)))
