"""TorchRec's own planner on the tasks of `skirl bench place`: its plans, its time, and sums by its estimator."""

import contextlib
import logging
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.problem import Placed, Problem
from skirl.placement.tables.spec import MULTIPLE, TableSpec

ALLOWED = {
    "whole": ["table_wise"],
    "columns": ["table_wise", "column_wise"],
    "rows": ["table_wise", "column_wise", "row_wise"],
}
"""Ways to cut tables that its planner may use."""
NAME = "torchrec"
"""The beginning of the names of its plans."""
ORDERS = ("storage", "perf")
"""Orders in which its partitioner places tables; the first is its default."""


def there() -> bool:
    """Return whether TorchRec is installed."""
    try:
        import torchrec.distributed.planner  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


@dataclass(frozen=True)
class PlannerSettings:
    """The settings of TorchRec's planner.

    **Arguments**

    - `allowed`: a key of `ALLOWED`.
    - `order`: one of `ORDERS`.
    - `config`: a HardwarePerfConfig; None: TorchRec's own.
    """

    allowed: str = "rows"
    order: str = "storage"
    config: Any = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress what TorchRec logs about each plan, and its warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def planned(problem: Problem, asked: PlannerSettings) -> tuple[Placed | None, float]:
    """Plan a problem with TorchRec's planner. Return its placement, or None if it finds no plan, and its seconds.

    It is told the pooling factors, the memory and the link, and reserves nothing. Of ranks that differ, it is told the
    memory alone. Columns are cut in halves: by default it cuts no table of 128 or fewer, and its finer cuts repeat more
    work.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `asked`: how to plan.
    """
    with quiet():
        from torchrec.distributed.planner.types import PlannerError

        module, planner, sharders = prepared(problem, asked)
        began = time.perf_counter()
        try:
            plan = planner.plan(module, sharders)
        except PlannerError:
            return None, time.perf_counter() - began
        took = time.perf_counter() - began
    items, at = [], []
    for number, _ in enumerate(problem.specs):
        for shard in plan.plan[""][f"t{number}"].sharding_spec.shards:
            (row, col), (rows, columns) = shard.shard_offsets, shard.shard_sizes
            if rows and columns:
                items.append((Piece(number, row, row + rows, col, col + columns),))
                at.append(shard.placement.rank())
    return problem.at(tuple(items), np.array(at, np.int64)), took


def prepared(problem: Problem, asked: PlannerSettings) -> tuple[Any, Any, list[Any]]:
    """Return the model, TorchRec's planner and its sharders for a problem.

    **Arguments**

    - `problem`, `asked`: as for `planned`.
    """
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
    from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import CustomTopologyData, ParameterConstraints, Topology

    world = len(problem.ranks.caps)
    caps = problem.ranks.caps
    unlike = None if len(set(caps)) == 1 else CustomTopologyData({"ddr_cap": list(caps)}, world)
    link = problem.costs.link / 1e3
    topology = Topology(
        world, "cpu", ddr_cap=caps[0], local_world_size=world, intra_host_bw=link, inter_host_bw=link,
        custom_topology_data=unlike,
    )  # fmt: skip
    constraints = {
        f"t{n}": ParameterConstraints(
            sharding_types=ALLOWED[asked.allowed],
            pooling_factors=[spec.ids / spec.batch],
            min_partition=max(MULTIPLE, spec.dim // 2),
        )
        for n, spec in enumerate(problem.specs)
    }
    batch = max(1, problem.specs[0].batch // world)
    estimators = [
        _perf_estimator(topology, constraints, asked.config),
        EmbeddingStorageEstimator(topology=topology, constraints=constraints),
    ]
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch,
        enumerator=EmbeddingEnumerator(topology, batch, constraints=constraints, estimator=estimators),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        partitioner=GreedyPerfPartitioner(sort_by=SortBy.PERF if asked.order == "perf" else SortBy.STORAGE),
        constraints=constraints,
        debug=False,
        stats=[],
    )
    return module_of(problem.specs), planner, [EmbeddingBagCollectionSharder()]


def _perf_estimator(topology: Any, constraints: Any, config: Any) -> Any:
    from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
    from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimator

    return EmbeddingPerfEstimator(topology, constraints, config=config or EmbeddingPerfEstimatorConfig())


def module_of(specs: Sequence[TableSpec]) -> Any:
    """Return a collection of these tables without weights, called t0, t1, ...

    **Arguments**

    - `specs`: the tables.
    """
    import torch
    from torchrec import optim
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{n}", num_embeddings=spec.rows, embedding_dim=spec.dim, feature_names=[f"t{n}"]
            )
            for n, spec in enumerate(specs)
        ],
        device=torch.device("meta"),
    )  # fmt: skip
    kinds = {
        "sgd": optim.SGD,
        "rowwise-adagrad": optim.RowWiseAdagrad,
        "adam": optim.Adam,
        "adagrad": torch.optim.Adagrad,
    }
    for n, spec in enumerate(specs):  # its planner counts the optimizer's state from this
        module.embedding_bags[f"t{n}"].weight._optimizer_classes = [kinds[spec.optimizer]]  # type: ignore[union-attr]
    return module


def all_of(problem: Problem, config: Any) -> dict[str, Placed]:
    """Return its plans in both orders, with tables whole, by columns too, by rows too; with its own and fitted costs.

    **Arguments**

    - `problem`: the problem of the task.
    - `config`: a fitted HardwarePerfConfig.
    """
    found: dict[str, Placed] = {}
    for kind, of in (("default", None), ("fitted", config)):
        for order in ORDERS:
            for allowed in ALLOWED:
                placed, _ = planned(problem, PlannerSettings(allowed, order, of))
                if placed is not None:
                    found[f"{NAME} {allowed}, {order}, {kind}"] = placed
    return found


class _TimeIsUpError(BaseException):
    """The time limit, which no `except Exception` of the planner catches."""


def timed(problem: Problem, seconds: float) -> tuple[Placed | None, float, bool]:
    """Time its planner on a problem, in its default order, with tables whole and by columns. Main thread only.

    Return its placement or None, its seconds, and whether it ended by itself.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `seconds`: the time limit.
    """

    def ended(*_: Any) -> None:
        raise _TimeIsUpError

    before = signal.signal(signal.SIGALRM, ended)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        placed, took = planned(problem, PlannerSettings("columns"))
        return placed, took, True
    except _TimeIsUpError:
        return None, seconds, False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ratios(measured: Sequence[Mapping[str, tuple[float, ...]]], ours: str) -> dict[str, float]:
    """Return the mean ratio of our busiest rank's time to TorchRec's, for each way to plan, over tasks that have both.

    **Arguments**

    - `measured`: for each task the times by plan, those of the busiest rank first.
    - `ours`: the name of our plan.
    """
    names = dict.fromkeys(name for times in measured for name in times if name.startswith(NAME))
    return {
        name: float(np.mean([times[ours][0] / times[name][0] for times in measured if name in times])) for name in names
    }


def estimated(specs_of: Sequence[Sequence[tuple[TableSpec, int, int]]], config: Any) -> np.ndarray:
    """Return the milliseconds of computing that TorchRec's estimator expects of combinations of whole tables.

    **Arguments**

    - `specs_of`: parts of each combination: table, rows and columns.
    - `config`: a HardwarePerfConfig; None: TorchRec's own.
    """
    from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
    from torchrec.distributed.planner.estimator.estimator import get_embedding_perf_sharding_evaluator

    of, known = config or EmbeddingPerfEstimatorConfig(), {}
    evaluator = get_embedding_perf_sharding_evaluator("table_wise", is_inference=False)
    sums = []
    for parts in specs_of:
        total = 0.0
        for spec, rows, dim in parts:
            key = (spec, rows, dim)
            if key not in known:
                context = context_of(spec, rows, dim, of)
                known[key] = evaluator.compute_fwd_comp(context, of) + evaluator.compute_bwd_comp(context, of)
            total += known[key]
        sums.append(total)
    return np.array(sums)


def said_of(sets: Sequence[Sequence[tuple[TableSpec, int, int]]], ms: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Return what its estimator says of measured combinations, as it is and fitted, each scaled to suit best.

    **Arguments**

    - `sets`: parts of each combination.
    - `ms`: measured milliseconds.
    - `config`: a fitted HardwarePerfConfig.
    """
    sums = {f"{NAME}_": estimated(sets, None), f"{NAME}_fitted_": estimated(sets, config)}
    return {name: of * np.median(ms / of) for name, of in sums.items()}


def context_of(spec: TableSpec, rows: int, dim: int, config: Any) -> Any:
    """Return what its estimator knows of this many rows and columns of a table on one CPU.

    **Arguments**

    - `spec`: the table.
    - `rows`, `dim`: size of the part.
    - `config`: a HardwarePerfConfig.
    """
    from torchrec.distributed.planner.constants import DDR_MEM_BW, HBM_MEM_BW, HBM_TO_DDR_MEM_BW, SSD_MEM_BW
    from torchrec.distributed.planner.estimator.types import ShardPerfContext

    return ShardPerfContext(
        sharding_type="table_wise", compute_kernel="fused", hash_size=rows, emb_dim=dim, batch_sizes=[spec.batch],
        num_poolings=[1.0], input_lengths=[spec.ids * rows / spec.rows / spec.batch],
        device_bw=config.get_device_bw("cpu", "fused", HBM_MEM_BW, DDR_MEM_BW, SSD_MEM_BW, HBM_TO_DDR_MEM_BW),
    )  # fmt: skip
