"""From jagged ids to keys and bags: correct compared with plain Python, and a clear error for anything else."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl import KeyedJagged, Table
from skirl.core.ids import BadIds, Hashes, Ids, Resolver, capture, hashes_of
from skirl.core.tables import ROW_BITS, Schema
from tests.cases import cases

TABLES = [
    Table("a", 10, 4),
    Table("shared", 1 << 40, 4, features=("s1", "s2"), pooling="mean"),
    Table("b", 7, 8, pooling="mean"),
]
SCHEMA = Schema.of(TABLES)


class Given:
    """An object with the four methods, which return what a test wants."""

    def __init__(self, keys=("a",), values=None, offsets=None, weights=None) -> None:
        self._keys, self._weights = keys, weights
        self._values = torch.tensor([3, 4]) if values is None else values
        self._offsets = torch.tensor([0, 1, 2]) if offsets is None else offsets

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def offsets(self):
        return self._offsets

    def weights_or_none(self):
        return self._weights


ONE = Schema.of([Table("a", 10, 4)])
INTEGERS = st.sampled_from([torch.int32, torch.int64])
WEIGHTS = st.sampled_from([0.5, 1.0, 3.0])


@st.composite
def jagged(draw: st.DrawFn) -> tuple[KeyedJagged, dict[str, list[list[tuple[int, float]]]]]:
    """Draw ids of all features in any order, including one that no table knows, and the same ids as lists."""
    batch = draw(st.integers(0, 4))
    names = draw(st.permutations(["a", "s1", "s2", "b", "unknown"]))
    rows = {feature: table.rows for table in TABLES for feature in table.features} | {"unknown": 1 << 60}
    bag_of = {
        name: st.lists(st.tuples(st.integers(0, min(rows[name], 1 << 31) - 1), WEIGHTS), max_size=3) for name in names
    }
    bags = {name: [draw(bag) for _ in range(batch)] for name, bag in bag_of.items()}
    flat = [one for name in names for bag in bags[name] for one in bag]
    lengths = torch.tensor([len(bag) for name in names for bag in bags[name]], dtype=draw(INTEGERS))
    weights = torch.tensor([weight for _, weight in flat]) if draw(st.booleans()) else None
    if weights is None:
        bags = {name: [[(value, 1.0) for value, _ in bag] for bag in some] for name, some in bags.items()}
    values = torch.tensor([value for value, _ in flat], dtype=draw(INTEGERS))
    return KeyedJagged(names, values, lengths=lengths, weights=weights), bags


def resolved(sparse, schema, bank, dtype, copy=True):
    captured = capture(sparse, schema.features, copy=copy)
    pools = Resolver(schema, dtype, pooled=True)
    return pools.resolve(pools.check(captured)).banks[bank]


@cases(200)
@given(given=jagged(), double=st.booleans())
def test_keys_and_bags(given, double):
    sparse, bags = given
    dtype = np.dtype(np.float64 if double else np.float32)
    pools = Resolver(SCHEMA, dtype, pooled=True)
    captured = pools.capture(sparse)
    rows = Resolver(SCHEMA, dtype, pooled=False).resolve(pools.check(captured)).banks
    for bank, ids, single in zip(SCHEMA.banks, pools.resolve(pools.check(captured)).banks, rows, strict=True):
        assert ids.batch == captured.samples == len(bags["a"])
        n = 0
        for f, feature in enumerate(bank.features):
            for b, bag in enumerate(bags[feature.name]):
                assert ids.offsets[f * ids.batch + b] == n
                for value, weight in bag:
                    assert ids.keys()[n] == feature.table << ROW_BITS | value
                    assert ids.bag_of[n] == b * len(bank.features) + f
                    mean = SCHEMA.tables[feature.table].pooling == "mean"
                    factor = dtype.type(weight) / dtype.type(len(bag)) if mean else dtype.type(weight)
                    assert (ids.scale[n] if len(ids.scale) else 1.0) == factor
                    n += 1
        assert ids.offsets[-1] == n == ids.count == len(ids.bag_of)
        assert len(ids.scale) in (0, n) and ids.scale.dtype == dtype
        assert ids.bags == len(bank.features) * ids.batch
        mask = np.arange(len(bank.features)) % 2 == 0
        assert ids.by_bag(mask).tolist() == mask.tolist() * ids.batch
        assert (single.bags, len(single.scale)) == (n, 0)
        counts = [sum(map(len, bags[feature.name])) for feature in bank.features]
        assert single.by_bag(mask).tolist() == np.repeat(mask, counts).tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Given(values=torch.tensor([10, 0])), "feature 'a', sample 0: id 10 is outside table 'a', which has rows 0 to"),
        (Given(values=torch.tensor([0, 2**63 - 1])), "sample 1: id 9223372036854775807 is outside table 'a'"),
        (Given(values=torch.tensor([0, -(2**63)])), "sample 1: id -9223372036854775808 is outside table 'a'"),
        (Given(values=torch.tensor([0, -(2**31)], dtype=torch.int32)), "sample 1: id -2147483648 is outside table 'a'"),
        (Given(keys=()), "the batch has no feature 'a': it has none"),
        (Given(keys=("a", "x"), offsets=torch.tensor([0, 2])), "offsets has 2 entries, but 2 features need a multiple"),
        (Given(offsets=torch.tensor([], dtype=torch.int64)), "offsets has 0 entries"),
        (Given(offsets=torch.tensor([0, 3])), "they run from 0 to 3"),
        (Given(offsets=torch.tensor([1, 2])), "they run from 1 to 2"),
        (Given(offsets=torch.tensor([0, 3, 2])), "from 0 to 2: pass offsets that never fall"),
        (Given(offsets=torch.tensor([0, -1, 2])), "pass offsets that never fall"),
        (Given(offsets=torch.tensor([0, 2**63 - 1, -(2**63), 2])), "pass offsets that never fall"),
        (Given(values=torch.tensor([], dtype=torch.int64)), "to the number of ids (0); they run from 0 to 2"),
    ],
)
def test_ids_that_cannot_be_looked_up_are_refused(given, message):
    with pytest.raises(BadIds, match=re.escape(message)):
        resolved(given, ONE, 0, np.dtype(np.float32))


def test_strided_ids_and_half_weights():
    values = torch.tensor([[3, 0], [4, 0]])[:, 0]
    weights = torch.tensor([0.5, 2.0], dtype=torch.bfloat16, requires_grad=True)
    ids = resolved(Given(values=values, weights=weights), ONE, 0, np.dtype(np.float64), copy=False)
    assert ids.keys().tolist() == [3, 4]
    assert ids.scale.tolist() == [0.5, 2.0]


# Hashes: equal for equal ids, whatever holds them, and different after any change that a loop may make to them.

NUMBERS = st.integers(0, 3) | st.integers(0, 2**48 - 1)


@st.composite
def batches(draw) -> dict[str, list[list[int]]]:
    samples = draw(st.integers(0, 4))
    bags = st.lists(st.lists(NUMBERS, max_size=4), min_size=samples, max_size=samples)
    return draw(st.dictionaries(st.sampled_from("abc"), bags, min_size=1))


def hashes(ids: KeyedJagged) -> Hashes:
    return hashes_of(capture(ids, ()))


@cases(150)
@given(one=batches(), other=batches())
def test_equal_hashes_mean_equal_bags(one, other):
    mine, theirs = hashes(KeyedJagged.of_bags(one)), hashes(KeyedJagged.of_bags(other))
    for name in mine.keys() & theirs.keys():
        assert (mine[name][0] == theirs[name][0]) == (one[name] == other[name])


@cases(50)
@given(batch=batches())
def test_a_part_and_another_order_of_features_have_the_same(batch):
    ids = KeyedJagged.of_bags(batch)
    whole = hashes(ids)
    for names in (sorted(whole, reverse=True), sorted(whole)[:1]):
        assert hashes(ids.select(names)) == {name: whole[name] for name in names}


def test_batches_that_differ_in_one_id_differ():
    """One id in one place. A hash that is linear in the ids would mistake a 2 in one place for a 1 in another."""
    found, tried = set(), 0
    values, ends = np.zeros(1000, np.int64), np.array([0, 1000])
    for id in range(1, 201):
        for place in range(1000 // id):
            values[place] = id
            found.add(
                hashes_of(Ids(("a",), values, ends, len(ends) - 1, np.array([0, len(ends) - 1]), (None,)))["a"][0]
            )
            values[place] = 0
            tried += 1
    assert len(found) == tried


@cases(50)
@given(weights=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2))
def test_weights_have_one_of_their_own(weights):
    ids = KeyedJagged(["a"], torch.tensor([1, 2]), lengths=torch.tensor([2]), weights=torch.tensor(weights))
    plain = KeyedJagged(["a"], torch.tensor([1, 2]), lengths=torch.tensor([2]), weights=torch.tensor([0.25, 0.5]))
    mine, theirs = hashes(ids)["a"], hashes(plain)["a"]
    assert mine[0] == theirs[0] and (mine[1] == theirs[1]) == (weights == [0.25, 0.5])
