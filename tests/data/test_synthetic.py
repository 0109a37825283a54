"""The published counts of Criteo Kaggle, streams and sessions that resume bit for bit, and labels that can be learned."""

from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.data import Synthetic
from skirl.data.files.hashing import fold, named, unit
from skirl.data.synthetic import _HEAT, EXPONENT, OFFSET, SHAPES, Sessions, bits_for, mass_of, rank_at, scatter
from skirl.tools.jit import kernel
from tests.data.logs import plain


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


def test_counts_are_the_published_ones() -> None:
    """Of 21 million ids in 50 batches, 92% are of the hottest percent of the rows; a batch holds 93 thousand rows."""
    data = Synthetic("criteo-kaggle", batch_size=16_384, batches=50, seed=1)
    rows = np.fromiter(data.rows.values(), np.int64)
    hot, base = np.zeros(rows.sum(), np.bool_), np.cumsum(rows) - rows
    for name, first, number in zip(data.rows, base, ranks_in(data, len(hot) // 100)):
        hot[hottest(data, name, number) + first] = True
    assert hot.mean() == pytest.approx(0.01, rel=1e-3)
    hits, distinct = 0.0, []
    for batch in data:
        ids = (batch.sparse.values().view(26, -1).numpy() + base[:, None]).reshape(-1)
        hits += hot[ids].mean() / 50
        if len(distinct) < 5:
            distinct.append(len(np.unique(ids)))
    assert hits == pytest.approx(0.92, abs=0.005) and np.mean(distinct) == pytest.approx(93_000, rel=0.03)


def same(a: Batch, b: Batch) -> bool:
    return plain(a) == plain(b)


@pytest.mark.parametrize("pooling_factor", [1, 3])
def test_batch_is_a_pure_function_of_seed_and_index(pooling_factor: int) -> None:
    def made(**options: Any) -> Synthetic:
        return Synthetic("tiny", 64, pooling_factor=pooling_factor, **options)

    whole = list(made(batches=6, seed=3))
    assert len(whole) == 6
    assert all(same(whole[i], made(seed=3).batch(i)) for i in (5, 0, 3))
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


@pytest.mark.parametrize(("pooling", "sizes"), [(1, [1]), (3, [*range(7)])])
def test_ids_lie_in_their_tables_and_bags_have_random_lengths(pooling: int, sizes: list[int]) -> None:
    data = Synthetic("tiny", 2000, pooling_factor=pooling)
    batch = data.batch(0)
    sparse, lengths = batch.sparse, batch.sparse.lengths()
    assert sparse.keys() == list(SHAPES["tiny"].rows) and batch.dense.shape == (2000, data.dense_features)
    assert sparse.values().numel() == lengths.sum() == sparse.offsets()[-1]
    assert sorted(lengths.unique().tolist()) == sizes
    assert float(lengths.double().mean()) == pytest.approx(pooling, abs=0.1)
    for first, end, rows in zip(sparse.offsets()[::2000], sparse.offsets()[2000::2000], data.rows.values()):
        assert int(sparse.values()[first:end].max()) < rows


def share(rows: int, below: np.ndarray) -> np.ndarray:
    """Return the share of accesses that go to ranks below some, from the integral of the density."""

    def integral(x: np.ndarray) -> np.ndarray:
        return (x + OFFSET) ** (1 - EXPONENT) - OFFSET ** (1 - EXPONENT)

    return integral(below) / integral(np.array(float(rows)))


@pytest.mark.parametrize("rows", [1, 2, 3, 50, 5683, 10_131_227, 292_775_614, 2**48])
def test_ranks_follow_the_density(rows: int) -> None:
    draws = 100_000
    mass = mass_of(rows)
    ranks = np.array([rank_at(unit(np.uint64(5), np.uint64(i)), rows, mass) for i in range(draws)])
    assert 0 <= ranks.min() <= ranks.max() < rows
    edges = np.unique(np.geomspace(1, rows, 12).astype(np.int64))
    measured = np.array([np.mean(ranks < edge) for edge in edges])
    assert np.abs(measured - share(rows, edges.astype(np.float64))).max() < 0.006  # Kolmogorov-Smirnov, 1 in 700


def lists_of(ids: KeyedJagged) -> dict[str, list[tuple[int, ...]]]:
    plain = ids.expanded()
    bags = [tuple(bag.tolist()) for bag in plain.values().split(plain.lengths().tolist())]
    return {name: bags[f * plain.stride() : (f + 1) * plain.stride()] for f, name in enumerate(plain.keys())}


def test_a_sample_is_the_same_however_the_stream_is_cut():
    def stream(batch: int, **options: int) -> Sessions:
        return Sessions(batch_size=batch, seed=5, change=0.3, pooling_factor=4, **options)

    whole, parts = stream(96).batch(1), list(stream(96, batches=2).sharded(0, 3, 3))[3:]
    smaller = [stream(32).batch(i) for i in (3, 4, 5)]
    for others in (parts, smaller):
        found = [lists_of(part.sparse) for part in others]
        joined = {name: list(chain.from_iterable(of[name] for of in found)) for name in found[0]}
        assert joined == lists_of(whole.sparse)
        assert torch.equal(torch.cat([part.labels for part in others]), whole.labels)
        assert torch.equal(torch.cat([part.dense for part in others]), whole.dense)


def test_lists_repeat_as_often_as_they_are_said_to():
    for options, factor in (({}, 9.3), ({"change": 0.2}, 4.0)):
        lists = lists_of(Sessions(batch_size=3000, pooling_factor=9, **options).batch(0).sparse)["seen_2"]
        repeats = sum(a == b for a, b in pairwise(lists))
        assert len(lists) / (len(lists) - repeats) == pytest.approx(factor, rel=0.15)
    batch = Sessions(batch_size=512, once=False).batch(0)
    assert not batch.sparse.groups and 0.1 < batch.labels.mean() < 0.5
