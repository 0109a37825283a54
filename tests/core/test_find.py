"""Repeated bags are found, whatever their hashes, and the batch stays the same."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from skirl import KeyedJagged
from skirl.core.find import _of_ids, find
from tests.cases import cases


def bags_of(ids: KeyedJagged) -> dict[str, list[list[tuple[int, float]]]]:
    """Return ids and weights of each sample, by feature, from values and lengths alone."""
    weights = [1.0] * len(ids.values()) if ids.weights_or_none() is None else ids.weights_or_none().tolist()  # type: ignore[union-attr]
    pairs, at = iter(zip(ids.values().tolist(), weights, strict=True)), 0
    bags: list[list[tuple[int, float]]] = []
    for length in ids.lengths().tolist():
        bags.append([next(pairs) for _ in range(length)])
    out: dict[str, list[list[tuple[int, float]]]] = {}
    shared = {name: inverse.tolist() for names, inverse in ids.groups.items() for name in names}
    for name, stride in zip(ids.keys(), ids.stride_per_key(), strict=True):
        own, at = bags[at : at + stride], at + stride
        out[name] = [own[bag] for bag in shared.get(name, range(stride))]
    return out


def drawn(rng: np.random.Generator) -> KeyedJagged:
    """Draw some features with few different bags each, including empty lists."""
    samples, weighted = int(rng.integers(1, 9)), rng.random() < 0.5
    values: list[int] = []
    lengths: list[int] = []
    for _ in range(3):
        bags = [rng.integers(0, 3, rng.integers(0, 4)).tolist() for _ in range(int(rng.integers(1, 5)))]
        for bag in rng.integers(0, len(bags), samples):
            values += bags[bag]
            lengths.append(len(bags[bag]))
    weights = torch.from_numpy(rng.choice([0.5, 1.0], len(values)).astype(np.float32)) if weighted else None
    ids = torch.tensor(values, dtype=torch.int64)
    return KeyedJagged(list("abc"), ids, lengths=torch.tensor(lengths), weights=weights)


def found_in(ids: KeyedJagged, mask: int) -> KeyedJagged:
    """Run `find` on all features, with hashes reduced by a mask."""
    return _of_ids(ids, ids.keys(), mask & (1 << 64) - 1)


def check(rng: np.random.Generator, alike: bool) -> None:
    ids = drawn(rng)
    found = found_in(ids, 0 if alike else -1)
    assert bags_of(found) == bags_of(ids) == bags_of(found.expanded())
    for name, samples in bags_of(ids).items():
        stride = found.stride_per_key()[ids.keys().index(name)]
        assert stride == len(set(map(tuple, samples)))
    inverses = [tuple(inverse.tolist()) for inverse in found.groups.values()]
    assert len(set(inverses)) == len(inverses), "features that change together share one"
    assert torch.equal(found.expanded().values(), ids.values())


@cases(100)
@example(0, False)
@given(st.integers(0, 1 << 30), st.booleans())
def test_every_bag_is_counted_once_whatever_the_hashes(seed, alike):
    check(np.random.default_rng(seed), alike)


@cases(60)
@given(seed=st.integers(0, 1 << 30), first=st.sampled_from([["a"], ["b"], ["c", "a"]]))
def test_what_is_shared_already_stays_and_the_rest_is_found(seed, first):
    ids = drawn(np.random.default_rng(seed))
    some, whole = find(ids, features=first), find(ids, features=list("abc"))
    found = find(some, features=list("abc"))
    assert bags_of(found) == bags_of(ids) and found.stride_per_key() == whole.stride_per_key()
    assert torch.equal(found.values(), whole.values()) and list(found.groups) == list(whole.groups)
    with pytest.raises(ValueError, match="no feature 'd': there are 'a', 'b', 'c'"):
        find(found, features=["d"])


def test_a_column_that_a_file_does_not_leave_out_is_looked_at():
    ids = KeyedJagged.of_bags({"once": [[1, 2]] * 4, "rest": [[3, 4, 5]] * 4})
    found = find(find(ids, features=["once"]))
    assert found.groups.keys() == {("once", "rest")} and found.stride_per_key() == [1, 1]
    assert find(found) is found


def lists(*bags: list[int], name: str = "a") -> KeyedJagged:
    return KeyedJagged.of_bags({name: list(bags)})


def test_what_does_not_pay_stays_plain():
    assert find(lists([1, 2], [1, 2], [3, 4], [3, 4])).stride_per_key() == [2]
    assert find(lists([7], [7], [7])).groups == {}, "one id a sample"
    assert find(lists([], [], [])).groups == find(lists([1, 2, 3])).groups == {}
    assert find(lists(*([i, i + 1, i + 2] for i in range(9)))).groups == {}
    most = [[i, i, i] * 10 for i in range(40)]
    assert find(lists(*most, *most[:3])).groups == {}, "43 / 40 is below 1.1"
    assert find(lists(*most, *most[:5])).stride_per_key() == [40]
    assert find(lists([7], [7]), features=["a"]).stride_per_key() == [1]
