"""Claim: skirl hides a slow link between trainers, and where the link is the limit it gains what it saves in bytes.

`--part trainers` ("Several trainers" in docs/benchmarks.md): two trainers in network namespaces with a token bucket between
them; the time of a step is compared with its roof, the least that compute, wire and cores allow. It needs `ip` and `tc`.
`--part bound` ("Where the link is the limit"): train.py behind an emulated link of 100 Mbit/s, for three sizes of the cache.
`--tables production`: over the same links, 60 tables with the published moments, by hash, placed, and by TorchRec.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import link_tables
from common import main, processes, result
from skirl.core.batch import Batch
from skirl.core.optim import RowwiseAdagrad
from skirl.data.synthetic import Synthetic
from skirl.nn.collection import EmbeddingBagCollection
from skirl.peers.base import Alone, Peers
from skirl.peers.job import trainers, using
from skirl.pipeline.lookahead import lookahead
from skirl.tools.machine import cores
from skirl.tools.units import Link
from train import RepeatedBatches, TrainSpeed

LOOPBACK = "loopback"
EDGE = 2
"""Untimed steps at the beginning of a turn."""
READ = 16
"""Different batches, which repeat."""
ADDRESS = "10.211.37.{}"
"""Addresses of the trainers, which nobody else sees."""
BURST = 0.0005
"""Size of the bucket in seconds of the rate: about what a network card sends at once."""
LEAST_BURST = 128 << 10
"""Minimum size of the bucket in bytes: twice what the system hands over in one piece."""
BOUND = {
    "modes": "skirl,serial,resident,on_demand,lru", "threads": 1, "link": "100Mbit,100us", "dim": 64, "rows_scale": 0.25,
    "batch": 128, "rounds": 6, "slice": 16, "warm": 450, "depth": 128,
}  # fmt: skip
"""Flags of train.py for `--part bound`: the rate is low enough that bytes decide, whatever the machine."""


@dataclass(frozen=True)
class LinkSpeed:
    """Time of trainers over links of limited rate, and of one trainer whose store is behind one."""

    part: Literal["trainers", "bound"] = "trainers"
    """trainers: two of them over real links; bound: one behind an emulated link, with several caches."""
    links: tuple[str, ...] = ("1Gbit", "10Gbit")
    """Rate of each link to measure; loopback sets no limit."""
    dense: tuple[int, ...] = (100_000, 400_000, 1_600_000)
    """Numbers of dense weights in the model, one measurement for each."""
    batch: int = 4096
    """Samples in a step, over both trainers."""
    dim: int = 64
    """Numbers in a row."""
    steps: int = 16
    """Steps in a turn."""
    rounds: int = 3
    """Timed turns, alone and together."""
    tables: Literal["criteo", "production"] = "criteo"
    """criteo: an id of each feature a sample; production: 60 tables with bags of 15.8 ids, for part trainers."""

    def run(self) -> dict[str, Any]:
        """Measure each link with each dense size, or each cache, in sequence."""
        if self.part == "bound":
            found = {str(percent): TrainSpeed(cache=f"touched:{percent}%", **BOUND).run() for percent in (1, 10, 50)}
            return result("link", self, "part", by_cache=found)
        if self.tables == "production":
            by_link = {link: link_tables.compared(self._children(link)) for link in self.links}
            return result("link", self, "tables links batch steps rounds", by_link=by_link)
        points = [point for link in self.links for point in self._points(link)]
        return result(
            "link", self, "part links dense batch dim steps rounds",
            vs_roof=max(point["vs_roof"] for point in points),
            rows_share=max(point["rows_share"] for point in points),
            points=points,
        )  # fmt: skip

    @property
    def source(self) -> Synthetic:
        """The stream of batches."""
        return Synthetic("criteo-kaggle", self.batch, batches=READ, rows_scale=0.1)

    def _points(self, link: str) -> list[dict[str, Any]]:
        ranks = zip(*self._children(link), strict=True)
        return [
            {"link": link, "dense": dense, **judged(each, rate_of(link))}
            for dense, each in zip(self.dense, ranks, strict=True)
        ]

    def _children(self, link: str) -> list[Any]:
        flags = {name: getattr(self, name) for name in ("tables", "dense", "batch", "dim", "steps", "rounds")}
        words = [__file__, "child", json.dumps(flags)]
        with nullcontext([]) if link == LOOPBACK else two_namespaces(rate_of(link)) as names:
            return processes(2, words, names, ADDRESS.format(1) if names else "127.0.0.1")


def rate_of(link: str) -> float:
    """Return the bytes per second of a link."""
    return Link().rate if link == LOOPBACK else Link.parse(f"{link},0us").rate


def judged(ranks: Sequence[dict[str, Any]], rate: float) -> dict[str, Any]:
    """Compare the time of a step with its roof."""
    together = [rank["together"] for rank in ranks]
    busiest = max(sum(rank[side].values()) for rank in together for side in ("sent", "received"))
    roof = {
        "compute": max(rank["local"]["seconds"] for rank in ranks), "wire": busiest / rate,
        "cores": sum(rank["cpu"] for rank in together) / cores(),
    }  # fmt: skip
    seconds = max(rank["seconds"] for rank in together)
    return {
        "vs_roof": seconds / max(roof.values()),
        "rows_share": max(rank["waited"]["rows"] for rank in together) / seconds,
        "seconds": seconds,
        "roof": roof,
    }


class TwoLayers(nn.Module):
    """Two dense layers over the rows."""

    def __init__(self, embeddings: EmbeddingBagCollection, width: int, dense: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        hidden = max(1, dense // (width + 2))
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the logit of each sample."""
        return self.layers(self.embeddings(batch.sparse).stacked().flatten(1)).squeeze(1)


class Way:
    """One way to train, step by step; with `Alone` all rows are local."""

    def __init__(self, job: LinkSpeed, dense: int, peers: Peers, parts: Sequence[Batch], stack: ExitStack) -> None:
        self.peers, self._steps = peers, job.steps
        tables = job.source.tables(job.dim)
        rows = min(sum(table.rows for table in tables), 26 * job.batch * READ)
        with using(peers):
            embeddings = EmbeddingBagCollection(tables, optimizer=RowwiseAdagrad(lr=0.02), cache=rows)
        torch.manual_seed(0)
        self.model = TwoLayers(embeddings, len(tables) * job.dim, dense)
        self._dense = torch.optim.SGD(self.model.layers.parameters(), lr=0.01)
        stack.callback(embeddings.close)
        stream = RepeatedBatches(parts * 1000)
        self._batches = iter(stack.enter_context(lookahead(stream, self.model, depth=8, shards=peers.size)))

    def turn(self) -> dict[str, Any]:
        """Train a turn and return its averages per step: time, bytes sent and received, and waits."""
        for _ in range(EDGE):
            self._trained()
        before, used, began = self._counted(), time.process_time(), time.perf_counter()
        for _ in range(self._steps):
            self._trained()
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        after = self._counted()
        moved = {
            side: {name: (after[name][n] - before[name][n]) / self._steps for name in after}
            for n, side in enumerate(("sent", "received"))
        }
        waits = {name: (after[name][2] - before[name][2]) / self._steps for name in after}
        return {"seconds": seconds / self._steps, "cpu": cpu / self._steps, **moved, "waited": waits}

    def _counted(self) -> dict[str, tuple[int, int, float]]:
        channels = {name: of for name, of in self.peers.counted().items() if name != "start"}
        return {
            name: (sum(of["bytes_sent"]), sum(of["bytes_received"]), of["seconds"]) for name, of in channels.items()
        }

    def _trained(self) -> None:
        batch = next(self._batches)
        loss = binary_cross_entropy_with_logits(self.model(batch), batch.labels)
        loss.backward()
        self._dense.step()
        self._dense.zero_grad()
        loss.item()


def of_rank(job: LinkSpeed, dense: int, peers: Peers) -> dict[str, Any]:
    """Measure one trainer alone and with the others, taking turns. Return the medians."""
    torch.set_num_threads(1)
    parts = list(job.source.sharded(peers.rank, peers.rank + 1, peers.size))
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in ("local", "together")}
    with ExitStack() as stack:
        local, together = (Way(job, dense, of, parts, stack) for of in (Alone(), peers))
        for _ in range(1 + job.rounds):
            for name, of in turns.items():
                peers.channel("start").exchange([np.zeros(0, np.uint8)] * peers.size, f"before {name}")
                of.append((local if name == "local" else together).turn())
    return {name: _middle(of[1:]) for name, of in turns.items()}


def _middle(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over the turns."""
    return {
        name: _middle([turn[name] for turn in turns])
        if isinstance(first, dict)
        else statistics.median(turn[name] for turn in turns)
        for name, first in turns[0].items()
    }


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def two_namespaces(rate: float) -> Iterator[list[str]]:
    """Make two network namespaces with a link of so many bytes per second between them and yield their names."""
    names = [f"skirl-{os.getpid()}-{n}" for n in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        burst = max(LEAST_BURST, int(rate * BURST))
        for n, name in enumerate(names):
            _run("ip", "-n", name, "addr", "add", f"{ADDRESS.format(n + 1)}/24", "dev", "wire")
            _run("ip", "-n", name, "link", "set", "wire", "up")
            limit = ("rate", f"{int(8 * rate)}bit", "burst", str(burst), "latency", "50ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "wire", "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            with suppress(OSError):
                _run("ip", "netns", "del", name)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        job, peers = LinkSpeed(**json.loads(sys.argv[2])), trainers()
        if job.tables == "production":
            print(json.dumps(link_tables.of_rank(job.batch, job.steps, job.rounds, peers)))
        else:
            print(json.dumps([of_rank(job, dense, peers) for dense in job.dense]))
    else:
        main(LinkSpeed)
