"""Packed rows unpack to the same rows, also through the frames of a spill."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.dedup import frames
from skirl.dedup.finish import with_keys
from skirl.dedup.frames import ordered, packing_of
from skirl.dedup.packed import Packing
from skirl.dedup.plan import highs_of
from skirl.dedup.spill import ALL, Spill, Spilled, path_of
from skirl.dedup.stretch import Stretch
from tests.cases import cases

SOME = st.lists(st.integers(-9, 9), max_size=4)
COLUMNS = {
    pa.list_(pa.int64()): SOME,
    pa.list_(pa.field("id", pa.int32(), nullable=False)): SOME,
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.int16(): st.integers(-9, 9),
    pa.bool_(): st.booleans(),
    pa.date32(): st.dates(),
    pa.timestamp("us", "UTC"): st.integers(-9, 9),
    pa.decimal128(20, 0): st.integers(-9, 9),
    pa.string(): st.text(max_size=3),
    pa.large_string(): st.text(max_size=3),
    pa.string_view(): st.text(max_size=20),
    pa.binary(): st.binary(max_size=3),
}


@given(st.data())
@cases(60)
def test_packed_rows_are_the_same(data: Any) -> None:
    rows = data.draw(st.integers(0, 8))
    low, high = sorted(data.draw(st.lists(st.integers(0, rows), min_size=2, max_size=2)))
    arrays = [pa.array(data.draw(st.lists(v, min_size=rows, max_size=rows)), kind) for kind, v in COLUMNS.items()]
    batch = pa.RecordBatch.from_arrays(arrays, names=[str(n) for n in range(len(arrays))]).slice(low, high - low)
    order = data.draw(st.lists(st.integers(0, high - low - 1), max_size=12)) if high > low else []
    back = data.draw(st.permutations(range(len(order))))
    packing = Packing(batch.schema)
    sizes = packing.sizes_of(batch)[np.array(order, np.int64)]
    packed = packing.packed(batch, np.array(order, np.int64), sizes)
    found = packing.columns(packed, (np.cumsum(sizes) - sizes)[np.array(back, np.int64)])
    found.validate(full=True)
    taken = [pa.array([column[order[k]].as_py() for k in back], column.type) for column in batch.columns]
    assert found.equals(pa.RecordBatch.from_arrays(taken, schema=batch.schema), check_metadata=True)


def test_nulls_are_refused() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1, None])], names=["visit"])
    with pytest.raises(AssertionError, match="column 'visit' has nulls"):
        Packing(batch.schema).packed(batch, np.arange(2), np.full(2, 8))


@pytest.mark.parametrize("most", [1 << 30, 2000, 0])
@pytest.mark.parametrize("largest", [1 << 20, 300, 1])
def test_a_stretch_gives_back_its_rows_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, largest: int
) -> None:
    """However rows are cut into frames, whether they are held all at once or in parts, and with many equal keys."""
    monkeypatch.setattr(frames, "TOGETHER", 3 * largest)
    check_a_stretch(tmp_path, most, largest)


def check_a_stretch(tmp_path: Path, most: int, largest: int) -> None:
    """Compare rows in frames of up to `largest` bytes, read up to `most` bytes at a time, with a plain sort."""
    draw = np.random.default_rng(0)
    written, spill, schema = [], Spill(tmp_path), pa.schema([])
    for load in range(3):
        rows = int(draw.integers(1, 60))
        lists = [draw.integers(0, 99, int(draw.integers(0, 9))).tolist() for _ in range(rows)]
        table = pa.table({"seen": pa.array(lists, pa.list_(pa.int64())), "at": np.arange(rows) + 100 * load})
        hashes = draw.integers(0, 4, (rows, 2)).astype(np.uint64) << np.uint64(62)
        times = draw.integers(0, 6, rows).astype(np.float64)
        keyed = with_keys(table, hashes, times)
        schema = keyed.schema
        spill.add(ordered(keyed, (times // 2 - 1).astype(np.int64)), largest)
        written += zip(map(tuple, hashes.tolist()), times.tolist(), table.to_pylist())
    spilled = Spilled(tmp_path, spill.close(), "mend it")
    cut = set()
    for partition in (None, -1, 0, 1):
        for first, last in (ALL, highs_of(0, 1, 4), highs_of(1, 4, 4)):
            own = [row for row in written if partition in (None, row[1] // 2 - 1) and first <= row[0][0] <= last]
            own.sort(key=lambda row: row[:2])
            pieces = list(Stretch(spilled, partition, (first, last), packing_of(schema), most).pieces())
            cut.add(len(pieces) > 1)
            found = [
                (tuple(h), t, size)
                for p in pieces
                for h, t, size in zip(p.hashes.tolist(), p.times, p.sizes, strict=True)
            ]
            assert found == [(h, t, 8 + 4 + 8 * len(row["seen"])) for h, t, row in own]
            halves = [(p, slice(len(p) // 2, len(p)), slice(0, len(p) // 2)) for p in pieces]
            assert [row for p, *both in halves for s in both[::-1] for row in p.taken(s.start, s.stop).to_pylist()] == [
                row for *_, row in own
            ]
            alone = Stretch(spilled, partition, (first, last), None, most).pieces()
            assert [time for piece in alone for time in piece.times] == [row[1] for row in own]
    spilled.close()
    assert (True in cut) == (most < 1 << 30)


@pytest.mark.parametrize("part", ["keys", "rows", "index"])
def test_every_byte_of_a_frame_is_checked(tmp_path: Path, part: str) -> None:
    spill = Spill(tmp_path)
    table = with_keys(pa.table({"at": np.arange(9)}), np.ones((9, 2), np.uint64), np.zeros(9))
    spill.add(ordered(table, np.zeros(9, np.int64)), 1 << 20)
    told = spill.close()
    path = path_of(tmp_path, {"rows": "rows"}.get(part, f"rows.{part}"))
    raw = bytearray(path.read_bytes())
    raw[8] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="is not what was written" if part == "index" else "is damaged behind byte"):
        spilled = Spilled(tmp_path, told, "mend it")
        with closing(spilled):
            records, _ = spilled.frames(None)
            spilled.keys(records)
            spilled.read(records, np.empty(int(records["length"].sum()), np.uint8))
