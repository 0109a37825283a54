"""Claim: trainers exchange little more than the vectors that they need ("Several trainers" in docs/benchmarks.md).

`wire_overhead`: all bytes of rows and ids over those of the vectors alone.
`dense_vs_allreduce`: the tree's sum of dense gradients over the backend's own.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from common import Stopwatch, main, processes, result
from skirl.core.optim import SGD, RowwiseAdagrad
from skirl.core.tables import Table
from skirl.core.tree import block_of
from skirl.data.synthetic import Synthetic
from skirl.nn.collection import EmbeddingBagCollection
from skirl.peers.job import join, trainers, using
from skirl.pipeline.lookahead import lookahead
from skirl.pipeline.shards import Shards

CHANNELS = ("rows", "ids")
"""Channels that training rows needs: of values and gradients, and of the ids of the batches ahead."""


@dataclass(frozen=True)
class Network:
    """Vectors and bytes that trainers exchange, and the sum of dense gradients next to the backend's own."""

    trainers: tuple[int, ...] = (2, 4)
    """Numbers of trainer processes, powers of two, one measurement for each."""
    numbers: int = 2_400_000
    """Dense gradients in a step, each a float32."""
    rounds: int = 25
    """Sums to time; skirl's and the backend's alternate."""
    batch: int = 4096
    """Samples in a step, over all trainers."""
    steps: int = 8
    """Steps whose rows are counted."""
    dim: int = 16
    """Numbers in a row."""

    def run(self) -> dict[str, Any]:
        """Measure with each number of processes in sequence."""
        dense, wire = {}, {}
        for count in self.trainers:
            flags = [self.numbers, self.rounds, self.batch, self.steps, self.dim]
            ranks = processes(count, [__file__, "child", json.dumps(flags)])
            dense[str(count)], wire[str(count)] = ranks[0]["dense"], self._overhead([rank["wire"] for rank in ranks])
        return result(
            "network", self, "trainers numbers rounds batch steps dim",
            wire_overhead=wire, dense_vs_allreduce=dense,
        )  # fmt: skip

    def _overhead(self, ranks: list[dict[str, Any]]) -> float:
        """Return the ratio of all bytes to those of the vectors alone."""
        vectors, ids = (sum(sum(rank[name]["bytes_sent"]) for rank in ranks) for name in CHANNELS)
        return (vectors + ids) / vectors


def wire(peers: Any, batch: int, steps: int, dim: int) -> dict[str, Any]:
    """Train rows on one trainer's shard of each batch and return what its channels counted."""
    source = Synthetic("criteo-kaggle", batch_size=batch, batches=steps)
    rows = EmbeddingBagCollection(source.tables(dim), optimizer=RowwiseAdagrad(lr=0.02), cache=batch * 26)
    with lookahead(source.sharded(peers.rank, peers.rank + 1, peers.size), rows, shards=peers.size) as batches:
        for part in batches:
            rows(part.sparse).stacked().square().mean().backward()
    rows.close()
    return {name: counters for name, counters in peers.counted().items() if name in CHANNELS}


def dense(numbers: int, rounds: int) -> float:
    """Time one rank's sums of gradients, as the loop does them and by the backend, each from `.grad` to `.grad`."""
    wide = max(1, int(numbers**0.5) // 2)
    sizes = [wide * wide] * (numbers // (wide * wide)) + ([rest] if (rest := numbers % (wide * wide)) else [])
    with join(patience=120) as peers, using(peers):
        weights = torch.nn.ParameterList(torch.zeros(size) for size in sizes)
        rows = EmbeddingBagCollection([Table("none", 1, 1)], optimizer=SGD(lr=1.0), cache=1)  # a model has some
        model = torch.nn.ModuleList([weights, rows])
        sums = Shards(model, peers.size, 1, 0, block_of(peers.rank, peers.size, peers.size), peers)
        parts = [
            [torch.randn(size, generator=torch.Generator().manual_seed(97 * rank + n)) for n, size in enumerate(sizes)]
            for rank in range(peers.size)
        ]
        flat = torch.zeros(numbers)

        def ours() -> None:
            sums.begin(0, 0)
            sums.complete()

        def backends() -> None:
            grads = [weight.grad for weight in weights if weight.grad is not None]
            torch.cat(grads, out=flat)
            dist.all_reduce(flat)
            flat.mul_(1 / peers.size)
            torch._foreach_copy_(grads, list(flat.split(sizes)))

        def timed(call: Callable[[], None]) -> float:
            for weight, part in zip(weights, parts[peers.rank], strict=True):
                weight.grad = part.clone()
            dist.barrier()
            with Stopwatch() as watch:
                call()
                dist.barrier()
            return watch.seconds * 1e3

        times = [[timed(call) for call in (ours, backends)] for _ in range(rounds + 3)][3:]
    return statistics.median(tree / backend for tree, backend in times)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        torch.set_num_threads(1)
        numbers, rounds, *stream = json.loads(sys.argv[2])
        sent = wire(trainers(), *stream)
        print(json.dumps({"wire": sent, "dense": dense(numbers, rounds)}))
    else:
        main(Network)
