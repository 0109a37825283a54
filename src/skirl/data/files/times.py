"""Reads columns of times, numbers as they are and dates as seconds since 1970; and numbers sessions."""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from skirl.data.files.columns import floats_of, ints_of, is_text, kinds_of, plain, texts_of
from skirl.data.files.find import WrongTime
from skirl.data.files.hashing import BAD, GOOD, hash_texts, seed_of

NUMBER = "a finite number"
DATE = "a date such as 2026-03-01, 2026-03-01T18:30:00 or 2026-03-01T18:30:00+01:00"
_PER_SECOND = {"seconds": 1, "milliseconds": 1e3, "microseconds": 1e6}
_LATEST = 1e11
"""Seconds from 1970 to the year 5138: a larger number must be in another unit."""
EXPECTED = {
    "seconds": 'seconds since 1970, 1e11 at most (if it counts others, write time_unit = "milliseconds" in the schema)',
    "milliseconds": "milliseconds since 1970, 1e14 at most, as time_unit in the schema says",
    "microseconds": "microseconds since 1970, 1e17 at most, as time_unit in the schema says",
    "YYMMDDHH": "a day and an hour as YYMMDDHH, as time_unit in the schema says",
}
"""The expected form of a time, by unit, for error messages."""
_NAIVE, _ZONED = pa.timestamp("us"), pa.timestamp("us", "UTC")


class Span(NamedTuple):
    """A span of time, from `low` to before `high`. Only rows whose time is in it are read."""

    column: str
    low: float
    high: float
    dated: bool = False
    """True if the times are dates; `low` and `high` are then seconds since 1970."""

    def has(self, file: str, column: pa.Array) -> tuple[np.ndarray, np.ndarray, str]:
        """Return whether each time is in the span (bool [n]), the kind of each value, and what was expected of it."""
        holds_dates = is_date(column.type)
        if not self.dated and holds_dates:
            raise WrongTime(
                f"{file}: time column {self.column!r} holds dates: set valid to one, such as time>=2026-03-01"
            )
        if self.dated and not holds_dates and not is_text(column.type):
            raise WrongTime(
                f"{file}: time column {self.column!r} holds numbers ({column.type}), and valid names a date: set valid to "
                "time>=NUMBER"
            )
        values, kinds = seconds_of(column) if self.dated else floats_of(column, False)
        return (values >= self.low) & (values < self.high), kinds, DATE if self.dated else NUMBER


def is_date(kind: pa.DataType) -> bool:
    """Return whether values of this type are dates, with or without a time of day."""
    return pt.is_timestamp(kind) or pt.is_date(kind)


def begins_with_dates(column: pa.Array) -> bool:
    """Return whether a column holds dates, by its type, or by the first text in it that is not missing."""
    if not is_text(column.type):
        return is_date(column.type)
    kinds = kinds_of(column)
    if not len(kinds) or kinds[first := int(np.argmin(kinds))] != GOOD:
        return False
    return seconds_of(column.slice(first, 1))[1][0] == GOOD


def second_of(text: str) -> float | None:
    """Return the seconds from 1970 to a date, or None if the text is not a date. Without a zone it is in UTC.

    >>> second_of("1970-01-02"), second_of("1970-01-01T00:00:01.5"), second_of("1970-01-01 02:00+01:00"), second_of("2026")
    (86400.0, 1.5, 3600.0, None)
    """
    values, kinds = seconds_of(pa.array([text]))
    return float(values[0]) if kinds[0] == GOOD else None


def seconds_of(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds from 1970 to each date (float64 [n]), and the kind of each; texts that are no dates are BAD."""
    kinds = kinds_of(column)
    if is_text(column.type):
        column = _parsed(column, kinds)
    elif not pt.is_timestamp(column.type):
        column = column.cast(_NAIVE)
    elif column.type.unit != "us":
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    return column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False) / 1e6, kinds


def since_1970(numbers: np.ndarray, unit: str) -> np.ndarray:
    """Return the seconds from 1970 to each time (float64 [n]); NaN for a number that is no time in its unit.

    - `numbers`: float64 [n], finite.

    >>> since_1970(np.array([14102100.0, 14102123, 14132100]), "YYMMDDHH").tolist()
    [1413849600.0, 1413932400.0, nan]
    >>> since_1970(np.array([1500.0, 1e15]), "milliseconds").tolist()
    [1.5, nan]
    """
    if not unit:
        return numbers
    if unit == "YYMMDDHH":
        return _of_digits(numbers)
    seconds = numbers / _PER_SECOND[unit]
    return np.where(np.abs(seconds) <= _LATEST, seconds, np.nan)


def _of_digits(numbers: np.ndarray) -> np.ndarray:
    whole = (numbers >= 0) & (numbers < 1e8) & (np.floor(numbers) == numbers)
    rest, hours = np.divmod(np.where(whole, numbers, 0).astype(np.int64), 100)
    rest, days = np.divmod(rest, 100)
    years, months = np.divmod(rest, 100)
    begins = ((years + 30) * 12 + months - 1).astype("datetime64[M]")
    dates = begins.astype("datetime64[D]") + (days - 1)
    right = whole & (months >= 1) & (months <= 12) & (dates.astype("datetime64[M]") == begins) & (hours < 24)
    return np.where(right, dates.astype(np.int64) * 86400.0 + hours * 3600.0, np.nan)


def hours_of(column: pa.Array, nan_is_missing: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers of the form YYMMDDHH unchanged, or the hour of the day of dates (float64 [n]); and the kind of each."""
    if not begins_with_dates(column):
        return floats_of(column, nan_is_missing)
    seconds, kinds = seconds_of(column)
    return np.floor(seconds / 3600) % 24, kinds


def _parsed(column: pa.Array, kinds: np.ndarray) -> Any:
    """Parse texts as timestamps. Texts that are none become null, and are marked malformed in `kinds`."""
    for kind in (_NAIVE, _ZONED):
        try:
            return column.cast(kind).cast(_NAIVE)
        except pa.ArrowInvalid:
            continue
    found = []
    for i, value in enumerate(column):  # the piece has dates of several forms, or malformed ones
        found.append(None if not value.is_valid else _one(value))
        if value.is_valid and found[-1] is None:
            kinds[i] = BAD
    return pa.array(found, _NAIVE)


def _one(value: Any) -> int | None:
    """Return the microseconds from 1970 to the date in one text; None if it is not a date."""
    for kind in (_NAIVE, _ZONED):
        try:
            return value.cast(kind).cast(pa.int64()).as_py()
        except pa.ArrowInvalid:
            continue
    return None


_SESSION = seed_of("session")


def sessions_of(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a number for each row's session (int64 [n]), and the kind of each value (uint8), as `kinds_of` does."""
    column = plain(column, ())
    if not is_text(column.type):
        return session_numbers(column)
    out = np.empty(len(column), np.uint64)
    hash_texts(*texts_of(column), _SESSION, out)
    return out.view(np.int64), kinds_of(column)


def session_numbers(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 [n] for a column of numbers or dates, and the kind of each value.

    7.0 becomes 7; dates, and floats that are not whole, become their bits.
    """
    if is_date(column.type):
        values, kinds = seconds_of(column)
        return values.view(np.int64), kinds
    if not pa.types.is_floating(column.type):
        return ints_of(column, False)
    floats, kinds = floats_of(column, False)
    whole = np.floor(floats) == floats
    values = np.where(whole, floats, 0).astype(np.int64)
    return np.where(whole, values, floats.astype(np.float64).view(np.int64)), kinds
