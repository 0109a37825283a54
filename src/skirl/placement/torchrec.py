"""`SkirlPlanner`, which takes the place of TorchRec's EmbeddingShardingPlanner; and plans as its ShardingPlan, and back.

What TorchRec would not run as planned is refused."""

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from skirl.placement.costs import KERNELS, Costs, check_kernel, load_costs, shipped
from skirl.placement.search import plan_tables
from skirl.placement.spec import MULTIPLE, Piece, TableSpec, pieces_of, reuse_of
from skirl.train.placed import PlacedTable, Plan

INSTALL = "torchrec is not installed: pip install torchrec and FBGEMM of one release, 1.8.0 for torch 2.13"
BATCH = 512  # TorchRec's default
OPTIMIZERS = {
    "SGD": "sgd", "EXACT_SGD": "sgd",
    "Adagrad": "adagrad", "EXACT_ADAGRAD": "adagrad",
    "RowWiseAdagrad": "rowwise-adagrad", "EXACT_ROWWISE_ADAGRAD": "rowwise-adagrad",
    "Adam": "adam", "ADAM": "adam",
}  # fmt: skip
"""Names of optimizer classes and of FBGEMM's kinds, with skirl's name for each."""
WHOLE, COLUMNS, ROWS = "table_wise", "column_wise", "row_wise"
_PLANNED = (WHOLE, COLUMNS, ROWS)
_REFUSED = (
    "min_partition", "cache_params", "key_value_params", "device_group", "enforce_hbm", "stochastic_rounding",
    "bounds_check_mode", "output_dtype", "num_poolings",
)  # fmt: skip


def needed() -> None:
    try:
        import torchrec.distributed  # noqa: F401
    except (ImportError, OSError) as error:
        raise ValueError(f"{INSTALL} ({error})") from None


@dataclass(frozen=True)
class ModelTable:
    path: str
    """Of its module in the model."""
    table: str
    spec: TableSpec
    forced: bool
    """Whether it has to be cut by rows."""


@dataclass(frozen=True)
class PlanRequest:
    world: int
    batch_size: int = BATCH
    constraints: Mapping[str, Any] | None = None
    batches: Sequence[Any] = ()
    optimizer: str | None = None


def tables_of(module: Any, sharders: Iterable[Any], request: PlanRequest) -> list[ModelTable]:
    """Every table of the model that the sharders shard, in the model's order."""
    by_type = {_name(sharder.module_type): sharder for sharder in sharders}
    found = list[tuple[str, Any, Any, Any]]()
    waiting = [("", module)]
    while waiting:
        path, child = waiting.pop(0)
        sharder = by_type.get(_name(type(child)))
        if sharder is None:
            waiting += [(f"{path}.{name}" if path else name, of) for name, of in child.named_children()]
            continue
        params = sharder.shardable_parameters(child)
        if params and not hasattr(child, "embedding_bag_configs"):
            raise ValueError(
                f"{path or 'the model'} is a {type(child).__name__}: skirl plans EmbeddingBagCollections, give it sharders "
                "of these and plan the rest with TorchRec"
            )
        configs = {config.name: config for config in child.embedding_bag_configs()} if params else {}
        found += [(path, configs[name], param, sharder) for name, param in params.items()]
    if not found:
        raise ValueError("the model has no table that the sharders shard: give it an EmbeddingBagCollection")
    known = [config.name for _, config, *_ in found]
    looked_up = _looked_up([config for _, config, *_ in found], request) if request.batches else None
    made = []
    for number, (path, config, param, sharder) in enumerate(found):
        who = f"{path}.{config.name}" if known.count(config.name) > 1 else config.name
        made.append(_table(path, who, config, param, sharder, request, looked_up and looked_up[number]))
    return made


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _table(path: str, who: str, config: Any, param: Any, sharder: Any, request: PlanRequest, counts: Any) -> ModelTable:
    if config.data_type.name != "FP32":
        raise ValueError(f"table {who!r} has rows of {config.data_type.name}: skirl plans FP32, make it FP32")
    constraint = (request.constraints or {}).get(config.name)
    split, forced = _ways(who, constraint)
    bags, ids, distinct, reuse = _expected(who, config, constraint, request) if counts is None else counts
    spec = TableSpec(
        who, int(config.num_embeddings), int(config.embedding_dim), bags, ids, distinct, reuse,
        request.optimizer or optimizer_of(who, param, sharder) or "sgd", split,
    )  # fmt: skip
    if forced and spec.rows < request.world:
        raise ValueError(f"table {who!r} has to be row-wise, and has fewer rows than there are ranks: allow table_wise")
    return ModelTable(path, config.name, spec, forced)


def optimizer_of(who: str, param: Any, sharder: Any) -> str | None:
    """skirl's name for the optimizer of a table, or None if neither table nor sharder names one."""
    classes = getattr(param, "_optimizer_classes", None) or getattr(param, "_optimizer_class", None)
    fused = (getattr(sharder, "fused_params", None) or {}).get("optimizer")
    if classes:
        name = (classes[0] if isinstance(classes, list | tuple) else classes).__name__
    elif fused is not None:
        name = getattr(fused, "name", str(fused))
    else:
        return None
    if name not in OPTIMIZERS:
        raise ValueError(
            f"table {who!r} has optimizer {name}, whose costs skirl does not know: set optimizer to the nearest of "
            f"{', '.join(sorted(set(OPTIMIZERS.values())))}"
        )
    return OPTIMIZERS[name]


def _ways(who: str, constraint: Any) -> tuple[Any, bool]:
    """How constraints let a table be cut, and whether it has to be cut by rows."""
    if constraint is None:
        return "any", False
    for name in _REFUSED:
        if getattr(constraint, name, None) is not None:
            raise ValueError(f"the constraints of table {who!r} set {name}, which skirl does not plan: leave it out")
    kernels = constraint.compute_kernels
    if kernels and "fused" not in kernels:
        raise ValueError(f"the constraints of table {who!r} allow {', '.join(kernels)}: skirl plans fused, allow it")
    types = constraint.sharding_types
    if not types:
        return "any", False
    planned, allowed = set(types) & set(_PLANNED), f"the constraints of table {who!r} allow {', '.join(types)}"
    if not planned:
        raise ValueError(f"{allowed}: skirl plans {', '.join(_PLANNED)}, allow one")
    if planned == {ROWS}:
        return "rows", True
    if WHOLE not in planned:
        raise ValueError(f"{allowed}, and skirl may find a table best whole: allow {WHOLE} as well, or only {ROWS}")
    rows, columns = ROWS in planned, COLUMNS in planned
    return "any" if rows and columns else "rows" if rows else "columns" if columns else "no", False


def _expected(
    who: str, config: Any, constraint: Any, request: PlanRequest
) -> tuple[int, float, float, tuple[float, ...]]:
    """Bags, ids and distinct rows of a step, from pooling factors, as if all rows were equally likely."""
    features = len(config.feature_names)
    pooling = list(getattr(constraint, "pooling_factors", None) or [1.0])
    if len(pooling) == 1:
        pooling *= features
    sizes = list(getattr(constraint, "batch_sizes", None) or [request.batch_size] * features)
    for what, of in (("pooling_factors", pooling), ("batch_sizes", sizes)):
        if len(of) != features:
            raise ValueError(
                f"the constraints of table {who!r} have {len(of)} {what} for {features} features: give one each"
            )
    ids = sum(a * b for a, b in zip(pooling, sizes, strict=True)) * request.world
    rows = config.num_embeddings
    distinct = 1.0 if rows == 1 else -rows * math.expm1(ids * math.log1p(-1 / rows))
    return max(1, sum(sizes) * request.world), float(ids), min(distinct, float(ids), float(rows)), ()


def _looked_up(configs: Sequence[Any], request: PlanRequest) -> list[tuple[int, float, float, tuple[float, ...]]]:
    """The same by counting: as many batches of single ranks are taken together as there are ranks."""
    steps, found = steps_of(request.batches, request.world), []
    for config in configs:
        counts = [np.unique(ids_of(config, step), return_counts=True)[1] for step in steps]
        bags = sum(batch.stride() * len(config.feature_names) for step in steps for batch in step)
        total, rows = (float(sum(map(of, counts))) / len(steps) for of in (np.sum, len))
        if not total:
            raise ValueError(f"table {config.name!r} has no ids in {len(request.batches)} batches: give more of them")
        found.append((max(1, round(bags / len(steps))), total, rows, reuse_of(np.concatenate(counts))))
    return found


def steps_of(batches: Sequence[Any], world: int) -> list[Sequence[Any]]:
    """Group batches of single ranks into steps, with as many batches as there are ranks."""
    if len(batches) < world:
        raise ValueError(f"there are {len(batches)} batches for {world} ranks: give one of each rank at least")
    return [batches[n : n + world] for n in range(0, len(batches) - world + 1, world)]


def ids_of(config: Any, step: Sequence[Any]) -> np.ndarray:
    """The ids that batches look up in a table, int64. Raise if one is not among its rows."""
    found = []
    for batch in step:
        names = list(batch.keys())
        for name in config.feature_names:
            if name not in names:
                raise ValueError(
                    f"a batch has no feature {name!r} of table {config.name!r}: give batches of this model"
                )
            ids = batch[name].values().cpu().numpy()
            if len(wrong := ids[(ids < 0) | (ids >= config.num_embeddings)]):
                raise ValueError(
                    f"feature {name!r} has an id {wrong[0]}, and table {config.name!r} has rows 0 to "
                    f"{config.num_embeddings - 1:,}: give ids of its rows"
                )
            found.append(ids)
    return np.concatenate(found).astype(np.int64)


def sharders_of(sharders: Iterable[Any] | None) -> list[Any]:
    needed()
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    return [EmbeddingBagCollectionSharder()] if sharders is None else list(sharders)


def plan(
    file: Path | str | Plan, model: Any, sharders: Iterable[Any] | None = None, *, device: str = "cpu",
    local_world_size: int | None = None,
) -> Any:  # fmt: skip
    """Return TorchRec's ShardingPlan of a file that `skirl place` wrote, for DistributedModelParallel.

    Tables are whole, cut by columns, or cut by rows evenly over all ranks, each with the fused kernel.

    **Arguments**

    - `file`: its path, or the plan in it.
    - `model`: the model, or any module that contains its EmbeddingBagCollections.
    - `sharders`: TorchRec's; the one for EmbeddingBagCollections if not given.
    - `device`: "cpu", "cuda" or "mtia".
    - `local_world_size`: number of ranks on one host; all of them if not given.
    """
    made = file if isinstance(file, Plan) else Plan.load(Path(file))
    if dist.is_initialized() and dist.get_world_size() < made.ranks:  # more may be in groups
        raise ValueError(
            f"the plan is for {made.ranks} ranks, and there are {dist.get_world_size()}: make the plan again"
        )
    tables = tables_of(model, sharders_of(sharders), PlanRequest(made.ranks))
    return exported(made, tables, device, local_world_size or made.ranks)


def exported(plan: Plan, tables: Sequence[ModelTable], device: str, local: int) -> Any:
    from torch.distributed._shard.sharding_spec import ShardMetadata
    from torchrec.distributed.sharding_plan import placement
    from torchrec.distributed.types import (
        EmbeddingModuleShardingPlan,
        EnumerableShardingSpec,
        ParameterSharding,
        ShardingPlan,
    )

    plan.check(table.spec for table in tables)
    placed = {table.name: table for table in plan.tables}
    modules: dict[str, Any] = {}
    for table in tables:
        kind, shards = laid_out(placed[table.spec.name], plan.ranks)
        modules.setdefault(table.path, EmbeddingModuleShardingPlan())[table.table] = ParameterSharding(
            sharding_type=ROWS if table.forced else kind,  # of a single rank, too
            compute_kernel="fused",  # a plan without it gets a dense kernel, whose rows nobody trains
            ranks=[rank for _, rank in shards],
            sharding_spec=EnumerableShardingSpec([
                ShardMetadata(
                    shard_offsets=[p.row, p.col], shard_sizes=[p.rows, p.dim], placement=placement(device, rank, local)
                )
                for p, rank in shards
            ]),
        )  # fmt: skip
    return ShardingPlan(modules)


def laid_out(table: PlacedTable, ranks: int) -> tuple[str, list[tuple[Piece, int]]]:
    """TorchRec's name for this way to cut a table, and its shards in TorchRec's order."""
    shards = pieces_of(0, table, ranks)
    if odd := next((piece.dim for piece, _ in shards if piece.dim % MULTIPLE), None):
        raise ValueError(
            f"table {table.name!r} has {odd} columns at a rank, and TorchRec's kernels take multiples of {MULTIPLE}: set "
            "dim to one, and plan again"
        )
    return ROWS if table.at is None else WHOLE if isinstance(table.at, int) else COLUMNS, shards


HBM_RESERVED = 0.15  # of a GPU's memory is left free, as TorchRec's planner does


class SkirlPlanner:
    """A planner that takes the place of TorchRec's EmbeddingShardingPlanner.

    `plan` and `collective_plan` return a ShardingPlan for DistributedModelParallel. Tables are whole, cut by columns,
    or cut by rows evenly over all ranks.

    **Arguments**

    - `topology`: TorchRec's; plans keep to its memory (of the device that computes, and 15% of a GPU's is left free) and
      use its bandwidth.
    - `batch_size`: samples of one rank in a step, 512 if not given. Not used if there are batches.
    - `constraints`: TorchRec's, by table: sharding types, pooling factors, batch sizes. What cannot be followed is
      refused, such as types without table_wise, unless row_wise is the only one.
    - `batches`: KeyedJaggedTensors of single ranks, at least one for each, in which ids and distinct rows are counted.
      If there are none, TorchRec's pooling factors are used.
    - `optimizer`: the row optimizer, by skirl's name; if not given, the one applied in backward or in the sharder's
      `fused_params`, else SGD, as in TorchRec's kernel.
    - `costs`: from `measure_costs`, or a file of `skirl place --costs`; if not given, those of skirl's own kernels.
    - `seconds`: most seconds to search.
    """

    def __init__(
        self, topology: Any, batch_size: int | None = None, *, constraints: Mapping[str, Any] | None = None,
        batches: Sequence[Any] = (), optimizer: str | None = None, costs: Costs | str | Path | None = None,
        seconds: float = 30.0,
    ) -> None:  # fmt: skip
        needed()
        if not 0 < seconds < float("inf"):
            raise ValueError(f"seconds is {seconds}: set it above 0")
        self.topology = topology
        self.request = PlanRequest(topology.world_size, batch_size or BATCH, constraints, batches, optimizer)
        self.costs, self.seconds = costs, seconds
        self.table_plan: Plan | None = None

    def plan(self, module: Any, sharders: Iterable[Any] | None = None) -> Any:
        """Return a ShardingPlan within all memory, of a model that may be on the meta device. Raise if there is none."""
        tables = tables_of(module, sharders_of(sharders), self.request)
        self.table_plan, _, _ = plan_tables(
            [table.spec for table in tables], self._caps(), self._costs(),
            seconds=self.seconds, forced=[t.spec.name for t in tables if t.forced],
        )  # fmt: skip
        return self._exported(tables)

    def collective_plan(self, module: Any, sharders: Iterable[Any] | None = None, pg: Any = None) -> Any:
        """Return the first rank's plan, at every rank of a process group. If it finds none, every rank raises why."""
        if pg is None and not dist.is_initialized():
            raise ValueError("there is no process group: call torch.distributed.init_process_group first, or use plan")
        text = wrong = ""
        why = None
        if dist.get_rank(pg) == 0:
            try:
                self.plan(module, sharders)
                assert self.table_plan is not None
                text = self.table_plan.text()
            except Exception as error:  # whatever it is: the others wait
                why = error
                wrong = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        text, wrong = from_first([text, wrong], pg)
        if wrong:
            raise ValueError(wrong) from why
        self.table_plan = Plan.parsed(text)
        return self._exported(tables_of(module, sharders_of(sharders), self.request))

    def _exported(self, tables: Sequence[ModelTable]) -> Any:
        assert self.table_plan is not None
        return exported(self.table_plan, tables, self.topology.compute_device, self.topology.local_world_size)

    def _caps(self) -> tuple[int, ...]:
        devices = [device.storage for device in self.topology.devices]
        if self.topology.compute_device == "cpu":
            return tuple(int(storage.ddr) for storage in devices)
        return tuple(int(storage.hbm * (1 - HBM_RESERVED)) for storage in devices)

    def _costs(self) -> Costs:
        topology = self.topology
        far = topology.world_size > topology.local_world_size
        link = 1e3 * (topology.inter_host_bw if far else topology.intra_host_bw)
        kernels = ("fbgemm-cpu", KERNELS[0]) if topology.compute_device == "cpu" else ("fbgemm-cuda",)
        if isinstance(self.costs, Costs):
            check_kernel(self.costs.kernel, kernels)
            return replace(self.costs, link=link, ranks=topology.world_size)
        if self.costs is not None:
            return load_costs(Path(self.costs), link=link, ranks=topology.world_size, kernels=kernels)
        if topology.compute_device != "cpu":
            warnings.warn(
                f"tables are planned for {topology.compute_device} with costs of skirl's CPU kernels: set costs",
                stacklevel=3,
            )
        return shipped(link, topology.world_size)


def from_first(message: list[str], group: Any = None) -> list[str]:
    """The message of the first rank, at every rank: JSON, so that nothing is unpickled."""
    import torch

    first, on = 0 if group is None else dist.get_global_rank(group, 0), "cpu"
    if dist.get_backend(group) == "nccl":
        on = "cuda"
    sent = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(on)
    size = torch.tensor([len(sent)], device=on)
    dist.broadcast(size, first, group=group)
    sent = sent if dist.get_rank(group) == 0 else torch.empty(int(size), dtype=torch.uint8, device=on)
    dist.broadcast(sent, first, group=group)
    return json.loads(bytes(sent.cpu().numpy()))
