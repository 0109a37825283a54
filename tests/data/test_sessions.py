"""Synthetic sessions: any sample can be computed directly, and lists repeat as often as specified."""

from itertools import chain, pairwise

import pytest
import torch

from skirl.core.batch import KeyedJagged
from skirl.data.flags import DataFlags
from skirl.data.sessions import Sessions


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
        assert {name: list(chain.from_iterable(of[name] for of in found)) for name in found[0]} == lists_of(
            whole.sparse
        )
        assert torch.equal(torch.cat([part.labels for part in others]), whole.labels)
        assert torch.equal(torch.cat([part.dense for part in others]), whole.dense)


def test_lists_repeat_as_often_as_they_are_said_to():
    for options, factor in (({}, 9.3), ({"change": 0.2}, 4.0)):
        lists = lists_of(Sessions(batch_size=3000, pooling_factor=9, **options).batch(0).sparse)["seen_2"]
        repeats = sum(a == b for a, b in pairwise(lists))
        assert len(lists) / (len(lists) - repeats) == pytest.approx(factor, rel=0.15)
    batch = Sessions(batch_size=512, once=False).batch(0)
    assert not batch.sparse.groups and 0.1 < batch.labels.mean() < 0.5


def test_the_flags_say_the_same():
    flags = {"per_session": 4.0, "change": 0.1, "lists": 2}
    stream = DataFlags("synthetic:sessions", batch=8, steps=2, **flags).stream()
    assert isinstance(stream, Sessions) and stream.lists == ("seen_1", "seen_2")
    assert (stream.per_session, stream.change) == (4.0, 0.1)
    assert [table.features for table in stream.tables(4)] == [("user",), ("item", "seen_1"), ("seen_2",)]
    state = stream.state_dict()
    with pytest.raises(ValueError, match=r"a stream with change=0\.1"):
        DataFlags("synthetic:sessions", batch=8, steps=2, **(flags | {"change": 0.2})).stream().check_state(state)


@pytest.mark.parametrize(
    ("data", "flags", "text"),
    [
        ("sessions", {"per_session": 0.5}, "per_session is 0.5: set it between 1"),
        ("sessions", {"change": 1.5}, "change is 1.5: set it between 0 and 1"),
        ("sessions", {"lists": 0}, "lists is 0: set it between 1 and 32"),
        ("tiny", {"lists": 2}, "lists is a flag of synthetic:sessions, and data is synthetic:tiny: leave it out"),
    ],
)
def test_wrong_numbers_are_refused(data, flags, text):
    with pytest.raises(ValueError, match=text):
        DataFlags(f"synthetic:{data}", **flags)
