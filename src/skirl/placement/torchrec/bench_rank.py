"""One process of `skirl bench place --part torchrec`, which runs plans under DistributedModelParallel, over gloo."""

import copy
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from skirl.placement.tables.costs import Costs, load_costs, save_costs
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.plan_file import TablePlan
from skirl.placement.tables.pool import pool
from skirl.placement.torchrec.kernel import BACKEND, measure_costs
from skirl.placement.torchrec.planner import SkirlPlanner
from skirl.placement.torchrec.sharding import sharding_plan
from skirl.placement.torchrec.trained import Parallel, Plain, Theirs, TrainedTable, batch_of, rows_of, sharder

TABLES = (
    TrainedTable("a", 400, 24, 3.0, 20.0), TrainedTable("b", 301, 8, 1.0, 5.0), TrainedTable("c", 77, 16, 6.0, 3.0),
    TrainedTable("d", 1000, 16, 2.0, 50.0), TrainedTable("e", 5, 4, 1.0, 2.0),
)  # fmt: skip
"""Tables of the plans that are compared with plain torch."""
BATCH = 32
OPTIMIZERS = ("sgd", "rowwise-adagrad")
GB = 1 << 30
_BATCHES = 4
"""Batches that whole iterations go through, again and again."""


def plan_by_hand(kind: str, optimizer: str, world: int) -> TablePlan:
    """Return a plan of `TABLES` that cuts all of them in one way.

    **Arguments**

    - `kind`: "whole", "rows" or "columns".
    - `optimizer`: the row optimizer.
    - `world`: number of ranks.
    """
    from skirl.placement.tables.evenly import blocks

    pieces = []
    for n, table in enumerate(TABLES):
        whole = ((Piece(n, 0, table.rows, 0, table.dim), (n + 1) % world),)
        if kind == "rows":
            pieces.append(
                tuple((Piece(n, a, b, 0, table.dim), r) for r, (a, b) in enumerate(blocks(table.rows, world)) if a < b)
            )
        elif kind == "columns" and table.dim > 4:
            at = table.dim - 4 if n % 2 else 4
            at = at if world > 1 else table.dim // 2  # TorchRec cannot run unlike widths at one rank
            ends = ((0, at), (at, table.dim))
            pieces.append(tuple((Piece(n, 0, table.rows, *of), (n + r) % world) for r, of in enumerate(ends)))
        else:
            pieces.append(whole)
    return TablePlan(world, tuple((t.name, t.rows, t.dim, optimizer) for t in TABLES), tuple(pieces))


def differences(steps: int, seed: int) -> dict[str, float]:
    """Return how far rows, dense weights and losses are from plain torch at most, by kind of plan and optimizer.

    **Arguments**

    - `steps`: number of training steps.
    - `seed`: the random seed.
    """
    rank, world, found = dist.get_rank(), dist.get_world_size(), dict[str, float]()
    rows = rows_of(TABLES, seed)
    for kind in ("whole", "rows", "columns", "planned"):
        for optimizer in OPTIMIZERS:
            torch.manual_seed(seed)
            model = Theirs(TABLES, device="meta")
            plain = Plain(TABLES, copy.deepcopy(model.dense), rows, optimizer)
            sharders = [sharder(optimizer)]
            if kind == "planned":
                batches = [batch_of(TABLES, BATCH, [seed, 0, r])[0] for r in range(world)]
                plan = SkirlPlanner(topology(world), batches=batches, seconds=1.0).collective_plan(model, sharders)
            else:
                plan = sharding_plan(plan_by_hand(kind, optimizer, world), model, sharders)
            parallel = Parallel(model, plan, optimizer)
            parallel.take(rows)
            wanted = []
            for step in range(steps):
                every = [batch_of(TABLES, BATCH, [seed, step, r]) for r in range(world)]
                wanted.append(plain.step(every))
                parallel.step(every[rank])
            numbers = sum(weights.numel() for _, weights, _ in parallel.shards())
            dense = zip(parallel.dense, plain.dense.parameters(), strict=True)
            off = [float((a - b).abs().max()) for a, b in dense]
            off += [
                float((weights - plain.rows[name][where]).abs().max())
                for name, weights, where in parallel.shards()
                if weights.numel()
            ]
            said = torch.tensor([max(off), float(numbers), *parallel.losses], dtype=torch.float64)
            every_rank = [torch.zeros_like(said) for _ in range(world)]
            dist.all_gather(every_rank, said)
            table = torch.stack(every_rank)
            assert int(table[:, 1].sum()) == sum(t.rows * t.dim for t in TABLES), "shards do not have each number once"
            losses = (table[:, 2:].mean(dim=0) - torch.tensor(wanted, dtype=torch.float64)).abs().max()
            found[f"{kind}, {optimizer}"] = max(float(table[:, 0].max()), float(losses))
    return found


def topology(world: int) -> Any:
    """Return the topology of ranks on this machine.

    **Arguments**

    - `world`: number of ranks.
    """
    from torchrec.distributed.planner.types import Topology

    return Topology(world, "cpu", ddr_cap=4 * GB, local_world_size=world, intra_host_bw=1.25e6)


# Whole iterations


def skewed(rng: np.random.Generator) -> list[TrainedTable]:
    """Return 10 to 20 tables with dims and lookups spread like those of published production tables, but fewer rows.

    **Arguments**

    - `rng`: the random generator.
    """
    made = pool(int(rng.integers(10, 21)), batch=BATCH, max_dim=128, seed=int(rng.integers(1 << 30)))
    return [
        TrainedTable(f"t{n}", int(10 ** rng.uniform(3, 5.2)), m.spec.dim, m.spec.ids / BATCH, m.head)
        for n, m in enumerate(made)
    ]


def iteration(task: int, said: dict[str, Any], costs: Costs) -> dict[str, Any]:
    """Time whole iterations under a plan of skirl and under one of TorchRec, in turns.

    **Arguments**

    - `task`: number of the task.
    - `said`: what this process was told.
    - `costs`: costs of the kernel on this machine.
    """
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.types import ParameterConstraints

    rank, world, optimizer = dist.get_rank(), dist.get_world_size(), "rowwise-adagrad"
    seed, batch, turns = said["seed"], said["batch"], said["turns"]
    tables = skewed(np.random.default_rng([seed, task]))
    seen = [batch_of(tables, batch, [seed, task, 1, n])[0] for n in range(2 * world)]
    constraints = {t.name: ParameterConstraints(pooling_factors=[t.pooling]) for t in tables}
    sharders = [sharder(optimizer)]
    planners = {
        "skirl": SkirlPlanner(topology(world), batch, batches=seen, costs=costs, seconds=5.0),
        "torchrec": EmbeddingShardingPlanner(topology(world), batch, constraints=constraints),
    }
    sides, kinds = dict[str, Parallel](), dict[str, dict[str, int]]()
    for name, planner in planners.items():
        torch.manual_seed(seed)
        model = Theirs(tables, said["hidden"], device="meta")
        plan = planner.collective_plan(model, sharders)
        of = [parameter.sharding_type for parameter in plan.plan["ebc"].values()]
        kinds[name] = {kind: of.count(kind) for kind in sorted(set(of))}
        sides[name] = Parallel(model, plan, optimizer)
    batches = [batch_of(tables, batch, [seed, task, 2, n, rank]) for n in range(_BATCHES)]
    ms: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(_BATCHES * turns + _BATCHES):
        for name in sorted(sides, reverse=turn % 2 == 1):
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            sides[name].step(batches[turn % _BATCHES])
            cpu[name].append(1e3 * (time.process_time() - worked))
            dist.barrier()
            ms[name].append(1e3 * (time.perf_counter() - began))
    medians = {name: float(np.median(of[_BATCHES:])) for name, of in ms.items()}
    least = {name: float(_least(of[_BATCHES:]).mean()) for name, of in ms.items()}
    busiest = {name: _busiest(of[_BATCHES:]) for name, of in cpu.items()}
    return {
        "tables": len(tables), "ratio": least["skirl"] / least["torchrec"], "ms": least,
        "median_ratio": medians["skirl"] / medians["torchrec"], "kinds": kinds,
        "cpu_ratio": busiest["skirl"][0] / busiest["torchrec"][0],
        "cpu_ms": {name: of[0] for name, of in busiest.items()},
        "balance": {name: of[0] / of[1] for name, of in busiest.items()},
        "noise": max(_differ(of[_BATCHES:]) for of in ms.values()),
    }  # fmt: skip


def _least(ms: Sequence[float]) -> np.ndarray:
    """Return the least time of each batch over all turns."""
    return np.array(ms).reshape(-1, _BATCHES).min(axis=0)


def _differ(ms: Sequence[float]) -> float:
    """Return the relative difference between the least times by every other turn and those by the rest."""
    turns = np.array(ms).reshape(-1, _BATCHES)
    one, other = (float(half.min(axis=0).mean()) for half in (turns[::2], turns[1::2]))
    return abs(one - other) / min(one, other)


def _busiest(cpu: Sequence[float]) -> tuple[float, float]:
    """Return the CPU milliseconds of the busier rank, and of the mean rank."""
    mine = torch.tensor(_least(cpu))
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    table = torch.stack(every)
    return float(table.max(dim=0).values.mean()), float(table.mean())


def main(text: str) -> None:
    """Do what the JSON says, and have the first rank write the results.

    **Arguments**

    - `text`: JSON from the caller.
    """
    said = json.loads(text)
    folder = Path(said["folder"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=said["rank"], world_size=said["world"])
    found: dict[str, Any] = {"differences": differences(said["steps"], said["seed"]), "iterations": []}
    if said["tasks"]:
        if not said["rank"]:
            save_costs(measure_costs(combinations=said["combinations"]), folder / "costs.json")
        dist.barrier()
        costs = load_costs(folder / "costs.json", link=1.0, ranks=said["world"], backends=(BACKEND,))
        found["iterations"] = [iteration(task, said, costs) for task in range(said["tasks"])]
    if said["rank"] == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
