"""A run as one of several trainers: counts over all, the same on each, and the bits of one process; and which trainer looks
which table up for all.
"""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import skirl
from skirl.checkpoint import folder
from skirl.checkpoint.keeper import Asked, Keeper
from skirl.cli.train import Train
from skirl.core.placement import Placement
from skirl.core.tables import Schema
from skirl.data.share import block
from skirl.peers.base import Alone
from skirl.peers.job import using
from skirl.peers.processes import BEGINS_AGAIN
from skirl.tools.flags import flags_of
from skirl.train.flags import StepFlags
from skirl.train.loop import Done, TrainerShare, keys_of
from skirl.train.metrics import Meter
from skirl.train.placed import PlacedTable, Plan, count, dealt, evenly, placement_of, read
from skirl.train.recipe import Recipe
from tests.loops import wait_for
from tests.resume import learned
from tests.threads_as_trainers import InProcess
from tests.warm import COMMAND, Python

SMALL: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 32, "steps": 6, "cache": "300", "threads": 1,
    "quiet": True, "run": "none", "shards": 2,
}  # fmt: skip
TUNED: dict[str, Any] = {**SMALL, "seed": 3, "lr": 0.3}
JUDGED: dict[str, Any] = {**SMALL, "valid": "20%", "eval_every": 2, "keep_best": True}


@pytest.fixture
def by_trainers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Return `by_trainers(n, **flags)`, which gives the results of n trainers, run as threads of this process."""
    making, made = threading.Lock(), Recipe.model_over

    def model_over(recipe: Recipe, embeddings: Any) -> Any:
        with making:  # torch has one generator for all threads
            return made(recipe, embeddings)

    monkeypatch.setattr(Recipe, "model_over", model_over)

    def run(size: int, **flags: Any) -> list[dict[str, Any]]:
        def work(peers: InProcess) -> dict[str, Any]:
            with using(peers):
                return Train.of(**flags).run()

        flags_of(Train)  # Python 3.11 fails if two threads parse sources at once
        return InProcess.run(size, work)

    return run


METRICS = ("loss", "auc", "logloss", "samples", "steps", "from", "best", "test_logloss", "stopped_early")


OF_FIRST = ("auc", "logloss")
"""Metrics of predictions, which only the first trainer has and shows."""


def same(results: list[dict[str, Any]], one: dict[str, Any], *but: str) -> None:
    for rank, result in enumerate(results):
        for name in METRICS:
            if name not in but:
                assert result.get(name) == (None if rank and name in OF_FIRST else one.get(name)), name


def steps_of(first: int, last: int) -> list[Done]:
    """Return some of the 4 shards of 5 steps, with 6 samples each."""
    drawn = torch.Generator().manual_seed(0)
    found = []
    for _ in range(5):
        logits, labels = torch.randn(4, 6, generator=drawn), torch.randint(0, 2, (4, 6), generator=drawn).float()
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
        mine, size = slice(first, last), 6 * (last - first)
        mean = losses[mine].mean()
        found.append(Done(logits[mine].reshape(-1), labels[mine].reshape(-1), losses[mine], mean, size))
    return found


def measured(peers) -> tuple[dict, list[int]]:
    """Return what a trainer's meter counts, except times, and the bytes that it sent."""
    share, meter = TrainerShare(peers), Meter()
    for done in steps_of(*block(peers.rank, peers.size, 4)):
        of_all, _ = share.whole(done)
        meter.add(of_all.loss_tensor, of_all.logits, of_all.labels, samples=of_all.samples, finite=of_all.finite)
    result = {name: value for name, value in meter.result().items() if "second" not in name}
    return result, [] if share.alone else peers.channel("lookups").counters.bytes_sent


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_trainer_counts_what_one_process_does(size: int) -> None:
    alone, _ = measured(Alone())
    (first, few), *others = InProcess.run(size, measured)
    assert first == alone and alone["auc"] is not None and alone["samples"] == 5 * 4 * 6
    for other, sent in others:
        assert other["loss"] == alone["loss"] and other["samples"] == alone["samples"] and other["auc"] is None
        assert max(few) < sent[0], "others are sent logits and labels"


def test_all_trainers_hear_of_a_stop_and_of_predictions_that_are_not_finite() -> None:
    def work(peers):
        [done, *_] = steps_of(*block(peers.rank, peers.size, 4))
        if peers.rank == 2:
            done.logits[0] = torch.inf
        of_all, asked = TrainerShare(peers).whole(done, Asked(stop=peers.rank == 1, save=peers.rank == 2))
        return of_all.finite, asked, len(of_all.logits)

    assert InProcess.run(3, work) == [(False, Asked(stop=True), logits) for logits in (24, 0, 0)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoints of a run whose rows others start from."""
    path = tmp_path_factory.mktemp("base")
    Train.of(**SMALL, save=path / "saved", store=f"disk:{path / 'rows'}").run()
    return path / "saved"


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[Any, bytes]]:
    """Return the result of one process that starts from them, and what it has learned."""
    save = tmp_path_factory.mktemp("tuned") / "saved"
    return Train.of(**TUNED, from_=base, save=save).run(), learned(save)


@pytest.mark.parametrize("trainers", [2, 3])
def test_a_run_from_another_ones_rows_is_that_of_one_process(by_trainers, base, tuned, tmp_path, trainers):
    flags = {**TUNED, "shards": 2} if trainers == 2 else {**TUNED, "shards": 4}
    save = tmp_path / "saved"
    results = by_trainers(trainers, **flags, from_=base, save=save, store=f"disk:{tmp_path / 'rows'}")
    one, rows = tuned
    if trainers == 3:
        one, rows = Train.of(**flags, from_=base, save=tmp_path / "one").run(), learned(tmp_path / "one")
    assert one["from"]["rows"] > 100 and results[0]["from"]["rows"] == one["from"]["rows"]
    same(results, one)
    assert learned(save) == rows


def test_the_best_checkpoint_is_kept_by_one_for_all(by_trainers, tmp_path):
    flags = {**JUDGED, "lr": 5.0}  # gets worse
    results = by_trainers(2, **flags, save=tmp_path / "two")
    one = Train.of(**flags, save=tmp_path / "one").run()
    same(results, one, "best")
    for result in results:
        assert result["best"]["step"] == one["best"]["step"] < one["steps"]
        assert result["best"]["test_logloss"] == one["best"]["test_logloss"]
    assert learned(tmp_path / "two" / folder.BEST) == learned(tmp_path / "one" / folder.BEST)
    assert learned(tmp_path / "two" / folder.BEST) != learned(tmp_path / "two")


def test_all_end_at_the_step_at_which_one_is_told_to(by_trainers, tmp_path, monkeypatch):
    """Whenever the signal comes: if all have already agreed on a step, it waits for the next one."""
    real = TrainerShare.whole

    def late(share: TrainerShare, *given: Any) -> Any:
        found = real(share, *given)
        if share.rank == 1 and share.peers.channel("lookups").counters.calls >= 3:
            keepers[1]._signals.came = "SIGTERM"
        return found

    keepers: dict[int, Keeper] = {}
    entered = Keeper.__enter__

    def enter(keeper: Keeper) -> Keeper:
        keepers[0 if keeper._first else 1] = keeper
        return entered(keeper)

    monkeypatch.setattr(TrainerShare, "whole", late)
    monkeypatch.setattr(Keeper, "__enter__", enter)
    results = by_trainers(2, **SMALL, save=tmp_path)
    monkeypatch.undo()
    [step] = {result["steps"] for result in results}
    assert 2 <= step < 6
    assert [result["checkpoints"]["newest"] for result in results] == [step] * 2
    assert [result["checkpoints"]["stopped_by"] for result in results] == ["another trainer", "SIGTERM"]
    assert [result["begins_again"] for result in results] == [False] * 2  # on a single machine it was meant
    Train.of(**SMALL, save=tmp_path, resume=True).run()
    Train.of(**SMALL, save=tmp_path / "one").run()
    assert learned(tmp_path) == learned(tmp_path / "one")


def test_a_signal_to_one_process_ends_all_at_one_step(python: Python, tmp_path):
    """No launcher hears of success, because it would end launchers on machines that nobody has stopped."""
    flags = {**SMALL, "steps": 100_000, "save": tmp_path / "saved", "save_every": 5}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not True]
    team = python.team(2, COMMAND, "train", *words, "--quiet", "--json", env={"GROUP_WORLD_SIZE": "2"})
    with team[0], team[1]:
        wait_for((tmp_path / "saved" / "checkpoint-000002.json").exists)
        team[1].send_signal(signal.SIGTERM)
        said = [process.communicate(60) for process in team]
    assert [process.returncode for process in team] == [BEGINS_AGAIN] * 2, said
    assert said[1][0] == ""  # the first speaks for all
    result = json.loads(said[0][0])
    assert result["checkpoints"]["stopped_by"] == "another trainer" and result["begins_again"]
    assert 5 <= result["checkpoints"]["newest"] == result["steps"] < 100_000


def test_each_trainer_tells_of_the_rows_that_it_owns(tmp_path: Path) -> None:
    def work(peers: InProcess) -> dict[str, Any]:
        with using(peers):
            return Train.of(**SMALL | {"run": str(tmp_path / "two")}, log_every=2).run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skirl.pipeline.shards.check_weights", lambda *_: None)  # they share one generator
        first, second = InProcess.run(2, work)
    assert second["run"] is None
    found = json.loads((tmp_path / "two" / "result.json").read_text())
    lanes = found["by_trainer"]["lanes"]
    assert lanes == first["by_trainer"]["lanes"] == second["by_trainer"]["lanes"]
    recipe = Recipe.of(**{name: value for name, value in SMALL.items() if name not in ("quiet", "run")})
    keys = np.unique(np.concatenate([keys_of(b.sparse, Schema.of(recipe.tables())) for b in recipe.stream()]))
    owners = Placement.even(2).site_of(keys)
    assert [lane["touched"] for lane in lanes] == np.bincount(owners, minlength=2).tolist()
    assert sum(lane["new"] for lane in lanes) == found["counters"]["new"] == len(keys)
    assert all(lane["sent"] > 0 for lane in lanes)


TABLES = [skirl.Table("a", 30, 4, features=("x", "y")), skirl.Table("b", 90, 8)]


def draw(seed, samples=12):
    rng = np.random.default_rng(seed)
    bags = {f: [rng.integers(0, 30, rng.integers(0, 6)).tolist() for _ in range(samples)] for f in ("x", "y", "b")}
    return bags, skirl.KeyedJagged.of_bags(bags)


@pytest.mark.parametrize("trainers", [2, 3])
def test_bytes_are_those_counted_one_by_one(trainers):
    drawn = [draw(seed) for seed in range(3)]
    found = count([ids for _, ids in drawn], TABLES, trainers)
    for table in TABLES:
        rows = whole = each = 0
        for bags, _ in drawn:
            for rank in range(trainers):
                own = [bags[f][rank * 12 // trainers : (rank + 1) * 12 // trainers] for f in table.features]
                ids = [i for feature in own for bag in feature for i in bag]
                rows += len({*ids}) * (4 + 8 * table.dim)  # its number, its values, its gradient
                each += len(ids) * 4 + sum(map(len, own))  # ids and lengths
                whole += len(ids) * 4 + sum(map(len, own)) * (1 + 8 * table.dim)  # these, and vectors both ways
        share = (trainers - 1) / trainers / len(drawn)  # what a trainer needs of its own does not travel
        assert found[table.name][0] == pytest.approx((rows * share, whole * share, each * share))


@pytest.mark.parametrize(("dim", "trainers"), [(16, 3), (7, 2), (6, 8), (4, 4), (2, 2), (3, 2)])
def test_columns_are_cut_at_even_numbers_of_them(dim, trainers):
    found = evenly(dim, trainers)
    if dim < 4:
        assert found == 0
    else:
        assert sum(found.values()) == dim and len(found) == min(trainers, dim // 2)
        assert not any(count % 2 for count in [*found.values()][:-1])
        assert max(found.values()) - min(found.values()) <= 3


def test_tables_are_dealt_by_their_load():
    assert dealt({"a": 5.0, "b": 3.0, "c": 2.0, "d": 1.0}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_a_run_takes_what_moves_fewer_bytes():
    flags = {"data": "synthetic:sessions", "model": "dlrm-tiny", "dim": 4, "batch": 32, "steps": 2, "shards": 2}
    chosen = placement_of(Train.of(**flags, placement="auto").recipe, 2)
    assert chosen and {*chosen.values()} <= {0, 1}
    assert (
        placement_of(Train.of(**flags, placement="rows").recipe, 2) == placement_of(Train.of(**flags).recipe, 1) == {}
    )


A, B = ({"name": table.name, "rows": table.rows, "dim": table.dim} for table in TABLES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ranks": 3}, "a plan for 3 trainers, and there are 2"),
        ({"tables": [A | {"at": 0}]}, "table 'b' is absent in the plan and .* here: make the plan again"),
        ({"tables": [A | {"at": 0}, B | {"rows": 3, "at": 0}]}, r"table 'b' is \[3, .*\] in the plan and"),
        ({"tables": [A | {"at": 2}, B | {"at": None}]}, "table 'a' at 2: name ranks below 2"),
        ({"tables": [A | {"at": {"0": 2, "2": 2}}, B | {"at": 0}]}, "ranks below 2"),
        ({"tables": [A | {"at": {"0": 4, "1": 0}}, B | {"at": 0}]}, "and columns above 0"),
        ({"tables": [A | {"at": {"0": 1, "1": 1}}, B | {"at": 0}]}, "4 in all"),
        ({"tables": [A | {"at": 0}, B | {"at": 0}, B | {"at": 0}]}, "it has table 'b' twice"),
        ({"format": "other"}, "it is no plan of tables in format 1: make the plan again, or leave placement out"),
        ({"tables": "none"}, "it is damaged"),
    ],
)  # fmt: skip
def test_another_plan_is_refused(tmp_path, change, said):
    path = tmp_path / "plan.json"
    plan = Plan(2, (PlacedTable(*A.values(), 1), PlacedTable(*B.values(), None)))
    plan.save(path)
    assert Plan.load(path) == plan and read(path, TABLES, 2) == {"a": 1}
    path.write_text(json.dumps(json.loads(plan.text()) | change))
    with pytest.raises(ValueError, match=said):
        read(path, TABLES, 2)
    path.write_bytes(path.read_bytes()[:-9] + b"\xff")
    with pytest.raises(ValueError, match="it is no JSON, or not all of it: make the plan again"):
        read(path, TABLES, 2)
    with pytest.raises(ValueError, match="placement is 'colums': set it to auto, rows, whole, columns, mixed, or to a"):
        StepFlags(placement="colums")
