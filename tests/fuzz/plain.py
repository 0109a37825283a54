"""A plain reading of click logs to compare the library with, using Python's own types, one line and one value at a time.

It shares no code with the readers: text is split by `split`, numbers are Python's, and ids are hashed by
`tests.data.logs`. The schema's contents come from `FileSchema`, which has its own target.
"""

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from skirl.core.batch import Batch
from skirl.data.files.schema import Dense, FileSchema, Id
from tests.data.logs import number_hash, row_of, text_hash

_FLOAT = re.compile(rb"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WHOLE = re.compile(rb"-?\d+")
_HEX = re.compile(rb"[0-9a-fA-F]{1,16}")
_HEAD = 4096
_BOM = b"\xef\xbb\xbf"
_MAGIC = (b"PAR1", b"ARROW1", b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"FEA1", b"\xff\xfe",
          b"\xfe\xff", b"\xff\xff\xff\xff")  # fmt: skip

Sample = tuple[list[float], list[float], list[list[int]]]
"""Labels, dense features, and the rows of each id feature."""


class Refused(Exception):
    """Raised if the whole file is refused."""


class Bad(Exception):
    """Raised if a row is malformed."""


@dataclass
class Reading:
    """The contents of a file: a sample for each row, None for a malformed one; and the lines before the first row."""

    rows: list[Sample | None]
    before: int = 0

    @property
    def good(self) -> list[Sample]:
        return [row for row in self.rows if row is not None]

    @property
    def first_bad(self) -> int | None:
        return next((i for i, row in enumerate(self.rows) if row is None), None)


def read_text(data: bytes, schema: FileSchema, rows: dict[str, int], packed: bool = False) -> Reading:
    """Return the contents of a text file. Raise Refused if none of it is read."""
    if not data or (not packed and data.startswith(_MAGIC)) or b"\0" in data[:_HEAD]:
        raise Refused
    delimiter = b"\t" if schema.text.delimiter == "tab" else schema.text.delimiter.encode()
    lines = data.removeprefix(_BOM).split(b"\n")
    first = [name.decode("utf-8", "replace") for name in lines[0].rstrip(b"\r").split(delimiter)]
    absent = [name for name in schema.needed if name not in first]
    names, before = list(schema.text.columns), 0
    if schema.text.header == "yes" or (schema.text.header == "auto" and not absent):
        if absent or len(set(first)) < len(first):
            raise Refused
        names, before, lines = first, 1, lines[1:]
    elif not names:
        raise Refused
    if lines and lines[-1] == b"":
        lines.pop()
    return Reading([_line(line, delimiter, names, schema, rows) for line in lines], before)


def _line(line: bytes, delimiter: bytes, names: list[str], schema: FileSchema, rows: dict[str, int]) -> Sample | None:
    line = line.removesuffix(b"\r")
    fields = line.split(delimiter)
    if b"\r" in line or line.startswith(_BOM) or len(fields) != len(names):
        return None
    try:
        line.decode()
    except UnicodeDecodeError:
        return None
    return read_row(dict(zip(names, fields)), schema, rows)


def read_row(values: dict[str, Any], schema: FileSchema, rows: dict[str, int]) -> Sample | None:
    """Return the sample of a row's values, which are bytes, numbers, lists of them, or None."""
    missing = {text.encode() for text in schema.missing}

    def of(name: str) -> Any:
        value = values[name]
        return None if isinstance(value, bytes) and value in missing else value

    try:
        labels = [_label(of(label.name), label.kind) for label in schema.labels]
        dense = [x for column in schema.dense for x in _dense(of(column.column or column.name), column, schema)]
        ids = []
        for column in schema.ids:
            value = of(column.column or column.name)
            if column.list:
                items = [] if value is None else value
                if isinstance(items, bytes):
                    items = items.split(column.separator.encode())
                ids.append([_id(None if x in missing else x, column, schema, rows) for x in items])
            else:
                ids.append([_id(value, column, schema, rows)])
    except Bad:
        return None
    return labels, dense, ids


def _number(value: Any, nan_is_missing: bool) -> float | None:
    if isinstance(value, bytes):
        if nan_is_missing and re.fullmatch(rb"(?i)[-+]?nan", value):
            return None
        if not _FLOAT.fullmatch(value):
            raise Bad
        value = float(value)
    if value is None:
        return None
    value = float(value)
    if math.isnan(value) and nan_is_missing:
        return None
    if not math.isfinite(value):
        raise Bad
    return value


def _label(value: Any, kind: str) -> float:
    number = _number(value, False)
    if number is None or (kind == "binary" and number not in (0, 1)) or not _fits(number):
        raise Bad
    return number


def _fits(number: float) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.float32(number)))


def _dense(value: Any, column: Dense, schema: FileSchema) -> list[float]:
    number = _number(value, schema.nan_is_missing)
    if number is None:
        found = column.fill
    elif column.transform == "log":
        found = math.log1p(max(0.0, number))
    elif column.transform == "hour":
        found = number % 100 / 24
    else:
        found = number
        if not _fits(number):
            raise Bad
    return [found, float(number is None)] if column.indicator else [found]


def _id(value: Any, column: Id, schema: FileSchema, rows: dict[str, int]) -> int:
    table = column.table or column.name
    if column.type == "string":
        return 0 if value is None else row_of(text_hash(value, table), rows[table])
    if isinstance(value, bytes) and column.type == "hex":
        number = _matched(_HEX, value, 16)
    elif isinstance(value, bytes):
        number = _whole(value) if column.type != "float" or _WHOLE.fullmatch(value) else _number(value, False)
    else:
        number = value
    if isinstance(number, float) and math.isnan(number) and schema.nan_is_missing and not isinstance(value, bytes):
        number = None
    if isinstance(number, float):
        if not math.isfinite(number) or number != math.floor(number) or abs(number) >= 2.0**63:
            raise Bad
        number = int(number)
    if column.encode == "row":
        if number is None or not 0 <= _signed(number) < rows[table]:
            raise Bad
        return int(number)
    if number is None or (column.type == "fingerprint" and number == 0):
        return 0
    if column.type == "fingerprint":
        return row_of(int(number) & (1 << 64) - 1, rows[table])
    return row_of(number_hash(int(number), table), rows[table])


def _matched(pattern: re.Pattern[bytes], value: bytes, base: int) -> int:
    if not pattern.fullmatch(value):
        raise Bad
    return int(value, base)


def _whole(value: bytes) -> int:
    number = _matched(_WHOLE, value, 10)
    if not -(1 << 63) <= number < 1 << 63:
        raise Bad
    return number


def _signed(number: Any) -> int:
    number = int(number) & (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def samples_of(batches: list[Batch]) -> list[Sample]:
    """Convert batches to samples."""
    found: list[Sample] = []
    for batch in batches:
        n, keys = len(batch.labels), batch.sparse.keys()
        ends = np.concatenate([[0], np.cumsum(batch.sparse.lengths().numpy())])
        values = batch.sparse.values().tolist()
        strides = batch.sparse.stride_per_key()
        first = [sum(strides[:f]) for f in range(len(keys) + 1)]
        inverse = {name: of.tolist() for names, of in batch.sparse.groups.items() for name in names}
        assert ends[-1] == len(values) and len(ends) == first[-1] + 1
        parts = [list(pairwise(ends[first[f] : first[f + 1] + 1])) for f in range(len(keys))]
        lists = [[of[bag] for bag in inverse.get(name, range(n))] for name, of in zip(keys, parts, strict=True)]
        labels = batch.labels.reshape(n, -1).tolist()
        dense = batch.dense.tolist()
        for i in range(n):
            ids = [values[begin:end] for begin, end in (of[i] for of in lists)]
            found.append((labels[i], dense[i], ids))
    return found


def assert_equal(found: list[Sample], expected: list[Sample]) -> None:
    """Assert equal labels and rows, to the last bit, and dense features up to the rounding of a logarithm."""
    assert len(found) == len(expected), f"{len(found)} samples, {len(expected)} expected"
    for i, (ours, theirs) in enumerate(zip(found, expected)):
        assert ours[0] == [float(np.float32(x)) for x in theirs[0]], f"sample {i}: labels {ours[0]}, not {theirs[0]}"
        assert ours[2] == theirs[2], f"sample {i}: ids {ours[2]}, not {theirs[2]}"
        close = np.allclose(ours[1], np.array(theirs[1], np.float32), rtol=1e-6, atol=0)
        assert close, f"sample {i}: dense {ours[1]}, not {theirs[1]}"
