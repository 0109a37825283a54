"""Windows of rows, which are shuffled together, and the rows of each part that one trainer reads."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from skirl.data.files.dataset import Dataset, FilePart, RowPosition
from skirl.data.files.encoded import Encoded, used
from skirl.data.files.session_order import chunks_of, laid
from skirl.data.share import Cut, Share
from skirl.data.skew import named, unit
from skirl.tools.jit import kernel


@dataclass(frozen=True)
class Windows:
    """Cuts the rows of one epoch, from a place on, into windows and samples; picklable."""

    share: Share
    batch: int
    rows: int
    """Rows of a window: a whole number of steps."""
    number: int
    """Number of the first window in its epoch."""
    shuffled: tuple[int, int] | None
    """The seed and the epoch that decide the order of rows in a window; None keeps the order of the files."""
    most_rows: int | None = None
    """Most rows of a session that are shuffled as one chunk, 0 for all; None shuffles single rows."""

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
                order = laid(begins, permutation(len(begins) - 1, stream))
            samples = order[samples]
        return steps, samples

    def parts(
        self, dataset: Dataset, begin: RowPosition, end: RowPosition | None
    ) -> Iterator[tuple[FilePart, np.ndarray]]:
        """Yield each part with explicit bounds, and the rows of it to read, ascending (int64).

        Rows are counted, without reading their values, up to the end of the window in which a part ends: the order of a last
        window depends on its size.
        """
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
                own = int(np.searchsorted(known, last))
                yield part, known[:own] - last + part.high
                known = known[own:]

        try:
            for part in counting.parts(begin, end):
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


def whole_windows(found: Iterable[tuple[Encoded, FilePart]], size: int) -> Iterator[RowWindow]:
    """Yield windows of `size` rows, the last one smaller. A window that lies in one piece is not cut out of it."""
    kept: deque[tuple[Encoded, FilePart]] = deque()
    begun = rows = 0  # rows of the first piece that are in windows already; rows that are not in one yet

    def window(size: int) -> RowWindow:
        nonlocal begun
        piece, part = kept[0]
        place = RowPosition(part.file, part.part, int(piece.places[begun]))
        if begun + size <= len(piece):
            whole = RowWindow(piece, begun, size, place)
            begun += size
            if begun == len(piece):
                kept.popleft()
                begun = 0
            return whole
        cuts, left = [], size
        while left:
            piece, _ = kept[0]
            end = min(begun + left, len(piece))
            cuts.append(cut(piece, begun, end))
            left -= end - begun
            begun = end
            if end == len(piece):
                kept.popleft()
                begun = 0
        return RowWindow(joined(cuts), 0, size, place)

    for piece, part in found:
        if len(piece):
            kept.append((piece, part))
            rows += len(piece)
        while rows >= size:
            yield window(size)
            rows -= size
    if rows:
        yield window(rows)


def partial_windows(found: Iterable[tuple[Encoded, FilePart]], size: int) -> Iterator[RowWindow]:
    """Yield the same from pieces with only some rows of their parts."""
    kept: deque[tuple[Encoded, FilePart]] = deque()
    rows = 0

    def window(size: int) -> RowWindow:
        first = kept[0][1]
        taken, left = [], size
        while left:
            piece, part = kept.popleft()
            assert part.high is not None
            end = min(part.low + left, part.high)
            own = int(np.searchsorted(piece.places, end))
            taken.append(cut(piece, 0, own))
            left -= end - part.low
            if end < part.high:
                kept.appendleft((cut(piece, own, len(piece)), part._replace(low=end)))
        some = [piece for piece in taken if len(piece)]
        return RowWindow(joined(some or taken[:1]), 0, size, RowPosition(first.file, first.part, first.low))

    for piece, part in found:
        assert part.high is not None
        if part.high > part.low:
            kept.append((piece, part))
            rows += part.high - part.low
        while rows >= size:
            yield window(size)
            rows -= size
    if rows:
        yield window(rows)


def cut(rows: Encoded, low: int, high: int) -> Encoded:
    """Return rows low .. high - 1: views, but copies of shared lists that have unused ones between them."""
    if low == 0 and high == len(rows):
        return rows
    ids, lengths, inverses = [], [], []
    for f, (values, sizes) in enumerate(zip(rows.ids, rows.lengths)):
        inverse = rows.inverse(f)
        if sizes is None:
            values = values[low:high]
        elif inverse is None:
            begin = int(sizes[:low].sum())
            values, sizes = values[begin : begin + int(sizes[low:high].sum())], sizes[low:high]
        else:
            values, sizes, inverse = used(values, sizes, inverse[low:high])
        ids.append(values)
        lengths.append(sizes)
        inverses.append(inverse)
    return replace(
        rows,
        labels=rows.labels[low:high],
        dense=rows.dense[low:high],
        ids=ids,
        lengths=lengths,
        places=rows.places[low:high],
        kept=[column.slice(low, high - low) for column in rows.kept],
        inverses=inverses,
        sessions=None if rows.sessions is None else rows.sessions[low:high],
    )


def joined(pieces: list[Encoded]) -> Encoded:
    """Return the concatenation of pieces."""
    if len(pieces) == 1:
        return pieces[0]
    features = range(len(pieces[0].ids))
    return Encoded(
        np.concatenate([p.labels for p in pieces]),
        np.concatenate([p.dense for p in pieces]),
        [np.concatenate([p.ids[f] for p in pieces]) for f in features],
        [_all_or_none([p.lengths[f] for p in pieces]) for f in features],
        np.concatenate([p.places for p in pieces]),
        fingerprints=pieces[0].fingerprints,
        kept=[_one([p.kept[c] for p in pieces]) for c in range(len(pieces[0].kept))],
        inverses=[_joined_inverse(pieces, f) for f in features],
        sessions=_all_or_none([p.sessions for p in pieces]),
    )


def _joined_inverse(pieces: list[Encoded], feature: int) -> np.ndarray | None:
    """Return the list of each row, among those of all pieces. A piece without an inverse has a list for each row."""
    if all(piece.inverse(feature) is None for piece in pieces):
        return None
    parts, before = [], 0
    for piece in pieces:
        inverse, sizes = piece.inverse(feature), piece.lengths[feature]
        parts.append(before + (np.arange(len(piece)) if inverse is None else inverse))
        before += 0 if sizes is None else len(sizes)
    return np.concatenate(parts)


def _one(arrays: list[Any]) -> Any:
    """Return the concatenation of Arrow arrays, cast to the type of the first: files may store different types."""
    return pa.concat_arrays([array.cast(arrays[0].type) for array in arrays])


def _all_or_none(arrays: list[np.ndarray | None]) -> np.ndarray | None:
    known = [array for array in arrays if array is not None]
    return np.concatenate(known) if known else None


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
