"""Claim: plans of `skirl place` keep the busiest rank busy shorter than greedy rules and TorchRec's planner do ("Tables over
ranks" in docs/benchmarks.md), by measured times of the kernels.

Tables are random, with the moments of 856 published production tables; no cost was fitted to them.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import cycle, islice
from math import log
from typing import Any, Literal

import numpy as np

from common import Bench, main, result
from skirl.placement.costs import Costs
from skirl.placement.measure import arena_of, check_plans, computing_ms, exchange_of, measure_machine
from skirl.placement.search import Placed, Problem, search
from skirl.placement.spec import Piece, TableSpec, blocks, canonical, reuse_of, whole

CELLS = tuple((ranks, dim) for ranks in (4, 8) for dim in (16, 128))
"""Number of ranks and largest dim of the tasks."""
BATCH, FULL, SEARCH, LINK, ROUNDS = 512, 0.6, 5.0, 1.25e9, 16
OPTIMIZER, KERNEL = "rowwise-adagrad", "skirl-cpu"
ALLOWED = {
    "whole": ["table_wise"],
    "columns": ["table_wise", "column_wise"],
    "rows": ["table_wise", "column_wise", "row_wise"],
}
"""Ways to cut tables that TorchRec's planner may use."""
RULES = {
    "size": lambda s: float(s.rows * s.dim),
    "dim": lambda s: float(s.dim),
    "lookup": lambda s: s.ids * s.dim,
    "size_lookup": lambda s: s.ids * s.dim * np.log10(s.rows),
    "round_robin": lambda s: 1.0,
}
"""The load of a table, according to each greedy rule."""


def production(count: int, max_dim: int, seed: int, batch: int = BATCH, optimizer: str = OPTIMIZER) -> list[TableSpec]:
    """Return random tables with the moments of published production tables, rows 4.1e6 +- 3.1e6, 15.8 +- 25.6 ids."""
    rng, specs = np.random.default_rng(seed), []
    spread = log(1 + (25.6 / 15.8) ** 2)
    for n in range(count):
        rows = int(max(100, rng.gamma((4.11 / 3.13) ** 2, 3.13**2 / 4.11 * 1e6)))
        ids = round(batch * min(200.0, max(1.0, rng.lognormal(log(15.8) - spread / 2, spread**0.5))))
        head = 10 ** rng.uniform(0, 2.5)
        active = max(head, 0.08 * rows)
        rank = (((active / head + 1) ** rng.random(ids) - 1) * head).astype(np.int64)
        counts = np.unique(rank * 2654435761 % rows, return_counts=True)[1]
        dim = 1 << int(rng.integers(2, max_dim.bit_length()))
        specs.append(TableSpec(f"t{n}", rows, dim, batch, ids, len(counts), reuse_of(counts), optimizer))
    return specs


def greedy(problem: Problem, sizes: Sequence[float]) -> Placed:
    """Place whole tables, largest first, each on the rank with room where the sum of these sizes is least."""
    caps, ranks = problem.bytes_of, len(problem.caps)
    used, load, at = np.zeros(ranks, np.int64), np.zeros(ranks), np.zeros(len(sizes), np.int64)
    for n in np.argsort(-np.array(sizes), kind="stable").tolist():
        nbytes = problem.cost(whole(n, problem.specs[n]))[2]
        room = used + nbytes <= caps
        at[n] = np.where(room, load, np.inf).argmin() if room.any() else (used - caps).argmin()
        load[at[n]] += sizes[n]
        used[at[n]] += nbytes
    return problem.at(problem.root(), at)


def row_wise(problem: Problem) -> Placed:
    """Cut every table by rows, evenly over all ranks."""
    parts = [
        (Piece(n, a, b, 0, spec.dim), rank)
        for n, spec in enumerate(problem.specs)
        for rank, (a, b) in enumerate(blocks(spec.rows, len(problem.caps)))
        if a < b
    ]
    return problem.at(tuple(piece for piece, _ in parts), np.array([rank for _, rank in parts]))


def by_torchrec(problem: Problem) -> dict[str, Placed]:
    """Return plans of TorchRec's planner in both orders, with tables whole, by columns too, by rows too."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology

    world, link, found = len(problem.caps), problem.costs.link / 1e3, dict[str, Placed]()
    of = {"ddr_cap": problem.caps[0], "local_world_size": world, "intra_host_bw": link, "inter_host_bw": link}
    for order in ("storage", "perf"):
        for allowed, types in ALLOWED.items():
            constraints = {
                spec.name: ParameterConstraints(
                    sharding_types=types, pooling_factors=[spec.ids / BATCH], min_partition=max(4, spec.dim // 2)
                )
                for spec in problem.specs
            }
            planner = EmbeddingShardingPlanner(
                topology=Topology(world, "cpu", **of),
                batch_size=BATCH // world,
                storage_reservation=FixedPercentageStorageReservation(0.0),
                partitioner=GreedyPerfPartitioner(sort_by=SortBy.PERF if order == "perf" else SortBy.STORAGE),
                constraints=constraints,
                stats=[],
            )
            module, sharders = collection(problem.specs), [EmbeddingBagCollectionSharder()]
            try:
                plan = planner.plan(module, sharders)
            except PlannerError:
                continue
            if all(parameter.sharding_spec is not None for parameter in plan.plan[""].values()):
                found[f"torchrec {allowed}, {order}"] = placed_as(plan.plan[""], problem)
    return found


def placed_as(sharding: Any, problem: Problem) -> Placed:
    """Return a module's part of TorchRec's ShardingPlan as a placement."""
    items, at = [], []
    for table, spec in enumerate(problem.specs):
        for shard in sharding[spec.name].sharding_spec.shards:
            (row, col), (rows, columns) = shard.shard_offsets, shard.shard_sizes
            if rows and columns:
                items.append(Piece(table, row, row + rows, col, col + columns))
                at.append(shard.placement.rank())
    return problem.at(tuple(items), np.array(at, np.int64))


def collection(specs: Sequence[TableSpec]) -> Any:
    """Return TorchRec's collection of some tables, without rows."""
    import torch
    import torchrec

    configs = [
        torchrec.EmbeddingBagConfig(name=s.name, num_embeddings=s.rows, embedding_dim=s.dim, feature_names=[s.name])
        for s in specs
    ]
    made = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    for spec in specs:  # its planner counts the optimizer's state from this
        made.embedding_bags[spec.name].weight._optimizer_classes = [torchrec.optim.RowWiseAdagrad]  # type: ignore
    return made


@dataclass(frozen=True)
class Placement(Bench):
    """Measured plans of tables against greedy rules and against plans of TorchRec's planner."""

    part: Literal["torchrec", "home"] = "torchrec"
    """torchrec: plans for TorchRec's ranks; home: for skirl's own trainers."""
    tasks: int = 80
    """Number of tasks."""
    optimizer: str = OPTIMIZER
    """Of the rows, for part home; adagrad: tables may be cut by columns."""

    def run(self) -> dict[str, Any]:
        """Measure the busiest rank's milliseconds under our plans and under simpler plans of the same tasks."""
        warnings.simplefilter("ignore")
        costs, arena = measure_machine(KERNEL, [self.optimizer], minutes=2.0), arena_of(KERNEL)
        off, (busiest, even, limit) = list[float](), (list[dict[str, float]]() for _ in range(3))
        for n, problem in enumerate(self._problems(costs)):
            placed = {name: greedy(problem, [rule(s) for s in problem.specs]) for name, rule in RULES.items()}
            placed["costs"] = greedy(problem, [sum(problem.cost(piece)[:2]) for piece in problem.root()])
            placed["row_wise"] = row_wise(problem)
            placed["skirl"], *_ = check_plans(problem, search(problem, seconds=SEARCH), arena, self.tasks + n)
            if self.part == "torchrec" and find_spec("torchrec") is not None:
                placed |= by_torchrec(problem)
            ms = computing_ms(problem, list(placed.values()), arena, n, ROUNDS)
            both = [compute + exchange_of(problem, plan) for compute, plan in zip(ms, placed.values(), strict=True)]
            fits = {name: of for (name, plan), of in zip(placed.items(), both, strict=True) if not plan.score[0]}
            busiest.append({name: float(of.max()) for name, of in fits.items()})
            even.append({name: float(of.mean()) for name, of in fits.items()})
            predicted = placed["skirl"].score[1]
            limit.append({name: predicted / placed[name].score[1] for name in RULES if name in fits})
            off.append(abs(predicted / busiest[-1]["skirl"] - 1))
        names = {name for of in busiest for name in of} - {"skirl"}
        vs = {n: float(np.mean([of["skirl"] / of[n] for of in busiest if n in of])) for n in sorted(names)}
        rule = max(RULES, key=lambda name: vs[name])
        both = [(of, means) for of, means in zip(busiest, even, strict=True) if rule in of]
        ratios = np.array([of["skirl"] / of[rule] for of, _ in both])
        half = 1.96 * ratios.std(ddof=1) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
        lost = sum(of[rule] - means[rule] for of, means in both)
        return result(
            "placement", self, "part tasks optimizer", greedy=rule, vs_greedy=vs[rule], do_not_fit=len(busiest) - len(both),
            vs_greedy_95=[vs[rule] - half, vs[rule] + half], vs=vs, link=LINK, predicted_vs_measured=float(np.mean(off)),
            vs_greedy_predicted=float(np.mean([of[rule] for of in limit if rule in of])),
            gap_closed=sum(of[rule] - of["skirl"] for of, _ in both) / lost,
        )  # fmt: skip

    def _problems(self, costs: Costs) -> Iterator[Problem]:
        """Yield 10 to 60 random tables for some ranks, which they fill to FULL."""
        rng = np.random.default_rng(0)
        pools = {dim: production(150, dim, 2000 + dim, optimizer=self.optimizer) for _, dim in CELLS}
        for ranks, dim in islice(cycle(CELLS), self.tasks):
            some = [pools[dim][i] for i in rng.choice(150, int(rng.integers(10, 61)), replace=False).tolist()]
            cap = int(sum(s.nbytes(s.rows, s.dim) for s in some) / ranks / FULL)
            sent = {s.name: s.sent(ranks) for s in some} if self.part == "home" else None
            of = replace(costs, link=LINK, ranks=ranks, sent=sent)
            yield Problem([some[i] for i in canonical(some)], (cap,) * ranks, of)


if __name__ == "__main__":
    main(Placement)
