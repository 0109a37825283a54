"""Measured costs of FBGEMM's operator; and for users who keep TorchRec's planner, fitted coefficients for its estimator and
counted cache statistics."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skirl.placement.calibrate import LEAST, fit, measure_machine
from skirl.placement.costs import Costs, shipped
from skirl.placement.fbgemm import check_optimizers
from skirl.placement.measure import generate
from skirl.placement.torchrec.planner import sharders_of
from skirl.placement.torchrec.tables import PlanRequest, ids_of, needed, steps_of, tables_of
from skirl.tools.jit import kernel

_INT, _FLOAT = 8, 4
_TABLES, _BATCHES = 120, (256, 512, 1024, 4096)
BINS = 1000  # of a miss ratio curve


def measure_costs(
    optimizer: str = "rowwise-adagrad", combinations: int = 60, seed: int = 0, *, device: str = "cpu",
    minutes: float = 0.5, out: str | Path | None = None,
) -> Costs:  # fmt: skip
    """Measure what parts of tables cost FBGEMM's operator, on one thread of this CPU or on a GPU.

    The result is for `SkirlPlanner(costs=...)` and `hardware_config`. Random combinations of tables are timed in some
    rounds, and costs are fitted to the least times.

    **Arguments**

    - `optimizer`: the row optimizer: "rowwise-adagrad", "sgd", "adagrad", or on a GPU "adam".
    - `combinations`: number of random combinations of tables; a quarter as many judge.
    - `device`: "cpu", or "cuda", which nobody has run yet.
    - `minutes`: time for all rounds together; two are always measured.
    - `out`: a file for the costs, which `skirl place --costs` takes too.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}: set it to cpu or cuda")
    if not 0 < minutes < float("inf"):
        raise ValueError(f"minutes is {minutes}: set it above 0")
    if combinations < LEAST:
        raise ValueError(f"combinations is {combinations}: set it to {LEAST} or more")
    check_optimizers([optimizer], device)
    kernel = "fbgemm-cpu" if device == "cpu" else "fbgemm-cuda"
    path = None if out is None else Path(out)
    return measure_machine(kernel, [optimizer], minutes=minutes, combinations=combinations, seed=seed, out=path)


def hardware_config(costs: Costs | None = None, optimizer: str = "rowwise-adagrad") -> Any:
    """Return a HardwarePerfConfig for `EmbeddingPerfEstimatorFactory.create_with_config`, fitted to measured costs.

    **Arguments**

    - `costs`: costs of parts of tables; those that come with skirl if not given.
    - `optimizer`: the row optimizer; its update is part of the costs.
    """
    needed()
    from torchrec.distributed.planner.constants import DDR_MEM_BW
    from torchrec.distributed.planner.estimator.types import (
        EstimatorPerfCoefficients,
        HardwarePerfConfig,
        PerfCoefficient,
        PerfCoefficientConfig,
    )

    costs = costs or shipped(1.0, 1)
    specs = [
        spec
        for n, batch in enumerate(_BATCHES)
        for spec in generate(_TABLES, batch=batch, max_dim=128, seed=n, optimizer=optimizer)
    ]  # the estimator multiplies bytes of ids, rows looked up and outputs, and rows, by coefficients
    sizes = [(_INT * s.ids, _FLOAT * s.ids * s.dim, _FLOAT * s.batch * s.dim, s.rows) for s in specs]
    numbers = fit(np.array(sizes), np.array([costs.part(s, s.rows, s.dim)[0] for s in specs]))
    # A third of a step counts as its forward pass.
    forward = EstimatorPerfCoefficients(fwd=PerfCoefficient(*(float(n) * DDR_MEM_BW / 3 for n in numbers)))
    config = HardwarePerfConfig()
    config.name = "skirl"
    config.device_bw = DDR_MEM_BW  # it divides what the coefficients are multiplied by
    config._coefficients = PerfCoefficientConfig(
        table_wise=forward, column_wise=forward, row_wise=forward, table_row_wise=forward, data_parallel=forward
    )
    config._bwd_compute_multiplier = 2.0
    vars(config).update(_use_block_usage_penalty=False, _use_min_dim_for_lookup=False)
    return config


def cache_statistics(
    module: Any, batches: Sequence[Any], world: int, sharders: Iterable[Any] | None = None
) -> dict[str, Any]:
    """Return TorchRec's CacheStatistics by table, for the CacheParams of constraints.

    They give the miss rate of an LRU cache of any size, counted over the distinct rows of each step; first uses are
    left out.

    **Arguments**

    - `batches`: KeyedJaggedTensors of single ranks, in order; `world` of them make one step.
    - `sharders`: TorchRec's; the one for EmbeddingBagCollections if not given.
    """
    sharders = sharders_of(sharders)
    import torch
    from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats

    every_step = steps_of(batches, world)
    tables = tables_of(module, sharders, PlanRequest(world, batches=batches))
    configs = {
        (path, config.name): config
        for path, child in module.named_modules()
        if hasattr(child, "embedding_bag_configs")
        for config in child.embedding_bag_configs()
    }
    found = {}
    for table in tables:
        steps = []
        for step in every_step:
            every, first = np.unique(ids_of(configs[table.path, table.table], step), return_index=True)
            steps.append(every[np.argsort(first)])
        rows = table.spec.rows
        distances = stack_distances(np.concatenate(steps), rows)
        bins = min(BINS, rows)
        hist = np.histogram(distances[distances > 0] - 1, np.linspace(0, rows, bins + 1))[0]
        misses = 1 - np.cumsum(hist) / max(1, hist.sum())
        found[table.spec.name] = EmbeddingOffloadStats(
            float(misses.mean()), round(table.spec.distinct), torch.from_numpy(hist.astype(np.float32)), rows
        )
    return found


def stack_distances(rows: np.ndarray, count: int) -> np.ndarray:
    """Return the least LRU cache that still has the row at each use: 1 if it was used just before, 0 at its first use."""
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:  # compiled loops do not check bounds
        raise ValueError(
            f"there are rows {rows.min()} to {rows.max()} of {count}: name rows from 0 on, below their count"
        )
    out = np.zeros(len(rows), np.int64)
    _distances(rows, np.full(count, -1, np.int64), np.zeros(len(rows) + 1, np.int64), out)
    return out


@kernel
def _distances(rows, last, tree, out):
    """Fill `out` with the distinct rows since each row's last use, counted in a tree of sums that marks last uses."""
    n = len(rows)
    for i in range(n):
        before = last[rows[i]]
        if before >= 0:
            count = 0
            k = i
            while k > 0:
                count += tree[k]
                k -= k & -k
            k = before
            while k > 0:
                count -= tree[k]
                k -= k & -k
            out[i] = count
            k = before + 1
            while k <= n:
                tree[k] -= 1
                k += k & -k
        last[rows[i]] = i
        k = i + 1
        while k <= n:
            tree[k] += 1
            k += k & -k
