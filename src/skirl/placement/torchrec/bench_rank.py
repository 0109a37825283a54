"""One of the processes of `skirl bench place --part torchrec`: plans run under DistributedModelParallel, over gloo."""

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

from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.plan_file import TablePlan
from skirl.placement.torchrec.planner import SkirlPlanner
from skirl.placement.torchrec.sharding import sharding_plan
from skirl.placement.torchrec.trained import Bags, Parallel, Plain, Theirs, batch_of, rows_of, sharder

TABLES = (
    Bags("a", 400, 24, 3.0, 20.0), Bags("b", 301, 8, 1.0, 5.0), Bags("c", 77, 16, 6.0, 3.0), Bags("d", 1000, 16, 2.0, 50.0),
    Bags("e", 5, 4, 1.0, 2.0),
)  # fmt: skip
"""Of the plans that are compared with plain torch."""
BATCH = 32
OPTIMIZERS = ("sgd", "rowwise-adagrad")
GB = 1 << 30


def plan_by_hand(kind: str, optimizer: str, world: int) -> TablePlan:
    """A plan of `TABLES`, all of them cut in one way.

    **Arguments**

    - `kind`: "whole", "rows" or "columns".
    - `optimizer`: of rows.
    - `world`: ranks.
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
            at = at if world > 1 else table.dim // 2  # unlike widths are not run at one rank
            ends = ((0, at), (at, table.dim))
            pieces.append(tuple((Piece(n, 0, table.rows, *of), (n + r) % world) for r, of in enumerate(ends)))
        else:
            pieces.append(whole)
    return TablePlan(world, tuple((t.name, t.rows, t.dim, optimizer) for t in TABLES), tuple(pieces))


def differences(steps: int, seed: int) -> dict[str, float]:
    """Of each kind of plan and optimizer, by how much rows, dense weights and losses differ from plain torch at the most.

    **Arguments**

    - `steps`: of training.
    - `seed`: of chance.
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
    """Ranks on this machine.

    **Arguments**

    - `world`: how many.
    """
    from torchrec.distributed.planner.types import Topology

    return Topology(world, "cpu", ddr_cap=4 * GB, local_world_size=world, intra_host_bw=1.25e6)


# Whole iterations


def skewed(rng: np.random.Generator) -> list[Bags]:
    """10 to 20 tables of unlike rows, dims and lookups.

    **Arguments**

    - `rng`: chance.
    """
    return [
        Bags(
            f"t{n}", int(10 ** rng.uniform(3, 5.2)), int(rng.choice([8, 16, 32, 64, 128])),
            float(min(100.0, max(1.0, rng.lognormal(2.0, 1.2)))), float(10 ** rng.uniform(0, 2.5)),
        )
        for n in range(int(rng.integers(10, 21)))
    ]  # fmt: skip


def iteration(task: int, seed: int, batch: int, hidden: Sequence[int], turns: int) -> dict[str, Any]:
    """Milliseconds of whole iterations by a plan of skirl and by TorchRec's own, in turns.

    **Arguments**

    - `task`, `seed`: of chance.
    - `batch`: samples of a rank.
    - `hidden`: sizes of the dense layers.
    - `turns`: of each plan.
    """
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.types import ParameterConstraints

    rank, world, optimizer = dist.get_rank(), dist.get_world_size(), "rowwise-adagrad"
    tables = skewed(np.random.default_rng([seed, task]))
    seen = [batch_of(tables, batch, [seed, task, 1, n])[0] for n in range(2 * world)]
    constraints = {t.name: ParameterConstraints(pooling_factors=[t.pooling]) for t in tables}
    sharders = [sharder(optimizer)]
    planners = {
        "skirl": SkirlPlanner(topology(world), batch, batches=seen, seconds=5.0),
        "torchrec": EmbeddingShardingPlanner(topology(world), batch, constraints=constraints),
    }
    sides, kinds = dict[str, Parallel](), dict[str, dict[str, int]]()
    for name, planner in planners.items():
        torch.manual_seed(seed)
        model = Theirs(tables, hidden, device="meta")
        plan = planner.collective_plan(model, sharders)
        of = [parameter.sharding_type for parameter in plan.plan["ebc"].values()]
        kinds[name] = {kind: of.count(kind) for kind in sorted(set(of))}
        sides[name] = Parallel(model, plan, optimizer)
    batches = [batch_of(tables, batch, [seed, task, 2, n, rank]) for n in range(4)]
    ms: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 3):
        for name in sorted(sides, reverse=turn % 2 == 1):
            dist.barrier()
            began = time.perf_counter()
            sides[name].step(batches[turn % len(batches)])
            dist.barrier()
            if turn >= 3:
                ms[name].append(1e3 * (time.perf_counter() - began))
    medians = {name: float(np.median(of)) for name, of in ms.items()}
    return {
        "tables": len(tables), "ratio": medians["skirl"] / medians["torchrec"],
        "ratio_of_least": min(ms["skirl"]) / min(ms["torchrec"]), "ms": medians, "kinds": kinds,
    }  # fmt: skip


def main(text: str) -> None:
    """Do what the JSON says, and have the first rank write what came out.

    **Arguments**

    - `text`: of the caller.
    """
    said = json.loads(text)
    folder = Path(said["folder"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=said["rank"], world_size=said["world"])
    found: dict[str, Any] = {"differences": differences(said["steps"], said["seed"]), "iterations": []}
    for task in range(said["tasks"]):
        found["iterations"].append(iteration(task, said["seed"], said["batch"], said["hidden"], said["turns"]))
    if said["rank"] == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
