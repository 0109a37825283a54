"""Small files, read as training reads them."""

from pathlib import Path
from typing import Any

from skirl.data import DataFlags
from skirl.data.files.find import BadFile, BadRow, BadSchema

CLEAN = (BadFile, BadRow, BadSchema)
INTS = '[[label]]\nname = "y"\nkind = "number"\n[[id]]\nname = "item"\ntype = "int"\n[file]\ncolumns = ["y", "item"]\n'
"""A schema with two columns and no header."""


def ids_of(folder: Path, text: bytes, schema: str, **flags: Any) -> list[int]:
    (folder / "file").write_bytes(text)
    (folder / "s.toml").write_text(schema)
    files = DataFlags(f"csv:{folder / 'file'}", schema=str(folder / "s.toml"), rows="1000", **flags).files()
    return [row for batch in files for row in batch.sparse.values().tolist()]


def outcome(path: Path, kind: str, schema: str | None = None) -> int | None:
    """Return the number of samples read, or None if the file is refused, after checking that every batch is sound."""
    count = 0
    try:
        files = DataFlags(f"{kind}:{path}", rows="100", schema=schema, bad_rows="skip").files(700)
        for batch in files:
            n = len(batch.labels)
            assert batch.dense.isfinite().all() and ((batch.labels == 0) | (batch.labels == 1)).all()
            values = batch.sparse.values()
            assert int(batch.sparse.lengths().sum()) == len(values)
            assert not len(values) or (int(values.min()) >= 0 and int(values.max()) < 100)
            count += n
    except CLEAN:
        return None
    except ValueError as error:
        assert "there are no rows left to read" in str(error)
        return None
    return count
