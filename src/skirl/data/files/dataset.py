"""Data files as one sequence of rows, read in parts."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from skirl.data.files.columnar import SLICE, ParquetFile
from skirl.data.files.find import BadFile, kind_of
from skirl.data.files.schema import FileSchema
from skirl.data.files.text import PART, MindFile, TextFile


class RowPosition(NamedTuple):
    """The position of a row: file, part of the file, and row in the part."""

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
    """Bytes of a part of a text file."""
    slice_rows: int = SLICE
    """Most rows of Parquet files to decode at once, unless a file leaves lists out."""
    whole_bytes: int | None = None
    """Most bytes of a row group that leaves lists out, and so is read as a whole; None: any."""

    def opened(self, number: int) -> ParquetFile | TextFile:
        """Return a file, in the format that its first bytes say it has."""
        path, text = self.paths[number], self.schema.text
        kind = kind_of(path)
        if kind == "parquet":
            return ParquetFile(path, self.schema, self.slice_rows, self.whole_bytes)
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
        """Return the number of rows of the parts before `end`, or of all, including malformed ones."""
        return sum(file.rows(part.part) for part, file in self.parts(end=end))

    def place(self, row: int) -> RowPosition:
        """Return the place of a row, counted from the first file's first row; past the last row, the end."""
        for part, file in self.parts():
            if row < (rows := file.rows(part.part)):
                return RowPosition(part.file, part.part, row)
            row -= rows
        return RowPosition(len(self.paths))
