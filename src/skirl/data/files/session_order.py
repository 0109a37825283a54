"""The order in which sessions are shuffled: each is cut into chunks of a few rows, and chunks change places."""

from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.files.columns import floats_of, ints_of, is_text, kinds_of, plain, texts_of
from skirl.data.files.hashing import hash_texts, seed_of
from skirl.data.files.times import is_date, seconds_of
from skirl.tools.jit import kernel

_SEED = seed_of("session")


def sessions_of(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n]: what stands for the session of each row, and uint8: what each value is, as in `kinds_of`."""
    column = plain(column, ())
    if not is_text(column.type):
        return session_numbers(column)
    out = np.empty(len(column), np.uint64)
    hash_texts(*texts_of(column), _SEED, out)
    return out.view(np.int64), kinds_of(column)


def session_numbers(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n]: of a column of numbers or dates; 7.0 is as 7, other numbers with a point are their bits."""
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
    """int64: where chunks begin among rows in order, and their end: rows of one session that follow each other.

    **Arguments**

    - `sessions`: int64 [n], what stands for each row's.
    - `most`: rows of a chunk; 0: any number.

    >>> chunks_of(np.array([5, 5, 5, 7, 7, 5]), 2).tolist()
    [0, 2, 3, 5, 6]
    """
    begins = np.empty(len(sessions) + 1, np.int64)
    return begins[: _chunks(sessions, most, begins) + 1]


def laid(begins: np.ndarray, order: np.ndarray) -> np.ndarray:
    """int64 [n]: the rows, chunk after chunk.

    **Arguments**

    - `begins`: where chunks begin, and the end of all.
    - `order`: which chunk comes when.

    >>> laid(np.array([0, 2, 3, 5]), np.array([2, 0, 1])).tolist()
    [3, 4, 0, 1, 2]
    """
    rows = np.empty(int(begins[-1]), np.int64)
    _lay(begins, order, rows)
    return rows


@kernel
def _chunks(sessions, most, begins):
    """Fill in where chunks begin, and their end; how many there are."""
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
