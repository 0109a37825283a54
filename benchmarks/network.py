"""Claim: trainers exchange little more than the vectors that they need ("Several trainers" in docs/benchmarks.md).

`wire_overhead`: all bytes of rows and ids over those of the vectors alone, which must be the vectors that were planned.
`dense_vs_allreduce`: the tree's sum of dense gradients over the backend's own. `rows_vs_...`, `critical_vs_...`: vectors
that other schemes would move in a step, over those of owners by key, counted without processes: a ring all-reduce of the
rows that BagPipe's rule synchronises (`critical`: at once), and pooled vectors there and back.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from common import Stopwatch, at_least_one, main, processes, result
from oracle import Owner, parts_of
from skirl.core.keys import ROW_BITS
from skirl.core.optim import SGD, RowwiseAdagrad
from skirl.core.placement import Placement
from skirl.core.positions import Positions
from skirl.core.tables import Schema, Table
from skirl.core.tree import block_of
from skirl.data.synthetic import Synthetic
from skirl.nn.collection import EmbeddingBagCollection
from skirl.nn.dense_sums import DenseSums
from skirl.oracle.halves import critical_gradients, critical_values
from skirl.oracle.options import Plan
from skirl.oracle.step import Step
from skirl.oracle.together import Joined
from skirl.peers.job import trainers, using
from skirl.peers.start import join
from skirl.pipeline.lookahead import lookahead
from skirl.train.verify import rows_of

VECTORS = ("rows", "moves")
"""Channels of values and gradients: those that the loop waits for, and those that travel while it computes."""
CHANNELS = (*VECTORS, "ids", "links")
"""All channels that training rows needs; the others carry ids of the batches ahead, and which vectors are critical."""
NEVER, BIT = np.iinfo(np.int32).max, np.uint64(1)
WARM, COUNTED = 5, 10
"""Steps that fill the caches before others are counted, and steps that are."""


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
    counted: tuple[int, ...] = (8, 16, 32, 64)
    """Numbers of trainers, up to 64, for which to count each scheme's vectors; this starts no processes."""
    windows: tuple[int, ...] = (200, 20, 20, 20)
    """Batches known in advance, for each number of --counted."""
    samples: int = 2048
    """Samples in a step for each trainer of --counted."""
    cache: int = 675_000
    """Slots of each trainer of --counted; 8 times the default is what BagPipe's rule holds with a window of 200."""
    seed: int = 0
    """Seed of the ids, whose skew is that of Criteo Kaggle."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "numbers", "rounds", "steps", "dim", "samples")
        if len(self.windows) != len(self.counted) or max(self.counted, default=0) > 64:
            raise ValueError(
                f"windows is {self.windows} for counted {self.counted}: set one for each, up to 64 trainers"
            )

    def run(self) -> dict[str, Any]:
        """Measure with each number of processes in sequence, then count."""
        dense, wire = {}, {}
        for count in self.trainers:
            words = [
                __file__,
                "child",
                json.dumps([self.numbers, self.rounds, self.batch, self.steps, self.dim, self.seed]),
            ]
            ranks = processes(count, words)
            dense[str(count)], wire[str(count)] = ranks[0]["dense"], self._overhead([rank["wire"] for rank in ranks])
        moved = [self._schemes(count, window) for count, window in zip(self.counted, self.windows, strict=True)]
        return result(
            "network", self, "trainers numbers rounds batch steps dim counted windows samples cache seed",
            wire_overhead={count: figures["ratio"] for count, figures in wire.items()},
            dense_vs_allreduce={count: figures["ratio"] for count, figures in dense.items()},
            wire=wire, dense=dense, movement={str(facts["trainers"]): facts for facts in moved},
        )  # fmt: skip

    def _overhead(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the ratio of all bytes to those of the vectors alone, and whether the vectors are those planned."""
        planned = np.zeros((len(ranks), len(ranks)), np.int64)
        source = Synthetic("criteo-kaggle", batch_size=self.batch, batches=self.steps, seed=self.seed)
        schema, placement = Schema.of(source.tables(self.dim)), Placement.even(len(ranks))
        for reader in range(len(ranks)):
            for part in source.sharded(reader, reader + 1, len(ranks)):
                owners = np.bincount(placement.site_of(np.unique(rows_of([part], schema))), minlength=len(ranks))
                owners[reader] = 0  # a trainer's own rows cross no network
                planned[:, reader] += owners
                planned[reader] += owners
        sent, received = (
            np.sum([[rank[name][way] for rank in ranks] for name in VECTORS], axis=0) for way in ("sent", "received")
        )
        by_channel = {name: sum(sum(rank[name]["bytes_sent"]) for rank in ranks) for name in CHANNELS}
        return {
            "ratio": sum(by_channel.values()) / (int(sent.sum()) * self.dim * 4),
            "vectors": int(sent.sum()),
            "vectors_critical": sum(sum(rank["rows"]["sent"]) for rank in ranks),
            "vectors_planned": int(planned.sum()),
            "as_planned": bool((sent == planned).all() and (planned == received.T).all()),
            "bytes": by_channel,
        }

    def _schemes(self, ranks: int, window: int) -> dict[str, Any]:
        """Count vectors per step with owners by key and with the other schemes, and compute the ratios."""
        batches = WARM + COUNTED + window + 1
        source = Synthetic("criteo-kaggle", batch_size=ranks * self.samples, batches=batches, seed=self.seed)
        schema = Schema.of([Table(name, rows, self.dim) for name, rows in source.rows.items()])
        steps, rows, owned, critical = range(WARM, WARM + COUNTED), list[StepRows](), 0, 0
        for number, halves in enumerate(halves_of(schema, source, ranks, self.cache, Plan(window, ramp=False))):
            rows.append(StepRows.of(halves))
            if number in steps:
                owned += sum(2 * int(half.remote.sum()) for half in halves)
                critical += sum(
                    int((half.remote & way).sum()) for half in halves for way in (half.values, half.gradients)
                )
        now, later = published(schema, rows, window, steps)
        ring = 2 * (ranks - 1)
        vectors = {
            "owners": owned,
            "owners_critical": critical,
            "allreduce": ring * (now + later),
            "allreduce_now": ring * now,
            "alltoall": 2 * len(source.rows) * self.samples * (ranks - 1) * COUNTED,
        }
        return {
            "trainers": ranks,
            "window": window,
            "rows_vs_allreduce": vectors["allreduce"] / owned,
            "critical_vs_allreduce": vectors["allreduce_now"] / critical if critical else None,
            "rows_vs_alltoall": vectors["alltoall"] / owned,
            "vectors": {name: count / COUNTED for name, count in vectors.items()},
        }


@dataclass
class Half:
    """An owner's half of a step: by request, whether it crosses the network, and which of its vectors are critical."""

    step: Step
    joined: Joined
    ids: np.ndarray
    """How many ids each request stands for."""
    remote: np.ndarray
    values: np.ndarray
    """Whether the step before changed the row, so that the loop waits for its value."""
    gradients: np.ndarray
    """Whether the next step uses the row, or its owner evicts it by then, so that the loop waits for its gradient."""


def halves_of(schema: Schema, source: Synthetic, ranks: int, capacity: int, plan: Plan) -> Iterator[list[Half]]:
    """Yield the halves of all owners for each step, as soon as the step after it is planned.

    All ranks take turns in this thread; the production code does all the planning.
    """
    owners, near = [Owner(schema, rank, ranks, capacity, plan) for rank in range(ranks)], list[list[Half]]()
    tables, batch = np.arange(len(source.rows)), source.batch_size
    parts, counts = (
        np.stack([tables, tables * batch, (tables + 1) * batch, 0 * tables], axis=1),
        list[list[np.ndarray]](),
    )

    def planned() -> Iterator[list[Half]]:
        while None not in (steps := [owner.next() for owner in owners]):
            after, ids = [], counts.pop(0)
            for rank, (joined, step) in enumerate(filter(None, steps)):
                serve, none = joined.serve[0], np.zeros(len(step.slots), np.bool_)
                remote = np.ones(int(serve[-1]), np.bool_)
                remote[serve[rank] : serve[rank + 1]] = False
                before = near[-1][rank].step if near else None
                values = none if before is None else critical_values(before, step, capacity)
                after.append(Half(step, joined, ids[rank], remote, values, none))
                if before is not None:
                    near[-1][rank].gradients = critical_gradients(before, step, capacity)
            near.append(after)
            if len(near) > 1:
                yield near.pop(0)

    for drawn in source:
        split = parts_of(Positions(drawn.sparse.values().numpy(), parts), ranks)
        letters = [owner.ask(part) for owner, part in zip(owners, split, strict=True)]
        answers = [
            owner.together.answer(given) for owner, given in zip(owners, zip(*letters, strict=True), strict=True)
        ]
        reads = [answer.reads[0] for answer in answers]
        counts.append(
            [np.concatenate([np.diff(r.group_start[r.ask[n] : r.ask[n + 1] + 1]) for r in reads]) for n in range(ranks)]
        )
        for owner, answer in zip(owners, answers, strict=True):
            owner.add(answer)
        yield from planned()
    for owner in owners:
        owner.end()
    yield from planned()
    yield from near


@dataclass(slots=True)
class StepRows:
    """The distinct rows of one step: their keys, and whether exactly one id of the global batch uses each."""

    keys: np.ndarray
    once: np.ndarray

    @classmethod
    def of(cls, halves: list[Half]) -> "StepRows":
        """Return the rows of all owners."""
        keys, once = [], []
        for half in halves:
            begin = half.step.group_start[:-1]
            ids = half.ids[half.step.group_pos]
            keys.append(half.step.keys)
            once.append(np.add.reduceat(ids, begin) == 1 if len(begin) else np.empty(0, np.bool_))
        return cls(np.concatenate(keys), np.concatenate(once))


def published(schema: Schema, rows: list[StepRows], window: int, steps: range) -> tuple[int, int]:
    """Count the rows that BagPipe's rule synchronises now and later, if every trainer holds every row.

    now: the next batch uses the row. Not at all: one sample uses it, and no batch in the window after it. later: the rest.
    """
    first = np.cumsum([0, *(table.rows for table in schema.tables)])
    following = np.full(int(first[-1]), NEVER, np.int32)
    now = later = 0
    for step in reversed(range(len(rows))):
        keys = rows[step].keys
        mine = first[keys >> ROW_BITS] + (keys & ((1 << ROW_BITS) - 1))
        if step in steps:
            use = following[mine]
            soon, none = use == step + 1, rows[step].once & (use > step + window)
            now += int(soon.sum())
            later += int((~soon & ~none).sum())
        following[mine] = step
    return now, later


def wire(peers: Any, batch: int, steps: int, dim: int, seed: int) -> dict[str, Any]:
    """Train rows on one trainer's shard of each batch and return what its channels counted."""
    source = Synthetic("criteo-kaggle", batch_size=batch, batches=steps, seed=seed)
    rows = EmbeddingBagCollection(source.tables(dim), optimizer=RowwiseAdagrad(lr=0.02), cache=batch * 26)
    with lookahead(source.sharded(peers.rank, peers.rank + 1, peers.size), rows, shards=peers.size) as batches:
        for part in batches:
            rows(part.sparse).stacked().square().mean().backward()
    rows.close()
    return {name: counters for name, counters in peers.counted().items() if name in CHANNELS}


def dense(numbers: int, rounds: int) -> dict[str, Any]:
    """Time one rank's sums of gradients, as the loop does them and by the backend, each from `.grad` to `.grad`."""
    wide = max(1, int(numbers**0.5) // 2)
    sizes = [wide * wide] * (numbers // (wide * wide)) + ([rest] if (rest := numbers % (wide * wide)) else [])
    with join(patience=120) as peers, using(peers):
        weights = torch.nn.ParameterList(torch.zeros(size) for size in sizes)
        rows = EmbeddingBagCollection([Table("none", 1, 1)], optimizer=SGD(lr=1.0), cache=1)  # a model has some
        model = torch.nn.ModuleList([weights, rows])
        sums = DenseSums(model, peers.size, mine=block_of(peers.rank, peers.size, peers.size), peers=peers)
        parts = [
            [torch.randn(size, generator=torch.Generator().manual_seed(97 * rank + n)) for n, size in enumerate(sizes)]
            for rank in range(peers.size)
        ]
        flat = torch.zeros(numbers)

        def ours() -> None:
            sums.begin(0)
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

        bare = lambda: dist.all_reduce(flat)  # noqa: E731
        times = [[timed(call) for call in (ours, backends, bare)] for _ in range(rounds + 3)][3:]
        timed(ours)
        same = all(
            torch.equal(weight.grad, _tree([part[n] for part in parts]) / peers.size)
            for n, weight in enumerate(weights)
        )
    mine, reduced, bare_ms = (statistics.median(each) for each in zip(*times, strict=True))
    return {
        "ratio": mine / reduced, "ratio_of_bare": mine / bare_ms, "dense_ms": mine, "all_reduce_ms": reduced,
        "same_bits": same,
    }  # fmt: skip


def _tree(parts: list[Any]) -> Any:
    """Return the plain sum over shards as a balanced tree."""
    half = len(parts) // 2
    return parts[0] if len(parts) == 1 else _tree(parts[:half]) + _tree(parts[half:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        torch.set_num_threads(1)
        numbers, rounds, *stream = json.loads(sys.argv[2])
        sent = wire(trainers(), *stream)
        print(json.dumps({"wire": sent, "dense": dense(numbers, rounds)}))
    else:
        main(Network)
