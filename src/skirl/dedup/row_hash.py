"""Whether two data sets hold the same rows, in any order and layout: by a sum of hashes of rows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from skirl.core.initial import mix
from skirl.data.convert import keeping
from skirl.data.files.column import Encoded
from skirl.data.files.columns import floats_of, is_date, plain, seconds_of, sessions_of
from skirl.data.files.encode import Fingerprints
from skirl.data.files.hashing import GOLDEN, NONE, hash_numbers, seed_of
from skirl.data.files.schema import FileSchema
from skirl.tools.jit import kernel

if TYPE_CHECKING:
    from skirl.data.files.stream import Files

_OTHER = np.uint64(0xD1B54A32D192ED03)


def same_rows(source: "Files", written: FileSchema, kept: Mapping[str, str], copy: "Files") -> dict[str, Any]:
    """Compare files with those that were made of them, `copy`. Return rows, hashes, and whether they are equal."""
    copy = keeping(replace(copy, encoder=replace(copy.encoder, rows_of=Fingerprints())), tuple(kept))
    rows, of = _sum(source, written, kept)
    rows_written, of_written = _sum(copy, written, {name: name for name in kept})
    same = (rows, of) == (rows_written, of_written)
    return {
        "same": same, "rows": rows, "rows_written": rows_written, "hash": f"{of:016x}", "hash_written": f"{of_written:016x}"
    }  # fmt: skip


def _sum(files: "Files", schema: FileSchema, kept: Mapping[str, str]) -> tuple[int, int]:
    count, total = 0, 0
    for piece in files.pieces():
        columns = {name: piece.kept[files.encoder.schema.also.index(of)] for name, of in kept.items()}
        total += int(row_hashes(piece, schema, columns).sum())
        count += len(piece)
    return count, total & ((1 << 64) - 1)


def row_hashes(rows: Encoded, schema: FileSchema, kept: Mapping[str, Any]) -> np.ndarray:
    """Return a hash of each row (uint64 [n]), whatever the order and the layout of its columns. kept: columns by name."""
    out = np.zeros(len(rows), np.uint64)
    for columns, values in ((schema.labels, rows.labels), (schema.dense, rows.dense)):
        for k, column in enumerate(columns):
            out += _hashes(np.ascontiguousarray(values[:, k]).view(np.int32), f"number {column.name}")
    for column, ids in zip(schema.ids, rows.ids, strict=True):
        if ids.offsets is None:
            out += _hashes(ids.values, f"id {column.name}")
            continue
        lists = np.empty(len(ids.offsets) - 1, np.uint64)
        _fill(ids.values, ids.offsets, seed_of(f"id {column.name}"), lists)
        out += lists if ids.inverse is None else lists[ids.inverse]
    for name, column in kept.items():
        bits = session_hashes(column) if name == schema.session else time_bits(column)
        out += _hashes(bits.view(np.int64), f"kept {name}")
    # Without this, rows that swap a value would leave the sum over all rows unchanged.
    return _hashes(out.view(np.int64), "row")


def session_hashes(column: Any) -> np.ndarray:
    """Return hashes of texts or numbers (uint64 [n]). Equal values have equal hashes, however a file stores them."""
    values, kinds = sessions_of(column)
    out = _hashes(values, "session")
    out[kinds == NONE] = 0
    return out


def time_bits(column: Any) -> np.ndarray:
    """Return the bits of numbers, or of the seconds of dates, as float64 (uint64 [n])."""
    column = plain(column, ())
    values, kinds = seconds_of(column) if is_date(column.type) else floats_of(column, False)
    bits = np.ascontiguousarray(values, np.float64).view(np.uint64).copy()
    bits[kinds == NONE] = _OTHER
    return bits


def _hashes(values: np.ndarray, name: str) -> np.ndarray:
    out = np.empty(len(values), np.uint64)
    hash_numbers(values.astype(np.int64), seed_of(name), out)
    return out


@kernel
def _fill(values, offsets, seed, out):
    """Fill `out` with the hash of each list: of its ids, each mixed with its position, and of its length."""
    for i in range(out.size):
        total, place = np.uint64(offsets[i + 1] - offsets[i]), seed
        for k in range(offsets[i], offsets[i + 1]):
            place += GOLDEN
            total += mix(np.uint64(values[k]) ^ place)
        out[i] = mix(total ^ seed)
