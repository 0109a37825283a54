"""A batch whose samples share bags: every operation keeps the samples' ids, and errors name what is wrong."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from skirl import KeyedJagged, Table
from skirl.core.ids import BadIds, capture, hashes_of, positions_of
from skirl.core.once import _of_ids, find
from skirl.core.tables import Schema
from tests.cases import cases


@cases(100)
@given(seed=st.integers(0, 1 << 30))
def test_operations_keep_the_ids_of_all_samples(seed):
    rng = np.random.default_rng(seed)
    ids = found_in(drawn(rng), -1)
    plain, samples = bags_of(ids), ids.stride()
    assert {name: len(bags) for name, bags in plain.items()} == dict.fromkeys("abc", samples)
    order = rng.permutation(list("abc"))[: rng.integers(1, 4)].tolist()
    assert bags_of(ids.select(order)) == {name: plain[name] for name in order} and ids.select(order).keys() == order
    low, high = sorted(rng.integers(0, samples + 1, 2).tolist())
    assert bags_of(ids.samples(low, high)) == {name: bags[low:high] for name, bags in plain.items()}
    for again in (ids.to("cpu"), copy.deepcopy(ids), pickle.loads(pickle.dumps(ids)), KeyedJagged.of(ids)):
        assert bags_of(again) == plain and again.stride_per_key() == ids.stride_per_key()
    lengths = {name: lengths.tolist() for name, lengths in ids.lengths_by_sample().items()}
    assert lengths == {name: list(map(len, bags)) for name, bags in plain.items()}
    weights = [pair for bags in plain.values() for bag in bags for pair in bag]
    assert list(ids.expanded().values()) == [value for value, _ in weights]
    assert bags_of(ids.unweighted()) == {n: [[(i, 1.0) for i, _ in bag] for bag in bags] for n, bags in plain.items()}


@cases(60)
@given(seed=st.integers(0, 1 << 30))
def test_another_inverse_has_another_hash(seed):
    rng = np.random.default_rng(seed)
    ids = found_in(drawn(rng), -1)
    group = next(iter(ids.groups))
    other = torch.from_numpy(rng.permutation(ids.groups[group].numpy()))
    changed = KeyedJagged(
        ids.keys(), ids.values(), lengths=ids.lengths(), weights=ids.weights_or_none(), strides=ids.stride_per_key(),
        inverse={**ids.groups, group: other},
    )  # fmt: skip
    one, two = capture(ids, ()), capture(changed, ())
    same = torch.equal(other, ids.groups[group])
    assert (hashes_of(one) == hashes_of(two)) == same


IDS = {"values": torch.tensor([1, 2, 3]), "lengths": torch.tensor([1, 1, 1])}


@pytest.mark.parametrize(
    ("inverse", "text"),
    [
        ({("a", "b"): torch.tensor([0, 0])}, "no sample has bag 1 of feature 'b'"),
        ({"a": torch.tensor([0, 1])}, "of feature 'a' gives bag 1 for sample 1, but there are 1 bags"),
        ({"a": torch.tensor([0, 0]), "b": torch.tensor([1, 1])}, "no sample has bag 0 of feature 'b'"),
    ],
)
def test_an_inverse_that_does_not_fit_is_refused(inverse, text):
    with pytest.raises(ValueError, match=text):
        capture(KeyedJagged(["a", "b"], **IDS, strides=[1, 2], inverse=inverse), ())


@pytest.mark.parametrize("wrong", [-1, 5])
@pytest.mark.parametrize("use", ["expanded", "lengths_by_sample", "samples"])
def test_a_bag_that_does_not_exist_is_refused_before_it_is_read(wrong, use):
    ids = KeyedJagged(["a", "b"], **IDS, strides=[1, 2], inverse={"a": torch.tensor([0, wrong])})
    with pytest.raises(BadIds, match=f"of feature 'a' gives bag {wrong} for sample 1, but there are 1 bags: number"):
        getattr(ids, use)(*((0, 2) if use == "samples" else ()))


def test_a_bad_id_is_named_by_a_sample_that_has_it():
    ids = KeyedJagged(["a"], torch.tensor([1, 99]), lengths=torch.tensor([1, 1]), strides=[2],
                      inverse={"a": torch.tensor([0, 0, 1])})  # fmt: skip
    with pytest.raises(BadIds, match="feature 'a', sample 2: id 99 is outside"):
        positions_of(capture(ids, ["a"]), Schema.of([Table("a", 9, 2)]), 0)


def test_torchrecs_batches_of_variable_stride_are_read():
    torchrec = pytest.importorskip("torchrec", reason="not installed: constraints/others.txt")
    ids = found_in(drawn(np.random.default_rng(5)), -1)
    own = torch.arange(ids.stride())
    keys = ids.keys()
    inverse = [next((of for names, of in ids.groups.items() if name in names), own).long() for name in keys]
    options = {"keys": keys, "values": ids.values(), "lengths": ids.lengths(), "weights": ids.weights_or_none()}
    theirs = torchrec.KeyedJaggedTensor(
        **options, stride_per_key_per_rank=[[n] for n in ids.stride_per_key()],
        inverse_indices=(keys, torch.stack(inverse)),
    )  # fmt: skip
    assert bags_of(KeyedJagged.of(theirs)) == bags_of(ids)


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
