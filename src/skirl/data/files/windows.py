"""Windows of rows, which are shuffled together, and the rows of each part that one trainer reads."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from skirl.data.files.column import Column
from skirl.data.files.dataset import Dataset, FilePart, RowPosition
from skirl.data.files.encoded import Encoded
from skirl.data.share import WHOLE, Cut, Share
from skirl.data.skew import named, unit
from skirl.tools.jit import kernel


@dataclass(frozen=True)
class Windows:
    """Rows from one place to before another, or to the end, cut into windows and samples; picklable."""

    begin: RowPosition
    end: RowPosition | None
    share: Share = WHOLE
    batch: int = 1
    rows: int = 1
    """Rows of a window: a whole number of steps."""
    number: int = 0
    """Number of the first window in its epoch."""
    shuffled: tuple[int, int] | None = None
    """The seed and the epoch that decide the order of rows in a window; None keeps the order of the files."""
    most_rows: int | None = None
    """Most rows of a session that are shuffled as one chunk, 0 for all; None shuffles single rows."""
    partial: bool = False
    """True to read only the rows that are in samples."""

    def samples(self, number: int, rows: int, sessions: np.ndarray | None = None) -> tuple[list[list[Cut]], np.ndarray]:
        """Return the batches of each step in window `number`, and the row of each sample in them, in order (int64).

        rows: rows in the window. sessions: a number for each row's session, if sessions are shuffled.
        """
        steps = self.share.cuts(rows, self.batch)
        parts = [np.arange(low, high) for cuts in steps for low, high in cuts]
        samples = np.concatenate([np.empty(0, np.int64), *parts])
        if self.shuffled is not None:
            stream = named(*self.shuffled, number)
            if self.most_rows is None or sessions is None:
                order = permutation(rows, stream)
            else:
                begins = chunks_of(sessions, self.most_rows)
                order = Column(np.arange(rows), begins).take(permutation(len(begins) - 1, stream)).values
            samples = order[samples]
        return steps, samples

    def parts(self, dataset: Dataset) -> Iterator[tuple[FilePart, np.ndarray | None]]:
        """Yield each part, and the rows of it to read, ascending (int64); None for all. Partial ones have explicit bounds.

        Their rows are counted, without reading their values, up to the end of the window in which a part ends: the order
        of a last window depends on its size.
        """
        if not self.partial:
            yield from ((part, None) for part in dataset.parts(self.begin, self.end))
            return
        counting = dataset.anew()
        waiting: deque[tuple[FilePart, int]] = deque()
        known = np.empty(0, np.int64)  # rows to read, counted from `begin`, of the windows before `done`
        counted = done = 0
        number = self.number

        def ready(upto: int) -> Iterator[tuple[FilePart, np.ndarray]]:
            nonlocal known
            while waiting and waiting[0][1] <= upto:
                part, last = waiting.popleft()
                assert part.high is not None
                here = int(np.searchsorted(known, last))
                yield part, known[:here] - last + part.high
                known = known[here:]

        try:
            for part in counting.parts(self.begin, self.end):
                rows = counting.rows(part)
                high = max(part.low, rows if part.high is None else min(part.high, rows))
                counted += high - part.low
                waiting.append((part._replace(high=high), counted))
                chosen = [known]
                while counted - done >= self.rows:
                    chosen.append(done + np.sort(self.samples(number, self.rows)[1]))
                    done, number = done + self.rows, number + 1
                known = np.concatenate(chosen)
                yield from ready(done)
            known = np.concatenate([known, done + np.sort(self.samples(number, counted - done)[1])])
            yield from ready(counted)
        finally:
            counting.close()


class RowWindow(NamedTuple):
    """Rows that are read as one."""

    piece: Encoded
    """Its rows, and maybe others."""
    first: int
    """The index in the piece of its first row."""
    rows: int
    """Number of its rows. If only some are in the piece, the others count too."""
    place: RowPosition
    """The place of its first row."""


def in_windows(found: Iterable[tuple[Encoded, FilePart]], size: int, *, partial: bool = False) -> Iterator[RowWindow]:
    """Yield windows of `size` rows, the last one smaller. A window that lies in one piece is not cut out of it.

    partial: pieces have only some of the rows of their parts, and all of these count.
    """
    kept: deque[tuple[Encoded, FilePart, int]] = deque()
    begun = rows = 0  # rows of the first piece that are in windows already; rows that are not in one yet

    def index(piece: Encoded, part: FilePart, row: int) -> int:
        return int(np.searchsorted(piece.places, part.low + row)) if partial else row

    def window(size: int) -> RowWindow:
        nonlocal begun
        piece, part, _ = kept[0]
        place = RowPosition(part.file, part.part, part.low + begun if partial else int(piece.places[begun]))
        cuts, left = [], size
        while left:
            piece, part, there = kept[0]
            end = min(begun + left, there)
            cuts.append((piece, index(piece, part, begun), index(piece, part, end)))
            left, begun = left - (end - begun), end
            if end == there:
                kept.popleft()
                begun = 0
        if len(cuts) == 1:
            return RowWindow(cuts[0][0], cuts[0][1], size, place)
        some = [piece.slice(low, high) for piece, low, high in cuts if high > low] or [cuts[0][0].slice(0, 0)]
        return RowWindow(Encoded.concat(some), 0, size, place)

    for piece, part in found:
        there = len(piece)
        if partial:
            assert part.high is not None
            there = part.high - part.low
        if there:
            kept.append((piece, part, there))
            rows += there
        while rows >= size:
            yield window(size)
            rows -= size
    if rows:
        yield window(rows)


def chunks_of(sessions: np.ndarray, most: int) -> np.ndarray:
    """Return where each chunk of consecutive rows of one session begins, followed by the end of the last one (int64).

    - `sessions`: int64 [n], a number for each row's session.
    - `most`: most rows of a chunk; 0 for all.

    >>> chunks_of(np.array([5, 5, 5, 7, 7, 5]), 2).tolist()
    [0, 2, 3, 5, 6]
    """
    rows, begins = np.arange(len(sessions)), np.ones(len(sessions), np.bool_)
    begins[1:] = sessions[1:] != sessions[:-1]
    if most:
        begins |= (rows - np.maximum.accumulate(np.where(begins, rows, 0))) % most == 0
    return np.append(np.flatnonzero(begins), len(sessions))


@kernel
def permutation(n, stream):
    """Return the numbers 0 .. n - 1 in an order that depends only on the stream, not on NumPy's version.

    >>> sorted(permutation(4, np.uint64(7)).tolist())
    [0, 1, 2, 3]
    """
    order = np.arange(n)
    for i in range(n - 1, 0, -1):
        j = int(unit(stream, np.uint64(i)) * (i + 1))
        order[i], order[j] = order[j], order[i]
    return order
