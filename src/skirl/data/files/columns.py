"""Turns Arrow columns into NumPy arrays: numbers, texts, times and sessions, and which values are missing or malformed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.types as pt

from skirl.data.files.hashing import BAD, DIGITS, GOOD, NONE, hash_texts, parse_hex, seed_of
from skirl.tools.jit import read_only

pc: Any = pyarrow.compute
"""`Any`, because Arrow creates its functions at import, where type checkers do not see them."""
_NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,4})?$"
_WHOLE = r"^-?[0-9]{1,18}$"


def plain(column: Any, missing: Sequence[str]) -> pa.Array:
    """A column as one plain array: dictionaries decoded, 32-bit text offsets, and null for texts in `missing`."""
    column = one(column)
    if isinstance(column, pa.ChunkedArray):
        raise OverflowError("more than 2 GiB of text in one column of one row group")
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        if not (pt.is_string(column.type) or pt.is_binary(column.type)):
            column = column.cast(pa.binary())
        if not pt.is_string(column.type):
            column = pa.Array.from_buffers(pa.string(), len(column), column.buffers(), offset=column.offset)
        for text in missing:
            equal = pc.equal(column, text)
            if pc.any(equal).as_py():
                column = pc.if_else(equal, None, column)
    return column


def one(column: Any) -> Any:
    """A column as one array. Copies only if it has several chunks."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def is_text(kind: pa.DataType) -> bool:
    tests = (pt.is_string, pt.is_large_string, pt.is_binary, pt.is_large_binary, pt.is_string_view, pt.is_binary_view)
    return any(test(kind) for test in tests)


def is_list(kind: pa.DataType) -> bool:
    return pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)


def kinds_of(column: pa.Array) -> np.ndarray:
    """uint8 [n]: GOOD, or NONE where a value is missing."""
    if column.null_count == 0:
        return np.zeros(len(column), np.uint8)
    return column.is_null().to_numpy(zero_copy_only=False) * np.uint8(NONE)


def texts_of(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The offsets [n + 1] and the bytes of a text column, without copying."""
    _, offsets, data = column.buffers()
    if len(column) == 0 or offsets is None:
        return read_only(np.zeros(len(column) + 1, np.int32)), read_only(np.empty(0, np.uint8))
    view = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    text = np.empty(0, np.uint8) if data is None or data.size == 0 else np.frombuffer(data, np.uint8)
    return read_only(view), read_only(text)


def floats_of(column: pa.Array, nan_is_missing: bool) -> tuple[np.ndarray, np.ndarray]:
    """float64 [n] (float32 if stored so), and the kind of each value. Infinity is malformed, and so is NaN unless
    `nan_is_missing`."""
    kinds = kinds_of(column)
    if is_text(column.type):
        column = _cast(column, kinds, pa.float64(), _NUMBER)
    if not pt.is_float32(column.type) and not pt.is_float64(column.type):
        column = column.cast(pa.float64(), safe=False)  # rounds whole numbers beyond 2**53
    values = _numpy(column)
    finite = np.isfinite(values)
    if not finite.all():
        wrong = ~finite & (kinds == GOOD)  # the slot of a missing value may hold anything
        kinds[wrong] = BAD
        if nan_is_missing:
            kinds[wrong & np.isnan(values)] = NONE
    return values, kinds


def ints_of(column: pa.Array, nan_is_missing: bool, points: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers [n], without copying integers, and the kind of each value. One that is not whole, or does not fit into
    int64, is malformed; a uint64 keeps its bits. points: texts may be floats, "7.0" for 7."""
    kinds = kinds_of(column)
    if is_text(column.type):
        values = _numpy(_cast(column, kinds, pa.int64(), _WHOLE))
        if points and len(odd := np.flatnonzero(kinds == BAD)):
            floats, some = floats_of(column.take(pa.array(odd)), False)
            some[(some == GOOD) & ~_whole(floats)] = BAD
            values, kinds[odd] = values.copy(), some
            values[odd[some == GOOD]] = floats[some == GOOD].astype(np.int64)
        return values, kinds
    if pt.is_floating(column.type):
        floats, kinds = floats_of(column, nan_is_missing)
        whole = _whole(floats := floats.astype(np.float64))
        kinds[~whole & (kinds == GOOD)] = BAD
        return np.where(whole, floats, 0).astype(np.int64), kinds
    values = _numpy(column if pt.is_integer(column.type) else column.cast(pa.int64()))
    return values.view(np.int64) if pt.is_uint64(column.type) else values, kinds


def _whole(floats: np.ndarray) -> np.ndarray:
    return np.isfinite(floats) & (np.floor(floats) == floats) & (np.abs(floats) < 2.0**63)


def hex_of(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n] of hexadecimal texts, and the kind of each value."""
    kinds = kinds_of(column)
    offsets, data = texts_of(column)
    out = np.empty(len(column), np.int64)
    parse_hex(offsets, data, DIGITS, out, kinds)
    return out, kinds


def value_at(column: pa.Array, i: int) -> Any:
    if is_text(column.type):
        if not column[i].is_valid:
            return None
        offsets, data = texts_of(column)
        return data[offsets[i] : offsets[i + 1]].tobytes()
    return column[i].as_py()


def _cast(column: pa.Array, kinds: np.ndarray, to: pa.DataType, good: str) -> pa.Array:
    """Parse texts as numbers. What Arrow's cast rejects is marked malformed in `kinds`, and null in the result."""
    x = pt.is_int64(to) and _has_x(column)  # Arrow would read 0x1f as 31
    if not x and (whole := _tried(column, to)) is not None:
        return whole
    bytes_ = pa.Array.from_buffers(pa.binary(), len(column), column.buffers(), offset=column.offset)
    sure = pc.fill_null(pc.match_substring_regex(bytes_, good), False).to_numpy(zero_copy_only=False).copy()
    for i in np.flatnonzero(~sure & (kinds == GOOD)):  # few: they miss the pattern, but the cast may still accept them
        some = column.slice(i, 1)
        sure[i] = _tried(some, to) is not None and not (x and _has_x(some))
        if not sure[i]:
            kinds[i] = BAD
    return pc.if_else(pa.array(sure), column, None).cast(to)


def _tried(column: pa.Array, to: pa.DataType) -> Any:
    try:
        return column.cast(to)
    except pa.ArrowInvalid:
        return None


def _has_x(column: pa.Array) -> bool:
    offsets, data = texts_of(column)
    return bool(((data[offsets[0] : offsets[-1]] | 32) == ord("x")).any())


def _numpy(column: pa.Array) -> np.ndarray:
    """The numbers of a column, mostly without copying. The slot of a missing one may hold anything."""
    if pt.is_null(column.type):
        return np.zeros(len(column), np.float64)
    if pt.is_boolean(column.type) or pt.is_float16(column.type):
        return pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    data = column.buffers()[1]
    if len(column) == 0 or data is None:
        return np.zeros(len(column), column.type.to_pandas_dtype())
    kind = np.dtype(column.type.to_pandas_dtype())
    return np.frombuffer(data, kind, len(column), column.offset * kind.itemsize)


NUMBER = "a finite number"
DATE = "a date such as 2026-03-01, 2026-03-01T18:30:00 or 2026-03-01T18:30:00+01:00"
PER_SECOND = {"seconds": 1, "milliseconds": 1e3, "microseconds": 1e6}
_LATEST = 1e11  # seconds from 1970 to the year 5138: a larger number must be in another unit
_NAIVE, _ZONED = pa.timestamp("us"), pa.timestamp("us", "UTC")


class Span(NamedTuple):
    """A span of time, from `low` to before `high`. Only rows whose time is in it are read."""

    column: str
    low: float
    high: float
    dated: bool = False
    """Whether the times are dates; `low` and `high` are then seconds since 1970."""


def is_date(kind: pa.DataType) -> bool:
    return pt.is_timestamp(kind) or pt.is_date(kind)


def begins_with_dates(column: pa.Array) -> bool:
    """Whether a column holds dates, by its type, or by the first text in it that is not missing."""
    if not is_text(column.type):
        return is_date(column.type)
    kinds = kinds_of(column)
    if not len(kinds) or kinds[first := int(np.argmin(kinds))] != GOOD:
        return False
    return seconds_of(column.slice(first, 1))[1][0] == GOOD


def second_of(text: str) -> float | None:
    """Seconds from 1970 to a date, None if the text is not a date. Without a zone it is in UTC."""
    values, kinds = seconds_of(pa.array([text]))
    return float(values[0]) if kinds[0] == GOOD else None


def seconds_of(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from 1970 to each date (float64 [n]), and the kind of each; texts that are no dates are BAD."""
    kinds = kinds_of(column)
    if is_text(column.type):
        column = _parsed(column, kinds)
    elif not pt.is_timestamp(column.type):
        column = column.cast(_NAIVE)
    elif column.type.unit != "us":
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    return column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False) / 1e6, kinds


def since_1970(numbers: np.ndarray, unit: str) -> np.ndarray:
    """Seconds from 1970 to each time (finite float64 [n]); NaN for a number that is no time in its unit."""
    if not unit:
        return numbers
    if unit != "YYMMDDHH":
        seconds = numbers / PER_SECOND[unit]
        return np.where(np.abs(seconds) <= _LATEST, seconds, np.nan)
    whole = (numbers >= 0) & (numbers < 1e8) & (np.floor(numbers) == numbers)
    rest, hours = np.divmod(np.where(whole, numbers, 0).astype(np.int64), 100)
    rest, days = np.divmod(rest, 100)
    years, months = np.divmod(rest, 100)
    begins = ((years + 30) * 12 + months - 1).astype("datetime64[M]")
    dates = begins.astype("datetime64[D]") + (days - 1)
    right = whole & (months >= 1) & (months <= 12) & (dates.astype("datetime64[M]") == begins) & (hours < 24)
    return np.where(right, dates.astype(np.int64) * 86400.0 + hours * 3600.0, np.nan)


def hours_of(column: pa.Array, nan_is_missing: bool) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the form YYMMDDHH unchanged, or the hour of the day of dates (float64 [n]); and the kind of each."""
    if not begins_with_dates(column):
        return floats_of(column, nan_is_missing)
    seconds, kinds = seconds_of(column)
    return np.floor(seconds / 3600) % 24, kinds


def _parsed(column: pa.Array, kinds: np.ndarray) -> Any:
    """Parse texts as timestamps. Texts that are none become null, and are marked malformed in `kinds`."""
    for kind in (_NAIVE, _ZONED):
        if (whole := _tried(column, kind)) is not None:
            return whole.cast(_NAIVE)
    if len(column) == 1:
        kinds[0] = BAD
        return pa.nulls(1, _NAIVE)
    # The piece has dates of several forms, or malformed ones.
    return pa.concat_arrays([_parsed(column.slice(i, 1), kinds[i : i + 1]) for i in range(len(column))])


def sessions_of(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """A number for each row's session (int64 [n]), and the kind of each value. Texts become hashes, 7.0 becomes 7; dates,
    and floats that are not whole, become their bits."""
    column = plain(column, ())
    if is_text(column.type):
        out = np.empty(len(column), np.uint64)
        hash_texts(*texts_of(column), seed_of("session"), out)
        return out.view(np.int64), kinds_of(column)
    if is_date(column.type):
        values, kinds = seconds_of(column)
        return values.view(np.int64), kinds
    if not pa.types.is_floating(column.type):
        return ints_of(column, False)
    floats, kinds = floats_of(column, False)
    whole = np.floor(floats) == floats
    values = np.where(whole, floats, 0).astype(np.int64)
    return np.where(whole, values, floats.astype(np.float64).view(np.int64)), kinds
