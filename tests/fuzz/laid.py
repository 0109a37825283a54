"""Targets of files by session: omitted lists, and MIND's impressions."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skirl.data.files.columnar import KEY
from skirl.data.files.schema import FileSchema
from skirl.dedup.layout import once, with_runs
from tests.fuzz.loop import Target
from tests.fuzz.mutate import Draw, mutated, mutated_text
from tests.fuzz.samples import judged_files

SCHEMA = FileSchema.parse(
    '[[label]]\nname = "y"\n[[id]]\nnames = ["seen", "bought"]\ntype = "int"\nlist = true\n'
    '[[id]]\nname = "item"\ntype = "int"\n'
)


class Laid(Target):
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
        of = with_runs(SCHEMA)
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

    def judge(self, folder: Path) -> str:
        return judged_files(f"parquet:{folder / 'file'}", folder)


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
        return judged_files(f"mind:{folder / 'file'}", folder)


TARGETS: list[Target] = [Laid(), Mind()]
