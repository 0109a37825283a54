"""Claim: trainers exchange little more than the vectors that they need ("Several trainers" in docs/benchmarks.md).

`wire_overhead`: all bytes of rows and ids over those of the vectors alone.
`dense_vs_allreduce`: the tree's sum of dense gradients over the backend's own.
With the placement `auto`, bytes of rows and ids: `vs_hash`, by hash over these; `vs_pooled`, these over pooled vectors of
all tables, both ways, as TorchRec sends them; `bytes_vs_best_by_table`, these over the sum of each table's least way.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from common import Stopwatch, main, processes, result
from placement import production
from skirl.core.jagged import KeyedJagged
from skirl.core.optim import SGD, RowwiseAdagrad
from skirl.core.tables import Table
from skirl.core.tree import block_of
from skirl.data.synthetic import Synthetic
from skirl.nn.collection import EmbeddingBagCollection
from skirl.peers.job import join, trainers, using
from skirl.pipeline.lookahead import lookahead
from skirl.pipeline.shards import Shards
from skirl.placement.measure import draw_ids
from skirl.train.placed import WORTH, count, dealt

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
    tables: Literal["criteo", "production"] = "criteo"
    """criteo: 26 tables with an id a sample. production: 60 tables with the published moments, 15.8 ids a sample."""

    def run(self) -> dict[str, Any]:
        """Measure with each number of processes in sequence."""
        dense, wire = {}, {}
        ratios: dict[str, dict[str, float]] = {"vs_hash": {}, "vs_pooled": {}, "bytes_vs_best_by_table": {}, "MB": {}}
        for size in self.trainers:
            flags = [self.numbers, self.rounds, self.tables, self.batch, self.steps, self.dim]
            ranks = processes(size, [__file__, "child", json.dumps(flags)])
            dense[str(size)], wire[str(size)] = ranks[0]["dense"], self._overhead([rank["rows"] for rank in ranks])
            hashed, placed = (sum(map(_sent, (rank[how] for rank in ranks))) / self.steps for how in ("rows", "auto"))
            least, pooled = ranks[0]["counted"]
            found = hashed / placed, placed / pooled, placed / least, placed / 1e6
            for name, value in zip(ratios, found, strict=True):
                ratios[name][str(size)] = round(value, 4)
        return result(
            "network", self, "trainers numbers rounds batch steps dim tables",
            wire_overhead=wire, dense_vs_allreduce=dense, **ratios,
        )  # fmt: skip

    def _overhead(self, ranks: list[dict[str, Any]]) -> float:
        """Return the ratio of all bytes to those of the vectors alone."""
        vectors, ids = (sum(sum(rank[name]["bytes_sent"]) for rank in ranks) for name in CHANNELS)
        return (vectors + ids) / vectors


def _sent(rank: dict[str, Any]) -> int:
    return sum(sum(rank[name]["bytes_sent"]) for name in CHANNELS)


def batches_of(kind: str, batch: int, steps: int, dim: int) -> tuple[list[Table], list[KeyedJagged]]:
    """Return tables, and the ids of whole steps."""
    if kind == "criteo":
        source = Synthetic("criteo-kaggle", batch_size=batch, batches=steps)
        return list(source.tables(dim)), [each.sparse for each in source]
    rng, specs, found = np.random.default_rng(0), production(60, 128, 7, batch), []
    for _ in range(steps):
        lengths, values = [], []
        for spec in specs:
            most = 2 * spec.ids // spec.batch
            lengths.append(rng.integers(1 if most < 2 else 0, max(1, most) + 1, batch))
            values.append(rng.permutation(np.resize(draw_ids(spec, rng), int(lengths[-1].sum()))))
        ids = torch.from_numpy(np.concatenate(values))
        found.append(KeyedJagged([s.name for s in specs], ids, lengths=torch.from_numpy(np.concatenate(lengths))))
    return [Table(spec.name, spec.rows, spec.dim) for spec in specs], found


def part_of(ids: KeyedJagged, rank: int, size: int) -> KeyedJagged:
    """Return a trainer's samples of a step."""
    features, offsets = ids.keys(), ids.offsets().numpy()
    batch = (len(offsets) - 1) // len(features)
    each = batch // size
    lengths = np.diff(offsets).reshape(len(features), batch)[:, rank * each : (rank + 1) * each]
    begins = offsets[np.arange(len(features)) * batch + rank * each]
    ends = offsets[np.arange(len(features)) * batch + (rank + 1) * each]
    values = torch.cat([ids.values()[a:b] for a, b in zip(begins, ends, strict=True)])
    return KeyedJagged(features, values, lengths=torch.from_numpy(lengths.reshape(-1).copy()))


def wire(
    peers: Any, tables: Sequence[Table], steps: Sequence[KeyedJagged], placement: dict[str, int]
) -> dict[str, Any]:
    """Train rows on one trainer's part of each step and return what its channels counted."""
    before = peers.counted()
    loader = [part_of(ids, peers.rank, peers.size) for ids in steps]
    rows = EmbeddingBagCollection(tables, optimizer=RowwiseAdagrad(lr=0.02), cache="1GiB", placement=placement)
    with lookahead(loader, rows, shards=peers.size, depth=1, sparse=lambda ids: ids) as batches:
        for part in batches:
            out = rows(part)
            sum(out[name].square().mean() for name in out).backward()  # type: ignore[union-attr]
    rows.close()
    after = peers.counted()
    return {
        name: {
            "bytes_sent": [a - b for a, b in zip(after[name]["bytes_sent"], before[name]["bytes_sent"], strict=True)]
        }
        for name in CHANNELS
    }


def measured(kind: str, batch: int, steps: int, dim: int) -> dict[str, Any]:
    """Count bytes with rows by hash, and with tables where `train` would put them."""
    peers = trainers()
    tables, ids = batches_of(kind, batch, steps, dim)
    counted = count(ids, tables, peers.size)
    whole = {name: loads for name, (of, loads) in counted.items() if of.whole < WORTH * of.rows}
    pooled = 8 * batch * sum(table.dim for table in tables) * (peers.size - 1) / peers.size
    least = sum(min(of.rows, of.whole) for of, _ in counted.values())
    both = {"rows": {}, "auto": dealt(whole, peers.size)}
    return {how: wire(peers, tables, ids, to) for how, to in both.items()} | {"counted": [least, pooled]}


def dense(numbers: int, rounds: int) -> float:
    """Time one rank's sums of gradients, as the loop does them and by the backend, each from `.grad` to `.grad`."""
    wide = max(1, int(numbers**0.5) // 2)
    sizes = [wide * wide] * (numbers // (wide * wide)) + ([rest] if (rest := numbers % (wide * wide)) else [])
    with join(timeout=120) as peers, using(peers):
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
        print(json.dumps(measured(*stream) | {"dense": dense(numbers, rounds) if rounds else None}))
    else:
        main(Network)
