"""Claim: a checkpoint pauses training for milliseconds ("Checkpoints" in docs/benchmarks.md).

Also its bytes.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from common import Bench, main, result
from skirl.checkpoint import Saving, save
from skirl.core.batch import Batch, KeyedJagged
from skirl.core.optim import RowwiseAdagrad
from skirl.core.tables import Table
from skirl.nn.collection import EmbeddingBagCollection
from skirl.pipeline.lookahead import lookahead

_PIECE = 1 << 18


@dataclass(frozen=True)
class Checkpoint(Bench):
    """The pause of training for a checkpoint, and its bytes."""

    touched: int = 10_000_000
    """Rows in the store when training begins."""
    dim: int = 16
    """Numbers in a row; its optimizer state is one more."""
    cache: str = "5%"
    """Rows on the device."""
    store: Literal["memory", "disk"] = "memory"
    """Where the rows outside the cache are."""
    batch: int = 1024
    """Samples in a step."""
    features: int = 26
    """Ids in a sample."""
    seconds: float = 60.0
    """Seconds between two checkpoints."""
    checkpoints: int = 3
    """The number of checkpoints to save."""

    def run(self) -> dict[str, Any]:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory(prefix="skirl-bench-") as folder:
            names = tuple(f"f{i}" for i in range(self.features))
            rows = EmbeddingBagCollection(
                [Table("t", self.touched, self.dim, features=names)],
                optimizer=RowwiseAdagrad(lr=0.02),
                cache=int(self.cache) if self.cache.isdigit() else self.cache,
                store="memory" if self.store == "memory" else f"disk:{folder}/rows",
            )
            self._fill(rows)
            found = self._train(rows, torch.nn.Linear(self.features * self.dim, 1), Path(folder, "checkpoint"))
            rows.close()
        flags = "touched dim cache store batch features seconds checkpoints"
        return result("checkpoint", self, flags, **found)

    def _fill(self, rows: EmbeddingBagCollection) -> None:
        engine = rows.engine
        for start in range(0, self.touched, _PIECE):
            keys = np.arange(start, min(self.touched, start + _PIECE))
            engine.store.write(keys, np.full((len(keys), engine.packs[0].widths[0]), 0.01, np.float32))
            engine.seen.add(keys)
        engine.store.flush()

    def _batches(self) -> Iterator[Batch]:
        rng, samples = np.random.default_rng(0), self.batch
        names = [f"f{i}" for i in range(self.features)]
        while True:
            ids = (rng.random((samples, self.features)) ** 4 * self.touched).astype(np.int64)
            yield Batch(torch.empty(samples, 0), KeyedJagged.one_hot(names, torch.from_numpy(ids)), torch.ones(samples))

    def _train(self, rows: EmbeddingBagCollection, top: torch.nn.Linear, folder: Path) -> dict[str, Any]:
        model = torch.nn.ModuleList([rows, top])
        dense = torch.optim.SGD(top.parameters(), lr=0.01)
        engine = rows.engine
        savings: list[Saving] = []
        with lookahead(self._batches(), model, depth=10) as batches:
            began = saved = time.perf_counter()
            for batch in batches:
                top(rows(batch.sparse).stacked().flatten(1)).square().mean().backward()
                dense.step()
                dense.zero_grad()
                now = time.perf_counter()
                if batches.step == 20:  # compiled, and the cache has begun to fill
                    began = saved = now
                elif batches.step > 20 and now - saved >= self.seconds:
                    if len(savings) == self.checkpoints:
                        break
                    savings.append(save(folder, model=model, optimizers=[dense], data=batches, keep_last=2, wait=False))
                    saved = now
            trained = time.perf_counter() - began
            savings[-1].wait()
        waited = sum(cache.changes.waited for cache in engine.caches)
        pause = sum(saving.pause for saving in savings)
        return {
            "trained_seconds": trained,
            "pauses": [saving.pause for saving in savings],
            "pause_share": (pause + waited) / trained,
            "waited_seconds": waited,
            "write_seconds": [saving.seconds for saving in savings],
            "bytes": [saving.bytes for saving in savings],
            "row_bytes": self.touched * engine.packs[0].widths[0] * 4,
        }


if __name__ == "__main__":
    main(Checkpoint)
