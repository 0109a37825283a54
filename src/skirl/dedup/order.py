"""The order of rows by session, and where sessions begin: pure functions of arrays."""

from typing import NamedTuple

import numpy as np

from skirl.core.initial import mix
from skirl.tools.jit import kernel

LONGEST = 10_000
"""Rows of a session; a longer one, of a robot, is cut."""


def buckets_of(hashes: np.ndarray, buckets: int) -> np.ndarray:
    """int64 [n]: the bucket of each row, so that a session lies in one.

    **Arguments**

    - `hashes`: uint64 [n, 2], of sessions or users.
    - `buckets`: how many; a power of two.
    """
    return (hashes[:, 0] >> np.uint64(65 - buckets.bit_length())).astype(np.int64) if buckets > 1 else _zeros(hashes)


def _zeros(hashes: np.ndarray) -> np.ndarray:
    return np.zeros(len(hashes), np.int64)


def partitions_of(times: np.ndarray, seconds: float | None) -> np.ndarray:
    """int64 [n]: the stretch of time that each row is in; 0 where time is not divided.

    **Arguments**

    - `times`: float64 [n].
    - `seconds`: how long a stretch is; None: all is one.
    """
    return np.zeros(len(times), np.int64) if seconds is None else np.floor(times / seconds).astype(np.int64)


def by_session(hashes: np.ndarray, times: np.ndarray) -> np.ndarray:
    """int64 [n]: the rows by session, each by time; equal ones stay as they are.

    **Arguments**

    - `hashes`: uint64 [n, 2].
    - `times`: float64 [n].
    """
    return np.lexsort((times, hashes[:, 1], hashes[:, 0]))


class SessionStarts:
    """Where sessions begin among rows in order, which come piece by piece, and how many were cut.

    **Arguments**

    - `gap`: seconds without a row after which a user begins a new session; None: hashes are those of sessions.
    - `longest`: rows of a session at most; None: `LONGEST`.
    """

    def __init__(self, gap: float | None, longest: int | None = None) -> None:
        self._gap, self._longest = np.inf if gap is None else float(gap), LONGEST if longest is None else longest
        self._hash, self._time = np.zeros(2, np.uint64), np.zeros(1)
        self._now = np.zeros(len(Now.__annotations__), np.int64)

    def begun(self, hashes: np.ndarray, times: np.ndarray, partitions: np.ndarray | None = None) -> np.ndarray:
        """bool [n]: where sessions begin, cut ones anew.

        **Arguments**

        - `hashes`: uint64 [n, 2], in order.
        - `times`: float64 [n], likewise.
        - `partitions`: int64 [n]: the stretch of time that each row is in, whose borders cut; None: all are in one.
        """
        new = np.empty(len(times), bool)
        partitions = _zeros(hashes) if partitions is None else partitions
        _begin(hashes, times, partitions, self._gap, self._longest, self._hash, self._time, self._now, new)
        return new

    @property
    def counts(self) -> dict[str, int]:
        """How many sessions have begun, and how many were cut at borders of partitions, and for their length."""
        now = Now(*self._now.tolist())
        return {name: getattr(now, name) for name in ("sessions", "cut_at_borders", "cut_as_too_long")}


class Now(NamedTuple):
    """What is known of the session of the last row, and counted of all."""

    rows: int
    partition: int
    crossed: int
    long: int
    sessions: int
    cut_at_borders: int
    cut_as_too_long: int


@kernel
def _begin(hashes, times, partitions, gap, longest, last_hash, last_time, now, new):
    """Mark rows that begin a session; now: as `Now`."""
    rows, partition, crossed, long = now[0], now[1], now[2], now[3]
    sessions, borders, lengths = now[4], now[5], now[6]
    high, low, time = last_hash[0], last_hash[1], last_time[0]
    for i in range(times.size):
        start = rows == 0 or hashes[i, 0] != high or hashes[i, 1] != low or times[i] - time > gap
        border = not start and partitions[i] != partition
        if start:
            crossed = 0
        if border and not crossed:
            crossed = 1
            borders += 1
        if start or border:
            long = 0
        cut = rows == longest and not (start or border)
        if cut and not long:
            long = 1
            lengths += 1
        new[i] = start or border or cut
        if new[i]:
            rows = 0
            sessions += 1
        rows += 1
        high, low, time, partition = hashes[i, 0], hashes[i, 1], times[i], partitions[i]
    now[0], now[1], now[2], now[3] = rows, partition, crossed, long
    now[4], now[5], now[6] = sessions, borders, lengths
    last_hash[0], last_hash[1], last_time[0] = high, low, time


def begins(hashes: np.ndarray, times: np.ndarray, gap: float | None) -> np.ndarray:
    """bool [n]: where sessions begin among all rows, in order.

    **Arguments**

    - `hashes`: uint64 [n, 2].
    - `times`: float64 [n].
    - `gap`: see `SessionStarts`.
    """
    return SessionStarts(gap).begun(hashes, times)


def sessions_named(hashes: np.ndarray, times: np.ndarray, new: np.ndarray, before: int = 0) -> np.ndarray:
    """int64 [n]: a number for the session of each row, where only users are known.

    **Arguments**

    - `hashes`, `times`: of rows in order.
    - `new`: where sessions begin.
    - `before`: that of the rows before the first that begins one.
    """
    first = np.flatnonzero(new)
    names = np.full(len(first) + 1, before, np.int64)
    _name(hashes[first], times[first].view(np.uint64), names[1:])
    return np.repeat(names, np.diff(first, prepend=0, append=len(new)))


@kernel
def _name(hashes, times, out):
    for i in range(out.size):
        out[i] = np.int64(mix(hashes[i, 0] ^ mix(times[i] ^ hashes[i, 1])) >> np.uint64(1))


def groups_of_rows(new: np.ndarray, most: int, sizes: np.ndarray | None = None, most_bytes: int = 1 << 62) -> list[int]:
    """Where row groups begin and the last one ends: at sessions, with at most so many rows unless one session has more.

    Where one session has more bytes than a group may have, a group begins inside of it.

    **Arguments**

    - `new`: where sessions begin.
    - `most`: rows of a group.
    - `sizes`: int64, bytes of each row; None: only rows are counted.
    - `most_bytes`: bytes of a group, unless one row has more.

    >>> new = np.array([True, False, True, False, False, True, True])
    >>> groups_of_rows(new, 3)
    [0, 2, 5, 7]
    >>> groups_of_rows(new, 3, np.array([1, 1, 1, 9, 1, 1, 1]), 10)
    [0, 2, 4, 7]
    """
    cuts = np.empty(len(new), np.int64)
    count = _cut(new, np.zeros(len(new), np.int64) if sizes is None else sizes, most, most_bytes, cuts)
    return [0, *cuts[:count].tolist(), len(new)] if len(new) else [0]


@kernel
def _cut(new, sizes, most, most_bytes, cuts):
    """Find where groups begin behind the first; how many. What is cut depends on no row behind it."""
    count = begin = session = 0
    held = before = 0  # bytes of the group, and of those before its last session
    for i in range(new.size):
        if new[i]:
            session, before = i, held
        if session > begin and (i + 1 - begin > most or held + sizes[i] > most_bytes):
            cuts[count] = begin = session
            count += 1
            held -= before
            before = 0
        if i > begin and held + sizes[i] > most_bytes:
            cuts[count] = begin = session = i
            count += 1
            held = before = 0
        held += sizes[i]
    return count
