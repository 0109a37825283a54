"""Files in order, cut into parts that any process can read by themselves."""

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


class Place(NamedTuple):
    """A row, by file, part of the file and place in the part."""

    file: int = 0
    part: int = 0
    row: int = 0


START = Place()


class Part(NamedTuple):
    """A part to read, or the rows low <= row < high of it."""

    file: int
    part: int
    low: int
    high: int | None
    share: int
    """Parts of one share are read by one worker."""


class DataFile(Protocol):
    """A file of rows in parts."""

    path: str

    def has(self, part: int) -> bool: ...
    def rows(self, part: int) -> int: ...
    def share(self, part: int) -> int: ...
    def read(self, part: int, rows: np.ndarray | None = None) -> Raw: ...
    def close(self) -> None: ...


@dataclass
class Dataset:
    """Files as one list of rows; picklable."""

    paths: list[str]
    schema: FileSchema
    part_bytes: int = PART
    """Of text files."""
    piece_bytes: int | None = None
    """Of Parquet and Arrow files: bytes of rows, about, that are decoded at once; None: as many as 65,536 rows have."""
    _open: dict[int, DataFile] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def anew(self) -> "Dataset":
        """The same files for another reader: this one's open file is where this one needs it."""
        return Dataset(self.paths, self.schema, self.part_bytes, self.piece_bytes)

    def parts(self, begin: Place = START, end: Place | None = None) -> Iterator[Part]:
        """The parts from one place to another, or to the end."""
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
                yield Part(number, part, low, high, share)
                part += 1
            self.close()

    def read(self, part: Part, rows: np.ndarray | None = None) -> Raw:
        """The columns of a part. rows: which of its rows, ascending, all within the part's bounds; None: all of those."""
        if rows is not None:
            return self._file(part.file).read(part.part, rows)
        return self._file(part.file).read(part.part).between(part.low, part.high)

    def rows(self, part: Part) -> int:
        """All rows of a part, malformed ones too, from its first on."""
        return self._file(part.file).rows(part.part)

    def count(self) -> int:
        """All rows, malformed ones too."""
        return sum(self.rows(part) for part in self.parts())

    def place(self, row: int) -> Place:
        """Where a row is, counted from the first of the first file; beyond all, the end."""
        for part in self.parts():
            rows = self._file(part.file).rows(part.part)
            if row < rows:
                return Place(part.file, part.part, row)
            row -= rows
        return Place(len(self.paths), 0, 0)

    def close(self) -> None:
        """Let the open file go."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _file(self, number: int) -> DataFile:
        if number not in self._open:
            self.close()  # one at a time: a folder may hold thousands
            self._open[number] = open_file(self.paths[number], self.schema, self.part_bytes, self.piece_bytes)
        return self._open[number]


def open_file(path: str, schema: FileSchema, part_bytes: int = PART, piece_bytes: int | None = None) -> DataFile:
    """A file as what its first bytes say it is."""
    kind = kind_of(path)
    if kind == "parquet":
        return ParquetFile(path, schema, piece_bytes=piece_bytes)
    if kind == "arrow":
        return ArrowFile(path, schema, piece_bytes=piece_bytes)
    if not schema.text.columns and schema.text.header == "no":
        raise BadFile(path, "is text, and the schema does not say what its columns are", "add columns to [file]")
    kind_of_text = MindFile if schema.text.samples == "shown" else TextFile
    return kind_of_text(path, schema, kind == "gzip", part_bytes)
