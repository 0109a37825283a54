"""Targets of columns: Parquet of any types, output of `skirl convert`."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from skirl.cli.files import Convert
from skirl.data.files.columnar import KEY
from tests.data.logs import criteo_rows, write_tsv
from tests.fuzz.loop import Target
from tests.fuzz.mutate import Draw, mutated
from tests.fuzz.samples import judged_files

SCHEMA = """
missing = ["", "NULL"]
[[label]]
name = "y"
[[dense]]
name = "x"
indicator = true
[[dense]]
name = "z"
transform = "log"
[[id]]
name = "item"
type = "int"
[[id]]
name = "name"
[[id]]
name = "tags"
type = "int"
list = true
[[id]]
name = "user"
type = "int"
encode = "row"
rows = 300
"""
_WHOLE = [0, 1, 2, 7, 127, 128, 255, 256, 299, 300, 65535, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63]
_WHOLE += [2**64 - 1, -1, -128, -(2**31), -(2**63)]
_REAL = [0.0, -0.0, 0.5, 1.0, 1e38, 3.5e38, 1e308, float("nan"), float("inf"), -float("inf"), -1.0, 2.0**53, 2.0**63]
_NAMES = ["", "NULL", "a", "b", "7", "0x1", "0.5", "ff", "é", "12345678", "123456789", "x" * 40]
_INTS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
_REALS = [pa.float16(), pa.float32(), pa.float64()]
_TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(), pa.binary_view()]
_OTHERS = [pa.bool_(), pa.null(), pa.date32(), pa.timestamp("us"), pa.decimal128(9, 2), pa.binary(3)]
_OTHERS += [pa.struct([("a", pa.int32())])]


def values(draw: Draw, kind: pa.DataType, n: int) -> pa.Array:
    """Draw n values of a type, some of them missing."""
    hole = draw.choice([0, 0, 0.2, 1])

    def one() -> Any:
        if draw.random() < hole:
            return None
        if pt.is_boolean(kind):
            return draw.random() < 0.5
        if pt.is_integer(kind):
            size = kind.bit_width - pt.is_signed_integer(kind)
            low = -(1 << size) if pt.is_signed_integer(kind) else 0
            return (
                min(max(draw.choice(_WHOLE), low), (1 << size) - 1) if draw.random() < 0.3 else draw.randrange(2, 100)
            )
        return draw.choice(_REAL) if draw.random() < 0.2 else float(draw.randrange(100))

    if pt.is_floating(kind):
        made = [one() for _ in range(n)]
        return pa.array(made, pa.float64()).cast(kind, safe=False)
    if pt.is_integer(kind) or pt.is_boolean(kind):
        return pa.array([one() for _ in range(n)], kind)
    if kind in _TEXTS:
        return pa.array([None if draw.random() < hole else draw.choice(_NAMES) for _ in range(n)], pa.string()).cast(
            kind
        )
    return pa.nulls(n, kind)


def column(draw: Draw, name: str, n: int) -> pa.Array:
    """Draw a column, mostly of a type that its name suggests."""
    if name == "y":
        kind = draw.choice([*_INTS, *_REALS, pa.bool_()]) if draw.random() < 0.9 else draw.choice(_OTHERS + _TEXTS)
        if kind in _OTHERS + _TEXTS and not pt.is_boolean(kind):
            return values(draw, kind, n)
        good = pa.array([draw.randrange(2) for _ in range(n)], pa.int8()).cast(kind)
        return values(draw, kind, n) if draw.random() < 0.1 else good
    usual = {"x": _REALS + _INTS, "z": _REALS + _INTS, "name": _TEXTS}.get(name, _INTS + _TEXTS[:2])
    kind = draw.choice(usual) if draw.random() < 0.93 else draw.choice(_OTHERS + _TEXTS + _INTS + _REALS)
    if (name == "tags" and draw.random() < 0.95) or draw.random() < 0.02:
        sizes = [draw.randrange(4) for _ in range(n)]
        flat = values(draw, kind, sum(sizes))
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + size)
        holes = [None if draw.random() < 0.1 else at for at in offsets[:-1]]
        made = pa.ListArray.from_arrays(pa.array([*holes, offsets[-1]], pa.int32()), flat)
        return made.cast(pa.large_list(kind)) if draw.random() < 0.2 else made
    if name == "user" and draw.random() < 0.8:
        return pa.array([draw.randrange(300) for _ in range(n)], pa.int64())
    made = values(draw, kind, n)
    if draw.random() < 0.15 and not (pt.is_nested(kind) or pt.is_null(kind) or kind in _TEXTS[4:]):
        made = made.dictionary_encode()
    return made


def table(draw: Draw, n: int) -> pa.Table:
    """Draw a table for SCHEMA with an unused column, and perhaps with a column missing or repeated."""
    names = ["y", "x", "z", "item", "name", "tags", "user", "other"]
    draw.shuffle(names)
    if draw.random() < 0.03:
        names = [*names, draw.choice(names)] if draw.random() < 0.5 else names[1:]
    return pa.Table.from_arrays([column(draw, name, n) for name in names], names=names)


def write(draw: Draw, made: pa.Table) -> bytes:
    """Return a Parquet file with options that some writer may use."""
    out = io.BytesIO()
    pq.write_table(
        made, out, row_group_size=draw.choice([1, 3, 10, 1 << 20]),
        compression=draw.choice(["none", "snappy", "zstd", "gzip"]), use_dictionary=draw.random() < 0.5,
        data_page_version=draw.choice(["1.0", "2.0"]), write_statistics=draw.random() < 0.5,
        data_page_size=draw.choice([1, 100, 1 << 20]), write_page_checksum=draw.random() < 0.2,
    )  # fmt: skip
    return out.getvalue()


class Columns(Target):
    """A file of columns: odd types in a valid file, or damaged bytes."""

    name = "parquet"

    def draw(self, draw: Draw, folder: Path) -> None:
        data = write(draw, table(draw, draw.choice([0, 1, 5, 30])))
        if draw.random() < 0.6:
            data = mutated(draw, data)
        (folder / "file").write_bytes(data[: 1 << 20])
        (folder / "schema.toml").write_text(SCHEMA)

    def judge(self, folder: Path) -> str:
        return judged_files(f"parquet:{folder / 'file'}", folder)


class Converted(Target):
    """The output of `skirl convert`, with ids as rows or as fingerprints: damaged, or with a changed schema inside."""

    name = "converted"

    def prepare(self, folder: Path) -> None:
        write_tsv(folder / "text", criteo_rows(60, 5))
        self._seeds = []
        for number, rows in enumerate([None, "1000"]):
            out = folder / f"{number}.parquet"
            Convert(f"criteo:{folder / 'text'}", str(out), rows=rows, quiet=True).run()
            self._seeds.append(out.read_bytes())

    def draw(self, draw: Draw, folder: Path) -> None:
        data = draw.choice(self._seeds)
        if draw.random() < 0.3:
            read = pq.read_table(pa.BufferReader(data))
            toml = mutated(draw, read.schema.metadata[KEY])
            out = io.BytesIO()
            pq.write_table(read.replace_schema_metadata({KEY: toml}), out)
            data = out.getvalue()
        else:
            data = mutated(draw, data, self._seeds)
        (folder / "file").write_bytes(data)

    def judge(self, folder: Path) -> str:
        return judged_files(f"parquet:{folder / 'file'}", folder, rows=None)


TARGETS: list[Target] = [Columns(), Converted()]
