"""Reads TSV and CSV files, plain or compressed with gzip, in parts that Arrow's CSV reader parses one by one.

Part k holds the lines that begin in bytes [k * PART, (k + 1) * PART) of the text.
"""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

from skirl.data.files.columns import pc, plain
from skirl.data.files.encode import Raw
from skirl.data.files.find import HEAD, BadFile, BadSchema, check_text, no_column, shown
from skirl.data.files.schema import FileSchema, Id, Text

PART = 1 << 21
LONGEST_LINE = 1 << 20
BEYOND = 1 << 16  # bytes to read beyond the end of a part, for the rest of its last line
_BOM = b"\xef\xbb\xbf"


class TextFile:
    def __init__(self, path: str, schema: FileSchema, packed: bool, part: int = PART) -> None:
        self.path, self._schema, self._part = path, schema, part
        self._delimiter = "\t" if schema.text.delimiter == "tab" else schema.text.delimiter
        self._text: Any = (UnpackedBytes if packed else pa.OSFile)(path)
        try:
            self.names, self._skip, self._header = self._named()
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        self._text.close()

    def has(self, part: int) -> bool:
        begin = max(0, part * self._part - 1)  # where `_lines` begins to read
        return len(self._text.read_at(2, begin)) > (part > 0)

    def share(self, part: int) -> int:
        return part

    def rows(self, part: int) -> int:
        data = self._lines(part)
        return data.count(b"\n") + (len(data) > 0 and not data.endswith(b"\n"))

    def read(self, part: int) -> Raw:
        data = self._lines(part)
        if data and not data.endswith(b"\n"):
            data += b"\n"
        needed, text = self._schema.needed, self._schema.text
        data, torn = _mended(data)
        if text.quotes and b'"' in data:
            data = _closed(data, self._delimiter, torn)
        broken: list[tuple[int, str, str]] = []

        def wrong(row: csv.InvalidRow) -> str:
            found = f"the line has {row.actual_columns:,} columns ({shown(row.text[:80])})"
            broken.append((row.number - 1, found, f"{row.expected_columns:,}"))
            return "skip"

        if not data:
            nothing = {name: pa.array([], pa.string()) for name in needed}
            return Raw(nothing, np.arange(0), self.path, str, [], nulls=True)
        try:
            table = csv.read_csv(
                pa.BufferReader(data),
                read_options=csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self.names),
                parse_options=csv.ParseOptions(
                    delimiter=self._delimiter, quote_char='"' if text.quotes else False, newlines_in_values=False,
                    ignore_empty_lines=False, invalid_row_handler=wrong,
                ),
                convert_options=csv.ConvertOptions(
                    include_columns=list(needed), column_types={name: pa.string() for name in needed}, check_utf8=False,
                    strings_can_be_null=True, quoted_strings_can_be_null=True, null_values=list(self._schema.missing),
                ),
            )  # fmt: skip
        except (pa.ArrowException, UnicodeDecodeError) as error:
            found = f"cannot be split into columns ({error})"
            raise BadFile(self.path, found, "check delimiter and quotes in the schema") from None
        lines = np.arange(table.num_rows + len(broken))
        if broken:
            lines = np.delete(lines, [line for line, _, _ in broken])
        if torn:
            keep = ~np.isin(lines, list(torn))
            table, lines = table.filter(pa.array(keep)), lines[keep]
            broken = [(line, *why) for line, why in torn.items()] + [one for one in broken if one[0] not in torn]
        columns = {name: table.column(name) for name in needed}

        def where(row: int) -> str:
            before = sum(TextFile.rows(self, before) for before in range(part))  # lines, whatever samples are
            return f"line {before + row + 1 + self._header:,}"

        return Raw(columns, lines, self.path, where, broken, nulls=True)

    # Names.

    def first_width(self) -> int:
        line = self._at_begin()[self._skip :].partition(b"\n")[0]
        return len(self.names) if self._header else line.count(self._delimiter.encode()) + 1

    def _named(self) -> tuple[list[str], int, bool]:
        """The columns in order, where the first row begins, and whether a header is before it."""
        data = self._at_begin()
        check_text(self.path, data[:HEAD])
        skip = len(_BOM) if data.startswith(_BOM) else 0
        text, needed = self._schema.text, self._schema.needed
        end = data.find(b"\n", skip)
        whole = data[skip : end if end >= 0 else len(data)]
        line = whole.rstrip(b"\r")
        fields = line.split(self._delimiter.encode())
        first = [name.strip(b'"' if text.quotes else b"").decode("utf-8", "replace") for name in fields]
        absent = [name for name in needed if name not in first]

        known = not absent or (len(absent) < len(needed) and not text.columns)
        if text.header == "yes" or (text.header == "auto" and known):
            if absent:
                then = "name the column in the schema as the file does, or fix the header"
                raise BadFile(self.path, f"its header has {no_column(absent[0], first)}", then)
            if len(set(first)) < len(first):
                twice = next(name for name in first if first.count(name) > 1)
                raise BadFile(self.path, f"its header names column {twice!r} twice", "name each column once")
            return first, skip + len(whole) + (end >= 0), True
        if not text.columns:
            raise BadSchema(
                f"{self.path}: its first line ({shown(line.decode('utf-8', 'replace'))}) is not a header that names "
                f"column {absent[0]!r}, and the schema does not list the columns: write columns = [...] under [file] in it"
            )
        return list(text.columns), skip, False

    # Lines.

    def _lines(self, part: int) -> bytes:
        """The lines that begin in a part, without byte order mark and header.

        These are bytes [a, b) of the text: a follows the first line end from part * PART - 1 on, b the first one from
        (part + 1) * PART - 1 on.
        """
        begin = max(0, part * self._part - 1)
        last = (part + 1) * self._part - 1 - begin  # where the search for the end begins
        data = self._text.read_at(last + 1 + BEYOND, begin)
        a = data.find(b"\n") + 1 if part else 0
        if a > last or (part and not a):
            return b""  # no line begins here
        b, there = data.find(b"\n", last), 0
        while b < 0 and len(data) > there:
            if len(data) > last + LONGEST_LINE:
                raise self._too_long()
            there = len(data)
            data = self._text.read_at(there + BEYOND, begin)
            b = data.find(b"\n", max(last, there))
        return data[a if part else self._skip : b + 1 if b >= 0 else None]

    def _too_long(self) -> BadFile:
        found = f"a line is longer than {LONGEST_LINE >> 20} MiB"
        return BadFile(self.path, found, "is it a text file with line ends?")

    def _at_begin(self) -> bytes:
        """The beginning of the text, with at least its first line."""
        data = self._text.read_at(LONGEST_LINE, 0)
        if not data:
            raise BadFile(self.path, "is empty", "remove it, or get it again")
        if b"\n" not in data and len(data) >= LONGEST_LINE:
            raise self._too_long()
        return data


class UnpackedBytes:
    """The text of a file that gzip has packed. Who reads before where the last read began starts again at its beginning."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._file: Any = pa.input_stream(self._path, compression="gzip")
        self._at, self._kept = 0, b""  # where the text that is kept begins, and this text

    def close(self) -> None:
        self._file.close()

    def read_at(self, size: int, begin: int) -> bytes:
        if begin < self._at:
            self.close()
            self._open()
        more = b"-"
        while more and self._at + len(self._kept) < begin + size:
            try:
                more = self._file.read(1 << 20)
            except (OSError, pa.ArrowException) as error:
                at = self._at + len(self._kept)
                found = f"is damaged: what follows byte {at:,} of its text cannot be unpacked ({error})"
                raise BadFile(self._path, found, "get it again") from None
            used = min(begin - self._at, len(self._kept))
            self._at, self._kept = self._at + used, self._kept[used:] + more
        return self._kept[begin - self._at :][:size]


def _mended(data: bytes) -> tuple[bytes, dict[int, tuple[str, str]]]:
    """Text that Arrow splits into the same lines as we do, and the lines already found malformed, with the reasons.

    Arrow takes a carriage return for a line end, and cannot report a line that is not UTF-8.
    """
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    torn: dict[int, tuple[str, str]] = {}
    if b"\r" not in data and (data.isascii() or (b"\n" + _BOM not in b"\n" + data and _undecodable(data) is None)):
        return data, torn
    lines = data.split(b"\n")
    for row, line in enumerate(lines):
        if b"\r" in line:
            torn[row] = ("there is a carriage return inside the line", "one at its end only")
            lines[row] = line = line.replace(b"\r", b" ")
        if line.startswith(_BOM):  # the file's own is gone by now, and Arrow would drop one from the first line it sees
            torn[row] = ("the line begins with a byte order mark", "one only at the start of the file")
        if (at := _undecodable(line)) is not None:
            torn[row] = (f"byte {at + 1} of the line is {line[at]:#04x}", "UTF-8 text")
            lines[row] = line.translate(_ASCII)
    return b"\n".join(lines), torn


def _undecodable(data: bytes) -> int | None:
    """The place of the first byte that is not UTF-8; None if all are."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _closed(data: bytes, delimiter: str, torn: dict[int, tuple[str, str]]) -> bytes:
    """The text without quotes that stay open, which would take the next line too; `torn` gets their lines."""
    text = np.frombuffer(data, np.uint8)
    counts = np.bincount(np.searchsorted(np.flatnonzero(text == 10), np.flatnonzero(text == 34)))
    opened = re.compile(rb'(?:^|%b)"(?:[^"]|"")*$' % re.escape(delimiter.encode()))
    if len(odd := np.flatnonzero(counts % 2)):
        lines = data.split(b"\n")
        for row in odd.tolist():
            if opened.search(lines[row]):
                torn[row] = ("a quote is not closed in its line", "quotes in pairs")
                lines[row] = lines[row].replace(b'"', b" ")
        data = b"\n".join(lines)
    return data


_ASCII = bytes(min(byte, 127) for byte in range(256))


# MIND: each line is an impression, and each item that it shows is a sample.

LINE = ("impression", "user", "time", "history", "shown")
"""The columns. Items are separated by spaces. One shown ends with "-1" if it was clicked and "-0" if not; in the test set it
has no ending."""
_LINES = FileSchema((), (), tuple(Id(name) for name in LINE), text=Text("tab", LINE, "no"))
_WHEN = "%m/%d/%Y %I:%M:%S %p"


class MindFile(TextFile):
    """A behaviors.tsv file. A line that cannot be split into columns counts as one malformed sample."""

    def __init__(self, path: str, schema: FileSchema, packed: bool, part: int = PART) -> None:
        super().__init__(path, replace(_LINES, missing=schema.missing), packed, part)
        self._needed = schema.needed

    def rows(self, part: int) -> int:
        return int(self._shown(part)[2].sum())

    def read(self, part: int) -> Raw:
        raw, shown, counts = self._shown(part)
        ends = np.cumsum(counts)
        of = np.repeat(np.arange(raw.rows), counts[raw.places])
        columns = {name: plain(raw.columns[name], ()).take(pa.array(of)) for name in LINE[:2] + LINE[3:4]}
        moments = pc.strptime(plain(raw.columns["time"], ()), format=_WHEN, unit="s", error_is_null=True)
        columns["time"] = moments.take(pa.array(of))
        each = pc.list_flatten(shown) if raw.rows else pa.array([], pa.string())
        found = pc.extract_regex(each, "^(?P<item>.*)-(?P<click>[^-]*)$")
        split = found.is_valid()  # items without a click mark, as in the test set, have no label
        columns["item"] = pc.if_else(split, pc.struct_field(found, "item"), each)
        columns["click"] = pc.if_else(split, pc.struct_field(found, "click"), None)
        broken = [(int(ends[line]) - 1, found, expected) for line, found, expected in raw.broken]
        return replace(
            raw,
            columns={name: columns[name] for name in self._needed},
            where=lambda row: raw.where(int(np.searchsorted(ends, row, side="right"))),
            broken=broken,
            places=np.delete(np.arange(counts.sum()), [at for at, _, _ in broken]),
        )

    def _shown(self, part: int) -> tuple[Raw, pa.Array, np.ndarray]:
        """The lines of a part, the items of each that could be split (a missing one if it has none), and the number of
        samples of each line (int64)."""
        raw = super().read(part)
        shown = pc.split_pattern(pc.fill_null(plain(raw.columns["shown"], ()), ""), " ")
        counts = np.ones(raw.rows + len(raw.broken), np.int64)
        counts[raw.places] = pc.list_value_length(shown).to_numpy(zero_copy_only=False)
        return raw, shown, counts
