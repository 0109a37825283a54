"""Data files as one data set, and what identifies it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np

from skirl.data.files.columnar import SLICE, ParquetFile
from skirl.data.files.encode import Raw
from skirl.data.files.find import BadFile, kind_of
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

    def has(self, part: int) -> bool:
        """Return whether the file has this part."""
        ...

    def rows(self, part: int) -> int:
        """Return the number of rows of a part, including malformed ones."""
        ...

    def share(self, part: int) -> int:
        """Return the share of a part. One worker reads all parts of a share."""
        ...

    def read(self, part: int, rows: np.ndarray | None = None) -> Raw:
        """Return a part's columns. rows: the rows to keep, ascending; None for all."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


@dataclass
class Dataset:
    """Files as one sequence of rows; picklable."""

    paths: list[str]
    schema: FileSchema
    part_bytes: int = PART
    """Bytes of a part of a text file."""
    slice_rows: int = SLICE
    """Most rows of Parquet files to decode at once, unless a file leaves lists out."""
    whole_bytes: int | None = None
    """Most bytes of a row group that leaves lists out, and so is read as a whole; None: any."""
    _open: dict[int, DataFile] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def anew(self) -> "Dataset":
        """Return the same files for another reader: each reader needs an open file of its own."""
        return Dataset(self.paths, self.schema, self.part_bytes, self.slice_rows, self.whole_bytes)

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
        """Return the number of rows of a whole part, whatever its bounds."""
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
        """Open a file, in the format that its first bytes say it has."""
        if number not in self._open:
            self.close()  # keep one open at a time: a folder may hold thousands
            path, text = self.paths[number], self.schema.text
            kind = kind_of(path)
            if kind == "parquet":
                self._open[number] = ParquetFile(path, self.schema, self.slice_rows, self.whole_bytes)
            elif not text.columns and text.header == "no":
                raise BadFile(
                    path, "is text, and the schema does not say what its columns are", "add columns to [file]"
                )
            else:
                kind_of_text = MindFile if text.samples == "shown" else TextFile
                self._open[number] = kind_of_text(path, self.schema, kind == "gzip", self.part_bytes)
        return self._open[number]


ORDER = "sessions"
"""Key for how sessions are shuffled; absent if they are not."""
REPEATS = "repeats"
"""Key for searching repeated lists: gradients are then summed by list first, which may change the last bit."""


_DIFFERS = {
    "reads": ("that reads {}, not {}", "set valid to what it was"),
    "rows_of": ("whose ids become rows {}, not {}", "set vocab to what it was"),
    "schema": ("whose schema has {}, not {}", "set schema and rows to what they were"),
    ORDER: ("whose sessions are shuffled by {}, not {}", "set session-order and most-rows to what they were"),
    REPEATS: ("with repeats {!r}, not {!r}", "set repeats to what it was"),
}
"""How streams differ, and what to do, in the order of checks."""
_UNSET = {ORDER: "none", REPEATS: "stored"}


def check_identity(state: dict[str, Any], stream: dict[str, Any]) -> None:
    """Raise if the identity in a state is not that of a stream, saying what differs."""
    if state.get("files") != stream["files"]:
        raise ValueError(_other_files(state.get("files"), stream["files"]))
    for name in dict.fromkeys((*_DIFFERS, *stream)):
        was, now = (of.get(name, _UNSET.get(name)) for of in (state, stream))
        if name in ("schema", "rows_of") and not isinstance(was, str):
            raise ValueError(
                "the state does not say which schema, rows and vocabulary it is of: go on with the skirl that saved it"
            )
        if was != now:
            what, then = _DIFFERS.get(name, (f"with {name}={{!r}}, not {{!r}}", "set it to that"))
            was, now = _other_lines(was, now) if name == "schema" else (was, now)
            raise ValueError(f"the state is of a stream {what.format(was, now)}: {then}")


def _other_files(was: Any, now: list[str]) -> str:
    """Return a message that says how the files of a state differ from these."""
    then = "set data to the files it was taken on"
    if not isinstance(was, list):
        return f"the state does not say which files it is of: {then}, with the skirl that saved it"
    if len(was) != len(now):
        return f"the state is of a stream with {len(was)} files, not {len(now)}: {then}"
    number = next(i for i, (a, b) in enumerate(zip(was, now)) if a != b)
    return f"the state is of other files: file {number} was {was[number]}, and is {now[number]}: {then}"


def _other_lines(state: str, stream: str) -> tuple[str, str]:
    """Return where the schema of a state, as TOML, first differs from a stream's: both lines, with the column."""
    column = was = now = ""
    for was, now in zip_longest(state.splitlines(), stream.splitlines(), fillvalue="nothing"):
        if was != now:
            break
        if was.startswith(("[", "name = ")):
            column = "" if was.startswith("[") else f" in column {was.removeprefix('name = ')}"
    return was, now + column
