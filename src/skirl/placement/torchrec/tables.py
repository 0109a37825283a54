"""The tables of a TorchRec model, recognized by names of types and methods: what a plan has to know."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skirl.placement.spec import TableSpec, reuse_of

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
_REFUSED = ("min_partition", "cache_params", "key_value_params", "device_group")


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
    poolings = list(getattr(constraint, "num_poolings", None) or [1.0] * features)
    sizes = list(getattr(constraint, "batch_sizes", None) or [request.batch_size] * features)
    for what, of in (("pooling_factors", pooling), ("num_poolings", poolings), ("batch_sizes", sizes)):
        if len(of) != features:
            raise ValueError(
                f"the constraints of table {who!r} have {len(of)} {what} for {features} features: give one each"
            )
        if not all(math.isfinite(value) and value >= 0 for value in of):
            raise ValueError(f"the constraints of table {who!r} have {what} {of}: set them to 0 or more")
    bags = sum(a * b for a, b in zip(poolings, sizes, strict=True))
    ids = sum(a * b * c for a, b, c in zip(pooling, poolings, sizes, strict=True)) * request.world
    rows = config.num_embeddings
    distinct = 1.0 if rows == 1 else -rows * math.expm1(ids * math.log1p(-1 / rows))
    return max(1, round(bags * request.world)), float(ids), min(distinct, float(ids), float(rows)), ()


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
