"""Plans for TorchRec: every number of every table once, refusal of what TorchRec would run differently, and reading its
plans; and that plans which TorchRec runs train what plain torch trains."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.placement import torchrec as tables
from skirl.placement.spec import pieces_of
from skirl.torchrec import SkirlPlanner
from skirl.torchrec import plan as plan_of
from skirl.train.placed import PlacedTable, Plan
from tests.placement.torchrec import model
from tests.placement.torchrec.model import sharder
from tests.warm import PIPE, Python

torchrec = pytest.importorskip("torchrec", reason="not installed: constraints/others.txt")
pytestmark = pytest.mark.filterwarnings("ignore")

Config = torchrec.EmbeddingBagConfig


def model_of(*tables: tuple[int, int, int], device: str = "meta") -> torch.nn.Module:
    """Return a model with tables of known rows, columns and features."""
    configs, feature = [], 0
    for n, (rows, dim, features) in enumerate(tables):
        names = [f"f{feature + k}" for k in range(features)]
        feature += features
        configs.append(Config(name=f"t{n}", num_embeddings=rows, embedding_dim=dim, feature_names=names))
    collection = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device(device))
    return torch.nn.ModuleDict({"inner": torch.nn.ModuleDict({"ebc": collection})})


def topology(world: int, cap: int = 1 << 32, device: str = "cpu") -> Any:
    from torchrec.distributed.planner.types import Topology

    return Topology(world, device, ddr_cap=cap, hbm_cap=cap, local_world_size=world)


def constraint(**said: Any) -> Any:
    from torchrec.distributed.planner.types import ParameterConstraints

    return {"t0": ParameterConstraints(**said)}


SIZES = st.lists(
    st.tuples(st.integers(4, 400), st.sampled_from([4, 8, 12, 20, 64]), st.integers(1, 2)), min_size=1, max_size=6
)


@settings(max_examples=12)
@given(SIZES, st.integers(1, 4), st.sampled_from(["sgd", "rowwise-adagrad"]))
def test_every_number_is_at_one_rank(sizes, world, optimizer):
    model, asked = model_of(*sizes), topology(world)
    planner = SkirlPlanner(asked, 16, optimizer=optimizer, seconds=0.05)
    plan = planner.plan(model)
    assert list(plan.plan) == ["inner.ebc"] and len(plan.plan["inner.ebc"]) == len(sizes)
    for n, (rows, dim, _) in enumerate(sizes):
        of, seen = plan.plan["inner.ebc"][f"t{n}"], np.zeros((rows, dim), int)
        planned = {(*p[1:], rank) for p, rank in pieces_of(n, planner.table_plan.tables[n], world)}
        assert of.compute_kernel == "fused" and len(of.ranks) == len(of.sharding_spec.shards)
        for rank, shard in zip(of.ranks, of.sharding_spec.shards, strict=True):
            (row, col), (height, width) = shard.shard_offsets, shard.shard_sizes
            seen[row : row + height, col : col + width] += 1
            assert not height or (row, row + height, col, col + width, rank) in planned
            assert shard.placement.rank() == rank < world
            assert width == dim or (of.sharding_type == "column_wise" and optimizer == "sgd")
        assert (seen == 1).all()
        if of.sharding_type == "row_wise":
            assert of.ranks == list(range(world)) and of.sharding_spec.shards[0].shard_sizes[0] == -(-rows // world)


def test_memory_and_constraints_are_kept(tmp_path):
    sizes = [(1000, 8, 1), (1000, 8, 1), (600, 16, 1), (64, 4, 1)]
    held = sum(rows * (dim + 1) * 4 for rows, dim, _ in sizes)
    model = model_of(*sizes)
    planner = SkirlPlanner(
        topology(2, int(held / 2 * 1.06)), constraints=constraint(sharding_types=["row_wise"], pooling_factors=[3.0]),
        optimizer="rowwise-adagrad", seconds=2.0,
    )  # fmt: skip
    plan = planner.plan(model).plan["inner.ebc"]
    assert plan["t0"].sharding_type == "row_wise"
    assert planner.table_plan is not None
    used = [0, 0]
    for p, rank in (each for table in planner.table_plan.tables for each in pieces_of(0, table, 2)):
        used[rank] += p.rows * (p.dim + 1) * 4
    assert max(used) <= int(held / 2 * 1.06)
    planner.table_plan.save(tmp_path / "p.json")
    again = plan_of(str(tmp_path / "p.json"), model)
    assert str(again) == str(planner.plan(model))


def test_sharding_types_are_those_that_constraints_allow():
    """One large table next to a small one; it would be cut by columns if all types were allowed."""
    model = model_of((4000, 64, 1), (50, 4, 1))
    for types, kinds in (
        (["table_wise", "column_wise"], {"column_wise"}),
        (["table_wise", "table_column_wise"], {"table_wise"}),
        (["table_wise", "row_wise", "table_row_wise"], {"row_wise"}),
        (["row_wise", "data_parallel"], {"row_wise"}),
    ):
        said = constraint(sharding_types=types, pooling_factors=[100.0])
        plan = SkirlPlanner(topology(2), 64, constraints=said, optimizer="sgd", seconds=0.2).plan(model)
        assert plan.plan["inner.ebc"]["t0"].sharding_type in kinds, types
    one = SkirlPlanner(topology(1), constraints=constraint(sharding_types=["row_wise"]), seconds=0.05).plan(model)
    assert one.plan["inner.ebc"]["t0"].sharding_type == "row_wise"


def batch(seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * 8,), generator=draw)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=draw)
    return torchrec.KeyedJaggedTensor(keys=["f0", "f1", "f2"], values=values, lengths=lengths)


def test_batches_of_all_ranks_are_counted_together():
    model = model_of((50, 8, 2), (60, 4, 1))
    batches = [batch(n) for n in range(4)]
    sharders = [torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder()]
    one, other = (t.spec for t in tables.tables_of(model, sharders, tables.PlanRequest(2, batches=batches)))
    steps = [[id for m in (n, n + 1) for f in ("f0", "f1") for id in batches[m][f].values()] for n in (0, 2)]
    assert one.ids == sum(map(len, steps)) / 2 and one.distinct == sum(len(set(map(int, s))) for s in steps) / 2
    assert (one.batch, other.batch, one.optimizer) == (2 * 2 * 8, 2 * 8, "sgd")
    request = tables.PlanRequest(2, 8, constraint(pooling_factors=[1.0, 2.0]))
    expected = tables.tables_of(model, sharders, request)[0].spec
    assert (expected.batch, expected.ids) == (32, 48) and 20 < expected.distinct < 48
    assert tables.optimizer_of("t0", object(), sharder("rowwise-adagrad")) == "rowwise-adagrad"


def test_whatever_the_first_rank_meets_every_rank_is_told(monkeypatch):
    planner, said, ranks = SkirlPlanner(topology(2)), list[Any](), iter(range(2))

    def heard(own: Any, pg: Any) -> Any:
        said.append(own)
        return said[0]

    monkeypatch.setattr(planner, "_caps", lambda: {}[3])
    monkeypatch.setattr("skirl.placement.torchrec.from_first", heard)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda pg=None: next(ranks))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^KeyError: 3$"):
            planner.collective_plan(model_of((50, 8, 1)))


def test_a_plan_for_another_model_is_refused():
    plan = Plan(2, (PlacedTable("t0", 50, 8, 1),))
    assert plan_of(plan, model_of((50, 8, 1))).plan["inner.ebc"]["t0"].ranks == [1]
    with pytest.raises(ValueError, match="table 't0' is \\[50, 8\\] in the plan and \\[51, 8\\] here"):
        plan_of(plan, model_of((51, 8, 1)))


def test_costs_of_the_operator_that_torchrec_runs_are_measured_and_used(tmp_path, monkeypatch):
    from skirl.placement import measure
    from skirl.placement.costs import load_costs, save_costs
    from skirl.placement.fbgemm import FbgemmArena
    from skirl.torchrec import measure_costs

    for name, value in (
        ("DIMS", (4, 8)),
        ("BATCHES", (16,)),
        ("OTHER_BATCHES", (24,)),
        ("TABLES", 4),
        ("COMBINATIONS", 16),
    ):
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr("skirl.placement.costs.EPOCHS", 2)
    with monkeypatch.context() as smaller:
        smaller.setattr(measure, "arena_of", lambda kernel: FbgemmArena(1 << 16))
        costs = measure_costs("sgd", minutes=1e-9, out=tmp_path / "a.json")
    assert costs.kernel == "fbgemm-cpu" and sum(costs.ms["sgd"]) > 0
    assert load_costs(tmp_path / "a.json", link=1.0, ranks=1, kernels=["fbgemm-cpu"]).ms == costs.ms
    model = model_of((50, 8, 1), (60, 4, 1))
    plans = [SkirlPlanner(topology(2), costs=of, seconds=0.2).plan(model) for of in (costs, tmp_path / "a.json")]
    assert str(plans[0]) == str(plans[1])
    save_costs(replace(costs, kernel="cuda"), tmp_path / "c.json")
    with pytest.raises(ValueError, match="for kernel 'cuda', not for 'fbgemm-cpu' or 'skirl-cpu'"):
        SkirlPlanner(topology(2), costs=tmp_path / "c.json").plan(model)
    for device, of, wanted in (
        ("cuda", costs, "'fbgemm-cuda'"), ("cpu", replace(costs, kernel="fbgemm-cuda"), "'fbgemm-cpu' or 'skirl-cpu'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^the costs are for kernel '{of.kernel}', not for {wanted}: measure"):
            SkirlPlanner(topology(2, device=device), costs=of).plan(model)
    on_gpu = SkirlPlanner(topology(2, device="cuda"), costs=replace(costs, kernel="fbgemm-cuda"), seconds=0.1)
    assert len(on_gpu.plan(model).plan["inner.ebc"]) == 2


CASES: list[tuple[dict[str, Any], str]] = [
    ({"seconds": 0}, "seconds is 0: set it above 0"),
    ({"constraints": {"min_partition": 8}}, "set min_partition, which skirl does not plan: leave it out"),
    ({"constraints": {"compute_kernels": ["dense"]}}, "allow dense: skirl plans fused, allow it"),
    ({"constraints": {"sharding_types": ["data_parallel"]}}, "allow data_parallel: skirl plans table_wise"),
    ({"constraints": {"sharding_types": ["column_wise"]}}, "allow column_wise, and skirl may find a table best whole"),
    ({"constraints": {"pooling_factors": [1.0, 2.0, 3.0]}}, "have 3 pooling_factors for 1 features: give one each"),
    ({"constraints": {"pooling_factors": [float("nan")]}}, "has nan ids a batch: set it above 0"),
    ({"batches": [0]}, "there are 1 batches for 2 ranks: give one of each rank at least"),
    ({"costs": "none.json"}, "none.json is missing: give a folder that holds a finished file of costs"),
]


@pytest.mark.parametrize(("said", "text"), CASES, ids=[text[:30] for _, text in CASES])
def test_what_cannot_be_planned_is_told_in_a_sentence(said, text):
    if "constraints" in said:
        said = {**said, "constraints": constraint(**said["constraints"])}
    with pytest.raises(ValueError, match=text.replace("(", r"\(")) as error:
        SkirlPlanner(topology(2), 16, **{"seconds": 0.05, **said}).plan(model_of((50, 8, 1), (60, 4, 1)))
    assert "\n" not in str(error.value)


TWO = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
from tests.placement.torchrec.model import differences

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
print(json.dumps(differences(10, 1)))
dist.destroy_process_group()
"""


def alike(found: dict[str, float]) -> bool:
    adagrad = found.pop("columns, rowwise-adagrad")
    return len(found) == 7 and max(found.values()) < 1e-4 < 1e-3 < adagrad  # each part of a row has a different number


def test_at_one_rank(tmp_path, monkeypatch):
    """Nothing is exchanged, but kernels, optimizers and the dense part are those used with two."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    threads = torch.get_num_threads()
    try:
        found = model.differences(2, 0)  # nothing is cut
        assert len(found) == 8 and max(found.values()) < 1e-4
        with pytest.raises(ValueError, match="the plan is for 2 ranks, and there are 1"):
            plan_of(model.plan_by_hand("whole", 2), model.Model())
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()


@pytest.mark.slow  # two processes import TorchRec
def test_at_two_ranks(python: Python, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    team = [python.start(TWO, str(tmp_path), str(rank), stdout=PIPE) for rank in range(2)]
    first, second = (json.loads(process.communicate(250)[0].splitlines()[-1]) for process in team)
    assert first == second and alike(first)
