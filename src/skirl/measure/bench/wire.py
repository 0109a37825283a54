"""Vectors and bytes that a step of several trainers sends, counted at the process group, and the least possible."""

from typing import Any

import numpy as np

from skirl.core.placement import Placement
from skirl.core.tables import Schema
from skirl.data.synthetic import Synthetic
from skirl.train.fingerprints import rows_of

VECTORS = ("rows", "moves")
"""Channels of values and gradients: those that the loop waits for, and those that travel while it computes."""
CHANNELS = (*VECTORS, "ids", "links")
"""All channels that training rows needs; the others carry ids of the batches ahead, and which vectors are critical."""


def source_of(batch: int, steps: int, dim: int, seed: int) -> tuple[Synthetic, list[Any]]:
    """Return the stream of the measurement and its tables."""
    source = Synthetic("criteo-kaggle", batch_size=batch, batches=steps, seed=seed)
    return source, source.tables(dim)


def of_rank(batch: int, steps: int, dim: int, seed: int) -> dict[str, Any]:
    """Train rows on one trainer's shard of each batch and return what its channels counted."""
    import torch

    from skirl.core.optim import RowwiseAdagrad
    from skirl.nn.collection import EmbeddingBagCollection
    from skirl.peers.job import trainers
    from skirl.pipeline.lookahead import lookahead

    torch.set_num_threads(1)
    peers = trainers()
    source, tables = source_of(batch, steps, dim, seed)
    embeddings = EmbeddingBagCollection(tables, optimizer=RowwiseAdagrad(lr=0.02), cache=batch * 26)
    mine = source.sharded(peers.rank, peers.rank + 1, peers.size)
    with lookahead(mine, embeddings, shards=peers.size) as batches:
        for part in batches:
            embeddings(part.sparse).stacked().square().mean().backward()
    embeddings.close()
    return {"channels": {name: counters for name, counters in peers.counted().items() if name in CHANNELS}}


def planned(trainers: int, batch: int, steps: int, dim: int, seed: int) -> np.ndarray:
    """Count, plainly, the vectors that each rank sends to each: a value and a gradient for every remote row read."""
    sources = [source_of(batch, steps, dim, seed)[0].sharded(n, n + 1, trainers) for n in range(trainers)]
    schema, placement = Schema.of(source_of(batch, steps, dim, seed)[1]), Placement.even(trainers)
    vectors = np.zeros((trainers, trainers), np.int64)
    for reader, source in enumerate(sources):
        for part in source:
            owners = np.bincount(placement.site_of(np.unique(rows_of([part], schema))), minlength=trainers)
            owners[reader] = 0  # a trainer's own rows cross no network
            vectors[:, reader] += owners
            vectors[reader] += owners
    return vectors


def overhead(ranks: list[dict[str, Any]], batch: int, steps: int, dim: int, seed: int) -> dict[str, Any]:
    """Return the ratio of all bytes to those of the vectors alone, and whether the vectors are those expected."""
    expected = planned(len(ranks), batch, steps, dim, seed)
    sent, received = (
        np.sum([[rank["channels"][name][way] for rank in ranks] for name in VECTORS], axis=0)
        for way in ("sent", "received")
    )
    received = received.T
    by_channel = {name: sum(sum(rank["channels"][name]["bytes_sent"]) for rank in ranks) for name in CHANNELS}
    vectors = int(sent.sum())
    return {
        "ratio": sum(by_channel.values()) / (vectors * dim * 4),
        "vectors": vectors,
        "vectors_critical": sum(sum(rank["channels"]["rows"]["sent"]) for rank in ranks),
        "vectors_planned": int(expected.sum()),
        "as_planned": bool((sent == expected).all() and (received == expected).all()),
        "bytes": by_channel,
        "seconds": {name: max(rank["channels"][name]["seconds"] for rank in ranks) for name in CHANNELS},
    }
