"""From jagged ids to keys and bags: correct compared with plain Python, and a clear error for anything else."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl import KeyedJagged, Table
from skirl.core.ids import BadIds, capture, positions_of, resolve
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


@st.composite
def jagged(draw: st.DrawFn) -> tuple[KeyedJagged, dict[str, list[list[tuple[int, float]]]]]:
    """Draw ids of all features in any order, including one that no table knows, and the same ids as lists."""
    batch = draw(st.integers(0, 4))
    names = draw(st.permutations(["a", "s1", "s2", "b", "unknown"]))
    rows = {feature: table.rows for table in TABLES for feature in table.features} | {"unknown": 1 << 60}
    bags = {
        name: [
            [
                (draw(st.integers(0, min(rows[name], 1 << 31) - 1)), draw(st.sampled_from([0.5, 1.0, 3.0])))
                for _ in range(draw(st.integers(0, 3)))
            ]
            for _ in range(batch)
        ]
        for name in names
    }
    flat = [one for name in names for bag in bags[name] for one in bag]
    lengths = torch.tensor([len(bag) for name in names for bag in bags[name]], dtype=draw(INTEGERS))
    weights = torch.tensor([weight for _, weight in flat]) if draw(st.booleans()) else None
    if weights is None:
        bags = {name: [[(value, 1.0) for value, _ in bag] for bag in some] for name, some in bags.items()}
    values = torch.tensor([value for value, _ in flat], dtype=draw(INTEGERS))
    return KeyedJagged(names, values, lengths=lengths, weights=weights), bags


def resolved(sparse, schema, bank, dtype, copy=True):
    captured = capture(sparse, schema.features, copy=copy)
    return resolve(captured, positions_of(captured, schema, bank), schema, bank, dtype)


INTEGERS = st.sampled_from([torch.int32, torch.int64])


@cases(200)
@given(given=jagged(), double=st.booleans())
def test_keys_and_bags(given, double):
    sparse, bags = given
    dtype = np.dtype(np.float64 if double else np.float32)
    captured = capture(sparse, SCHEMA.features)
    for number, bank in enumerate(SCHEMA.banks):
        ids = resolve(captured, positions_of(captured, SCHEMA, number), SCHEMA, number, dtype)
        assert ids.batch == captured.samples == len(bags["a"])
        n = 0
        for f, feature in enumerate(bank.features):
            for b, bag in enumerate(bags[feature.name]):
                assert ids.offsets[f * ids.batch + b] == n
                for value, weight in bag:
                    assert ids.positions.keys()[n] == feature.table << ROW_BITS | value
                    assert ids.bag_of[n] == b * len(bank.features) + f
                    mean = SCHEMA.tables[feature.table].pooling == "mean"
                    factor = dtype.type(weight) / dtype.type(len(bag)) if mean else dtype.type(weight)
                    assert (ids.scale[n] if len(ids.scale) else 1.0) == factor
                    n += 1
        assert ids.offsets[-1] == n == len(ids.positions) == len(ids.bag_of)
        assert len(ids.scale) in (0, n) and ids.scale.dtype == dtype
        assert ids.bags == len(bank.features) * ids.batch
        mask = np.arange(len(bank.features)) % 2 == 0
        assert ids.by_bag(mask).tolist() == mask.tolist() * ids.batch
        single = ids.unpooled()
        assert (single.bags, len(single.scale)) == (n, 0)
        counts = [sum(map(len, bags[feature.name])) for feature in bank.features]
        assert single.by_bag(mask).tolist() == np.repeat(mask, counts).tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            Given(values=torch.tensor([3, -1])),
            "feature 'a', sample 1: id -1 is outside table 'a', which has rows 0 to 9",
        ),
        (
            Given(values=torch.tensor([10, 0])),
            "feature 'a', sample 0: id 10 is outside table 'a', which has rows 0 to 9",
        ),
        (Given(values=torch.tensor([0, 2**63 - 1])), "sample 1: id 9223372036854775807 is outside table 'a'"),
        (Given(values=torch.tensor([0, -(2**63)])), "sample 1: id -9223372036854775808 is outside table 'a'"),
        (Given(values=torch.tensor([0, -(2**31)], dtype=torch.int32)), "sample 1: id -2147483648 is outside table 'a'"),
        (Given(keys=("b",)), "the batch has no feature 'a': it has 'b'"),
        (Given(keys=()), "the batch has no feature 'a': it has none"),
        (Given(keys=("a", "a")), "the batch names feature 'a' twice: give each its own name"),
        (
            Given(keys=("a", "x"), offsets=torch.tensor([0, 2])),
            "offsets has 2 entries, but 2 features need a multiple of 2",
        ),
        (Given(offsets=torch.tensor([], dtype=torch.int64)), "offsets has 0 entries"),
        (Given(offsets=torch.tensor([0, 1])), "rise from 0 to the number of ids (2); they run from 0 to 1"),
        (Given(offsets=torch.tensor([0, 3])), "they run from 0 to 3"),
        (Given(offsets=torch.tensor([1, 2])), "they run from 1 to 2"),
        (Given(offsets=torch.tensor([0, 3, 2])), "from 0 to 2: pass offsets that never fall"),
        (Given(offsets=torch.tensor([0, -1, 2])), "pass offsets that never fall"),
        (Given(offsets=torch.tensor([0, 2**63 - 1, -(2**63), 2])), "pass offsets that never fall"),
        (Given(weights=torch.ones(3)), "3 weights for 2 ids: pass one for each id"),
        (
            Given(values=torch.tensor([], dtype=torch.int64)),
            "rise from 0 to the number of ids (0); they run from 0 to 2",
        ),
    ],
)
def test_ids_that_cannot_be_looked_up_are_refused(given, message):
    with pytest.raises(BadIds, match=re.escape(message)):
        resolved(given, ONE, 0, np.dtype(np.float32))


def test_a_batch_without_samples():
    sparse = KeyedJagged(
        ["b", "s2", "s1", "a"], torch.tensor([], dtype=torch.int64), lengths=torch.tensor([], dtype=torch.int64)
    )
    ids = resolved(sparse, SCHEMA, 0, np.dtype(np.float32))
    assert (ids.batch, ids.bags, len(ids.positions), ids.offsets.tolist()) == (0, 0, 0, [0])
    assert ids.unpooled().by_bag(np.ones(3, np.bool_)).tolist() == []


def test_what_is_captured_is_a_copy():
    values, offsets, weights = torch.tensor([3, 4]), torch.tensor([0, 1, 2]), torch.tensor([1.0, 2.0])
    captured = capture(Given(values=values, offsets=offsets, weights=weights), ONE.features)
    for tensor in (values, offsets, weights):
        tensor.fill_(9)
    assert captured.values.tolist() == [3, 4]
    assert captured.offsets.tolist() == [0, 1, 2]
    assert captured.weights is not None and captured.weights.tolist() == [1, 2]


def test_strided_ids_and_half_weights():
    values = torch.tensor([[3, 0], [4, 0]])[:, 0]
    weights = torch.tensor([0.5, 2.0], dtype=torch.bfloat16, requires_grad=True)
    ids = resolved(Given(values=values, weights=weights), ONE, 0, np.dtype(np.float64), copy=False)
    assert ids.positions.keys().tolist() == [3, 4]
    assert ids.scale.tolist() == [0.5, 2.0]
