"""`skirl bench place --part torchrec`: plans that TorchRec runs, against plain torch and its planner's plans."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from skirl.placement.torchrec.models import needed

WORLD, STEPS, TURNS, COMBINATIONS = 2, 10, 15, 60
TABLES = 200
"""Tables of the model whose plan is checked for missing ones."""
SECONDS = 15.0
"""Seconds to search for its plan."""
BATCH, HIDDEN = 512, (256, 64)
SLOWEST = 1800.0
"""Seconds after which processes that still run are killed."""


def measured(tasks: int, seed: int) -> dict[str, Any]:
    """Return the figures of this part.

    **Arguments**

    - `tasks`: number of tasks for whole iterations.
    - `seed`: the random seed.
    """
    needed()
    found = ranks_found(
        {
            "steps": STEPS,
            "seed": seed,
            "tasks": tasks,
            "batch": BATCH,
            "hidden": HIDDEN,
            "turns": TURNS,
            "combinations": COMBINATIONS,
        }
    )
    of = found["differences"]
    adagrad = of.pop("columns, rowwise-adagrad")
    ratios = {
        f"iteration_{name}vs_torchrec": float(np.mean([task[f"{name}ratio"] for task in found["iterations"]]))
        for name in ("", "median_", "cpu_")
    }
    balance = {name: [task["balance"][name] for task in found["iterations"]] for name in ("skirl", "torchrec")}
    ratios |= {f"balance_{name}": float(np.mean(of)) for name, of in balance.items()}
    ratios["perfect_cpu_vs_torchrec"] = float(np.mean(1 / np.array(balance["torchrec"])))  # its work, dealt evenly
    return {
        "difference": max(of.values()), "differences": of, "columns_rowwise_adagrad": adagrad,
        "tables_missing": tables_missing(TABLES, seed), "tables": TABLES,
        **ratios, "noise": float(np.median([task["noise"] for task in found["iterations"]])),
        "iterations": found["iterations"], "ranks": WORLD, "batch": BATCH, "hidden": list(HIDDEN),
    }  # fmt: skip


def ranks_found(said: dict[str, Any]) -> dict[str, Any]:
    """Run a process for each rank, and return what they find.

    **Arguments**

    - `said`: what to tell them.
    """
    with tempfile.TemporaryDirectory(prefix="skirl-torchrec-") as folder:
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ran = [
            subprocess.Popen(
                [
                    sys.executable, "-W", "ignore", "-m", "skirl.placement.torchrec.bench_rank",
                    json.dumps(said | {"folder": folder, "rank": rank, "world": WORLD}),
                ],
                env=env, stdout=subprocess.DEVNULL, stderr=(Path(folder) / f"{rank}.err").open("w"),
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        until = time.monotonic() + SLOWEST
        try:
            while any(p.poll() is None for p in ran) and not any(p.poll() for p in ran) and time.monotonic() < until:
                time.sleep(0.1)
            failed = next((n for n, p in enumerate(ran) if p.poll() != 0), None)
        finally:
            for process in ran:
                process.kill()
                process.wait()
        if failed is not None:
            lines = (Path(folder) / f"{failed}.err").read_text().strip().splitlines()
            raise RuntimeError(f"rank {failed} did not end well: {lines[-1] if lines else 'it said nothing'}")
        return json.loads((Path(folder) / "found.json").read_text())


def tables_missing(count: int, seed: int) -> int:
    """Count the tables of a large model that a plan of `SkirlPlanner` does not contain exactly once.

    **Arguments**

    - `count`: number of tables.
    - `seed`: the random seed.
    """
    from torchrec.distributed.planner.types import ParameterConstraints, Topology

    from skirl.placement.tables.pool import pool
    from skirl.placement.torchrec.planner import SkirlPlanner
    from skirl.placement.torchrec.trained import Theirs, TrainedTable, sharder

    made = pool(count, batch=512, max_dim=128, seed=seed)
    tables = [TrainedTable(m.spec.name, m.spec.rows, m.spec.dim, m.spec.ids / m.spec.batch, m.head) for m in made]
    constraints = {t.name: ParameterConstraints(pooling_factors=[t.pooling]) for t in tables}
    held = sum(m.spec.nbytes(m.spec.rows, m.spec.dim) for m in made)
    topology = Topology(16, "cpu", ddr_cap=int(held / 16 / 0.9), local_world_size=16)
    planner = SkirlPlanner(topology, 32, constraints=constraints, seconds=SECONDS, seed=seed)
    plan = planner.plan(Theirs(tables, device="meta"), [sharder("rowwise-adagrad")]).plan["ebc"]
    missing = set(plan) ^ {t.name for t in tables}
    for table in tables:
        cells = [shard.shard_sizes[0] * shard.shard_sizes[1] for shard in plan[table.name].sharding_spec.shards]
        if sum(cells) != table.rows * table.dim:
            missing.add(table.name)
    return len(missing)


def told(result: dict[str, Any]) -> dict[str, str]:
    """Return the result as printed lines, by name.

    **Arguments**

    - `result`: what `measured` returned.
    """
    lines = {
        "difference": f"{result['difference']:.1e} at the most from plain torch after {STEPS} steps: "
        + ", ".join(f"{name} {of:.1e}" for name, of in result["differences"].items()),
        "columns": f"{result['columns_rowwise_adagrad']:.1e} under row-wise Adagrad, so they are off there by default",
        "tables": f"{result['tables_missing']} of {result['tables']} are missing",
    }
    for n, task in enumerate(result["iterations"]):
        ms, kinds = task["ms"], task["kinds"]
        balance = task["balance"]
        lines[f"task {n}"] = (
            f"{task['tables']} tables, {ms['skirl']:.1f} ms ({_counted(kinds['skirl'])}), TorchRec's own plan "
            f"{ms['torchrec']:.1f} ({_counted(kinds['torchrec'])}): {task['ratio']:.3f}; of CPU time {task['cpu_ratio']:.3f}"
            f", busier rank over the mean {balance['skirl']:.2f} and {balance['torchrec']:.2f}"
        )
    if result["iterations"]:
        lines["iteration"] = (
            f"{result['iteration_vs_torchrec']:.3f} of TorchRec's in the mean (medians "
            f"{result['iteration_median_vs_torchrec']:.3f}); CPU time of the busier rank "
            f"{result['iteration_cpu_vs_torchrec']:.3f}, {result['perfect_cpu_vs_torchrec']:.3f} if TorchRec's work were "
            f"even; busier rank over the mean {result['balance_skirl']:.3f}, TorchRec's {result['balance_torchrec']:.3f}"
        )
    return lines


def _counted(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in kinds.items())
