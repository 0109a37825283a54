"""Batches of any rows of a piece, in any order, hold the lists of those rows, and each list once where that pays."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.inverse import pays
from skirl.data.files.batches import batch_of
from skirl.data.files.encoded import Encoded
from tests.cases import cases


@given(st.data())
@cases(100)
def test_a_batch_holds_the_lists_of_its_rows(data: st.DataObject) -> None:
    """Compared with Python's lists: of one id per row, of a list per row, and of shared lists."""
    samples = data.draw(st.integers(1, 200))
    draw = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    kind = np.int32 if data.draw(st.booleans()) else np.int64
    plain, own = draw.integers(0, 99, samples).astype(kind), draw.integers(0, 4, samples)
    stored = data.draw(st.integers(1, samples))
    sizes = draw.integers(0, data.draw(st.sampled_from([2, 9])), stored)
    runs = np.sort(draw.integers(0, stored, samples))
    ids = draw.integers(0, 99, max(1, int(sizes.sum()), int(own.sum()))).astype(kind)
    piece = Encoded(
        draw.random((samples, data.draw(st.integers(1, 2))), np.float32),
        draw.random((samples, data.draw(st.integers(0, 2))), np.float32),
        [plain, ids, ids, ids],
        [None, own, sizes, sizes],
        np.arange(samples),
        inverses=[None, None, runs, runs],
    )
    rows = np.array(data.draw(st.lists(st.integers(0, samples - 1), unique=True)), np.int64)
    if data.draw(st.booleans()):
        rows = np.arange(min(rows, default=0), max(rows, default=-1) + 1)
    batch: Any = batch_of(piece, rows, ["plain", "own", "shared", "same"])
    full = batch.sparse.expanded() if batch.sparse.groups else batch.sparse
    found = np.split(full.values().numpy(), full.offsets().numpy()[1:-1]) if len(rows) else []
    at, begins = np.cumsum(own) - own, np.cumsum(sizes) - sizes
    expected = [plain[row : row + 1] for row in rows]
    expected += [ids[at[row] : at[row] + own[row]] for row in rows]
    for _ in range(2):
        expected += [ids[begins[list_] : begins[list_] + sizes[list_]] for list_ in runs[rows]]
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    labels = piece.labels if piece.labels.shape[1] == 2 else piece.labels[:, 0]
    assert np.array_equal(batch.labels.numpy(), labels[rows]) and np.array_equal(batch.dense.numpy(), piece.dense[rows])
    distinct = np.unique(runs[rows])
    total, left = int(sizes[runs[rows]].sum()), int(sizes[distinct].sum())
    shares = pays(total, left, len(rows))
    assert set(batch.sparse.groups) == ({("shared", "same")} if shares else set())
    for inverse in batch.sparse.groups.values():
        assert inverse.tolist() == np.searchsorted(distinct, runs[rows]).tolist()
    strides = dict(zip(batch.sparse.keys(), batch.sparse.stride_per_key(), strict=True))
    assert {strides["plain"], strides["own"]} == {len(rows)}
    assert {strides["shared"], strides["same"]} == {len(distinct) if shares else len(rows)}
