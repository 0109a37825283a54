"""The cost of what trainers exchange: dense gradients against the backend's own sum, rows against other schemes."""

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from skirl.core.tree import block_of, check_shards
from skirl.measure.bench.helpers import Stopwatch, at_least_one, processes, result

_MOST = 64
"""Maximum number of trainers to count for: a row's users are a bit mask of this width."""


@dataclass(frozen=True)
class Network:
    """Flags of `skirl bench network`."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "counted": ("counted", "windows", "samples"),
        "output": ("json",),
    }

    trainers: tuple[int, ...] = (2, 4)
    """Numbers of trainer processes, one measurement for each."""
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
    shards: int = 8
    """Shards of a step that one process computes, to compare with the same step as one batch."""
    counted: tuple[int, ...] = (8, 16, 32, 64)
    """Numbers of trainers, up to 64, for which to count each scheme's vectors; this starts no processes."""
    windows: tuple[int, ...] = (200, 20, 20, 20)
    """Batches known in advance, for each number of --counted."""
    samples: int = 2048
    """Samples in a step for each trainer of --counted."""
    seed: int = 0
    """Seed of the ids, whose skew is that of Criteo Kaggle."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "numbers", "rounds", "steps", "dim", "samples")
        if not self.counted or any(not 2 <= count <= _MOST for count in self.counted):
            raise ValueError(f"counted is {self.counted}: set it to numbers of trainers from 2 to {_MOST}")
        if len(self.windows) != len(self.counted) or min(self.windows) < 1:
            raise ValueError(f"windows is {self.windows} for counted {self.counted}: set one of 1 or more for each")
        if not self.trainers or any(count < 2 or count & (count - 1) for count in self.trainers):
            raise ValueError(f"trainers is {self.trainers}: set it to powers of two, from 2 on")
        check_shards(self.shards)
        most = max(*self.trainers, self.shards)
        if self.batch < most or self.batch % most:
            raise ValueError(
                f"batch is {self.batch}: set it to a multiple of {most}, the most parts that it is cut into"
            )

    def run(self) -> dict[str, Any]:
        """Measure with each number of processes in sequence and return the figures."""
        from skirl.measure.bench import movement, wire
        from skirl.measure.bench.shards_vs_whole import shards_vs_whole

        stream = (self.batch, self.steps, self.dim, self.seed)
        dense = {str(count): _measured(count, "dense", self.numbers, self.rounds)[0] for count in self.trainers}
        rows = {str(count): wire.overhead(_measured(count, "wire", *stream), *stream) for count in self.trainers}
        shards = shards_vs_whole(self.batch, self.shards)
        moved = [
            movement.schemes(movement.CountSettings(count, self.samples, window, seed=self.seed))
            for count, window in zip(self.counted, self.windows)
        ]
        return result(
            "network",
            self,
            "trainers numbers rounds batch steps dim shards counted windows samples seed",
            **{name: moved[0][name] for name in movement.RATIOS},
            wire_overhead={count: figures["ratio"] for count, figures in rows.items()},
            dense_vs_allreduce={count: figures["ratio"] for count, figures in dense.items()},
            shards_vs_whole=shards["shards_vs_whole"],
            wire=rows,
            dense=dense,
            sharded=shards,
            movement={str(count): facts for count, facts in zip(self.counted, moved)},
        )

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        lines = {}
        for count, facts in result["dense"].items():
            rows = result["wire"][count]
            lines[f"{count} trainers"] = (
                f"{facts['ratio']:.2f}x of {result['numbers']:,} dense gradients summed by gloo: "
                f"{facts['dense_ms']:.1f} ms, {facts['all_reduce_ms']:.1f} ms (bare {facts['bare_all_reduce_ms']:.1f} ms)"
                + ("" if facts["same_bits"] else "; the bits differ")
                + f"\n{rows['ratio']:.3f}x the bytes of {rows['vectors']:,} vectors of {result['dim']} numbers"
                + ("" if rows["as_planned"] else f"; the plan has {rows['vectors_planned']:,}")
            )
        for count, facts in result["movement"].items():
            best, vectors = facts["rows_vs_best"], facts["vectors"]
            lines[f"{count} counted"] = (
                f"{vectors['owners']:,.0f} vectors a step of {facts['batch']:,} samples, {vectors['owners_critical']:,.0f} "
                f"critical; a ring all-reduce: {facts['rows_vs_allreduce']:.2f}x, its critical part "
                f"{facts['critical_vs_allreduce']:.2f}x\npooled all-to-all: {facts['rows_vs_alltoall']:.2f}x; best owners, "
                f"knowing the future: 1/{best['rowwise_adagrad']:.2f} (row-wise Adagrad), 1/{best['adam']:.2f} (Adam)"
            )
        return lines | {
            "one process": f"{result['shards_vs_whole']:.2f}x the CPU of one batch of {result['batch']:,} in "
            f"{result['shards']} shards"
        }


def dense(numbers: int, rounds: int) -> dict[str, Any]:
    """Time one rank's sums of gradients, as the loop does them and by the backend, each from `.grad` to `.grad`."""
    import torch
    import torch.distributed as dist

    from skirl.core.optim import SGD
    from skirl.core.tables import Table
    from skirl.nn.collection import EmbeddingBagCollection
    from skirl.nn.dense_sums import DenseSums
    from skirl.peers.job import using
    from skirl.peers.start import join

    torch.set_num_threads(1)
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

        def theirs() -> None:
            grads = [weight.grad for weight in weights if weight.grad is not None]
            torch.cat(grads, out=flat)
            dist.all_reduce(flat)
            flat.mul_(1 / peers.size)
            torch._foreach_copy_(grads, list(flat.split(sizes)))

        def bare() -> None:
            dist.all_reduce(flat)

        def timed(call: Callable[[], None]) -> tuple[float, float]:
            for weight, part in zip(weights, parts[peers.rank]):
                weight.grad = part.clone()
            dist.barrier()
            with Stopwatch() as watch:
                call()
                dist.barrier()
            return watch.seconds * 1e3, watch.cpu * 1e3

        times = [[timed(call) for call in (ours, theirs, bare)] for _ in range(rounds + 3)][3:]
        timed(ours)
        same = all(
            torch.equal(
                weight.grad if weight.grad is not None else weight, _tree([part[n] for part in parts]) / peers.size
            )
            for n, weight in enumerate(weights)
        )
    mine, reduced, bare_ones = (statistics.median(row[n][0] for row in times) for n in range(3))
    return {
        "ratio": mine / reduced,
        "ratio_of_bare": mine / bare_ones,
        "cpu_ratio": statistics.median(row[0][1] for row in times) / statistics.median(row[1][1] for row in times),
        "dense_ms": mine,
        "all_reduce_ms": reduced,
        "bare_all_reduce_ms": bare_ones,
        "same_bits": same,
    }


def _tree(parts: list[Any]) -> Any:
    """Return the plain sum over shards as a balanced tree."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return _tree(parts[:half]) + _tree(parts[half:])


def of_rank(part: str, *args: int) -> dict[str, Any]:
    """Do one rank's share of a measurement, "dense" or "wire", and return its figures."""
    from skirl.measure.bench import wire

    return {"dense": dense, "wire": wire.of_rank}[part](*args)


def _measured(count: int, part: str, *args: int) -> list[dict[str, Any]]:
    """Measure a part with `count` processes and return each one's figures."""
    return processes(count, ["-m", __spec__.name, part, *map(str, args)])


if __name__ == "__main__":
    print(json.dumps(of_rank(sys.argv[1], *map(int, sys.argv[2:]))))
