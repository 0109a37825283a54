"""Batches of files in order, with the number of each row, so that a prediction can be written next to its row."""

from collections.abc import Iterator

import numpy as np

from skirl.core.batch import Batch
from skirl.data.files.dataset import Dataset, FilePart, RowPosition
from skirl.data.files.encoded import Encoded
from skirl.data.files.stream import Files
from skirl.data.files.windows import cut, joined
from skirl.data.files.workers import Range, pieces


def numbered(files: Files) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yield the batches of one epoch that is not shuffled, with the number of each row.

    Numbers count all rows of all files, from 0. The batches are the same as those from iterating over `files`.
    """
    number = _Numbers(files)
    kept: list[Encoded] = []
    rows, done, size = 0, 0, files.batch_size
    files.bad_rows = 0
    source = pieces(files.dataset, files.encoder, [Range(files.begin, files.end)], files.workers)
    try:
        for found in iter(lambda: next(source), None):
            piece, part = found
            files.bad_rows += piece.bad
            piece.places = number(piece, part)
            if len(piece):
                kept.append(piece)
                rows += len(piece)
            if (full := rows // size * size) == 0:
                continue
            whole = joined(kept)
            for first in range(0, full, size):
                yield files.batch_of(whole, np.arange(first, first + size)), whole.places[first : first + size]
            done += full
            kept, rows = [cut(whole, full, rows)] if rows > full else [], rows - full
        if rows:
            whole = joined(kept)
            yield files.batch_of(whole, np.arange(rows)), whole.places
        elif not done:
            files.refuse_empty()
    finally:
        source.close()
        number.close()


class _Numbers:
    """Numbers the rows of pieces that arrive in order."""

    def __init__(self, files: Files) -> None:
        self._counting: Dataset | None = None
        if files.encoder.skip or files.encoder.keep is not None:  # rows may be left out, so each part must be counted
            self._counting = files.dataset.anew()
            self._parts = self._counting.parts()
            self._before, self._part = 0, next(self._parts, None)
        else:
            self._next = _rows_before(files.dataset.anew(), files.begin)

    def __call__(self, piece: Encoded, part: FilePart) -> np.ndarray:
        if self._counting is None:
            begin = self._next
            self._next += len(piece)
            return np.arange(begin, self._next)
        while self._part is not None and (self._part.file, self._part.part) != (part.file, part.part):
            self._before += self._counting.rows(self._part)
            self._part = next(self._parts, None)
        return piece.places + self._before

    def close(self) -> None:
        """Close the file whose rows are being counted."""
        if self._counting is not None:
            self._counting.close()


def _rows_before(dataset: Dataset, place: RowPosition) -> int:
    """Return the number of rows before a place, over all files."""
    before = 0
    if place.file or place.part:
        for part in dataset.parts(end=RowPosition(place.file, place.part, 0)):
            before += dataset.rows(part)
    dataset.close()
    return before + place.row
