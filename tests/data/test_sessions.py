"""Synthetic sessions: any sample can be computed directly, and lists repeat as often as specified."""

from itertools import chain, pairwise

import pytest
import torch

from skirl.core.batch import KeyedJagged
from skirl.data.synthetic import Sessions


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
