"""Columns become labels, numbers and rows, and batches of these: compared with a plain reading and with Python's lists."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.inverse import pays
from skirl.data import DataFlags
from skirl.data.files.column import Column, Encoded, offsets_of
from skirl.data.files.encode import ByHash, Encoder, Raw
from skirl.data.files.find import BadRow
from skirl.data.files.hashing import BAD, DIGITS, GOOD, hash_numbers, hash_texts, parse_hex, rows_by_hash, seed_of
from skirl.data.files.schema import FileSchema
from tests.cases import cases
from tests.data import logs
from tests.data.corpus import SCHEMA, parquet
from tests.data.logs import INTS, ids_of

MIXED = FileSchema.parse(
    """
    [[label]]
    name = "y"
    [[dense]]
    name = "x"
    transform = "log"
    fill = -1.0
    indicator = true
    [[id]]
    name = "item"
    type = "int"
    rows = 40
    encode = "row"
    [[id]]
    name = "tags"
    list = true
    separator = " "
    rows = 100
    """
)
ROW = st.tuples(
    st.sampled_from(["0", "1", "1.0", "2", "x"]),
    st.sampled_from(["", "0", "-3", "7", "0.5", "1e3", "nan", "y"]),
    st.sampled_from(["0", "39", "40", "-1", "", "7"]),
    st.sampled_from(["", "a", "a b", "b a b"]),
)


def piece(rows: list[tuple[str, ...]]) -> Raw:
    names = ("y", "x", "item", "tags")
    columns = {name: pa.array([row[i] for row in rows], pa.string()) for i, name in enumerate(names)}
    return Raw(columns, np.arange(len(rows)), "file", lambda row: f"row {row}", [])


def encoder(**other: Any) -> Encoder:
    rows = MIXED.rows_of(None)
    return Encoder(MIXED, ByHash(rows), rows, **other)


def plainly(row: tuple[str, ...]) -> tuple[float, float, float, int, list[int]] | None:
    """Return label, number, whether it is missing, row, and rows of tags; None if the row is malformed."""
    y, x, item, tags = row
    if y not in ("0", "1", "1.0") or x in ("nan", "y") or item not in ("0", "39", "7"):
        return None
    number = -1.0 if x == "" else float(np.float32(math.log1p(max(float(x), 0))))
    of_tags = [logs.row_of(logs.text_hash(tag.encode(), "tags"), 100) for tag in tags.split()]
    return float(y), number, float(x == ""), int(item), of_tags


@given(rows=st.lists(ROW, max_size=30))
@cases(200)
def test_every_value_is_that_of_a_plain_reading(rows: list[tuple[str, ...]]) -> None:
    done = encoder(skip=True)(piece(rows))
    plain = [plainly(row) for row in rows]
    good = [i for i, values in enumerate(plain) if values is not None]
    expected = [plain[i] for i in good]
    assert done.places.tolist() == good and done.bad == len(rows) - len(good) and len(done) == len(good)
    assert done.labels[:, 0].tolist() == [values[0] for values in expected if values]
    assert done.dense.tolist() == [pytest.approx([values[1], values[2]], rel=1e-6) for values in expected if values]
    assert lists_of(done.ids[0]) == [[values[3]] for values in expected if values]
    assert lists_of(done.ids[1]) == [values[4] for values in expected if values]


@given(rows=st.lists(ROW, min_size=1, max_size=30))
@cases(100)
def test_the_first_malformed_row_is_the_error(rows: list[tuple[str, ...]]) -> None:
    bad = [i for i, row in enumerate(rows) if plainly(row) is None]
    if not bad:
        assert len(encoder()(piece(rows))) == len(rows)
        return
    with pytest.raises(BadRow) as caught:
        encoder()(piece(rows))
    assert caught.value.args[1] == f"row {bad[0]}"


@given(rows=st.lists(ROW, max_size=20), low=st.integers(0, 20), size=st.integers(0, 20))
@cases(100)
def test_a_stretch_of_a_piece_is_encoded_like_the_whole(rows: list[tuple[str, ...]], low: int, size: int) -> None:
    whole = encoder(skip=True)(piece(rows))
    part = encoder(skip=True)(piece(rows).only(low, low + size))
    within = np.flatnonzero((whole.places >= low) & (whole.places < low + size))
    same(part, whole.take(within))


def same(a: Encoded, b: Encoded) -> None:
    for x, y in zip((a.labels, a.dense, a.places), (b.labels, b.dense, b.places), strict=True):
        assert np.array_equal(x, y)
    assert list(map(lists_of, a.ids)) == list(map(lists_of, b.ids))


def test_nan_may_stand_for_nothing(tmp_path: Path) -> None:
    parquet(x=[0.5, float("nan"), 1, 2], item=[1.0, float("nan"), 3.0, 4.0])(tmp_path / "file")
    (tmp_path / "schema.toml").write_text("nan_is_missing = true\n" + SCHEMA)
    files = DataFlags(f"parquet:{tmp_path / 'file'}", schema=str(tmp_path / "schema.toml")).files()
    (batch,) = files
    assert batch.dense[:, 0].tolist() == [0.5, 0.0, 1.0, 2.0]
    assert batch.sparse.values()[:4].tolist()[1] == 0 and batch.sparse.lengths()[4:].tolist() == [1, 0, 2, 0]


def test_a_float_in_text_is_a_whole_number_where_the_schema_says_so(tmp_path: Path) -> None:
    floats = INTS.replace('"int"', '"float"')
    plain = ids_of(tmp_path, b"1,7\n1,-2\n1,1000\n1,9007199254740993\n", INTS)
    assert ids_of(tmp_path, b"1,7.0\n1,-2.\n1,1e3\n1,9007199254740993\n", floats) == plain
    for value in (b"7.5", b"1e30", b"9223372036854775808", b"nan", b"x"):
        with pytest.raises(BadRow, match="line 2: column item is"):
            ids_of(tmp_path, b"1,7\n1," + value + b"\n", floats)


def lists_of(column: Column) -> list[list[int]]:
    if column.offsets is None:
        return [[value] for value in column.values.tolist()]
    lists = [column.values[low:high].tolist() for low, high in zip(column.offsets, column.offsets[1:])]
    return lists if column.inverse is None else [lists[i] for i in column.inverse]


def drawn(data: st.DataObject, samples: int) -> list[Column]:
    """Draw a column of each kind; the last two share lists, and have the same inverse."""
    draw = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    kind = np.int32 if data.draw(st.booleans()) else np.int64
    stored = data.draw(st.integers(1, samples))
    sizes = draw.integers(0, data.draw(st.sampled_from([2, 9])), stored)
    runs, own = np.sort(draw.integers(0, stored, samples)), draw.integers(0, 4, samples)
    ids = draw.integers(0, 99, max(1, int(sizes.sum()), int(own.sum()))).astype(kind)
    shared = Column(ids, offsets_of(sizes), runs)
    return [Column(draw.integers(0, 99, samples).astype(kind)), Column(ids, offsets_of(own)), shared, shared]


@given(st.data())
@cases(100)
def test_columns_are_taken_sliced_and_joined_as_lists(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 100))
    rows = data.draw(st.lists(st.integers(0, samples - 1), max_size=100))
    low, high = sorted(data.draw(st.tuples(st.integers(0, samples), st.integers(0, samples))))
    for column in drawn(data, samples)[:3]:
        lists = lists_of(column)
        taken, part = column.take(np.array(rows, np.int64)), column.slice(low, high)
        assert lists_of(taken) == [lists[row] for row in rows] and len(taken) == len(rows)
        assert lists_of(part) == lists[low:high] and len(part) == high - low
        assert lists_of(part.expanded()) == lists[low:high] and part.expanded().inverse is None
        joined = Column.concat([part, column, taken.expanded()])
        assert lists_of(joined) == lists[low:high] + lists + [lists[row] for row in rows]


@given(st.data())
@cases(100)
def test_a_batch_holds_the_lists_of_its_rows(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 200))
    columns = drawn(data, samples)
    draw = np.random.default_rng(samples)
    labels, dense = (draw.random((samples, data.draw(st.integers(low, 2))), np.float32) for low in (1, 0))
    piece = Encoded(labels, dense, columns, np.arange(samples))
    rows = np.array(data.draw(st.lists(st.integers(0, samples - 1), unique=True)), np.int64)
    if data.draw(st.booleans()):
        rows = np.arange(min(rows, default=0), max(rows, default=-1) + 1)
    batch: Any = piece.batch(rows, ["plain", "own", "shared", "same"])
    full = batch.sparse.expanded() if batch.sparse.groups else batch.sparse
    found = np.split(full.values().numpy(), full.offsets().numpy()[1:-1]) if len(rows) else []
    assert [each.tolist() for each in found] == [lists_of(column)[row] for column in columns for row in rows]
    labels = labels if labels.shape[1] == 2 else labels[:, 0]
    assert np.array_equal(batch.labels.numpy(), labels[rows]) and np.array_equal(batch.dense.numpy(), dense[rows])
    runs, sizes = columns[2].inverse, np.diff(columns[2].offsets)  # type: ignore[arg-type]
    assert runs is not None
    distinct = np.unique(runs[rows])
    shares = pays(int(sizes[runs[rows]].sum()), int(sizes[distinct].sum()), len(rows))
    assert set(batch.sparse.groups) == ({("shared", "same")} if shares else set())
    for inverse in batch.sparse.groups.values():
        assert inverse.tolist() == np.searchsorted(distinct, runs[rows]).tolist()
    strides = dict(zip(batch.sparse.keys(), batch.sparse.stride_per_key(), strict=True))
    assert {strides["plain"], strides["own"]} == {len(rows)}
    assert {strides["shared"], strides["same"]} == {len(distinct) if shares else len(rows)}


def texts(values: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return offsets, np.frombuffer(b"".join(values), np.uint8)


@given(values=st.lists(st.binary(max_size=30)), table=st.text(max_size=5))
@cases(100)
def test_texts(values: list[bytes], table: str) -> None:
    out = np.empty(len(values), np.uint64)
    hash_texts(*texts(values), seed_of(table), out)
    assert out.tolist() == [logs.text_hash(value, table) or 1 for value in values]


@given(values=st.lists(st.integers(-(2**63), 2**63 - 1)), table=st.text(max_size=5))
@cases(100)
def test_numbers(values: list[int], table: str) -> None:
    out = np.empty(len(values), np.uint64)
    hash_numbers(np.array(values, np.int64), seed_of(table), out)
    assert out.tolist() == [logs.number_hash(value, table) or 1 for value in values]


def test_zero_is_the_fingerprint_of_nothing() -> None:
    """The bijection maps one number to 0; its fingerprint is 1 instead."""
    out = np.empty(1, np.uint64)
    hash_numbers(seed_of("a").reshape(1).view(np.int64), seed_of("a"), out)
    assert logs.number_hash(int(seed_of("a")), "a") == 0 and out[0] == 1


@given(prints=st.lists(st.integers(0, 2**64 - 1), min_size=1), rows=st.integers(2, 2**48))
@cases(200)
def test_rows(prints: list[int], rows: int) -> None:
    out = np.empty(len(prints), np.int64)
    rows_by_hash(np.array(prints, np.uint64), rows, out)
    for row, value in zip(out.tolist(), prints):
        assert row == (logs.row_of(value, rows) if value else 0) < rows


@given(values=st.lists(st.one_of(st.text("0123456789abcdefABCDEF", max_size=18), st.text(max_size=4))))
@cases(100)
def test_hex(values: list[str]) -> None:
    out, kinds = np.empty(len(values), np.int64), np.zeros(len(values), np.uint8)
    parse_hex(*texts([value.encode() for value in values]), DIGITS, out, kinds)
    for value, number, kind in zip(values, out.tolist(), kinds):
        right = 0 < len(value) <= 16 and set(value) <= set("0123456789abcdefABCDEF")
        assert kind == (GOOD if right else BAD)
        assert not right or number % 2**64 == int(value, 16)
