"""Reads a stretch of spilled rows in order: at once if it fits in memory, else in pieces."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from skirl.dedup.frames import TOGETHER
from skirl.dedup.order import by_session
from skirl.dedup.packed import Packing
from skirl.dedup.spill import ALL, HELD, Spilled


class Border(NamedTuple):
    """A position in the order of rows: by hash, then time, then frame."""

    high: int
    low: int
    time: float
    frame: int

    def behind(self, high: Any, low: Any, times: Any, frames: Any) -> np.ndarray:
        """Return which rows come before this border (bool [n]).

        **Arguments**

        - `high`, `low`, `times`: sort keys of the rows.
        - `frames`: number of each row's frame.
        """
        last = (times < self.time) | ((times == self.time) & (frames < self.frame))
        same = (high == np.uint64(self.high)) & ((low < np.uint64(self.low)) | ((low == np.uint64(self.low)) & last))
        return (high < np.uint64(self.high)) | same


class Some(NamedTuple):
    """Consecutive rows of consecutive frames."""

    records: np.ndarray
    first: int
    """Bytes of the rows before them in the first frame,"""
    length: int
    """and their own bytes."""


class RowsBetween:
    """All rows between two borders, in order.

    **Arguments**

    - `keys`: uint64 [n, 4], sort keys of the rows in the order of their frames, see `keys_in`.
    - `frames`: their frames.
    - `spilled`: the spill that holds the frames.
    - `packing`: packing of the rows; None if there are only sort keys.
    """

    def __init__(self, keys: np.ndarray, frames: list[Some], spilled: Spilled, packing: Packing | None) -> None:
        times, sizes = keys[:, 2].copy().view(np.float64), keys[:, 3].copy().view(np.int64)
        order = by_session(keys, times)
        self.hashes = np.ascontiguousarray(keys[order, :2])
        self.times, self.sizes = times[order], sizes[order]
        self._begins = (np.cumsum(sizes) - sizes)[order]
        self._frames, self._spilled, self._packing = frames, spilled, packing
        self._held: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.times)

    def taken(self, low: int, high: int) -> Any:
        """Return rows low .. high - 1 as a record batch without sort keys.

        **Arguments**

        - `low`, `high`: positions in the order of rows.
        """
        assert self._packing is not None
        if self._held is None:
            self._held = self._read()
        return self._packing.columns(self._held, self._begins[low:high])

    def _read(self) -> np.ndarray:
        held, at = np.empty(int(self.sizes.sum()), np.uint8), 0
        for records, first, length in self._frames:
            total = int(records["length"].sum())
            if length == total:
                self._spilled.read(records, held[at : at + length])
            elif length:
                whole = np.empty(total, np.uint8)
                self._spilled.read(records, whole)
                held[at : at + length] = whole[first : first + length]
            at += length
        return held


class Stretch:
    """The rows of a partition whose hashes are in a range.

    **Arguments**

    - `spilled`: the spill that holds them.
    - `partition`: partition of time; None for all.
    - `highs`: smallest and largest first half of the hashes.
    - `packing`: packing of the rows; None reads only sort keys.
    - `most`: approximate bytes of memory for rows at once.
    - `size`: bytes that all of them take; None estimates it by their frames, which may have other rows too.
    """

    def __init__(
        self, spilled: Spilled, partition: int | None, highs: tuple[int, int], packing: Packing | None, most: int,
        size: int | None = None,
    ) -> None:  # fmt: skip
        self.spilled = spilled
        self._partition, self._highs, self._packing, self._most, self._size = partition, highs, packing, most, size

    def pieces(self) -> Iterator[RowsBetween]:
        """Yield all rows in order, in pieces."""
        records, frames = self.spilled.frames(self._partition, self._highs)
        first, last = self._highs
        begin, end = Border(first, 0, -np.inf, -1), Border(last, ALL[1], np.inf, 1 << 62)
        for low, high in pairwise([begin, *self._borders(records, frames, begin), end]):
            if len(piece := self._between(records, frames, low, high)):
                yield piece

    def _borders(self, records: np.ndarray, frames: np.ndarray, begin: Border) -> list[Border]:
        """Return where to cut, so that a piece takes half of the memory: the rest is for frames that a border divides."""
        sizes = HELD * records["rows"] + (0 if self._packing is None else records["length"])
        if (sizes.sum() if self._size is None else self._size) <= self._most:
            return []
        places = records["first"]
        order = np.lexsort((frames, places["time"], places["low"], places["high"]))
        goes = np.cumsum(sizes[order]) // max(1, self._most // 2)
        cuts = order[np.flatnonzero(np.diff(goes) > 0) + 1]
        borders = [Border(*places[cut].item(), frame=int(frames[cut])) for cut in cuts]
        return [border for border in borders if border > begin]

    def _between(self, records: np.ndarray, frames: np.ndarray, low: Border, high: Border) -> RowsBetween:
        def before(border: Border, which: str) -> np.ndarray:
            places = records[which]
            return border.behind(places["high"], places["low"], places["time"], frames)

        own = np.flatnonzero(~before(low, "last") & before(high, "first"))
        begun, whole = before(low, "first"), before(high, "last")
        keys, some, at = np.empty((int(records["rows"][own].sum()), 4), np.uint64), [], 0
        for k, end in self._groups(records, frames, own):
            found, first, last = self.spilled.keys(records[k:end]), 0, None
            if begun[k] or not whole[end - 1]:
                of = np.repeat(frames[k:end], records["rows"][k:end])
                places = found[:, 0], found[:, 1], found[:, 2].view(np.float64), of
                first = int(low.behind(*places).sum())
                last = int(high.behind(*places).sum())
            inside = found[first:last]
            keys[at : at + len(inside)] = inside
            at += len(inside)
            if len(inside):
                some.append(Some(records[k:end], int(found[:first, 3].sum()), int(inside[:, 3].sum())))
        return RowsBetween(keys[:at], some, self.spilled, self._packing)

    def _groups(self, records: np.ndarray, frames: np.ndarray, own: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield ranges (first, last + 1) of the frames `own` that are consecutive, with rows in order across frames."""
        before, here = records["last"][own[:-1]], records["first"][own[1:]]
        last = (before["low"] > here["low"]) | ((before["low"] == here["low"]) & (before["time"] > here["time"]))
        cut = (before["high"] > here["high"]) | ((before["high"] == here["high"]) & last)
        cut |= (np.diff(frames[own]) != 1) | (np.diff(np.cumsum(records["length"][own]) // TOGETHER) != 0)
        ends = [0, *(np.flatnonzero(cut) + 1).tolist(), len(own)] if len(own) else [0]
        for low, high in pairwise(ends):
            yield int(own[low]), int(own[high - 1]) + 1
