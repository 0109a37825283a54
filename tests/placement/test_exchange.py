"""What trainers would exchange: counted from ids as a person would, sample by sample."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skirl.measure.bench import wire

from skirl.core.batch import KeyedJagged
from skirl.core.placement import Placement
from skirl.core.tables import Table
from skirl.placement.bench_exchange import counted_of
from skirl.placement.exchange import ExchangeCount, ids_of

TABLES = [Table("a", 20, 4, features=("x", "y")), Table("b", 9, 8)]


def by_hand(batches, trainers: int) -> dict[str, list[int]]:
    """Count by hand. batches: for each feature, the ids of each sample."""
    vectors = {way: [0, 0] for way in ("rows", "hashed", "partial", "pooled")}
    keys = np.concatenate([np.arange(20), 1 << 48 | np.arange(9)])
    owners = dict(zip(keys.tolist(), Placement.even(trainers).site_of(keys).tolist(), strict=True))
    for batch in batches:
        samples = len(batch["x"])
        for number, table in enumerate(TABLES):
            readers: dict[int, set[int]] = {}
            for sample in range(samples):
                trainer = next(t for t in range(trainers) if sample < samples * (t + 1) // trainers)
                vectors["pooled"][number] += 2 * len(table.features) * (trainer != number % trainers)
                for feature in table.features:
                    of = {owners[number << 48 | row] for row in batch[feature][sample]}
                    vectors["partial"][number] += 2 * len(of - {trainer})
                    for row in batch[feature][sample]:
                        readers.setdefault(row, set()).add(trainer)
            for row, of in readers.items():
                owner = owners[number << 48 | row]
                vectors["rows"][number] += 2 * (len(of) - 1)
                vectors["hashed"][number] += 2 * len(of - {owner})
    return vectors


def sparse_of(batch) -> KeyedJagged:
    names = ["x", "y", "b"]
    lengths = [len(ids) for name in names for ids in batch[name]]
    values = [row for name in names for ids in batch[name] for row in ids]
    return KeyedJagged(names, torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths))


BAGS = {name: st.lists(st.lists(st.integers(0, rows), max_size=3), min_size=8, max_size=8)
        for name, rows in (("x", 19), ("y", 19), ("b", 8))}  # fmt: skip


@settings(max_examples=20)
@given(st.lists(st.fixed_dictionaries(BAGS), min_size=1, max_size=2), st.integers(2, 5))
def test_vectors_are_those_that_a_person_counts(batches, trainers):
    check_vectors(batches, trainers)


def some_vectors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = {"x": 20, "y": 20, "b": 9}
    drawn = [
        {n: [rng.integers(0, r, rng.integers(0, 4)).tolist() for _ in range(8)] for n, r in rows.items()} for _ in "ab"
    ]
    check_vectors(drawn, 3)


def check_vectors(batches, trainers: int) -> None:
    exchange = ExchangeCount([(t.name, t.dim) for t in TABLES], trainers)
    for batch in batches:
        exchange.add(ids_of(sparse_of(batch), TABLES, trainers))
    wanted = by_hand(batches, trainers)
    assert {way: of.tolist() for way, of in exchange.vectors.items()} == wanted
    facts = exchange.facts()
    for n, of in enumerate(facts["tables"]):
        each = {way: wanted[way][n] * TABLES[n].dim * 4 / len(batches) for way in wanted}
        assert {way: of[way] for way in wanted} == each and of[of["better"]] == min(each["rows"], each["pooled"])
    assert facts["better"] == sum(min(of["rows"], of["pooled"]) for of in facts["tables"])


def test_samples_that_share_a_bag_ask_for_its_rows_once():
    values, lengths = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]), torch.tensor([2, 2, *[1] * 8])
    inverse = {"x": torch.tensor([0, 0, 0, 1])}
    shared = KeyedJagged(["x", "y", "b"], values, lengths=lengths, strides=[2, 4, 4], inverse=inverse)
    found = ids_of(shared, TABLES, 2)
    assert [sorted(rows.tolist()) for rows in found[0].rows] == [[1, 2, 5, 6], [1, 2, 3, 4, 7, 8]]
    assert found[0].bags == [4, 4] and found[1].bags == [2, 2]
    exchange, owner = ExchangeCount([(t.name, t.dim) for t in TABLES], 2), Placement.even(2).site_of
    exchange.add(found)
    bags = [(0, [1, 2]), (0, [1, 2]), (1, [1, 2]), (1, [3, 4]), (0, [5]), (0, [6]), (1, [7]), (1, [8])]
    sums = [set(owner(np.array(rows)).tolist()) - {trainer} for trainer, rows in bags]
    assert exchange.vectors["partial"][0] == 2 * sum(map(len, sums)) > 0


@pytest.mark.parametrize("trainers", [2, 3])
def test_owners_by_hash_are_those_of_the_plan_of_a_run(trainers):
    batch, steps, dim, seed = 96, 2, 4, 1
    assert counted_of(trainers, batch, steps, dim, seed) == wire.planned(trainers, batch, steps, dim, seed).sum() > 0
