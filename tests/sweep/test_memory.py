"""Planned steps: captured graphs, simulated bytes, plans and their checks, and the bits of variants trained by them."""

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass import (
    remat_using_tags_for_fwd_loss_bwd_graph,
)
from torch.utils.checkpoint import CheckpointPolicy

import skirl
from skirl.core.batch import Batch
from skirl.models.dlrm import DLRM

pytest.importorskip("skirl.sweep.passes", reason="another torch", exc_type=ImportError)

from skirl.sweep.capture import Dense, capture
from skirl.sweep.memory.execute import Link, Pack
from skirl.sweep.memory.orchestrate import Memory
from skirl.sweep.memory.policy import Choice, Infeasible, Plan, Planner, fastest, operators_again
from skirl.sweep.memory.schedule import Action, Schedule, Step, Unsound, in_pairs, in_turns, with_transfers
from tests.cases import some
from tests.sweep.planned import FEATURES, TABLES, Case, batch_of, chain, drawn_step, measured, on_demand_of


@pytest.mark.parametrize("name", ["dlrm", "dcnv2", "din", pytest.param("dcat", marks=pytest.mark.slow), "transformer"])
def test_graphs_have_the_bits_of_eager_and_hold_what_was_simulated(name: str) -> None:
    case = Case(name)
    step = case.step
    step = Step(step.operators, step.sizes, step.entered, step.outputs, dict.fromkeys(step.operators, 1e-5))
    free = Planner([step], float("inf"), 1e9).best()
    plans, limit = [free, Planner([step], 0, 1e9).least()], free.figures.peak
    for share in some((0.3, 0.0, 0.7)):
        limit = int(plans[1].figures.peak + share * (free.figures.peak - plans[1].figures.peak))
        plans.append(Planner([step], limit, 1e9).best())
        assert plans[-1].figures.peak <= limit
    for plan in plans:
        outputs, peak = case.run(plan)
        assert peak == plan.figures.peak == max(plan.schedule.check().peak, 0)
        assert all(torch.equal(own, eager) for own, eager in zip(outputs, case.eager, strict=True))


@pytest.mark.parametrize("name", ["dlrm", "dcnv2", "din"])
def test_what_runs_again_does_so_where_it_does_in_torch(name: str) -> None:
    case, draw = Case(name), random.Random(0)
    for share in (0.3, 0.7, 1.0):
        chosen = Choice(again=frozenset(each for each in case.step.maps if draw.random() < share))
        again = operators_again(case.step, chosen)
        assert again is not None
        forward, backward = case.step.order(again)
        assert [*forward, *backward] == order_of_torch(case.captured.graph, again)


def order_of_torch(module: fx.GraphModule, again: frozenset[str]) -> list[str]:
    for node in module.graph.nodes:
        node.meta["own"] = node.name
        if node.name in again:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    graph = remat_using_tags_for_fwd_loss_bwd_graph(module).graph
    for node in module.graph.nodes:
        node.meta.pop("recompute", None)
    return [node.meta["own"] for node in graph.nodes if node.op == "call_function"]


def test_greedy_is_within_5_percent_of_the_best_of_all_plans() -> None:
    draw, over = random.Random(0), list[float]()
    for _ in range(50):
        step, rate = drawn_step(draw, 5), draw.uniform(300, 2000)
        free, least = Planner([step], float("inf"), rate).best(), Planner([step], 0, rate).least()
        span = free.figures.peak - least.figures.peak
        planner = Planner([step], least.figures.peak + span * draw.choice([0.2, 0.4, 0.6, 0.8]), rate)
        plans = [planner.plan({step: choice}) for choice in every_choice(step)]
        times = [each.figures.seconds for each in plans if each.figures.peak <= planner.limit]
        over.append(planner.best().figures.seconds / min(times) - 1)
    assert sum(each <= 0.05 for each in over) >= 48 and max(over) < 0.1 and sum(over) < 50 * 0.005


def every_choice(step: Step) -> list[Choice]:
    chosen = [dict(zip(step.maps, ways, strict=True)) for ways in product(range(3), repeat=len(step.maps))]
    sets = [[frozenset(s for s, way in each.items() if way == wanted) for wanted in (1, 2)] for each in chosen]
    return [choice for choice in (Choice(*both) for both in sets) if operators_again(step, choice) is not None]


def test_mutated_schedules_are_refused() -> None:
    draw, refused = random.Random(0), 0
    while refused < 1000:
        steps = [drawn_step(draw, 6, once=0.1) for _ in range(2)]
        choices = {step: Choice(moved=frozenset(draw.sample(step.maps, 2))) for step in steps}
        for step, choice in choices.items():
            again = frozenset(draw.sample([each for each in step.maps if each not in choice.moved], 1))
            choices[step] = Choice(again, choice.moved)
        if any(operators_again(step, choice) is None for step, choice in choices.items()):
            continue
        plan = Planner(steps, float("inf"), 1000, paired=draw.random() < 0.5).plan(choices)
        schedule, peak = plan.schedule, plan.figures.peak
        schedule.check(peak)
        with pytest.raises(Unsound):
            schedule.check(peak - 1)
        for _ in range(20):
            wrong = mutated(schedule, draw)
            with pytest.raises(Unsound):
                Schedule(steps, wrong, schedule.rate).check()
            refused += 1


def mutated(schedule: Schedule, draw: random.Random) -> list[Action]:
    """Return actions of which one is missing, comes twice, is another pack's, or comes behind one that relies on it."""
    actions = list(schedule.actions)
    place = draw.randrange(len(actions))
    kind, pack, what = actions[place]
    way = draw.choice(["missing", "twice", "another's", "late", "again"])
    operators = schedule.steps[pack].operators

    def relies(other: Action) -> bool:
        reads = kind == other.kind == "run" and what in operators[other.what].reads
        return other.pack == pack and bool(what) and (other.what == what or reads)

    later = next((at for at in range(place + 1, len(actions)) if relies(actions[at])), None)
    if way == "twice":
        actions.insert(place, actions[place])
    elif way == "another's":
        actions[place] = actions[place]._replace(pack=1 - pack)
    elif way == "again":
        once = [each for each in actions if each.kind == "run" and runs_once(schedule, each)]
        actions.insert(draw.randrange(len(actions) + 1), draw.choice(once))
    elif way == "late" and later is not None:
        actions.insert(later, actions.pop(place))
    else:
        del actions[place]
    return actions


def runs_once(schedule: Schedule, action: Action) -> bool:
    operator = schedule.steps[action.pack].operators[action.what]
    return operator.once or operator.backward


def test_packs_in_pairs_stall_least() -> None:
    step = chain(12, 8 << 20)
    steps, orders, moves = [step] * 4, [step.order()] * 4, [[f"f{i}.0" for i in range(10)]] * 4
    for rate in (1e9, 2e9, 4e9, 8e9, 16e9, 32e9, 64e9):
        schedules = [
            with_transfers(steps, runs, moves, 24 * (8 << 20), rate) for runs in (in_turns(orders), in_pairs(orders))
        ]
        behind_own_backward, in_pair = (each.check().stall for each in schedules)
        on_demand = on_demand_of(schedules[0]).check().stall
        assert in_pair <= behind_own_backward < on_demand
        if 10 * (8 << 20) / rate < 12 * 0.001:  # all of it moves in the time of a forward
            assert in_pair == 0
    turns = Planner(steps, 6 * (8 << 20), 4e9).plan({step: Choice(moved=frozenset(moves[0]))})
    fast = fastest(steps, 8 * (8 << 20), 4e9)
    assert fast.figures.seconds < turns.figures.seconds
    assert fast.figures.peak <= 8 * (8 << 20)


class Drawing(DLRM):
    """Draws in every layer, writes to buffers, and takes some features alone."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(8)

    def forward(self, batch: Batch) -> Tensor:
        x = self.norm(self.drop(self.bottom(self._dense(batch))))
        rows = self.embeddings(batch.sparse)
        return (x * rows["t1"]).sum(1) + (self.drop(rows["t3"]) * x).sum(1)


class Measured(Memory):
    """Sums up what steps hold, at most `peak` bytes."""

    peak = 0

    def _run(self, plan: Plan, packs: Sequence[Pack]) -> None:
        self.peak = max(self.peak, measured(plan.schedule, packs))


def trained(kind: Any, count: int, samples: int, memory: Memory | None) -> tuple[list[Any], list[Tensor]]:
    variants = [skirl.Variant(f"v{number}", {"lr": 0.1 * (number + 1), "seed": number}) for number in range(count)]
    batches, losses = [batch_of(samples, seed) for seed in range(4)], []
    sweep = skirl.Sweep(
        lambda v: kind.tiny(v.embeddings, dense_features=4),
        variants,
        TABLES,
        cache="100%",
        optimizer=skirl.Adagrad(0.1),
    )
    with sweep, skirl.lookahead(batches, sweep, sparse=lambda batch: batch.sparse) as each:
        for batch in each:
            if memory is None:
                sweep.step(batch)
            else:
                memory.step(sweep.racing, batch, lambda model, batch: model.loss(batch))
            losses.append([variant.loss for variant in sweep.racing])
        rows = [variant.embeddings.rows(name, range(100)) for variant in sweep.racing for name in FEATURES]
        weights = [
            value.clone() for v in sweep.racing for value in v.model.state_dict().values() if isinstance(value, Tensor)
        ]
    return losses, rows + weights


@pytest.mark.parametrize("kind", [Drawing, DLRM])
def test_variants_keep_their_bits(kind: Any) -> None:
    losses, bits = trained(kind, 3, 64, None)
    free = Measured(1 << 30, Link(1e9))
    everything = trained(kind, 3, 64, free)
    assert free.plan is not None and free.peak == free.plan.figures.peak
    least = Planner(free.plan.schedule.steps, 0, 1e9).least().figures.peak
    tight = Measured(free.held + least, Link(1e9))
    for found in (everything, trained(kind, 3, 64, tight)):
        assert found[0] == losses and all(map(torch.equal, found[1], bits))
    assert tight.peak <= least <= free.peak
    with pytest.raises(
        Infeasible, match=rf"in turns, variants need .* \({free.held + least:,} bytes\) at least, and memory"
    ):
        trained(kind, 3, 64, Memory(free.held + least - 1, Link(1e9)))


def test_a_footprint_of_six_times_the_limit_trains() -> None:
    free, count = Memory(1 << 30, Link(1e9)), 8
    losses, bits = trained(DLRM, count, 1024, free)
    assert free.plan is not None
    tight = Measured((free.held + count * free.plan.figures.peak) // 6, Link(1e9))
    found = trained(DLRM, count, 1024, tight)
    assert found[0] == losses and all(map(torch.equal, found[1], bits))
    assert tight.held + tight.peak <= tight.limit


class Asks(DLRM):
    """Takes a tensor of the batch that a graph does not know of."""

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) + batch.sparse.values().sum()


@pytest.mark.parametrize(
    ("kind", "shared", "why"), [(Asks, False, "a model takes a tensor that"), (DLRM, True, "bags that samples share")]
)
def test_what_a_plan_does_not_know_of_is_refused(kind: Any, shared: bool, why: str) -> None:
    embeddings = skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.SGD(lr=0.1), cache="100%")
    model, batch = kind.tiny(embeddings, dense_features=4), batch_of(4)
    if shared:
        ids = skirl.KeyedJagged.one_hot(FEATURES, torch.zeros(2, 6, dtype=torch.int64))
        inverse = {name: torch.tensor([0, 0, 1, 1]) for name in FEATURES}
        ids = skirl.KeyedJagged(FEATURES, ids.values(), lengths=ids.lengths(), strides=[2] * 6, inverse=inverse)
        batch = Batch(dense=batch.dense, sparse=ids, labels=batch.labels)
    with pytest.raises(ValueError, match=why):
        capture(Dense(model, lambda model, batch: model.loss(batch), embeddings(batch.sparse), batch))
