"""Targets of columns: Parquet of any types, output of `skirl convert`, omitted lists; and MIND's impressions."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from skirl.cli.files import Convert
from skirl.data.files.columnar import KEY
from skirl.data.files.schema import FileSchema
from skirl.dedup.layout import once, with_runs
from tests.data.logs import criteo_rows, write_tsv
from tests.fuzz.mutate import Draw, mutated, mutated_text
from tests.fuzz.samples import OfFile
from tests.fuzz.target import Target

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


class Columns(OfFile):
    """A file of columns: odd types in a valid file, or damaged bytes."""

    name = "parquet"

    def draw(self, draw: Draw, folder: Path) -> None:
        data = write(draw, table(draw, draw.choice([0, 1, 5, 30])))
        if draw.random() < 0.6:
            data = mutated(draw, data)
        (folder / "file").write_bytes(data[: 1 << 20])
        (folder / "schema.toml").write_text(SCHEMA)


class Converted(OfFile):
    """The output of `skirl convert`, with ids as rows or as fingerprints: damaged, or with a changed schema inside."""

    name, rows = "converted", None

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


LISTS = FileSchema.parse(
    '[[label]]\nname = "y"\n[[id]]\nnames = ["seen", "bought"]\ntype = "int"\nlist = true\n'
    '[[id]]\nname = "item"\ntype = "int"\n'
)


class Laid(OfFile):
    """Lists omitted where they equal the row above's, with damaged bytes or changed values."""

    name = "layout-once"

    def draw(self, draw: Draw, folder: Path) -> None:
        new = np.array([True, *(draw.random() < 0.2 for _ in range(draw.randrange(30)))])
        now = {"seen": [1, 2, 3], "bought": [7]}
        rows = []
        for _ in new:
            for name, before in now.items():
                some = [draw.randrange(9) for _ in range(draw.randrange(10))]
                now[name] = draw.choice([before, before, before[1:] + some[:1], some[:1] + before[:-1], some])
            rows.append({**now, "y": float(draw.randrange(2)), "item": draw.randrange(50)})
        lists = pa.list_(pa.int64())
        kinds = pa.schema({"y": pa.float32(), "seen": lists, "bought": lists, "item": pa.int64()})
        table = pa.Table.from_pylist(rows, kinds)
        of = with_runs(LISTS)
        table = once(table, of, new)
        if draw.random() < 0.5:
            name = draw.choice(table.column_names[1:])
            values = table.column(name).to_pylist()
            at = draw.randrange(len(values))
            other = draw.choice([None, values[at - 1]])
            if not pa.types.is_list(table.schema.field(name).type):
                other = draw.choice([other, -1, 0, 1, 3, 2**31 - 1])
            values[at] = other
            table = table.set_column(
                table.column_names.index(name), name, pa.array(values, table.schema.field(name).type)
            )
        out = io.BytesIO()
        size = draw.choice([1 << 20, 1 << 20, 5])  # groups of five rows may begin with an omitted list
        pq.write_table(table.replace_schema_metadata({KEY: of.toml().encode()}), out, row_group_size=size)
        data = out.getvalue()
        (folder / "file").write_bytes(mutated(draw, data) if draw.random() < 0.4 else data)


class Mind(OfFile):
    """Impressions with changed fields, changed lines, or damaged bytes."""

    name, kind = "mind", "mind"

    def draw(self, draw: Draw, folder: Path) -> None:
        lines = [
            f"{n}\tU{draw.randrange(4)}\t11/13/2019 8:{n:02}:57 AM\t{' '.join(f'N{k}' for k in range(n % 4))}\tN7-1 N8-0"
            for n in range(draw.randrange(1, 12))
        ]
        data = "\n".join(lines).encode()
        (folder / "file").write_bytes(mutated_text(draw, data, b"\t") if draw.random() < 0.7 else mutated(draw, data))


TARGETS: list[Target] = [Columns(), Converted(), Laid(), Mind()]
