"""Files in order, cut into parts that any process can read independently."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from skirl.data.files.columnar import ArrowFile, ParquetFile
from skirl.data.files.encode import Raw
from skirl.data.files.errors import BadFile
from skirl.data.files.find import kind_of
from skirl.data.files.mind import MindFile
from skirl.data.files.schema import FileSchema
from skirl.data.files.text import PART, TextFile


class RowPosition(NamedTuple):
    """The position of a row: file, part of the file, and row in the part."""

    file: int = 0
    part: int = 0
    row: int = 0


START = RowPosition()


class FilePart(NamedTuple):
    """A part to read, or only its rows low <= row < high."""

    file: int
    part: int
    low: int
    high: int | None
    share: int
    """One worker reads all parts of a share."""


class DataFile(Protocol):
    """A file whose rows are read in parts."""

    path: str

    def has(self, part: int) -> bool: ...
    def rows(self, part: int) -> int: ...
    def share(self, part: int) -> int: ...
    def read(self, part: int, rows: np.ndarray | None = None) -> Raw: ...
    def close(self) -> None: ...


@dataclass
class Dataset:
    """Files as one sequence of rows; picklable."""

    paths: list[str]
    schema: FileSchema
    part_bytes: int = PART
    """Bytes of a part of a text file."""
    piece_bytes: int | None = None
    """Approximate bytes of rows of Parquet and Arrow files to decode at once; None for as many as 65,536 rows take."""
    _open: dict[int, DataFile] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def anew(self) -> "Dataset":
        """Return the same files for another reader: each reader needs an open file of its own."""
        return Dataset(self.paths, self.schema, self.part_bytes, self.piece_bytes)

    def parts(self, begin: RowPosition = START, end: RowPosition | None = None) -> Iterator[FilePart]:
        """Yield the parts from `begin` to before `end`, or to the last."""
        share = -1
        for number in range(begin.file, len(self.paths)):
            if end is not None and (number, 0, 0) >= end:
                return
            file = self._file(number)
            part = begin.part if number == begin.file else 0
            last = None
            while file.has(part):
                if end is not None and (number, part, 0) >= end:
                    break
                if (its := file.share(part)) != last:
                    share, last = share + 1, its
                low = begin.row if (number, part) == (begin.file, begin.part) else 0
                high = end.row if end is not None and (number, part) == (end.file, end.part) else None
                yield FilePart(number, part, low, high, share)
                part += 1
            self.close()

    def read(self, part: FilePart, rows: np.ndarray | None = None) -> Raw:
        """Return the columns of a part. rows: the rows to keep, ascending and within the part's bounds; None for all."""
        if rows is not None:
            return self._file(part.file).read(part.part, rows)
        return self._file(part.file).read(part.part).between(part.low, part.high)

    def rows(self, part: FilePart) -> int:
        """Return the number of rows of a whole part, whatever its bounds, including malformed ones."""
        return self._file(part.file).rows(part.part)

    def count(self) -> int:
        """Return the number of rows of all files, including malformed ones."""
        return sum(self.rows(part) for part in self.parts())

    def place(self, row: int) -> RowPosition:
        """Return the place of a row, counted from the first file's first row; past the last row, the end."""
        for part in self.parts():
            rows = self._file(part.file).rows(part.part)
            if row < rows:
                return RowPosition(part.file, part.part, row)
            row -= rows
        return RowPosition(len(self.paths), 0, 0)

    def close(self) -> None:
        """Close the open file."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _file(self, number: int) -> DataFile:
        if number not in self._open:
            self.close()  # keep one open at a time: a folder may hold thousands
            self._open[number] = open_file(self.paths[number], self.schema, self.part_bytes, self.piece_bytes)
        return self._open[number]


def open_file(path: str, schema: FileSchema, part_bytes: int = PART, piece_bytes: int | None = None) -> DataFile:
    """Open a file in the format that its first bytes say it has."""
    kind = kind_of(path)
    if kind == "parquet":
        return ParquetFile(path, schema, piece_bytes=piece_bytes)
    if kind == "arrow":
        return ArrowFile(path, schema, piece_bytes=piece_bytes)
    if not schema.text.columns and schema.text.header == "no":
        raise BadFile(path, "is text, and the schema does not say what its columns are", "add columns to [file]")
    kind_of_text = MindFile if schema.text.samples == "shown" else TextFile
    return kind_of_text(path, schema, kind == "gzip", part_bytes)
