"""Claim: plans of `skirl place` keep the busiest rank busy shorter than greedy rules and TorchRec's planner do ("Rows
placed" in docs/benchmarks.md), by measured times of the kernels and by whole iterations of TorchRec.

Tables are random, with the moments of 856 published production tables; no cost was fitted to them.
"""

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import log
from pathlib import Path
from typing import Any, Literal

import numpy as np

from common import main, processes, result
from skirl.placement.calibrate import measure_machine
from skirl.placement.check import computing_ms, exchange_of
from skirl.placement.costs import Costs, Kernel, load_costs, save_costs
from skirl.placement.measure import arena_of
from skirl.placement.pieces import Piece, blocks, whole
from skirl.placement.problem import Placed, Problem
from skirl.placement.search import search
from skirl.placement.spec import TableSpec, canonical, reuse_of

CELLS = tuple((ranks, dim) for ranks in (4, 8) for dim in (16, 128))
"""Number of ranks and largest dim of the tasks."""
BATCH, FULL, SEARCH, LINK = 512, 0.6, 5.0, 1.25e9
OPTIMIZER = "rowwise-adagrad"
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
}
"""The load of a table, according to each greedy rule."""


def production(count: int, max_dim: int, seed: int, small: bool = False) -> list[TableSpec]:
    """Return random tables with the moments of published production tables, rows 4.1e6 +- 3.1e6, 15.8 +- 25.6 ids, or
    `small` ones of 1,000 to 160,000 rows."""
    rng, specs = np.random.default_rng(seed), []
    spread = log(1 + (25.6 / 15.8) ** 2)
    for n in range(count):
        rows = int(max(100, rng.gamma((4.11 / 3.13) ** 2, 3.13**2 / 4.11 * 1e6)))
        rows = int(10 ** rng.uniform(3, 5.2)) if small else rows
        ids = round(BATCH * min(200.0, max(1.0, rng.lognormal(log(15.8) - spread / 2, spread**0.5))))
        head = 10 ** rng.uniform(0, 2.5)
        active = max(head, 0.08 * rows)
        rank = (((active / head + 1) ** rng.random(ids) - 1) * head).astype(np.int64)
        counts = np.unique(rank * 2654435761 % rows, return_counts=True)[1]
        dim = 1 << int(rng.integers(2, max_dim.bit_length()))
        specs.append(TableSpec(f"t{n}", rows, dim, BATCH, ids, len(counts), reuse_of(counts), OPTIMIZER))
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

    from skirl.torchrec import table_plan

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
                made = table_plan(plan, module, sharders, ranks=world, optimizer=OPTIMIZER)
                found[f"torchrec {allowed}, {order}"] = made.placed(problem)
    return found


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


def plans(tasks: int, seed: int, kernel: Kernel, with_torchrec: bool) -> dict[str, Any]:
    """Measure the busiest rank's milliseconds under our plans and under simpler plans of the same tasks."""
    costs = measure_machine(kernel, [OPTIMIZER], minutes=2.0, combinations=200, seed=seed)
    arena, rng = arena_of(kernel), np.random.default_rng(seed)
    pools = {dim: production(150, dim, seed + 2000 + dim) for _, dim in CELLS}
    busiest, even = list[dict[str, float]](), list[dict[str, float]]()
    for n in range(tasks):
        ranks, dim = CELLS[n % len(CELLS)]
        some = [pools[dim][i] for i in rng.choice(150, int(rng.integers(10, 61)), replace=False).tolist()]
        cap = int(sum(s.nbytes(s.rows, s.dim) for s in some) / ranks / FULL)
        of = replace(costs, link=LINK, ranks=ranks)
        problem = Problem([some[i] for i in canonical(some)], (cap,) * ranks, of)
        placed = {name: greedy(problem, [rule(s) for s in problem.specs]) for name, rule in RULES.items()}
        placed["costs"] = greedy(problem, [sum(problem.cost(piece)[:2]) for piece in problem.root()])
        placed["row_wise"] = row_wise(problem)
        placed["skirl"] = search(problem, seconds=SEARCH).placed
        if with_torchrec:
            placed |= by_torchrec(problem)
        ms, _ = computing_ms(problem, list(placed.values()), arena, seed + n)
        both = [compute + exchange_of(problem, plan) for compute, plan in zip(ms, placed.values(), strict=True)]
        busiest.append({name: float(of.max()) for name, of in zip(placed, both, strict=True)})
        even.append({name: float(of.mean()) for name, of in zip(placed, both, strict=True)})
    rule = min(RULES, key=lambda name: sum(of[name] for of in busiest))
    ratios = np.array([of["skirl"] / of[rule] for of in busiest])
    half = 1.96 * ratios.std(ddof=1) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    names = {name for of in busiest for name in of} - {"skirl"}
    vs = {n: float(np.mean([of["skirl"] / of[n] for of in busiest if n in of])) for n in sorted(names)}
    lost = sum(of[rule] - mean[rule] for of, mean in zip(busiest, even, strict=True))
    return {
        "tasks": tasks, "greedy": rule, "vs_greedy": vs[rule], "vs_greedy_95": [vs[rule] - half, vs[rule] + half],
        "vs": vs, "gap_closed": sum(of[rule] - of["skirl"] for of in busiest) / lost, "link": LINK,
    }  # fmt: skip


def rank_main(folder: Path, flags: dict[str, Any]) -> None:
    """Time iterations under a plan of skirl and under one of TorchRec in turns, in one of several processes."""
    import torch
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torch import nn
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.types import ParameterConstraints, Topology
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from skirl.placement.lookups import draw_ids
    from skirl.torchrec import SkirlPlanner

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=int(os.environ["RANK"]), world_size=2)
    costs, found = load_costs(folder / "costs.json", link=1.0, ranks=2, kernels=["fbgemm-cpu"]), []
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}
    sharders = [EmbeddingBagCollectionSharder(fused_params=fused)]
    for task in range(flags["tasks"]):
        rng = np.random.default_rng([flags["seed"], task])
        specs = production(int(rng.integers(10, 21)), 128, int(rng.integers(1 << 30)), small=True)

        def batch(*seed: int, specs: Sequence[TableSpec] = specs) -> Any:
            draw = np.random.default_rng(seed)
            ids = [draw_ids(spec, draw) for spec in specs]
            sizes = [np.bincount(draw.integers(0, BATCH, len(of)), minlength=BATCH) for of in ids]
            values, lengths = (torch.from_numpy(np.concatenate(of)) for of in (ids, sizes))
            return KeyedJaggedTensor(keys=[spec.name for spec in specs], values=values, lengths=lengths)

        of = Topology(2, "cpu", ddr_cap=1 << 32, local_world_size=2, intra_host_bw=1.25e6)
        pooling = {spec.name: ParameterConstraints(pooling_factors=[spec.ids / BATCH]) for spec in specs}
        seen = [batch(flags["seed"], task, 1, n) for n in range(4)]
        planners = {
            "skirl": SkirlPlanner(of, BATCH, batches=seen, costs=costs, seconds=SEARCH),
            "torchrec": EmbeddingShardingPlanner(of, BATCH, constraints=pooling),
        }
        sides = {}
        for name, planner in planners.items():
            module = nn.ModuleDict({"ebc": collection(specs)})
            plan = planner.collective_plan(module, sharders)
            parallel = DistributedModelParallel(module, device=torch.device("cpu"), plan=plan, sharders=sharders)
            sides[name] = parallel.module["ebc"]
        batches, turns = [batch(flags["seed"], task, 2, n, dist.get_rank()) for n in range(4)], flags["turns"]
        cpu = {name: np.zeros((turns + 1, 4)) for name in sides}
        for turn in range(4 * turns + 4):
            for name in sorted(sides, reverse=turn % 2 == 1):
                dist.barrier()
                worked = time.process_time()
                sides[name](batches[turn % 4]).values().square().mean().backward()
                cpu[name][divmod(turn, 4)] = 1e3 * (time.process_time() - worked)
        busy = {}
        for name in sides:
            mine = torch.tensor(cpu[name][1:].min(axis=0).mean())
            every = [torch.zeros_like(mine) for _ in range(2)]
            dist.all_gather(every, mine)
            busy[name] = [float(of) for of in every]
        found.append({"tables": len(specs), "cpu_ms": busy})
    print(json.dumps(found))


def torchrec_runs(tasks: int, seed: int, costs: Costs) -> dict[str, Any]:
    """Compare whole iterations under both planners' plans, in two gloo processes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        save_costs(costs, Path(folder, "costs.json"))
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        found, _ = processes(2, [__file__, "--rank", folder, json.dumps({"tasks": tasks, "seed": seed, "turns": 15})])

    both = [{name: (max(ms), float(np.mean(ms))) for name, ms in task["cpu_ms"].items()} for task in found]
    return {
        "iteration_cpu_vs_torchrec": float(np.mean([each["skirl"][0] / each["torchrec"][0] for each in both])),
        "balance_skirl": float(np.mean([each["skirl"][0] / each["skirl"][1] for each in both])),
        "balance_torchrec": float(np.mean([each["torchrec"][0] / each["torchrec"][1] for each in both])),
        "iterations": found,
    }


@dataclass
class Placement:
    """Plans of tables against greedy rules and against TorchRec's planner."""

    part: Literal["plans", "torchrec"] = "plans"
    """plans: measured plans against simpler ones and TorchRec's; torchrec: whole iterations of TorchRec under its own
    planner's plans and ours."""
    tasks: int | None = None
    """Number of tasks, by default 80 and 10."""
    kernel: Kernel = "skirl-cpu"
    """The kernels to measure, for plans."""
    seed: int = 0

    def run(self) -> dict[str, Any]:
        warnings.simplefilter("ignore")
        if self.part == "torchrec":
            from skirl.torchrec import measure_costs

            found = torchrec_runs(self.tasks or 10, self.seed, measure_costs(minutes=1.0))
        else:
            found = plans(self.tasks or 80, self.seed, self.kernel, find_spec("torchrec") is not None)
        return result("placement", self, "part kernel seed", **found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main(Placement)
