"""The published counts of Criteo Kaggle, streams that resume bit for bit, and labels that can be learned."""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from skirl.core.batch import Batch
from skirl.data import Synthetic
from skirl.data.files.hashing import fold, named
from skirl.data.synthetic import _HEAT, EXPONENT, OFFSET, SHAPES, bits_for, scatter
from skirl.tools.jit import kernel
from tests.data.logs import plain

# The counts


@kernel
def mark(ids, base, samples, bitmap):
    """Set each id's bit, and return how many were not set before. `base` is the first bit of each table."""
    fresh = 0
    for position in range(ids.size):
        bit = base[position // samples] + ids[position]
        if not bitmap[bit >> 3] >> (bit & 7) & 1:
            bitmap[bit >> 3] |= 1 << (bit & 7)
            fresh += 1
    return fresh


@kernel
def among(ids, base, samples, bitmap):
    """Return how many ids have their bit set."""
    hits = 0
    for position in range(ids.size):
        bit = base[position // samples] + ids[position]
        hits += bitmap[bit >> 3] >> (bit & 7) & 1
    return hits


@kernel
def rows_of_ranks(ranks, rows, place):
    """Return the rows of ranks 0 .. ranks - 1."""
    out, bits = np.empty(ranks, np.int64), bits_for(rows)
    for rank in range(ranks):
        out[rank] = scatter(rank, rows, bits, place)
    return out


def hottest(data: Synthetic, table: str, number: int) -> np.ndarray:
    """Return the rows of a table that are looked up most often, the hottest first."""
    rows, place = data.rows[table], named(data._world, _HEAT)
    return rows_of_ranks(min(number, rows), rows, np.uint64(fold(place, np.uint64(list(data.rows).index(table)))))


def ranks_in(data: Synthetic, number: int) -> list[int]:
    """Return how many of the hottest `number` rows of all tables are in each table: those above one common probability."""

    def ranks_above(p: float, rows: int) -> int:
        mass = (rows + OFFSET) ** (1 - EXPONENT) - OFFSET ** (1 - EXPONENT)
        return int(np.clip(((1 - EXPONENT) / (mass * p)) ** (1 / EXPONENT) - OFFSET, 0, rows))

    low, high = 1e-15, 1.0
    for _ in range(100):
        middle = (low * high) ** 0.5
        many = sum(ranks_above(middle, rows) for rows in data.rows.values()) > number
        low, high = (middle, high) if many else (low, middle)
    return [ranks_above(high, rows) for rows in data.rows.values()]


@dataclass
class Counts:
    hottest_share: float
    distinct_in_batch: float
    distinct: list[int]
    """Distinct rows in the first 0, 1, 2, ... batches."""


@pytest.fixture(scope="module")
def counts() -> Counts:
    """Count one pass over 50 batches of 16,384: 21 million ids."""
    return counted(50)


def counted(batches: int) -> Counts:
    data = Synthetic("criteo-kaggle", batch_size=16_384, batches=batches, seed=1)
    rows = np.fromiter(data.rows.values(), np.int64)
    total = int(rows.sum())
    base = np.cumsum(rows) - rows
    hot = np.zeros(total // 8 + 1, np.uint8)
    for name, first, number in zip(data.rows, base, ranks_in(data, total // 100)):
        mark(hottest(data, name, number) + first, np.zeros(1, np.int64), number, hot)
    assert np.bitwise_count(hot).sum() == pytest.approx(total / 100, rel=1e-3)
    seen = np.zeros(total // 8 + 1, np.uint8)
    distinct, single, hits = [0], [], 0
    for i, batch in enumerate(data):
        ids = batch.sparse.values().numpy()
        distinct.append(distinct[-1] + mark(ids, base, 16_384, seen))
        if i < 5:
            single.append(mark(ids, base, 16_384, np.zeros(total // 8 + 1, np.uint8)))
        hits += among(ids, base, 16_384, hot)
    return Counts(hits / (batches * 16_384 * 26), float(np.mean(single)), distinct)


def test_hottest_percent_of_rows_takes_92_percent(counts: Counts) -> None:
    assert counts.hottest_share == pytest.approx(0.92, abs=0.005)


def test_a_batch_holds_93_thousand_rows(counts: Counts) -> None:
    assert counts.distinct_in_batch == pytest.approx(93_000, rel=0.03)


@pytest.mark.parametrize(
    ("name", "tables", "rows"),
    [("avazu", 21, 9.45e6), ("criteo-kaggle", 26, 33.76e6), ("criteo-terabyte", 26, 882.8e6)],
)
def test_shapes_are_the_published_ones(name: str, tables: int, rows: float) -> None:
    made = Synthetic(name).tables(dim=48)
    assert len(made) == tables
    assert sum(table.rows for table in made) == pytest.approx(rows, rel=5e-4)


# The stream


def same(a: Batch, b: Batch) -> bool:
    return plain(a) == plain(b)


@pytest.mark.parametrize("pooling_factor", [1, 3])
def test_batch_is_a_pure_function_of_seed_and_index(pooling_factor: int) -> None:
    def made(**options: Any) -> Synthetic:
        return Synthetic("tiny", 64, pooling_factor=pooling_factor, **options)

    whole = list(made(batches=6, seed=3))
    assert len(whole) == len(made(batches=6)) == 6
    assert all(same(whole[i], made(seed=3).batch(i)) for i in (5, 0, 3))
    assert all(same(a, b) for a, b in zip(whole[4:], (made(seed=3).batch(i) for i in (4, 5)), strict=True))
    assert all(same(a, b) for a, b in zip(whole, islice(made(seed=3), 6), strict=True))
    assert not same(whole[0], whole[1])
    assert not same(whole[0], made(seed=4).batch(0))


def test_held_out_is_another_sample_of_the_same_world() -> None:
    data = Synthetic("tiny", 64, batches=3, held_out_batches=2)
    other = data.held_out
    assert other is not None and other.samples == 128 and data.samples == 192 and other.held_out is None
    assert not any(same(a, b) for a in data for b in other)
    assert hottest(other, "user", 5).tolist() == hottest(data, "user", 5).tolist()
    assert Synthetic("tiny").held_out is None


def test_state_resumes_once_and_knows_its_stream() -> None:
    data = Synthetic("tiny", 64, batches=5)
    whole = list(data)
    stream = iter(data)
    next(stream), next(stream)
    state = data.state_dict()
    resumed = Synthetic("tiny", 64, batches=5)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert all(same(a, b) for a, b in zip(whole[2:], resumed, strict=True))
    assert all(same(a, b) for a, b in zip(whole, resumed, strict=True)), "the next pass is a whole one"
    with pytest.raises(ValueError, match="seed=0: set seed to that"):
        Synthetic("tiny", 64, seed=1).load_state_dict(state)


def test_ids_lie_in_their_tables_and_use_them() -> None:
    data = Synthetic("tiny", 4096)
    batch = data.batch(0)
    assert batch.sparse.keys() == list(SHAPES["tiny"].rows)
    assert batch.dense.shape == (4096, data.dense_features)
    assert batch.dense.dtype == batch.labels.dtype == torch.float32
    for ids, rows in zip(batch.sparse.values().view(6, 4096), data.rows.values()):
        assert ids.min() >= 0 and ids.max() < rows
    assert len(batch.sparse.values()[-4096:].unique()) == 7, "all weekdays"


def test_multi_hot_bags_have_random_lengths() -> None:
    data = Synthetic("tiny", 2000, pooling_factor=3)
    sparse = data.batch(0).sparse
    lengths = sparse.lengths()
    assert sparse.values().numel() == lengths.sum() == sparse.offsets()[-1]
    assert sorted(lengths.unique().tolist()) == list(range(7)), "empty bags too"
    assert float(lengths.double().mean()) == pytest.approx(3, abs=0.1)
    for first, end, rows in zip(sparse.offsets()[::2000], sparse.offsets()[2000::2000], data.rows.values()):
        assert int(sparse.values()[first:end].max()) < rows
