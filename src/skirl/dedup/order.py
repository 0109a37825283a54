"""The order of rows by session, and where sessions begin: pure functions of arrays."""

from itertools import pairwise

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


def begins(hashes: np.ndarray, times: np.ndarray, gap: float | None, longest: int = LONGEST) -> np.ndarray:
    """bool [n]: where sessions begin among rows in order, cut ones anew.

    **Arguments**

    - `hashes`: uint64 [n, 2], in order.
    - `times`: float64 [n], likewise.
    - `gap`: seconds without a row after which a user begins a new session; None: hashes are those of sessions.
    - `longest`: rows of a session at most.
    """
    new = np.ones(len(hashes), bool)
    new[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    if gap is not None:
        new[1:] |= np.diff(times) > gap
    _cut(new, longest)
    return new


@kernel
def _cut(new, longest):
    """Begin anew where a session gets too long."""
    rows = 0
    for i in range(new.size):
        rows = 1 if new[i] or rows == longest else rows + 1
        if rows == 1:
            new[i] = True


def too_long(new: np.ndarray, uncut: np.ndarray) -> int:
    """How many sessions were cut for their length.

    **Arguments**

    - `new`: where sessions begin after cutting.
    - `uncut`: where they begin without.
    """
    pieces = np.add.reduceat(new.astype(np.int64), np.flatnonzero(uncut)) if len(new) else np.empty(0)
    return int((pieces > 1).sum())


def sessions_named(hashes: np.ndarray, times: np.ndarray, new: np.ndarray) -> np.ndarray:
    """int64 [n]: a number for the session of each row, where only users are known.

    **Arguments**

    - `hashes`, `times`: of rows in order.
    - `new`: where sessions begin.
    """
    first = np.flatnonzero(new)
    names = np.empty(len(first), np.int64)
    _name(hashes[first], times[first].view(np.uint64), names)
    return np.repeat(names, np.diff(np.append(first, len(new))))


@kernel
def _name(hashes, times, out):
    for i in range(out.size):
        out[i] = np.int64(mix(hashes[i, 0] ^ mix(times[i] ^ hashes[i, 1])) >> np.uint64(1))


def groups_of_rows(new: np.ndarray, most: int) -> list[int]:
    """Where row groups begin and the last one ends: at sessions, with at most so many rows unless one session has more.

    **Arguments**

    - `new`: where sessions begin.
    - `most`: rows of a group.

    >>> groups_of_rows(np.array([True, False, True, False, False, True, True]), 3)
    [0, 2, 5, 7]
    """
    first = np.append(np.flatnonzero(new), len(new)).tolist()
    cuts = [0]
    for begin, end in pairwise(first):
        if end - cuts[-1] > most and begin > cuts[-1]:
            cuts.append(begin)
    return [*cuts, len(new)] if len(new) else cuts
