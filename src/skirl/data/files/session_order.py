"""The order of shuffled sessions: each session is cut into chunks of a few rows, and the chunks are shuffled."""

from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.files.columns import floats_of, hash_texts, ints_of, is_text, kinds_of, plain, seed_of, texts_of
from skirl.data.files.times import is_date, seconds_of
from skirl.tools.jit import kernel

_SEED = seed_of("session")


def sessions_of(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a number for each row's session (int64 [n]), and the kind of each value (uint8), as `kinds_of` does."""
    column = plain(column, ())
    if not is_text(column.type):
        return session_numbers(column)
    out = np.empty(len(column), np.uint64)
    hash_texts(*texts_of(column), _SEED, out)
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


def chunks_of(sessions: np.ndarray, most: int) -> np.ndarray:
    """Return where each chunk of consecutive rows of one session begins, followed by the end of the last one (int64).

    - `sessions`: int64 [n], a number for each row's session.

    >>> chunks_of(np.array([5, 5, 5, 7, 7, 5]), 2).tolist()
    [0, 2, 3, 5, 6]
    """
    begins = np.empty(len(sessions) + 1, np.int64)
    return begins[: _chunks(sessions, most, begins) + 1]


def laid(begins: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the rows in the order of their chunks (int64 [n]).

    >>> laid(np.array([0, 2, 3, 5]), np.array([2, 0, 1])).tolist()
    [3, 4, 0, 1, 2]
    """
    rows = np.empty(int(begins[-1]), np.int64)
    _lay(begins, order, rows)
    return rows


@kernel
def _chunks(sessions, most, begins):
    """Fill `begins` with the start of each chunk, then the end of the last one. Return the number of chunks."""
    chunks = rows = 0
    for i in range(sessions.size):
        if i == 0 or sessions[i] != sessions[i - 1] or rows == most:
            begins[chunks] = i
            chunks += 1
            rows = 0
        rows += 1
    begins[chunks] = sessions.size
    return chunks


@kernel
def _lay(begins, order, rows):
    at = 0
    for chunk in order:
        for row in range(begins[chunk], begins[chunk + 1]):
            rows[at] = row
            at += 1
