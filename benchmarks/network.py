"""Claim: trainers exchange little more than the vectors that they need ("Several trainers" in docs/benchmarks.md).

`wire_overhead`: all bytes of rows and ids over those of the vectors alone.
`dense_vs_allreduce`: the tree's sum of dense gradients over the backend's own.
With the placement `auto`, bytes of rows and ids: `vs_hash`, by hash over these; `vs_pooled`, these over pooled vectors of
all tables, both ways, as TorchRec sends them; `bytes_vs_best_by_table`, these over the sum of each table's least way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from common import Bench, Stopwatch, main, ratio, result, trainers_of
from placement import production
from skirl.core.batch import KeyedJagged
from skirl.core.optim import SGD, RowwiseAdagrad
from skirl.core.tables import Table
from skirl.core.tree import block_of
from skirl.data.synthetic import Synthetic
from skirl.nn.collection import EmbeddingBagCollection
from skirl.peers.base import Peers
from skirl.peers.job import join, trainers, using
from skirl.pipeline.lookahead import lookahead
from skirl.pipeline.shards import Shards
from skirl.placement.measure import draw_ids
from skirl.train.placed import WORTH, Bytes, count, dealt

CHANNELS = ("rows", "ids")
"""Channels that training rows needs: of values and gradients, and of the ids of the batches ahead."""


@dataclass(frozen=True)
class Network(Bench):
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
        found: dict[str, dict[str, Any]] = {}
        for size in self.trainers:
            flags = [self.numbers, self.rounds, self.tables, self.batch, self.steps, self.dim]
            ranks = trainers_of(size, __file__, flags)
            hashed, placed = (np.sum([rank[how] for rank in ranks], axis=0) for how in ("hash", "auto"))
            vectors, ids = hashed.tolist()
            bytes_of_step = placed.sum() / self.steps
            figures = {
                "wire_overhead": (vectors + ids) / vectors,
                "dense_vs_allreduce": ranks[0]["dense"],
                "vs_hash": round(hashed.sum() / placed.sum(), 4),
                "vs_pooled": round(bytes_of_step / ranks[0]["pooled"], 4),
                "bytes_vs_best_by_table": round(bytes_of_step / ranks[0]["least"], 4),
            }
            for name, value in figures.items():
                found.setdefault(name, {})[str(size)] = value
        return result("network", self, "trainers numbers rounds batch steps dim tables", **found)


def batches_of(kind: str, batch: int, steps: int, dim: int, scale: int = 1) -> tuple[list[Table], list[KeyedJagged]]:
    """Return tables with 1 / `scale` of the rows, and the ids of whole steps."""
    if kind == "criteo":
        source = Synthetic("criteo-kaggle", batch_size=batch, batches=steps, rows_scale=1 / scale)
        return list(source.tables(dim)), [each.sparse for each in source]
    rng, specs, found = np.random.default_rng(0), production(60, 128, 7, batch), []
    tables = [Table(spec.name, -(-spec.rows // scale), spec.dim) for spec in specs]
    for _ in range(steps):
        lengths, values = [], []
        for spec, table in zip(specs, tables, strict=True):
            most = 2 * spec.ids // spec.batch
            lengths.append(rng.integers(1 if most < 2 else 0, max(1, most) + 1, batch))
            values.append(rng.permutation(np.resize(draw_ids(spec, rng), int(lengths[-1].sum()))) % table.rows)
        ids = torch.from_numpy(np.concatenate(values))
        found.append(KeyedJagged([t.name for t in tables], ids, lengths=torch.from_numpy(np.concatenate(lengths))))
    return tables, found


def parts_of(steps: Sequence[KeyedJagged], peers: Peers) -> list[KeyedJagged]:
    """Return this trainer's samples of each step."""
    each = steps[0].stride() // peers.size
    return [ids.samples(peers.rank * each, (peers.rank + 1) * each) for ids in steps]


def placed(counted: Mapping[str, tuple[Bytes, float]], size: int) -> dict[str, int]:
    return dealt({name: loads for name, (of, loads) in counted.items() if of.whole < WORTH * of.rows}, size)


def sent(peers: Peers) -> np.ndarray:
    """Return the bytes that this trainer has sent so far, by channel."""
    counted = peers.counted()
    return np.array([sum(counted[name]["bytes_sent"]) for name in CHANNELS])


def wire(peers: Peers, tables: Sequence[Table], parts: Sequence[KeyedJagged], placement: dict[str, int]) -> list[int]:
    """Train rows on one trainer's part of each step and return the bytes that it sent, by channel."""
    before = sent(peers)
    rows = EmbeddingBagCollection(tables, optimizer=RowwiseAdagrad(lr=0.02), cache="1GiB", placement=placement)
    with lookahead(parts, rows, shards=peers.size, depth=1, sparse=lambda ids: ids) as batches:
        for part in batches:
            out = rows(part)
            sum(out[name].square().mean() for name in out).backward()  # type: ignore[union-attr]
    rows.close()
    return (sent(peers) - before).tolist()


def of_rank(numbers: int, rounds: int, kind: str, batch: int, steps: int, dim: int) -> dict[str, Any]:
    """Count bytes with rows by hash, and with tables where `train` would put them; time sums of dense gradients."""
    torch.set_num_threads(1)
    peers = trainers()
    tables, ids = batches_of(kind, batch, steps, dim)
    counted, parts = count(ids, tables, peers.size), parts_of(ids, peers)
    return {
        "hash": wire(peers, tables, parts, {}),
        "auto": wire(peers, tables, parts, placed(counted, peers.size)),
        "pooled": 8 * batch * sum(table.dim for table in tables) * (peers.size - 1) / peers.size,
        "least": sum(min(of.rows, of.whole) for of, _ in counted.values()),
        "dense": dense(numbers, rounds) if rounds else None,
    }


def dense(numbers: int, rounds: int) -> float | None:
    """Time one rank's sums of gradients, as the loop does them and by the backend, each from `.grad` to `.grad`."""
    with join(timeout=120) as peers, using(peers):
        weights = torch.nn.ParameterList(torch.zeros(size) for size in [numbers // 4] * 4)
        rows = EmbeddingBagCollection([Table("none", 1, 1)], optimizer=SGD(lr=1.0), cache=1)  # a model has some
        model = torch.nn.ModuleList([weights, rows])
        sums = Shards(model, peers.size, 1, 0, block_of(peers.rank, peers.size, peers.size), peers)
        own = [torch.randn_like(weight) for weight in weights]
        flat = torch.zeros(sum(map(len, own)))

        def ours() -> None:
            sums.begin(0, 0)
            sums.complete()

        def backends() -> None:
            grads = [weight.grad for weight in weights if weight.grad is not None]
            torch.cat(grads, out=flat)
            dist.all_reduce(flat)
            flat.mul_(1 / peers.size)
            torch._foreach_copy_(grads, list(flat.split(len(own[0]))))

        def timed(call: Callable[[], None]) -> float:
            for weight, part in zip(weights, own, strict=True):
                weight.grad = part.clone()
            dist.barrier()
            with Stopwatch() as watch:
                call()
                dist.barrier()
            return watch.seconds

        times = [[timed(call) for call in (ours, backends)] for _ in range(rounds + 3)][3:]
    return ratio(*zip(*times, strict=True))


if __name__ == "__main__":
    main(Network, of_rank)
