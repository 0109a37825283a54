"""Columns of ids, of a list for each row and of shared lists: taken, sliced, joined and batched as Python's lists are."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.inverse import pays
from skirl.data.files.column import Column, Encoded, offsets_of
from tests.cases import cases


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
