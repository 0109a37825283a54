"""Targets of files by session: omitted lists, windows, spilled rows, MIND's impressions."""

import io
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skirl.data.files.columnar import KEY
from skirl.data.files.errors import BadFile
from skirl.data.files.mind import MIND
from skirl.data.files.schema import FileSchema
from skirl.dedup import spill as spills
from skirl.dedup.finish import LAYOUTS, with_keys
from skirl.dedup.frames import ordered, packing_of
from skirl.dedup.spill import Spill, path_of
from tests.data.files.read import outcome
from tests.fuzz.loop import READ, REFUSED, Target, clean
from tests.fuzz.mutate import Draw, mutated, mutated_text
from tests.fuzz.tables import judged_table

SCHEMA = FileSchema.parse(
    '[[label]]\nname = "y"\n[[id]]\nnames = ["seen", "bought"]\ntype = "int"\nlist = true\n'
    '[[id]]\nname = "item"\ntype = "int"\n'
)


class Laid(Target):
    """Lists omitted where they equal the row above's, or windows of one buffer, with damaged bytes or changed values."""

    def __init__(self, layout: str) -> None:
        self.name, self._layout = f"layout-{layout}", LAYOUTS[layout]

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
        groups = self._layout.found(table, SCHEMA, new)
        table, of = self._layout.lay(table, groups, new), self._layout.schema(SCHEMA, groups)
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

    def judge(self, folder: Path) -> str:
        return judged_table(f"parquet:{folder / 'file'}", folder, SCHEMA, False)


class Spilled(Target):
    """Rows on disk and their index, with damaged bytes of the same or another length."""

    name = "spill"

    def prepare(self, folder: Path) -> None:
        rows = pa.table({"a": np.arange(40), "b": pa.array([[n] * (n % 3) for n in range(40)])})
        self._packing = packing_of(rows.schema)
        rows = with_keys(rows, np.arange(80, dtype=np.uint64).reshape(40, 2), np.arange(40.0))
        spill = Spill(folder)
        spill.add(ordered(rows, np.arange(40) // 25), 1 << 20)
        spill.add(ordered(rows, np.zeros(40, np.int64)), 500)
        self._told = spill.close()
        self.paths = [path_of(folder, name) for name in ("rows", "rows.keys", "rows.index")]
        self._data = [path.read_bytes() for path in self.paths]
        self._rows = self._read(folder)

    def _read(self, folder: Path) -> list[tuple[int, Any]]:
        told = self._told | {"sum": zlib.crc32((folder / "rows.index").read_bytes())}  # damaged before it is summed
        found = []
        with closing(spills.Spilled(folder, told, "remove it")) as spilled:
            records, _ = spilled.frames(None)
            for first, end in ((0, 2), (2, len(records))):
                keys = spilled.keys(records[first:end])
                rows = np.empty(int(records["length"][first:end].sum()), np.uint8)
                spilled.read(records[first:end], rows)
                sizes = keys[:, 3].view(np.int64)
                table = self._packing.columns(rows, np.cumsum(sizes) - sizes)
                found.append((records["partition"][first:end].tolist(), keys.tolist(), table.to_pylist()))
        return found

    def draw(self, draw: Draw, folder: Path) -> None:
        which = draw.randrange(len(self.paths))
        for k, (path, data) in enumerate(zip(self.paths, self._data)):
            if k == which:
                size, data = len(data), mutated(draw, data)
                if draw.random() < 0.8:
                    data = data[:size].ljust(size, b"\0")
            (folder / path.name).write_bytes(data)

    def judge(self, folder: Path) -> str:
        try:
            found = self._read(folder)
        except BadFile as error:
            return clean(error, folder, BadFile)
        assert found == self._rows, "other rows"
        return READ


class Mind(Target):
    """Impressions with changed fields, changed lines, or damaged bytes."""

    name = "mind"

    def draw(self, draw: Draw, folder: Path) -> None:
        lines = [
            f"{n}\tU{draw.randrange(4)}\t11/13/2019 8:{n:02}:57 AM\t{' '.join(f'N{k}' for k in range(n % 4))}\tN7-1 N8-0"
            for n in range(draw.randrange(1, 12))
        ]
        data = "\n".join(lines).encode()
        (folder / "file").write_bytes(mutated_text(draw, data, b"\t") if draw.random() < 0.7 else mutated(draw, data))

    def judge(self, folder: Path) -> str:
        assert MIND.text.samples == "shown"
        return REFUSED if outcome(folder / "file", "mind") is None else READ


TARGETS: list[Target] = [Laid("once"), Laid("window"), Spilled(), Mind()]
