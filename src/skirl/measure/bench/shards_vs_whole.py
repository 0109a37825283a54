"""The cost of shards if one process has them all: a DLRM's training step in shards against the same step as one batch."""

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.core.optim import RowwiseAdagrad
from skirl.data.synthetic import Synthetic
from skirl.measure.bench.limited import Again
from skirl.models.dlrm import DLRM
from skirl.nn.collection import EmbeddingBagCollection
from skirl.pipeline.lookahead import Lookahead, lookahead

READ = 8
"""Number of batches, which are made beforehand and repeat."""


class Trainer:
    """One way to train, step by step.

    **Arguments**

    - `source`: the stream of global batches.
    - `shards`: shards in a step; with 1 a step is one batch.
    - `stack`: closes the lookahead.
    """

    def __init__(self, source: Synthetic, shards: int, stack: ExitStack) -> None:
        tables = source.tables(16)
        embeddings = EmbeddingBagCollection(tables, optimizer=RowwiseAdagrad(lr=0.02), cache="100%")
        torch.manual_seed(0)
        self.model = DLRM.paper(embeddings, dense_features=source.dense_features)
        self.dense = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        parts = list(source.sharded(0, shards, shards))
        self.ahead: Lookahead = stack.enter_context(lookahead(Again(parts), self.model, depth=4, shards=shards))
        self.shards = shards
        self._batches = iter(self.ahead)

    def step(self) -> float:
        """Train on one global batch and return the CPU time that it took, over all threads."""
        began = time.process_time()
        for _ in range(self.shards):
            batch = next(self._batches)
            loss = binary_cross_entropy_with_logits(self.model(batch), batch.labels)
            loss.backward()
            self.dense.step()
            self.dense.zero_grad()
        return time.process_time() - began


def shards_vs_whole(batch: int = 4096, shards: int = 8, steps: int = 20, rows_scale: float = 0.01) -> dict[str, Any]:
    """Compare the CPU time of whole training steps in shards and as one batch, in turns.

    **Arguments**

    - `batch`: samples in a step.
    - `shards`: shards in a step.
    - `steps`: timed steps of each kind, after two that are not timed.
    - `rows_scale`: scale of the Criteo Kaggle tables, which are all in the cache.
    """
    source = Synthetic("criteo-kaggle", batch_size=batch, batches=READ, rows_scale=rows_scale)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # CPU time means nothing if threads spin while they wait for each other
    try:
        with ExitStack() as stack:
            ways = [Trainer(source, of, stack) for of in (1, shards)]
            for _ in range(2):
                for way in ways:
                    way.step()
            times = [[way.step() for way in ways] for _ in range(steps)]
    finally:
        torch.set_num_threads(threads)
    whole, sharded = zip(*times, strict=True)
    return {
        "batch": batch,
        "shards": shards,
        "steps": steps,
        "whole_seconds": median(whole),
        "sharded_seconds": median(sharded),
        "shards_vs_whole": median(s / w for w, s in times),
    }
