"""Claim: a checkpoint pauses training for milliseconds ("Checkpoints" in docs/benchmarks.md).

Also how much slower steps are meanwhile, its bytes, and the memory that it takes.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from common import at_least_one, main, processes, result
from skirl.checkpoint import Saving, save
from skirl.core.batch import Batch, KeyedJagged
from skirl.core.optim import RowwiseAdagrad
from skirl.core.tables import Table
from skirl.nn.collection import EmbeddingBagCollection
from skirl.peers.base import Alone, Peers
from skirl.pipeline.lookahead import lookahead

_PIECE = 1 << 18
FLAGS = "touched dim cache store batch features seconds checkpoints trainers"


@dataclass(frozen=True)
class Checkpoint:
    """The pause of training for a checkpoint, its bytes, and the memory that it takes."""

    touched: int = 10_000_000
    """Rows in the store when training begins."""
    dim: int = 16
    """Numbers in a row; its optimizer state is one more."""
    cache: str = "5%"
    """Rows on the device."""
    store: Literal["memory", "disk"] = "memory"
    """Where the rows outside the cache are; for disk see --rows."""
    batch: int = 1024
    """Samples in a step."""
    features: int = 26
    """Ids in a sample."""
    seconds: float = 60.0
    """Seconds between two checkpoints."""
    checkpoints: int = 3
    """The number of checkpoints to save."""
    trainers: int = 1
    """Processes that train and save together, each with its share of the rows, the cache and the batch."""
    folder: Path | None = None
    """Where to write checkpoints, in a new folder that is removed afterwards; the system's temporary folder if not
    given."""
    rows: Path | None = None
    """Where a disk store keeps its rows, for instance on another file system; removed afterwards. Next to the
    checkpoints if not given."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "touched", "dim", "batch", "features", "checkpoints", "trainers")
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}: set it above 0")

    def run(self) -> dict[str, Any]:
        """Train and save, and return the figures."""
        with (
            tempfile.TemporaryDirectory(dir=self.folder, prefix="skirl-bench-") as folder,
            tempfile.TemporaryDirectory(dir=self.rows or folder, prefix="skirl-bench-") as rows,
        ):
            if self.trainers == 1:
                found = self.trainer(Path(folder), rows)
            else:
                flags = {name: getattr(self, name) for name in FLAGS.split()}
                of_each = processes(self.trainers, [__file__, "child", json.dumps(flags), folder, rows])
                found = {name: _of_all(name, [one[name] for one in of_each]) for name in of_each[0]}
        return result("checkpoint", self, FLAGS, **found)

    def trainer(self, folder: Path, rows_in: str) -> dict[str, Any]:
        """Run one trainer and return its figures. Its checkpoints go to a folder shared by all, its rows to another."""

        torch.manual_seed(0)
        names = tuple(f"f{i}" for i in range(self.features))
        rows = EmbeddingBagCollection(
            [Table("t", self.touched, self.dim, features=names)],
            optimizer=RowwiseAdagrad(lr=0.02),
            cache=int(self.cache) if self.cache.isdigit() else self.cache,
            store="memory" if self.store == "memory" else f"disk:{rows_in}/rows",
        )
        self._fill(rows)
        top = torch.nn.Linear(self.features * self.dim, 1)
        found = self._train(rows, top, folder / "checkpoint")
        rows.close()
        return found

    def _fill(self, rows: EmbeddingBagCollection) -> None:
        engine = rows.engine
        for start in range(0, self.touched, _PIECE):
            keys = np.arange(start, min(self.touched, start + _PIECE))
            keys = keys if engine.exchange is None else keys[engine.exchange.owns(keys)]
            engine.store.write(keys, np.full((len(keys), engine.widths[0]), 0.01, np.float32))
            engine.seen.add(keys)
        engine.store.flush()

    def _batches(self, rank: int) -> Iterator[Batch]:

        rng = np.random.default_rng(rank)
        names, samples = [f"f{i}" for i in range(self.features)], self.batch // self.trainers
        while True:
            ids = (rng.random((samples, self.features)) ** 4 * self.touched).astype(np.int64)
            yield Batch(torch.empty(samples, 0), KeyedJagged.one_hot(names, torch.from_numpy(ids)), torch.ones(samples))

    def _train(self, rows: EmbeddingBagCollection, top: torch.nn.Linear, folder: Path) -> dict[str, Any]:

        model = torch.nn.ModuleList([rows, top])
        dense = torch.optim.SGD(top.parameters(), lr=0.01)
        engine = rows.engine
        peers = Alone() if engine.exchange is None else engine.exchange.peers
        savings: list[Saving] = []
        quiet: list[float] = []
        writing: list[float] = []
        with lookahead(self._batches(peers.rank), model, depth=10) as batches:
            began = saved = before = time.perf_counter()
            resident = most = 0
            for batch in batches:
                top(rows(batch.sparse).stacked().flatten(1)).square().mean().backward()
                dense.step()
                dense.zero_grad()
                now = time.perf_counter()
                if batches.step == 20:  # compiled, and the cache has begun to fill
                    began = saved = now
                    resident = most = _resident()
                elif batches.step > 20:
                    (writing if savings and not savings[-1].done else quiet).append(now - before)
                    most = max(most, _resident()) if batches.step % 10 == 0 else most
                    if _any(peers, now - saved >= self.seconds):
                        if len(savings) == self.checkpoints:
                            break
                        savings.append(save(folder, model=model, optimizers=[dense], data=batches, keep=2, wait=False))
                        saved = now
                before = time.perf_counter()
            trained = time.perf_counter() - began
            savings[-1].wait()
        waited = sum(cache.changes.waited for cache in engine.caches)
        pause = sum(saving.pause for saving in savings)
        middle = statistics.median(quiet)
        return {
            "steps": len(quiet) + len(writing),
            "trained_seconds": trained,
            "pauses": [saving.pause for saving in savings],
            "pause_share": (pause + waited) / trained,
            "waited_seconds": waited,
            "step_seconds": middle,
            "step_seconds_while_writing": statistics.median(writing) if writing else middle,
            "write_seconds": [saving.seconds for saving in savings],
            "bytes": [saving.bytes for saving in savings],
            "row_bytes": self.touched * engine.widths[0] * 4,
            "cache_bytes": sum(cache.records.nbytes for cache in engine.caches),
            "resident_bytes": resident,
            "resident_growth": most - resident,
            "set_aside_bytes": max((cache.changes.most_aside for cache in engine.caches), default=0),
        }


def _any(peers: Peers, due: bool) -> bool:
    """Return whether `due` is true on any trainer."""
    if peers.size == 1:
        return due
    came = peers.channel("lookups").exchange([np.array([due], np.int8)] * peers.size, "whether to save")
    return bool(np.concatenate(came).any())


def _of_all(name: str, each: list[Any]) -> Any:
    """Combine a figure over all trainers: add bytes and growth, take the maximum of everything else."""
    if isinstance(each[0], list):
        return [_of_all(name, list(ones)) for ones in zip(*each)]
    return sum(each) if "bytes" in name or "growth" in name else max(each)


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(Checkpoint(**json.loads(sys.argv[2])).trainer(Path(sys.argv[3]), sys.argv[4])))
    else:
        main(Checkpoint)
