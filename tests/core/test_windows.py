"""Batches whose lists are windows of buffers, compared with the lists themselves: every operation keeps the samples' ids."""

import copy
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl import KeyedJagged, Table
from skirl.core.find import find
from skirl.core.id_hash import hashes_of
from skirl.core.ids import BadIds, Captured, capture, positions_of
from skirl.core.stretches import Stretches, at_windows, indices
from skirl.core.tables import Schema
from tests.cases import cases

Lists = dict[str, list[list[int]]]


def drawn(rng: np.random.Generator) -> tuple[KeyedJagged, Lists]:
    """Draw windows of features a and c, some unused and some empty, and single ids of b. Return each sample's lists too."""
    samples = int(rng.integers(1, 9))
    lists: Lists = {}
    values: list[int] = []
    lengths: list[int] = []
    strides, windows, inverse = [], {}, {}
    for name in "abc":
        if name == "b":
            ids = rng.integers(0, 50, samples).tolist()
            lists[name] = [[i] for i in ids]
            values, lengths, strides = values + ids, lengths + [1] * samples, [*strides, samples]
            continue
        sizes = rng.integers(0, 9, int(rng.integers(1, 4)))
        ids, starts = rng.integers(0, 50, sizes.sum()).tolist(), np.cumsum(sizes) - sizes
        count = samples if (alone := rng.random() < 0.3) else int(rng.integers(1, 7))
        buffer = rng.integers(0, len(sizes), count)
        begins = starts[buffer] + [int(rng.integers(0, sizes[b] + 1)) for b in buffer]
        ends = [int(rng.integers(low, starts[b] + sizes[b] + 1)) for low, b in zip(begins, buffer, strict=True)]
        which = np.arange(samples) if alone else rng.integers(0, count, samples)
        windows[name] = torch.from_numpy(begins), torch.from_numpy(np.array(ends) - begins)
        if not alone:
            inverse[name] = torch.from_numpy(which)
        lists[name] = [ids[begins[w] : ends[w]] for w in which]
        values, lengths, strides = values + ids, lengths + sizes.tolist(), [*strides, len(sizes)]
    ids = torch.tensor(values, dtype=torch.int64)
    whole = KeyedJagged(
        list("abc"), ids, lengths=torch.tensor(lengths), strides=strides, inverse=inverse, windows=windows
    )
    return whole, lists


def lists_of(ids: KeyedJagged) -> Lists:
    """Return the lists of each sample, by feature, from what the batch holds."""
    out: Lists = {}
    values, lengths = ids.values().tolist(), ids.lengths().tolist()
    bag = at = 0
    inverse = {name: of.tolist() for names, of in ids.groups.items() for name in names}
    for name, stride in zip(ids.keys(), ids.stride_per_key(), strict=True):
        own, begin = [], at
        for length in lengths[bag : bag + stride]:
            own.append(values[at : at + length])
            at += length
        bag += stride
        if name in ids.windows:
            begins, sizes = (of.tolist() for of in ids.windows[name])
            own = [values[begin:at][low : low + size] for low, size in zip(begins, sizes, strict=True)]
        out[name] = [own[i] for i in inverse.get(name, range(len(own)))]
    return out


def captured_lists(captured: Captured) -> Lists:
    """Return the lists of each sample of captured ids."""
    out: Lists = {}
    for place, name in enumerate(captured.keys):
        starts, window = captured.starts(place).tolist(), captured.window(place)
        own = [captured.values[low:high].tolist() for low, high in pairwise(starts)]
        if window is not None:
            begins, lengths = (starts[0] + window[0]).tolist(), window[1].tolist()
            own = [captured.values[low : low + size].tolist() for low, size in zip(begins, lengths, strict=True)]
        of = None if captured.inverse is None else captured.inverse.of[place]
        out[name] = own if of is None else [own[i] for i in of]
    return out


@cases(150)
@given(seed=st.integers(0, 1 << 30))
def test_operations_keep_the_ids_of_all_samples(seed: int) -> None:
    check_operations(seed)


def check_operations(seed: int) -> None:
    """Check that a drawn batch holds the same lists after each operation."""
    rng = np.random.default_rng(seed)
    ids, lists = drawn(rng)
    samples = ids.stride()
    assert lists_of(ids) == lists and samples == len(lists["b"])
    order = rng.permutation(3).tolist()
    permuted = ids.permute(order)
    assert lists_of(permuted) == lists and permuted.keys() == ["abc"[i] for i in order]
    first, second = ids.split([1, 2])
    assert lists_of(first) | lists_of(second) == lists
    assert lists_of(KeyedJagged.concat([second, first])) == lists
    low, high = sorted(rng.integers(0, samples + 1, 2).tolist())
    some = ids.samples(low, high)
    assert lists_of(some) == {name: own[low:high] for name, own in lists.items()} and set(some.windows) == {"a", "c"}
    for again in (ids.to("cpu"), copy.deepcopy(ids), pickle.loads(pickle.dumps(ids)), ids.unweighted(), find(ids)):
        assert lists_of(again) == lists and set(again.windows) == {"a", "c"}
    lengths = {name: lengths.tolist() for name, lengths in ids.lengths_by_sample().items()}
    assert lengths == {name: list(map(len, own)) for name, own in lists.items()}
    bags, plain = ids.without_windows(), ids.expanded()
    assert lists_of(bags) == lists_of(plain) == lists and not bags.windows and not plain.groups
    assert {*bags.groups} == {*ids.groups}
    assert plain.values().tolist() == [i for name in "abc" for own in lists[name] for i in own]


@cases(150)
@given(seed=st.integers(0, 1 << 30))
def test_ids_outside_of_windows_are_dropped_and_the_others_are_there_once(seed: int) -> None:
    check_captured(seed)


def check_captured(seed: int) -> None:
    """Check that captured ids hold the same lists, each id of a buffer once, and no others."""
    ids, lists = drawn(np.random.default_rng(seed))
    found = capture(ids, ())
    bags = found.without_windows()
    assert captured_lists(found) == captured_lists(bags) == lists
    for place, name in enumerate(ids.keys()):
        if (window := found.window(place)) is None:
            continue
        starts = found.starts(place)
        held = np.zeros(int(starts[-1] - starts[0]), bool)
        held[indices(*window)] = True
        assert held.all(), "an id that no sample has"
        assert set(found.inverse.of[place].tolist()) == set(range(window.shape[1]))  # type: ignore[union-attr]
        begins, sizes = (of.numpy() for of in ids.windows[name])
        used = {i for names, of in ids.groups.items() if name in names for i in of.tolist()}
        there = {i for w in used for i in range(begins[w], begins[w] + sizes[w])}
        assert len(held) == len(there)
        total, once = sum(map(len, lists[name])), sum(int(sizes[w]) for w in used)
        shares = bags.inverse is not None and bags.inverse.of[place] is not None
        assert shares == (total >= 1.1 * once and total - once >= ids.stride())


@cases(150)
@given(
    windows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12).map(lambda of: np.array(of, int))
)
def test_stretches_hold_each_id_of_the_windows_once(windows: Any) -> None:
    begins, lengths = windows.reshape(-1, 2).T.astype(np.int64)
    found, values = Stretches.of(begins, lengths), np.arange(100)
    taken, places = found.taken(values), found.places
    assert taken.tolist() == sorted({i for low, size in zip(begins, lengths) for i in range(low, low + size)})
    assert at_windows(taken, places, lengths).tolist() == at_windows(values, begins, lengths).tolist()
    assert found.ids == len(taken) and (found.ends[:-1] <= found.begins[1:]).all()
    for window, stretch in enumerate(found.which.tolist()):
        if lengths[window]:
            assert found.begins[stretch] <= begins[window] < begins[window] + lengths[window] <= found.ends[stretch]


@cases(60)
@given(seed=st.integers(0, 1 << 30))
def test_another_window_has_another_hash_and_another_digest(seed: int) -> None:
    check_hashes(seed)


def check_hashes(seed: int) -> None:
    """Check that a batch with the same ids and inverse has other hashes if a window that a sample has is another one."""
    ids = KeyedJagged(["a"], torch.arange(9), lengths=torch.tensor([9]), strides=[1],
                      inverse={"a": torch.tensor([0, 1, 0, 2, 3])},
                      windows={"a": (torch.tensor([0, 3, 2, 0]), torch.tensor([4, 3, 5, 9]))})  # fmt: skip
    rng = np.random.default_rng(seed)
    begins, lengths = (of.clone() for of in ids.windows["a"])
    which = int(rng.integers(0, 3))
    begins[which] = int(rng.integers(0, 9))
    lengths[which] = int(rng.integers(1, 10 - begins[which]))
    other = KeyedJagged(["a"], ids.values(), lengths=ids.lengths(), strides=[1], inverse=ids.groups,
                        windows={"a": (begins, lengths)})  # fmt: skip
    same = torch.equal(begins, ids.windows["a"][0]) and torch.equal(lengths, ids.windows["a"][1])
    one, two = capture(ids, ()), capture(other, ())
    assert (hashes_of(one) == hashes_of(two)) == same
    schema = Schema.of([Table("a", 9, 2)])
    digests = [positions_of(each, schema, 0).inverse for each in (one, two)]
    assert (digests[0] == digests[1]) == same


def test_a_class_with_the_same_methods_keeps_its_windows() -> None:
    class Theirs:
        def __init__(self, ids: KeyedJagged) -> None:
            self.ids = ids

        def __getattr__(self, name: str) -> Any:
            return getattr(self.ids, name)

    ids, lists = drawn(np.random.default_rng(3))
    found = KeyedJagged.of(Theirs(ids))
    assert lists_of(found) == lists and set(found.windows) == {"a", "c"}


def given_windows(begins: Any, lengths: Any, **options: Any) -> KeyedJagged:
    given = {"strides": [2, 2], "windows": {"a": (begins, lengths)}, **options}
    return KeyedJagged(["a", "b"], torch.arange(6), lengths=torch.tensor([3, 1, 1, 1]), **given)


TWO = torch.tensor([0, 1]), torch.tensor([3, 2])


WRONG = [
    (*TWO, {"strides": None}, "windows are given without strides: pass strides as well"),
    (*TWO, {"weights": torch.ones(6)}, "windows and weights are both given"),
    (*TWO, {"windows": {"c": TWO}}, "windows name feature 'c': there are 'a', 'b'"),
    (*TWO, {"windows": {"a": TWO[0]}}, "the windows of feature 'a' are Tensor: pass two tensors"),
    (TWO[0], TWO[1].float(), {}, "the lengths of the windows of feature 'a' are float32: pass int64 or int32"),
    (TWO[0][:, None], TWO[1], {}, r"the begins of the windows of feature 'a' have shape \[2, 1\]"),
    (TWO[0][:1], TWO[1], {}, "feature 'a' has 1 begins and 2 lengths of windows"),
    (
        TWO[0],
        torch.tensor([3, 3]),
        {},
        "window 1 of feature 'a' has 3 ids from id 1 on, outside its buffer, which has 3 from id 0",
    ),
    (torch.tensor([0, -1]), TWO[1], {}, "window 1 of feature 'a' has 2 ids from id -1 on, outside its buffer"),
    (torch.tensor([5, 1]), TWO[1], {}, "window 0 of feature 'a' has 3 ids from id 5 on, outside its buffer"),
    (
        TWO[0],
        torch.tensor([3, 2**63 - 1]),
        {},
        "window 1 of feature 'a' has 9223372036854775807 ids from id 1 on, outside",
    ),
    (TWO[0], torch.tensor([3, -1]), {}, "window 1 of feature 'a' has -1 ids from id 1 on, outside its buffer"),
    (*TWO, {"inverse": {"a": torch.tensor([0, 2])}}, "of feature 'a' gives window 2 for sample 1, but there are 2"),
    (TWO[0][:1], TWO[1][:1], {}, "feature 'b' has 2 bags for 1 samples and no inverse"),
    (
        TWO[0][:1],
        TWO[1][:1],
        {"inverse": {("a", "b"): torch.tensor([0, 0])}},
        r"features of one group have different numbers of bags \(a: 1, b: 2\)",
    ),
]


@pytest.mark.parametrize(("begins", "lengths", "options", "text"), WRONG)
def test_what_is_wrong_is_refused(begins: Any, lengths: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        capture(given_windows(begins, lengths, **options), ())


def test_wrong_windows_are_refused_before_they_are_read() -> None:
    ids = given_windows(TWO[0], torch.tensor([3, 9]))
    for use in (ids.expanded, ids.without_windows, lambda: ids.samples(0, 2)):
        with pytest.raises(BadIds, match="window 1 of feature 'a' has 9 ids from id 1 on, outside its buffer"):
            use()


def test_lengths_and_windows_that_do_not_exist_are_refused_before_they_are_read() -> None:
    ids = given_windows(TWO[0], torch.tensor([3, -1]))
    with pytest.raises(BadIds, match="window 1 of feature 'a' has -1 ids: pass lengths of 0 or more"):
        ids.lengths_by_sample()
    ids = given_windows(*TWO, inverse={"a": torch.tensor([0, 2])})
    for use in (ids.expanded, ids.lengths_by_sample):
        with pytest.raises(BadIds, match="of feature 'a' gives window 2 for sample 1, but there are 2 windows"):
            use()


def test_torchrecs_form_has_no_windows() -> None:
    ids = given_windows(*TWO)
    with pytest.raises(ValueError, match=r"feature 'a' has windows, .* call without_windows\(\) first"):
        ids.inverse_indices()
    assert ids.variable_stride_per_key() and ids.into(dict)["stride_per_key_per_rank"] == [[2], [2]]


def test_a_bad_id_is_named_by_a_sample_that_has_it() -> None:
    ids = KeyedJagged(["a"], torch.tensor([1, 2, 99]), lengths=torch.tensor([3]), strides=[1],
                      inverse={"a": torch.tensor([0, 0, 1])},
                      windows={"a": (torch.tensor([0, 1]), torch.tensor([2, 2]))})  # fmt: skip
    with pytest.raises(BadIds, match="feature 'a', sample 2: id 99 is outside"):
        positions_of(capture(ids, ["a"]), Schema.of([Table("a", 9, 2)]), 0)
