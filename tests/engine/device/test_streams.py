"""The compute stream follows the loop, and blocks, pairs of buffers with owners, are limited in number."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import skirl
from skirl.engine.access import peek, put
from skirl.engine.device.transfers import Blocks, Streams
from tests.cases import cases


@dataclass
class Counted(Streams):
    begun: int = 0

    def begin(self) -> None:
        self.begun += 1


def test_the_stream_is_asked_for_at_every_use_of_rows(monkeypatch):
    streams = Counted()
    monkeypatch.setattr("skirl.engine.device.gpu.Streams", lambda: streams)
    embeddings = skirl.EmbeddingBagCollection(
        [skirl.Table("a", 10, 2)], optimizer=skirl.SGD(lr=0.1), cache=10, device="interpret"
    )
    ids = skirl.KeyedJagged.one_hot(["a"], torch.tensor([[1], [2]]))
    out = embeddings(ids)["a"]
    assert streams.begun == 2  # rows arrive, and are pooled
    out.sum().backward()
    assert streams.begun == 3
    with torch.no_grad():
        embeddings(ids)["a"]
    assert streams.begun == 4


@pytest.mark.parametrize("device", ["cpu", "interpret"])
def test_the_old_cache_is_gone_before_a_lookahead_makes_its_own(device):
    embeddings = skirl.EmbeddingBagCollection(
        [skirl.Table("a", 10, 2)], optimizer=skirl.SGD(lr=0.1), cache=10, device=device
    )
    ids = skirl.KeyedJagged.one_hot(["a"], torch.tensor([[1], [2]]))
    embeddings(ids)["a"].sum().backward()
    before = embeddings.engine.banks
    with skirl.lookahead([ids], embeddings, sparse=lambda ids: ids) as batches:
        for batch in batches:
            embeddings(batch)["a"].sum().backward()
    assert all(new is not old for new, old in zip(embeddings.engine.banks, before, strict=True))


def test_a_default_device_of_torch_is_not_that_of_what_stays_on_the_host():
    """`meta` stands for a GPU: a tensor made there by default has no numbers."""
    embeddings = skirl.EmbeddingBagCollection(
        [skirl.Table("a", 10, 3)], optimizer=skirl.SGD(lr=0.1), cache=2, dtype=torch.bfloat16, device="interpret"
    )
    batches = [skirl.KeyedJagged.one_hot(["a"], torch.tensor([[i], [i + 1]])) for i in (1, 5, 1)]
    with torch.device("meta"):
        for ids in batches:
            embeddings(ids)["a"].sum().backward()
        keys = np.array([1, 2], np.int64)
        put(embeddings.engine, keys, np.ones((2, 3), np.float32), 0)
    assert peek(embeddings.engine, keys, 0).tolist() == [[1, 1, 1], [1, 1, 1]]


class Event:
    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


def make(most=1 << 20, kept=1 << 30):
    return Blocks(torch.device("cpu"), Streams().here, most, kept)


def test_memory_beyond_the_bound_is_let_go_of_once_nothing_uses_it():
    blocks = make(most=100_000)
    taken = [blocks.take(40_000) for _ in range(5)]
    assert blocks.nbytes >= 200_000
    events = []
    for block in taken:
        block.copied, block.used = Event(), Event()
        events.append((block.copied, block.used))
        blocks.release(block)
    assert blocks.nbytes <= 100_000 and not blocks._used
    dropped = sum(copied.waited == used.waited == 1 for copied, used in events)
    assert dropped == 5 - blocks.nbytes // taken[0].host.numel()


@cases(100)
@given(st.lists(st.tuples(st.sampled_from(["take", "retain", "release"]), st.integers(0, 100_000)), max_size=60))
def test_blocks_are_never_shared_and_sizes_add_up(actions):
    blocks, owned = make(most=130_000), []
    for action, number in actions:
        if action == "take":
            block = blocks.take(number)
            assert block.host.nbytes >= number and all(block is not other for other, _ in owned)
            owned.append((block, 1))
        elif owned:
            block, owners = owned.pop(number % len(owned))
            getattr(blocks, action)(block)
            owners += 1 if action == "retain" else -1
            if owners:
                owned.append((block, owners))
        used = sum(block.host.nbytes for block, _ in owned)
        assert len(blocks._used) == len(owned)
        assert blocks.nbytes == used + sum(block.host.nbytes for block in blocks._free) <= max(130_000, used)
    blocks.reset()
    assert not blocks._used and all(blocks.take(100_000) is not block for block, _ in owned)
