"""`SkirlPlanner`, which takes the place of TorchRec's EmbeddingShardingPlanner; and plans as its ShardingPlan, and back.

What TorchRec would not run as planned is refused."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from skirl.placement.costs import KERNELS, Costs, check_kernel, load_costs, shipped
from skirl.placement.problem import Columns
from skirl.placement.search import plan_tables
from skirl.placement.spec import MULTIPLE, Piece, TablePlan, blocks
from skirl.placement.torchrec.tables import BATCH, COLUMNS, ROWS, WHOLE, ModelTable, PlanRequest, needed, tables_of

_PASSED = ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")
"""Attributes of constraints that a ShardingPlan hands on to the kernel."""


def sharders_of(sharders: Iterable[Any] | None) -> list[Any]:
    needed()
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    return [EmbeddingBagCollectionSharder()] if sharders is None else list(sharders)


def plan(
    file: Path | str | TablePlan, model: Any, sharders: Iterable[Any] | None = None, *, device: str = "cpu",
    local_world_size: int | None = None, constraints: Any = None,
) -> Any:  # fmt: skip
    """Return TorchRec's ShardingPlan of a file that `skirl place` wrote, for DistributedModelParallel.

    Tables are whole, cut by columns, or cut by rows evenly over all ranks, each with the fused kernel.

    **Arguments**

    - `file`: its path, or the plan in it.
    - `model`: the model, or any module that contains its EmbeddingBagCollections.
    - `sharders`: TorchRec's; the one for EmbeddingBagCollections if not given.
    - `device`: "cpu", "cuda" or "mtia".
    - `local_world_size`: number of ranks on one host; all of them if not given.
    - `constraints`: TorchRec's, by table. Sharding types that they do not allow are refused; their rounding, bounds check
      and output type are handed on.
    """
    made = file if isinstance(file, TablePlan) else TablePlan.load(Path(file))
    if dist.is_initialized() and dist.get_world_size() < made.ranks:  # more may be in groups
        raise ValueError(
            f"the plan is for {made.ranks} ranks, and there are {dist.get_world_size()}: make the plan again"
        )
    tables = tables_of(model, sharders_of(sharders), PlanRequest(made.ranks))
    return exported(made, tables, device, local_world_size or made.ranks, constraints or {})


def exported(plan: TablePlan, tables: Sequence[ModelTable], device: str, local: int, constraints: Any) -> Any:
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
    if odd := next((table for table in tables if table.spec.dim % MULTIPLE), None):
        raise ValueError(
            f"table {odd.spec.name!r} has dim {odd.spec.dim}, and TorchRec's kernels take multiples of {MULTIPLE}: set dim "
            "to one"
        )
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
                f"table {table.spec.name!r} is {kind} in the plan, and its constraints allow {', '.join(allowed)}: allow it"
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
    """TorchRec's name for this way to cut a table, and its shards in TorchRec's order."""
    ordered = sorted(pieces)
    if len(ordered) == 1:
        return WHOLE, ordered
    if all(p.rows == rows for p, _ in ordered):
        for rank in {rank for _, rank in ordered}:
            widths = [p.dim for p, at in ordered if at == rank]
            if len(set(widths)) > 1:  # its kernel assumes that all parts of a table at a rank have one width
                unlike = " and ".join(map(str, widths))
                raise ValueError(f"table {name!r} has parts of {unlike} columns at rank {rank}: make them equally wide")
        return COLUMNS, sorted(ordered, key=lambda of: of[0].col)
    even = [(Piece(ordered[0][0].table, a, b, 0, dim), r) for r, (a, b) in enumerate(blocks(rows, ranks))]
    if ordered == sorted(of for of in even if of[0].rows):
        return ROWS, even  # a shard for each rank, also where it has no rows
    raise ValueError(
        f"table {name!r} is cut by rows unevenly, or by columns as well; TorchRec looks rows up as if they were cut evenly "
        "over all ranks: plan with `skirl place`"
    )


def table_plan(
    sharding: Any, module: Any, sharders: Iterable[Any] | None = None, *, ranks: int, optimizer: str | None = None
) -> TablePlan:
    """Return TorchRec's ShardingPlan as a plan of skirl, which must cover each row and column once."""
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


HBM_RESERVED = 0.15  # of a GPU's memory is left free if no reservation is given, as TorchRec's planner does


class SkirlPlanner:
    """A planner that takes the place of TorchRec's EmbeddingShardingPlanner.

    `plan` and `collective_plan` return a ShardingPlan for DistributedModelParallel. Tables are whole, cut by columns,
    or cut by rows evenly over all ranks.

    **Arguments**

    - `topology`: TorchRec's; plans keep to its memory (of the device that computes) and use its bandwidth.
    - `batch_size`: samples of one rank in a step, 512 if not given. Not used if there are batches.
    - `storage_reservation`: TorchRec's; if not given, 15% of a GPU's memory is left free, and nothing on a CPU.
    - `constraints`: TorchRec's, by table: sharding types, pooling factors, batch sizes. What cannot be followed is
      refused, such as types without table_wise, unless row_wise is the only one.
    - `batches`: KeyedJaggedTensors of single ranks, at least one for each, in which ids and distinct rows are counted.
      If there are none, TorchRec's pooling factors are used.
    - `optimizer`: the row optimizer, by skirl's name; if not given, the one applied in backward or in the sharder's
      `fused_params`, else SGD, as in TorchRec's kernel.
    - `costs`: from `measure_costs`, or a file of `skirl place --costs`; if not given, those of skirl's own kernels.
    - `columns`: "exact" cuts no table by columns whose optimizer keeps one number per row, since that would train
      another model; "always" and "never" do as they say.
    - `seconds`: most seconds to search.
    """

    def __init__(
        self, topology: Any, batch_size: int | None = None, storage_reservation: Any = None,
        constraints: Mapping[str, Any] | None = None, *, batches: Sequence[Any] = (), optimizer: str | None = None,
        costs: Costs | str | Path | None = None, columns: Columns = "exact", seconds: float = 30.0,
    ) -> None:  # fmt: skip
        needed()
        if not 0 < seconds < float("inf"):
            raise ValueError(f"seconds is {seconds}: set it above 0")
        if columns not in ("exact", "always", "never"):
            raise ValueError(f"columns is {columns!r}: set it to exact, always or never")
        self.topology, self.reservation, self.constraints = topology, storage_reservation, constraints
        self.request = PlanRequest(topology.world_size, batch_size or BATCH, constraints, batches, optimizer)
        self.columns: Columns = columns
        self.costs, self.seconds = costs, seconds
        self.table_plan: TablePlan | None = None

    def plan(self, module: Any, sharders: Iterable[Any] | None = None) -> Any:
        """Return a ShardingPlan within all memory, of a model that may be on the meta device. Raise if there is none."""
        sharders = sharders_of(sharders)
        tables = tables_of(module, sharders, self.request)
        self.table_plan, _, _ = plan_tables(
            [table.spec for table in tables], self._caps(module, sharders), self._costs(), columns=self.columns,
            seconds=self.seconds, forced=[t.spec.name for t in tables if t.forced],
        )  # fmt: skip
        return self._exported(tables)

    def collective_plan(self, module: Any, sharders: Iterable[Any] | None = None, pg: Any = None) -> Any:
        """Return the first rank's plan, at every rank of a process group. If it finds none, every rank raises why."""
        if pg is None and not dist.is_initialized():
            raise ValueError("there is no process group: call torch.distributed.init_process_group first, or use plan")
        found, message, why = None, None, None
        if dist.get_rank(pg) == 0:
            try:
                found = self.plan(module, sharders)
                assert self.table_plan is not None
                message = {"plan": self.table_plan.text()}
            except Exception as error:  # whatever it is: the others wait for a message
                named = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                message, why = {"wrong": f"{named}{error}"}, error
        message = from_first(message, pg)
        if "wrong" in message:
            raise ValueError(message["wrong"]) from why
        if found is None:
            self.table_plan = TablePlan.parsed(message["plan"])
            found = self._exported(tables_of(module, sharders_of(sharders), self.request))
        return found

    def _exported(self, tables: Sequence[ModelTable]) -> Any:
        assert self.table_plan is not None
        local = self.topology.local_world_size
        return exported(self.table_plan, tables, self.topology.compute_device, local, self.constraints or {})

    def _caps(self, module: Any, sharders: Sequence[Any]) -> tuple[int, ...]:
        """Bytes that tables may take at each rank."""
        gpu, topology = self.topology.compute_device != "cpu", self.topology
        if self.reservation is not None:
            from torchrec.distributed.planner.types import PlannerError

            try:
                topology = self.reservation.reserve(
                    topology=topology, batch_size=self.request.batch_size, module=module, sharders=sharders,
                    constraints=self.constraints,
                )  # fmt: skip
            except PlannerError as error:  # its text goes on for paragraphs
                first = str(error).partition("\n")[0].strip()
                raise ValueError(f"the storage reservation leaves no memory for tables: {first}") from error
        elif gpu:
            return tuple(int(device.storage.hbm * (1 - HBM_RESERVED)) for device in topology.devices)
        return tuple(int(device.storage.hbm if gpu else device.storage.ddr) for device in topology.devices)

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


def from_first(message: Any, group: Any = None) -> Any:
    """The message of the first rank, at every rank: JSON, so that nothing is unpickled."""
    import torch

    first = 0 if group is None else dist.get_global_rank(group, 0)
    sends = dist.get_rank(group) == 0
    on = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    data = json.dumps(message).encode() if sends else b""
    length = torch.tensor([len(data)], device=on)
    dist.broadcast(length, first, group=group)
    sent = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if sends else torch.empty(int(length), dtype=torch.uint8)
    )
    sent = sent.to(on)
    dist.broadcast(sent, first, group=group)
    return json.loads(bytes(sent.cpu().numpy()))
