"""The order of rows by session, and where sessions begin: pure functions of arrays."""

from typing import NamedTuple

import numpy as np

from skirl.core.initial import mix
from skirl.tools.jit import kernel

LONGEST = 10_000
"""Most rows of a session; a longer one, such as a robot's, is cut."""


def buckets_of(hashes: np.ndarray, buckets: int) -> np.ndarray:
    """Return the bucket of each row (int64 [n]); all rows of a session are in the same bucket.

    **Arguments**

    - `hashes`: uint64 [n, 2], hashes of sessions or users.
    - `buckets`: number of buckets, a power of two.
    """
    return (hashes[:, 0] >> np.uint64(65 - buckets.bit_length())).astype(np.int64) if buckets > 1 else _zeros(hashes)


def _zeros(hashes: np.ndarray) -> np.ndarray:
    return np.zeros(len(hashes), np.int64)


def partitions_of(times: np.ndarray, seconds: float | None) -> np.ndarray:
    """Return the partition of time that each row is in (int64 [n]); 0 if time is not divided.

    **Arguments**

    - `times`: float64 [n].
    - `seconds`: length of a partition; None for a single one.
    """
    return np.zeros(len(times), np.int64) if seconds is None else np.floor(times / seconds).astype(np.int64)


def by_session(hashes: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the order of rows by session, then by time (int64 [n]). Equal rows keep their order.

    **Arguments**

    - `hashes`: uint64 [n, 2].
    - `times`: float64 [n].
    """
    return np.lexsort((times, hashes[:, 1], hashes[:, 0]))


class SessionStarts:
    """Finds where sessions begin in rows in order, which arrive in pieces, and counts sessions and cut ones.

    **Arguments**

    - `gap`: seconds without a row that end a user's session; None if hashes are those of sessions.
    - `longest`: most rows of a session; None for `LONGEST`.
    """

    def __init__(self, gap: float | None, longest: int | None = None) -> None:
        self._gap, self._longest = np.inf if gap is None else float(gap), LONGEST if longest is None else longest
        self._hash, self._time = np.zeros(2, np.uint64), np.zeros(1)
        self._now = np.zeros(len(Now.__annotations__), np.int64)

    def begun(self, hashes: np.ndarray, times: np.ndarray, partitions: np.ndarray | None = None) -> np.ndarray:
        """Return where sessions begin (bool [n]). A cut session begins again after the cut.

        **Arguments**

        - `hashes`: uint64 [n, 2], in order.
        - `times`: float64 [n], likewise.
        - `partitions`: int64 [n]: the partition of each row, whose borders cut sessions; None for a single one.
        """
        new = np.empty(len(times), bool)
        partitions = _zeros(hashes) if partitions is None else partitions
        _begin(hashes, times, partitions, self._gap, self._longest, self._hash, self._time, self._now, new)
        return new

    @property
    def counts(self) -> dict[str, int]:
        """Number of sessions so far, of those cut at borders of partitions, and of those cut for their length."""
        now = Now(*self._now.tolist())
        return {name: getattr(now, name) for name in ("sessions", "cut_at_borders", "cut_as_too_long")}


class Now(NamedTuple):
    """The state of the last row's session, and the counts of all sessions."""

    rows: int
    partition: int
    crossed: int
    long: int
    sessions: int
    cut_at_borders: int
    cut_as_too_long: int


@kernel
def _begin(hashes, times, partitions, gap, longest, last_hash, last_time, now, new):
    """Mark rows that begin a session in `new`, and update `now`, which has the fields of `Now`."""
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
    """Return where sessions begin in rows in order, given all at once (bool [n]).

    **Arguments**

    - `hashes`: uint64 [n, 2].
    - `times`: float64 [n].
    - `gap`: as for `SessionStarts`.
    """
    return SessionStarts(gap).begun(hashes, times)


def sessions_named(hashes: np.ndarray, times: np.ndarray, new: np.ndarray, before: int = 0) -> np.ndarray:
    """Return a number for the session of each row, where only users are known (int64 [n]).

    **Arguments**

    - `hashes`, `times`: sort keys of rows in order.
    - `new`: where sessions begin.
    - `before`: the number for rows before the first one that begins a session.
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
    """Return where row groups begin, and where the last one ends.

    Groups begin at sessions. They have at most `most` rows, unless one session has more. Only a session with more bytes than
    a group may have is divided.

    **Arguments**

    - `new`: where sessions begin.
    - `most`: most rows of a group.
    - `sizes`: int64, bytes of each row; None counts rows only.
    - `most_bytes`: most bytes of a group, unless one row has more.

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
    """Fill `cuts` with where groups after the first begin, and return their number. Later rows do not change a cut."""
    count = begin = session = 0
    held = before = 0  # bytes of the group, and of its rows before its last session
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
