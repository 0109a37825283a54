"""Data files as one sequence of rows, read in parts and cut into windows, by this process or by several."""

import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from skirl.data.files.column import Encoded
from skirl.data.files.columnar import SLICE, ParquetFile
from skirl.data.files.encode import Encoder
from skirl.data.files.find import BadFile, kind_of
from skirl.data.files.hashing import unit
from skirl.data.files.schema import FileSchema
from skirl.data.files.text import PART, MindFile, TextFile
from skirl.tools.jit import kernel


class RowPosition(NamedTuple):
    file: int = 0
    part: int = 0
    row: int = 0


START = RowPosition()


class FilePart(NamedTuple):
    """A part to read, or only its rows low <= row < high. One worker reads all parts of a share."""

    file: int
    part: int
    low: int
    high: int | None
    share: int


@dataclass(frozen=True)
class Dataset:
    """Files as one sequence of rows; picklable, and open only while parts are read."""

    paths: list[str]
    schema: FileSchema
    part_bytes: int = PART
    slice_rows: int = SLICE
    """Most rows of Parquet files to decode at once, unless a file leaves lists out."""

    def opened(self, number: int) -> ParquetFile | TextFile:
        """A file, in the format that its first bytes say it has."""
        path, text = self.paths[number], self.schema.text
        kind = kind_of(path)
        if kind == "parquet":
            return ParquetFile(path, self.schema, self.slice_rows)
        if not text.columns and text.header == "no":
            raise BadFile(path, "is text, and the schema does not say what its columns are", "add columns to [file]")
        kind_of_text = MindFile if text.samples == "shown" else TextFile
        return kind_of_text(path, self.schema, kind == "gzip", self.part_bytes)

    def parts(
        self, begin: RowPosition = START, end: RowPosition | None = None
    ) -> Iterator[tuple[FilePart, ParquetFile | TextFile]]:
        """Yield the parts from `begin` to before `end`, or to the last, with their file, open until the next one is."""
        share = -1
        for number in range(begin.file, len(self.paths)):
            if end is not None and (number, 0, 0) >= end:
                return
            part, last = begin.part if number == begin.file else 0, None
            with closing(self.opened(number)) as file:
                while file.has(part) and (end is None or (number, part, 0) < end):
                    if (its := file.share(part)) != last:
                        share, last = share + 1, its
                    low = begin.row if (number, part) == begin[:2] else 0
                    high = end.row if end is not None and (number, part) == end[:2] else None
                    yield FilePart(number, part, low, high, share), file
                    part += 1

    def rows(self, end: RowPosition | None = None) -> int:
        """Rows of the parts before `end`, or of all, including malformed ones."""
        return sum(file.rows(part.part) for part, file in self.parts(end=end))

    def place(self, row: int) -> RowPosition:
        """The place of a row, counted from the first file's first row; past the last row, the end."""
        for part, file in self.parts():
            if row < (rows := file.rows(part.part)):
                return RowPosition(part.file, part.part, row)
            row -= rows
        return RowPosition(len(self.paths))


class RowWindow(NamedTuple):
    """Rows that are read as one, which begin at a place, and in a piece at index `first`."""

    piece: Encoded
    """Its rows, and maybe others."""
    first: int
    rows: int
    place: RowPosition


def in_windows(found: Iterable[tuple[Encoded, FilePart]], size: int) -> Iterator[RowWindow]:
    """Yield windows of `size` rows, the last one smaller. A window that lies in one piece is not cut out of it."""
    cuts: list[RowWindow] = []
    rows = 0
    for piece, part in found:
        first = 0
        while first < len(piece):
            more = min(size - rows, len(piece) - first)
            cuts.append(RowWindow(piece, first, more, RowPosition(part.file, part.part, int(piece.places[first]))))
            first, rows = first + more, rows + more
            if rows == size:
                yield _joined(cuts)
                cuts, rows = [], 0
    if cuts:
        yield _joined(cuts)


def _joined(cuts: list[RowWindow]) -> RowWindow:
    if len(cuts) == 1:
        return cuts[0]
    whole = Encoded.concat([piece.slice(first, first + rows) for piece, first, rows, _ in cuts])
    return RowWindow(whole, 0, len(whole), cuts[0].place)


CHUNK = 8  # most rows of a session that stay together where sessions are shuffled


def chunks_of(sessions: np.ndarray) -> np.ndarray:
    """Where each chunk of at most `CHUNK` rows of a session begins, and the end of the last (int64)."""
    rows, begins = np.arange(len(sessions)), np.ones(len(sessions), np.bool_)
    begins[1:] = sessions[1:] != sessions[:-1]
    begins |= (rows - np.maximum.accumulate(np.where(begins, rows, 0))) % CHUNK == 0
    return np.append(np.flatnonzero(begins), len(sessions))


@kernel
def permutation(n, stream):
    """The numbers 0 .. n - 1 in an order that depends only on the stream, not on NumPy's version."""
    order = np.arange(n)
    for i in range(n - 1, 0, -1):
        j = int(unit(stream, np.uint64(i)) * (i + 1))
        order[i], order[j] = order[j], order[i]
    return order


TIMEOUT = 5.0  # seconds to wait for a worker to exit by itself


class WorkerDied(RuntimeError):
    """A worker process ended without an error message."""


Stretch = tuple[RowPosition, RowPosition | None]
"""Rows from one place to before another, or to the end."""


def pieces(
    dataset: Dataset, encoder: Encoder, ranges: Sequence[Stretch], workers: int
) -> Generator[tuple[Encoded, FilePart] | None, None, None]:
    """Yield the encoded pieces of each range in turn, with their parts, and None at the end of each range."""
    if not workers:
        for stretch in ranges:
            for part, file in dataset.parts(*stretch):
                yield _read(encoder, part, file), part
            yield None
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["skirl.data.files.dataset"])  # imports modules once, which takes 2 s
    team: list[tuple[Any, Connection]] = []
    try:
        for number in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            what = (theirs, dataset, encoder, ranges, number, workers)
            process = context.Process(target=_work, args=what, daemon=True, name=f"skirl-reader-{number}")
            process.start()
            theirs.close()
            team.append((process, ours))
        for _ in ranges:
            share = 0
            # A worker that sends None has no such share. Then there is no later one either, and all others send None too.
            while (message := _receive(*team[share % workers])) is not None:
                if isinstance(message, BaseException):
                    raise message
                piece, part, last = message
                yield piece, part
                if last:
                    share += 1
            for other in range(workers):
                if other != share % workers and _receive(*team[other]) is not None:
                    raise RuntimeError(
                        "readers disagree about where the data ends: do the files change while they are read?"
                    )
            yield None
    finally:
        for _, pipe in team:
            pipe.close()
        for process, _ in team:
            process.kill()  # they ignore SIGTERM, and have nothing to save
        for process, _ in team:
            process.join()
            process.close()


def _read(encoder: Encoder, part: FilePart, file: Any) -> Encoded:
    raw = file.read(part.part)
    return encoder(raw.only(part.low, part.high) if part.low or part.high is not None else raw)


def _receive(process: Any, pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        process.join(TIMEOUT)
        raise WorkerDied(
            f"a reader process ended by itself (exit code {process.exitcode}): is there enough memory? Set workers to 0 "
            "to read in this process"
        ) from None


def _work(
    pipe: Connection, dataset: Dataset, encoder: Encoder, ranges: Sequence[Stretch], number: int, workers: int
) -> None:
    """Run a worker. It sends (piece, part, whether it ends a share) for each piece, None after each range, or its error."""
    # Ctrl-C and SIGTERM also reach the training process, which saves and then ends this worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        try:
            for stretch in ranges:
                before: tuple[Encoded, FilePart] | None = None
                for part, file in dataset.parts(*stretch):
                    if part.share % workers != number:
                        continue
                    if before is not None:
                        pipe.send((*before, before[1].share != part.share))
                    before = _read(encoder, part, file), part
                if before is not None:
                    pipe.send((*before, True))
                pipe.send(None)
        except BaseException as error:
            pipe.send(error)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # nobody reads the pipe any more
