"""Remembered rows equal the real rows, even after some were forgotten and after a store failed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import skirl
from skirl.core.keys import ROW_BITS
from skirl.engine.access import Remembered, bank_of

TABLES = [skirl.Table("a", rows=30, dim=4), skirl.Table("b", rows=20, dim=4), skirl.Table("c", rows=10, dim=2)]


@pytest.fixture(scope="module")
def trained() -> skirl.EmbeddingBagCollection:
    """Return a collection with some rows in the cache, some in the store, and some never used."""
    embeddings = skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.Adagrad(lr=0.1), cache=25)
    draw = torch.Generator().manual_seed(0)
    for _ in range(6):
        ids = [torch.randint(0, table.rows // 2, (4, 1), generator=draw) for table in TABLES]
        out = embeddings(skirl.KeyedJagged.one_hot([table.name for table in TABLES], torch.cat(ids, 1)))
        sum((out[name] * 3).square().sum() for name in out).backward()
    return embeddings


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), max_size=12), st.integers(0, 11)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([0, 200, 400, 1 << 20]),
)
def test_rows_are_those_of_a_lookup_by_id(trained, batches, limit):
    remembered, given_out = Remembered(trained.engine, limit), []
    for table, ids, shift in batches:
        rows = (np.array(ids, np.int64) + shift) % TABLES[table].rows
        found, place = remembered.find(rows | (table << ROW_BITS), bank_of(trained.engine, table))
        given_out.append((found, place, trained.rows(TABLES[table].name, rows).numpy()))
    for found, place, expected in given_out:
        assert np.array_equal(found[place], expected)


def test_each_row_is_read_once_until_they_are_too_many(trained, monkeypatch):
    asked: list[int] = []
    read = trained.engine.store.read
    monkeypatch.setattr(
        trained.engine.store, "read", lambda keys, out: (asked.extend(keys.tolist()), read(keys, out))[1]
    )
    trained.flush()
    remembered, keys, bank = Remembered(trained.engine), np.arange(15, dtype=np.int64), bank_of(trained.engine, 0)
    remembered.find(keys, bank)
    once = len(asked)
    remembered.find(keys[::-1].copy(), bank)
    assert 0 < once == len(asked) == len(set(asked))
    small = Remembered(trained.engine, limit=2 * 4 * 4 * 3)  # three rows of each bank
    small.find(keys[:3], bank)
    small.find(keys[3:6], bank)
    assert len(small.find(keys[:1], bank)[0]) <= 3


def test_after_a_store_that_failed_rows_are_read_again(trained, monkeypatch):
    trained.flush()
    remembered, keys, bank = Remembered(trained.engine), np.arange(15, dtype=np.int64), bank_of(trained.engine, 0)
    with monkeypatch.context() as broken:
        broken.setattr(trained.engine.store, "read", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            remembered.find(keys, bank)
    found, place = remembered.find(keys, bank)
    assert np.array_equal(found[place], trained.rows("a", keys).numpy())
