"""A batch whose samples share bags: every operation keeps the samples' ids, and errors name what is wrong."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl import KeyedJagged, Table
from skirl.core.ids import BadIds, capture, hashes_of, positions_of
from skirl.core.tables import Schema
from tests.cases import cases
from tests.core.test_find import bags_of, drawn, found_in


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
    stride = ids.stride_per_key()[ids.keys().index(group[0])]
    other = torch.from_numpy(rng.integers(0, stride, ids.stride()))
    changed = KeyedJagged(
        ids.keys(), ids.values(), lengths=ids.lengths(), weights=ids.weights_or_none(), strides=ids.stride_per_key(),
        inverse={**ids.groups, group: other},
    )  # fmt: skip
    one, two = capture(ids, ()), capture(changed, ())
    same = torch.equal(other, ids.groups[group].to(torch.int64))
    assert (hashes_of(one) == hashes_of(two)) == same


@cases(60)
@given(seed=st.integers(0, 1 << 30))
def test_bags_that_no_sample_has_are_left_out(seed):
    """The result equals the batch made of the samples' bags alone; the order of the other bags is kept."""
    rng = np.random.default_rng(seed)
    ids = found_in(drawn(rng), -1)
    strides = dict(zip(ids.keys(), ids.stride_per_key(), strict=True))
    inverse = {
        group: torch.from_numpy(rng.integers(0, strides[group[0]], ids.stride()))
        for group in ids.groups
        if rng.random() < 0.8
    }
    some = KeyedJagged(
        ids.keys(), ids.values(), lengths=ids.lengths(), weights=ids.weights_or_none(), strides=ids.stride_per_key(),
        inverse={**ids.groups, **inverse},
    )  # fmt: skip
    left, alone = capture(some, ()), capture(some.samples(0, some.stride()), ())
    for name in ("values", "offsets", "weights"):
        np.testing.assert_array_equal(getattr(left, name), getattr(alone, name))
    assert left.shares == alone.shares
    assert hashes_of(left) == hashes_of(alone)


IDS = {"values": torch.tensor([1, 2, 3]), "lengths": torch.tensor([1, 1, 1])}


@pytest.mark.parametrize(
    ("strides", "inverse", "text"),
    [
        ([1, 2], None, "strides is given alone"),
        (None, {"a": torch.tensor([0, 0])}, "inverse is given alone"),
        ([1, 3], {"a": torch.tensor([0, 0])}, r"strides are \[1, 3\] for 2 features and 3 bags: pass how many"),
        ([4, -1], {"a": torch.tensor([0, 0])}, r"strides are \[4, -1\]"),
        ([1, 2], {"c": torch.tensor([0, 0])}, "the inverse names features 'c': there are 'a', 'b'"),
        ([1, 2], {("a", "b"): torch.tensor([0, 0])}, r"different numbers of bags \(a: 1, b: 2\)"),
        ([1, 2], {"a": torch.tensor([0, 0]), ("a",): torch.tensor([0, 0])}, "name each once"),
        ([1, 2], {"a": torch.tensor([[0, 0]])}, r"the inverse of a is \[1, 2\]"),
        ([1, 2], {"a": torch.tensor([0, 1])}, "of feature 'a' gives bag 1 for sample 1, but there are 1 bags"),
        ([1, 2], {"a": torch.tensor([0.0, 0.0])}, "of feature 'a' are float32: pass int64 or int32"),
        ([1, 2], {"a": torch.tensor([0, 0, 0])}, "feature 'b' has 2 bags for 3 samples and no inverse"),
        ([1, 2], {"a": torch.zeros(2).long(), "b": torch.zeros(3).long()}, "of feature 'b' has 3 entries, that of fea"),
    ],
)
def test_what_is_wrong_is_refused(strides, inverse, text):
    with pytest.raises((ValueError, TypeError), match=text):
        capture(KeyedJagged(["a", "b"], IDS["values"], lengths=IDS["lengths"], strides=strides, inverse=inverse), ())


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
