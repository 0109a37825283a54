"""A plan of tables as TorchRec's ShardingPlan, and back. What TorchRec would not run as planned is refused."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from skirl.placement.pieces import Piece, blocks
from skirl.placement.plan_file import TablePlan
from skirl.placement.torchrec.tables import COLUMNS, ROWS, WHOLE, ModelTable, PlanRequest, needed, tables_of

_PASSED = ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")
"""Attributes of constraints that a ShardingPlan hands on to the kernel."""


def sharders_of(sharders: Iterable[Any] | None) -> list[Any]:
    """Return the given sharders, or else the one for EmbeddingBagCollections."""
    needed()
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    return [EmbeddingBagCollectionSharder()] if sharders is None else list(sharders)


def sharding_plan(
    plan: TablePlan,
    module: Any,
    sharders: Iterable[Any] | None = None,
    *,
    device: str = "cpu",
    local_world_size: int | None = None,
    constraints: Any = None,
) -> Any:
    """Return a plan as TorchRec's ShardingPlan, for DistributedModelParallel.

    Tables are whole, cut by columns, or cut by rows evenly over all ranks, each with the fused kernel.

    **Arguments**

    - `plan`: from `SkirlPlanner`, or from a file: `skirl place` writes one, `TablePlan.load` reads it.
    - `module`: the model, or any module that contains its EmbeddingBagCollections.
    - `sharders`: TorchRec's sharders; the one for EmbeddingBagCollections if not given.
    - `device`: "cpu", "cuda" or "mtia".
    - `local_world_size`: number of ranks on one host; all of them if not given.
    - `constraints`: TorchRec's, by table; None allows all. Sharding types that they do not allow are refused; their
      rounding, bounds check and output type are handed on.
    """
    tables = tables_of(module, sharders_of(sharders), PlanRequest(plan.ranks))
    return exported(plan, tables, device, local_world_size or plan.ranks, constraints or {})


def exported(plan: TablePlan, tables: Sequence[ModelTable], device: str, local: int, constraints: Any) -> Any:
    """Return the same for tables that are already known."""
    needed()
    from torch.distributed._shard.sharding_spec import ShardMetadata
    from torchrec.distributed.sharding_plan import placement
    from torchrec.distributed.types import (
        EmbeddingModuleShardingPlan,
        EnumerableShardingSpec,
        ParameterSharding,
        ShardingPlan,
    )

    of_plan = {name: optimizer for name, _, _, optimizer in plan.tables}
    plan.check([replace(t.spec, optimizer=of_plan.get(t.spec.name, t.spec.optimizer)) for t in tables])
    pieces = dict(zip(of_plan, plan.pieces, strict=True))
    modules: dict[str, Any] = {}
    for table in tables:
        kind, shards = laid_out(table.spec.name, table.spec.rows, table.spec.dim, pieces[table.spec.name], plan.ranks)
        constraint = constraints.get(table.table)
        allowed = getattr(constraint, "sharding_types", None) or (WHOLE, COLUMNS, ROWS)
        if plan.ranks == 1 and kind not in allowed and ROWS in allowed:
            kind = ROWS  # all rows evenly over one rank
        if kind not in allowed:
            raise ValueError(
                f"table {table.spec.name!r} is {kind} in the plan, and its constraints allow {', '.join(allowed)}: plan "
                "with these constraints, or allow it"
            )
        passed = {name: getattr(constraint, name) for name in _PASSED if constraint is not None}
        modules.setdefault(table.path, EmbeddingModuleShardingPlan())[table.table] = ParameterSharding(
            sharding_type=kind,
            compute_kernel="fused",  # a plan without it gets a dense kernel, whose rows nobody trains
            ranks=[rank for _, rank in shards],
            sharding_spec=EnumerableShardingSpec([
                ShardMetadata(
                    shard_offsets=[p.row, p.col], shard_sizes=[p.rows, p.dim], placement=placement(device, rank, local)
                )
                for p, rank in shards
            ]),
            **passed,
        )  # fmt: skip
    return ShardingPlan(modules)


def laid_out(
    name: str, rows: int, dim: int, pieces: Sequence[tuple[Piece, int]], ranks: int
) -> tuple[str, list[tuple[Piece, int]]]:
    """Return TorchRec's name for this way to cut a table, and its shards in TorchRec's order."""
    ordered = sorted(pieces)
    if len(ordered) == 1:
        return WHOLE, ordered
    if all(p.rows == rows for p, _ in ordered):
        for rank in {rank for _, rank in ordered}:
            widths = [p.dim for p, at in ordered if at == rank]
            if len(set(widths)) > 1:  # its kernel assumes that all parts of a table at a rank have one width
                unlike = " and ".join(map(str, widths))
                raise ValueError(
                    f"table {name!r} has parts of {unlike} columns at rank {rank}: make them equally wide for TorchRec"
                )
        return COLUMNS, sorted(ordered, key=lambda of: of[0].col)
    even = [(Piece(ordered[0][0].table, a, b, 0, dim), r) for r, (a, b) in enumerate(blocks(rows, ranks))]
    if ordered == sorted(of for of in even if of[0].rows):
        return ROWS, even  # a shard for each rank, also where it has no rows
    how = "both ways" if any(p.dim < dim for p, _ in ordered) else "unevenly, or not over all ranks"
    raise ValueError(
        f"table {name!r} is cut by rows {how}; TorchRec looks rows up as if they were cut evenly over all ranks: plan with "
        "`skirl place`"
    )


def table_plan(
    sharding: Any, module: Any, sharders: Iterable[Any] | None = None, *, ranks: int, optimizer: str | None = None
) -> TablePlan:
    """Return TorchRec's ShardingPlan as a plan of skirl, for `ranks` ranks. It must cover each row and column once.

    **Arguments**

    - `sharding`, `module`, `sharders`: the ShardingPlan, its model and sharders.
    - `ranks`: number of ranks.
    - `optimizer`: the row optimizer; the one that model or sharder name if not given.
    """
    tables = tables_of(module, sharders_of(sharders), PlanRequest(ranks, optimizer=optimizer))
    listed, pieces = [], []
    for number, table in enumerate(tables):
        spec, of = table.spec, (sharding.plan.get(table.path) or {}).get(table.table)
        if of is None:
            raise ValueError(f"the ShardingPlan has no table {spec.name!r}: plan this model again")
        if of.sharding_spec is None:
            raise ValueError(
                f"table {spec.name!r} is {of.sharding_type}, a copy at each rank: allow table_wise instead"
            )
        listed.append((spec.name, spec.rows, spec.dim, spec.optimizer))
        shards = [
            (Piece(number, row, row + rows, col, col + columns), shard.placement.rank())
            for shard in of.sharding_spec.shards
            for (row, col), (rows, columns) in [(shard.shard_offsets, shard.shard_sizes)]
            if rows and columns
        ]
        pieces.append(tuple(sorted(shards)))
    return TablePlan(ranks, tuple(listed), tuple(pieces))
