"""Rows as plain Python, as data sets hold them, and files of them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
SCHEMA = """
session = "visit"
time = "when"
[[label]]
name = "click"
[[dense]]
name = "price"
[[id]]
name = "item"
type = "int"
[[id]]
name = "seen"
type = "int"
table = "item"
list = true
[[id]]
name = "bought"
type = "int"
list = true
"""
TYPES = pa.schema(
    {
        "click": pa.int8(), "price": pa.float32(), "item": pa.int64(), "seen": pa.list_(pa.int64()),
        "bought": pa.list_(pa.int64()), "visit": pa.int64(), "when": pa.int64(), "user": pa.string(),
    }
)  # fmt: skip


def write(path: Path, rows: Sequence[Row], group: int = 1 << 20) -> str:
    """Write a Parquet file of rows, and return its --data flag."""
    kept = [TYPES.field(name) for name in TYPES.names if not rows or name in rows[0]]
    pq.write_table(pa.Table.from_pylist(list(rows), pa.schema(kept)), path, row_group_size=group)
    return f"parquet:{path}"


def schema(folder: Path) -> str:
    """Write the schema of these files, and return its path."""
    path = folder / "schema.toml"
    path.write_text(SCHEMA)
    return str(path)


def counted(rows: Sequence[Row]) -> Counter[str]:
    """Return which rows there are, and how many of each."""
    return Counter(repr(sorted(row.items())) for row in rows)
