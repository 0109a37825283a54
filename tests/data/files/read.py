"""Small files, read as training reads them."""

from pathlib import Path
from typing import Any

from skirl.data import DataFlags

INTS = '[[label]]\nname = "y"\nkind = "number"\n[[id]]\nname = "item"\ntype = "int"\n[file]\ncolumns = ["y", "item"]\n'
"""A schema with two columns and no header."""


def ids_of(folder: Path, text: bytes, schema: str, **flags: Any) -> list[int]:
    (folder / "file").write_bytes(text)
    (folder / "s.toml").write_text(schema)
    files = DataFlags(f"csv:{folder / 'file'}", schema=str(folder / "s.toml"), rows="1000", **flags).files()
    return [row for batch in files for row in batch.sparse.values().tolist()]
