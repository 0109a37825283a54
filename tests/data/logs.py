"""Synthetic click logs in the layouts that skirl reads, and a plain reading of them that shares no code with skirl's."""

import csv
import gzip
import math
import random
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skirl.core.batch import Batch
from skirl.data import DataFlags

CRITEO = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
MASK = (1 << 64) - 1


def criteo_rows(n: int, seed: int = 0) -> list[list[str]]:
    """Return rows in Criteo's layout as text; '' means missing."""
    draw = random.Random(seed)
    rows = []
    for _ in range(n):
        numbers = ["" if draw.random() < 0.2 else str(int(draw.expovariate(0.02)) - 2) for _ in range(13)]
        ids = ["" if draw.random() < 0.1 else f"{draw.randrange(1 << draw.choice([4, 12, 32])):08x}" for _ in range(26)]
        rows.append([str(draw.randrange(2)), *numbers, *ids])
    return rows


def text(rows: list[list[str]], end: str = "\n") -> bytes:
    return "".join("\t".join(row) + end for row in rows).encode()


def write_tsv(path: Path, rows: list[list[str]], *, packed: bool = False) -> Path:
    path.write_bytes(gzip.compress(text(rows)) if packed else text(rows))
    return path


def write_parquet(path: Path, rows: list[list[str]], names: list[str] = CRITEO, group: int = 100) -> Path:
    table = pa.table({name: pa.array([row[i] for row in rows]) for i, name in enumerate(names)})
    pq.write_table(table, path, row_group_size=group)
    return path


def write_in_three_forms(folder: Path, rows: list[list[str]], cuts: tuple[int, ...], **of_parquet: Any) -> None:
    """Write the same rows as text, packed text and Parquet, each in several files."""
    for name in ("text", "packed", "parquet"):
        (folder / name).mkdir()
        for number, (low, high) in enumerate(pairwise(cuts)):
            path = folder / name / f"part-{number}"
            if name == "parquet":
                write_parquet(path, rows[low:high], **of_parquet)
            else:
                write_tsv(path, rows[low:high], packed=name == "packed")


def read_tsv(path: Path) -> list[list[str]]:
    with path.open() as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


# The plain reference: Python's integers, no Arrow, no NumPy.


def splitmix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def seed_of(table: str) -> int:
    raw = table.encode()
    return ((zlib.crc32(raw) << 32) | zlib.crc32(raw, 0x5EED)) ^ 0x736B69726C6461


def number_hash(value: int, table: str) -> int:
    return splitmix((value & MASK) ^ seed_of(table))


def text_hash(value: bytes, table: str) -> int:
    state = splitmix(seed_of(table) ^ (len(value) * 0x9E3779B97F4A7C15 & MASK))
    for at in range(0, len(value), 8):
        word = int.from_bytes(value[at : at + 8], "little")
        state = splitmix(((state ^ word) + 0x9E3779B97F4A7C15) & MASK)
    return state


def row_of(fingerprint: int, rows: int) -> int:
    if rows - 1 < 1 << 32:
        return 1 + ((fingerprint >> 32) * (rows - 1) >> 32)
    return 1 + (fingerprint * (rows - 1) >> 64)


def criteo_sample(row: list[str], rows: int) -> tuple[float, list[float], list[int]]:
    """Return label, dense features and rows of one line."""
    dense = [0.0 if not text else math.log1p(max(0, int(text))) for text in row[1:14]]
    ids = [
        0 if not text else row_of(number_hash(int(text, 16), name), rows) for name, text in zip(CRITEO[14:], row[14:])
    ]
    return float(row[0]), dense, ids


def samples_of(batches: list[Batch]) -> list[tuple[float, list[float], list[int]]]:
    """Convert batches with one id per feature to samples."""
    found = []
    for batch in batches:
        n = len(batch.labels)
        ids = batch.sparse.values().view(-1, n).t().tolist()
        found += zip(batch.labels.tolist(), batch.dense.tolist(), ids)
    return found


def plain(batch: Batch) -> tuple[list[Any], ...]:
    """Return all that a batch holds, each list in full."""
    sparse = batch.sparse.expanded()
    return tuple(of.tolist() for of in (batch.dense, batch.labels, sparse.values(), sparse.lengths()))


INTS = '[[label]]\nname = "y"\nkind = "number"\n[[id]]\nname = "item"\ntype = "int"\n[file]\ncolumns = ["y", "item"]\n'
"""A schema with two columns and no header."""


def ids_of(folder: Path, text: bytes, schema: str) -> list[int]:
    (folder / "file").write_bytes(text)
    (folder / "s.toml").write_text(schema)
    files = DataFlags(f"csv:{folder / 'file'}", schema=str(folder / "s.toml"), rows="1000").files()
    return [row for batch in files for row in batch.sparse.values().tolist()]
