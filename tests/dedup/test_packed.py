"""Rows that were packed are the same rows, also through the frames of a spill."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.dedup import spill as spills
from skirl.dedup.finish import Unit, with_keys
from skirl.dedup.packed import Packing
from skirl.dedup.spill import Bucket, Spill, packing_of
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


@pytest.mark.parametrize("held", [1 << 30, 0])
@pytest.mark.parametrize("largest", [1 << 20, 300, 1])
def test_a_bucket_gives_back_its_rows_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, largest: int
) -> None:
    """However rows are cut into frames, whether all are held or each row group is read by itself."""
    monkeypatch.setattr(spills, "LARGEST", largest)
    monkeypatch.setattr(spills, "TOGETHER", 3 * largest)
    draw = np.random.default_rng(0)
    written, spill, schema = [], Spill(tmp_path, 4), pa.schema([])
    counted: dict[tuple[int, int], int] = {}
    for load in range(3):
        rows = int(draw.integers(1, 60))
        lists = [draw.integers(0, 99, int(draw.integers(0, 9))).tolist() for _ in range(rows)]
        table = pa.table({"seen": pa.array(lists, pa.list_(pa.int64())), "at": np.arange(rows) + 100 * load})
        hashes, times = draw.integers(0, 1 << 60, (rows, 2)).astype(np.uint64), draw.random(rows)
        buckets, partitions = draw.integers(0, 4, rows), draw.integers(-1, 2, rows)
        keyed = with_keys(table, hashes, times)
        schema = keyed.schema
        for bucket, frame in spill.add(keyed, buckets, partitions):
            counted[bucket, frame.partition] = counted.get((bucket, frame.partition), 0) + frame.bytes
        for k, row in enumerate(table.to_pylist()):
            written.append((int(buckets[k]), int(partitions[k]), tuple(hashes[k]), times[k], row))
    spill.close()
    packing = packing_of(schema)
    for partition in (-1, 0, 1):
        for first, end in pairwise((0, 1, 4)):
            unit = Unit(
                [Bucket(tmp_path, k, spill.sizes[k], "mend it") for k in range(first, end)], partition, packing, held
            )
            own = [row for k in range(first, end) for row in written if row[:2] == (k, partition)]
            hashes, times = unit.keys()
            assert [tuple(each) for each in hashes] == [row[2] for row in own]
            assert times.tolist() == [row[3] for row in own]
            order = draw.permutation(len(own))[: max(1, len(own) // 2)]
            assert unit.taken(order).to_pylist() == [own[k][4] for k in order]
            in_memory = sum(8 + 4 + 8 * len(row[4]["seen"]) + 24 for row in own)
            assert unit.bytes == in_memory == sum(counted.get((k, partition), 0) for k in range(first, end))
            unit.close()


@pytest.mark.parametrize("part", ["keys", "rows", "header"])
def test_every_byte_of_a_frame_is_checked(tmp_path: Path, part: str) -> None:
    spill = Spill(tmp_path, 1)
    table = with_keys(pa.table({"at": np.arange(9)}), np.ones((9, 2), np.uint64), np.zeros(9))
    spill.add(table, np.zeros(9, np.int64), np.zeros(9, np.int64))
    [path] = tmp_path.iterdir()
    raw = bytearray(path.read_bytes())
    raw[{"header": 8, "keys": 70, "rows": len(raw) - 64 - 4}[part]] ^= 1
    path.write_bytes(raw)
    bucket = Bucket(tmp_path, 0, spill.sizes[0], "mend it")
    with pytest.raises(ValueError, match="is damaged behind byte"):
        bucket.keys(bucket.frames[0])
        bucket.read(bucket.frames[0], np.empty(bucket.frames[0].length, np.uint8))
    bucket.close()
