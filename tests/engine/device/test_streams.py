"""The compute stream follows the loop: a lookup or a backward on another stream finds its rows in order."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import skirl
from skirl.engine.access import peek, put
from skirl.engine.device.transfers import Stream, Streams


@dataclass
class Counted(Streams):
    begun: int = 0

    def begin(self) -> None:
        self.begun += 1


def test_the_stream_is_asked_for_at_every_use_of_rows(monkeypatch):
    streams = Counted(Stream(), Stream(), Stream())
    monkeypatch.setattr("skirl.engine.device.gpu.no_streams", lambda: streams)
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
