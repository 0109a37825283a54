"""A few runs that together cover everything that happens to a row. They take seconds, with or without compiled kernels."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import skirl
from skirl import FTRL, SGD, Adagrad, Adam, Constant, KeyedJagged, Normal, RowwiseAdagrad, Table, Uniform
from skirl.core.placement import Placement
from skirl.engine.capacity import DoesNotFit
from skirl.oracle.bank import BankPlanner
from skirl.oracle.seen import Seen
from skirl.oracle.together import FailedElsewhere
from tests import runs
from tests.checkpoint.checks import CHECKS
from tests.engine.device.hazards import hazards
from tests.faults.run import DISK_AREAS
from tests.oracle.execute import Cache
from tests.oracle.traces import SCHEMA, keys_of
from tests.runs import Case, Part, Run
from tests.store.disk.crashing import KINDS, SCRIPTS, Hooked, crash_everywhere, make_small
from tests.test_exact_torch import test_trained_weights_get_the_gradient_of_per_sample_weights as trained_weights

TABLES = (
    Table("a", 60, 3, features=("x", "y"), init=Normal(0.5)),
    Table("b", 50_000_000, 5, pooling="mean", init=Uniform(0.5)),
    Table("c", 40, 3, pooling="mean", init=Constant(0.0)),
)
TWO = [Table("a", 10, 2), Table("b", 10, 2)]
ONE_DIM = (Table("a", 60, 3, features=("x", "y")), Table("c", 40, 3, pooling="mean"))
BEGUN = (
    Table("a", 60, 3, features=("x", "y"), init=np.arange(180, dtype=np.float32).reshape(60, 3) / 7),
    Table("b", 40, 5, pooling="mean", init=-np.arange(200, dtype=np.float32).reshape(40, 5) / 9),
    Table("c", 40, 3, pooling="mean", init=Constant(0.0)),
)
STORMY = (Part(0, 14, (9,)), Part(9, 14), Part(0, 6, alone=True), Part(4, 14, (None, 5)), Part(14, 20, (3,)))

CASES = {
    "plain": Case(ONE_DIM, SGD(lr=0.3), (Part(0, 16),), universe=16, longest=4, weights=1.0),
    "by table": Case(
        (*TABLES, Table("d", 40, 3)), {"a": FTRL(lr=0.3, l1=0.01), "b": SGD(lr=0.1), "c": SGD(lr=0.3, momentum=0.9),
        "d": SGD(lr=0.1, momentum=0.5, weight_decay=0.1)}, (Part(0, 16),), universe=16, use="some", gamma=0.9, frozen=("b",),
    ),
    "frozen": Case(ONE_DIM, SGD(lr=0.1), (Part(0, 10),), use="stacked", frozen=("c",)),
    "everything": Case(
        TABLES, Adam(lr=0.05), STORMY, depth=3, use="some", lost=0.3, evaluate=0.2, weights=0.5, gamma=0.9, fresh=False,
        universe=60,
    ),
    "epoch": Case(
        TABLES, Adagrad(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1), (Part(0, 14, (None, None)),),
        depth="epoch", accumulate=2, use="some", lost=0.3, fresh=False, universe=12,
    ),
    "deep": Case(TABLES, Adam(lr=0.05), (Part(0, 40),), depth=30, spare=12, universe=40, sizes=(2, 5)),
    "warm": Case(ONE_DIM, SGD(lr=0.1), (Part(0, 20, (None, None, 7)),), depth=4, spare=6),
    "lru": Case(
        TABLES, RowwiseAdagrad(lr=0.1, weight_decay=0.01), (Part(0, 14),), policy="lru", prefetch=5, lost=0.2
    ),
    "lfu": Case(ONE_DIM, Adagrad(lr=0.1, clip=0.05), (Part(0, 14),), policy="lfu", dtype=torch.float64),
    "ttl": Case(ONE_DIM, SGD(lr=0.1), (Part(0, 14),), policy="ttl", depth=3),
    "stacked": Case(ONE_DIM, RowwiseAdagrad(lr=0.1), (Part(0, 10, (7,)), Part(7, 10)), use="stacked", prefetch=0),
    "unpooled": Case(TABLES, Adam(lr=0.05), (Part(0, 10),), unpooled=True, use="some", accumulate=3),
    "alone": Case(TABLES, Adam(lr=0.05, clip=0.05), (Part(0, 12, alone=True),), evaluate=0.3, weights=0.5),
    "slow writes": Case(ONE_DIM, Adam(lr=0.05), (Part(0, 24),), slow_write=0.03, evaluate=0.2, universe=40, spare=3),
    "two banks": Case(TABLES, SGD(lr=0.1), (Part(0, 24),), slow_write=0.01, sizes=(2, 2), longest=1, prefetch=0, depth=8),
    "wide": Case((Table("w", 50, 300),), Adam(lr=0.05), (Part(0, 10),), sizes=(1, 5)),
    "long ago": Case(
        ONE_DIM, SGD(lr=0.1), (Part(0, 40),), slow_write=0.02, prefetch=0, sizes=(1, 2), longest=1, depth=2, spare=4,
        universe=12,
    ),
    "from an array": Case(
        BEGUN, Adagrad(lr=0.1, initial_accumulator_value=0.1), (Part(0, 14, (9,)), Part(9, 14), Part(0, 4, alone=True)),
        depth=3, evaluate=0.2, weights=0.5, universe=30,
    ),
    "shared": Case(
        TABLES, Adagrad(lr=0.1), (Part(0, 8),), shared=1.0, sizes=(3, 6), use="some", evaluate=0.2, weights=0.5, universe=60,
        accumulate=2,
    ),
    "shared, unpooled": Case(ONE_DIM, SGD(lr=0.1), (Part(0, 8),), shared=1.0, sizes=(3, 6), unpooled=True, universe=16),
    "tight epoch": Case(ONE_DIM, SGD(lr=0.1), (Part(0, 30),), depth="epoch", universe=60, sizes=(1, 4)),
}  # fmt: skip


def too_large(ahead: bool) -> None:
    """Check that one row too many for the cache is refused, in the loop, by the right name."""
    embeddings = skirl.EmbeddingBagCollection([Table("a", 10, 2)], optimizer=SGD(), cache=3)
    batch = KeyedJagged.one_hot(["a"], torch.arange(4).reshape(-1, 1))
    with pytest.raises(DoesNotFit, match="batch 0 needs 4" if ahead else "this batch needs 4"):
        if not ahead:
            embeddings(batch)
        with skirl.lookahead([batch], embeddings, sparse=lambda ids: ids, patience=runs.PATIENCE) as batches:
            next(iter(batches))


def plans(shift: int) -> None:
    """Carry out steps as late as they allow, independent of a run's timing: rows return long after they left."""
    rng = np.random.default_rng(shift)
    planner = BankPlanner(SCHEMA, 0, 6, depth=2, seen=Seen(SCHEMA), hold=1, hold_rows=2)
    world = Cache(6, hold=1, hold_rows=2)
    batches = [keys_of(rng.integers(0, 14, 3)) for _ in range(80)]
    planner.enter(batches[0])
    for number, batch in enumerate(batches):
        if number + 1 < len(batches):
            planner.enter(batches[number + 1])
        world.run(planner.plan(), batch)


def both_views() -> None:
    """Take a feature by name and again with all of them, in both orders: gradients must add up."""
    for by_name_first in (True, False):
        embeddings = skirl.EmbeddingBagCollection(TWO, optimizer=SGD(lr=1.0), cache=20)
        ids = KeyedJagged.one_hot(["a", "b"], torch.tensor([[1, 2]]))
        before = embeddings.eval()(ids).stacked().clone()
        out = embeddings.train()(ids)
        views = [lambda out=out: out["a"], out.stacked]
        parts = [view() for view in (views if by_name_first else views[::-1])]
        (parts[0].sum() + parts[1].sum()).backward()
        took = (before - embeddings.eval()(ids).stacked()).round()
        assert took[0, :, 0].tolist() == [2, 1], took


def other_inverse() -> None:
    """Check that a second pass with the same ids in other samples is not taken for a repetition."""
    from tests.nn.test_shared import test_an_epoch_sees_the_inverse

    test_an_epoch_sees_the_inverse()


def found() -> None:
    """Check that the bags found to repeat really do: with few different bags, and with equal hashes."""
    from tests.core.test_find import check

    for seed in range(20):
        check(np.random.default_rng(seed), alike=seed % 2 == 1)


def weights_of_shared_bags() -> None:
    """Check the weights of a feature with a gradient next to a feature without one."""
    from tests.nn.test_shared import test_weights_of_shared_bags_get_their_gradient_where_another_feature_has_none

    test_weights_of_shared_bags_get_their_gradient_where_another_feature_has_none()


def unused_bags() -> None:
    """Check that bags which no sample uses train no row, and that their weights get no gradient."""
    from tests.nn import test_shared

    test_shared.test_bags_that_no_sample_has_are_not_trained(skirl.EmbeddingBagCollection, False)
    test_shared.test_weights_of_bags_that_no_sample_has_get_no_gradient()


def encoded() -> None:
    """Check that encoders, and models over histories, give what they give for every sample by itself."""
    from skirl.models import DCAT, DIN
    from tests.core import test_once
    from tests.models import test_dcat

    test_once.test_gradients_are_summed_sample_by_sample_from_zero()
    test_once.test_wrong_use_gets_a_sentence()
    for case in ("all equal", "distinct and in another order"):
        test_once.test_an_encoder_runs_as_over_every_sample(case)
    for shape in ("sessions", "in no order"):
        for kind in (DCAT, DIN):
            test_dcat.test_shared_histories_are_those_of_every_sample(kind, shape)
    test_dcat.test_a_history_agrees_with_an_ordinary_transformer()


def battery(shift: int) -> dict[str, Callable[[], object]]:
    """Return all checks; `shift` is added to the seeds of the runs."""
    return {
        "plans": lambda: plans(shift),
        "batch too large": lambda: too_large(False),
        "batch too large for a lookahead": lambda: too_large(True),
        **{name: lambda case=case: Run(replace(case, seed=case.seed + shift)).go() for name, case in CASES.items()},
        "both views": both_views,
        "found": found,
        "another inverse": other_inverse,
        "trained weights": lambda: trained_weights(True, "cpu"),
        "weights of shared bags": weights_of_shared_bags,
        "unused bags": unused_bags,
        "shards": lambda: shards(shift),
        "tree": lambda: tree(shift),
        "encoded": encoded,
    }


def shards(shift: int) -> None:
    """Run steps of shards, with their dense gradients and random numbers; some shards have no backward."""
    from tests.pipeline.test_shards import Case, check_equal, in_plain_python, with_skirl

    case = Case(8, seed=shift, steps=3, lost=0.2, optimizer=SGD(lr=0.1))
    check_equal(with_skirl(case), in_plain_python(case))


def tree(shift: int) -> None:
    """Sum rows that are hot in several micro-batches, and rows without a gradient in some."""
    from tests.engine.kernels.test_tree import Step, check, sums

    for hot in (True, False):
        check(Step(shift, 3, np.float32, [0, 1, 2, 3, 6], scaled=True, dead=True, hot=hot), sums)


def trainers(shift: int) -> dict[str, Callable[[], object]]:
    """Return checks of several trainers in threads, some with shards that are not a whole subtree, against the plain
    reference."""
    from skirl.data import Synthetic
    from tests.data.test_share import check_shards
    from tests.oracle.test_share import check_plans
    from tests.pipeline.test_shards import test_random_numbers_do_not_depend_on_the_trainer as random_numbers
    from tests.test_trainers import RETURNING, Case, check, together
    from tests.test_trainers import test_a_step_that_overflows_on_one_trainer_is_skipped_by_all as overflows

    def run(case: Case) -> None:
        with pytest.MonkeyPatch.context() as patch:
            check(replace(case, seed=case.seed + shift, patience=runs.PATIENCE), patch)

    def too_small() -> None:
        with pytest.raises((DoesNotFit, FailedElsewhere), match=r"rank [01]"):
            together(Case(shards=2, cache=4, depth=1, steps=2, patience=runs.PATIENCE))

    cases = {
        "three trainers": Case(trainers=3, shards=8, optimizer=Adam(lr=0.05), cache=40, steps=4, lost=0.3),
        "rows that return": RETURNING[0],
        "mostly without gradient": Case(trainers=3, shards=4, optimizer=Adam(lr=0.05), cache=40, steps=6, lost=0.9),
        "naps": Case(slow=0.003),
    }
    return {
        "random numbers": random_numbers,
        "numbers of an owner's rows": lambda: [check_plans(20 * shift + n, n % 4) for n in range(12)],
        **{name: lambda case=case: run(case) for name, case in cases.items()},
        "a step that overflows": lambda: overflows(3, None),
        "a cache that is too small": too_small,
        "shards of data": lambda: check_shards(Synthetic("tiny", 8, batches=3), 8, 4, 2),
    }


def gpu(shift: int, *, runs: int, whole: bool) -> dict[str, Callable[[], object]]:
    """Return checks of all orders that the pipeline allows, and whole runs."""
    on_gpu = {"seed": shift, "device": "interpret", "eager": 0.3}
    names = ("alone", "plain", "everything", "shared") if whole else ()
    return {
        "hazards": lambda: hazards(range(runs * shift, runs * (shift + 1))),
        **{name: lambda name=name: Run(replace(CASES[name], **on_gpu)).go() for name in names},
        "trained weights": lambda: trained_weights(True, "interpret"),
    }


def in_folder(check: Callable[..., object], *args: object) -> None:
    """Run a check in a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        check(Path(name), *args)


def sessions(shift: int) -> dict[str, Callable[[], object]]:
    """Return checks of sessions shuffled in chunks, of their states, and of rows by session."""
    from tests.data.files.test_session_order import check_chunks, check_states, check_windows
    from tests.dedup import test_by_session as by_session
    from tests.dedup.test_analyze import test_a_sample_has_whole_sessions_and_keeps_to_its_memory as sample

    users = by_session.Sessions(layout="rows", user="user", gap="20s", partition="100s")
    return {
        "chunks": lambda: in_folder(check_chunks, 150, 20, 3, 70, 7, shift),
        "windows": lambda: in_folder(check_windows, shift),
        "states": lambda: in_folder(check_states, shift),
        "sample": sample,
        "units": lambda: in_folder(by_session.test_times_count_what_the_schema_says, "milliseconds"),
        "users": lambda: in_folder(by_session.check_sessions, 300, 20, shift, users),
        "sums": lambda: [by_session.check_sums(*pair) for pair in by_session.PAIRS],
    }


def layouts(shift: int) -> dict[str, Callable[[], object]]:
    """Return checks of files by session, with lists left out: what they read, and what they refuse."""
    from tests.dedup import test_once as once

    return {
        "empty": lambda: in_folder(once.test_an_empty_list_stays_one),
        "once": lambda: in_folder(once.check_batches, 60, 5, shift, 7),
        **{
            f"once, {name}": lambda name=name: in_folder(once.test_damaged_files_are_refused, name)
            for name in once.DAMAGES
        },
    }


def crashes(shift: int, scripts: Sequence[str], kinds: Sequence[type[Hooked]] = KINDS) -> None:
    """Kill a store on disk, or cut its power, at each call of some workloads."""
    memory = Path("/dev/shm")
    folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
    with pytest.MonkeyPatch.context() as patch, folder as name:
        make_small(patch)
        crash_everywhere(Path(name), shift, times=1, scripts=scripts, kinds=kinds)


def placement(sound: bool) -> dict[str, Callable[[], object]]:
    """Return checks of plans of tables and of rows, and of stores of several sites, as their own tests run them."""
    from tests.core import test_placement, test_placement_plan
    from tests.placement import test_command, test_measure, test_nets, test_search
    from tests.placement.torchrec import test_sharding
    from tests.store.placed import test_store
    from tests.tools import test_sealed_json

    def wrong_files(folder: Path) -> None:
        check: Any = test_placement_plan.test_a_wrong_file_is_refused_in_a_sentence
        [mark] = check.pytestmark
        for text, says in mark.args[1]:
            test_placement_plan.test_a_wrong_file_is_refused_in_a_sentence(text, says, folder)

    def where_rows_are() -> None:
        cuts = test_store.CUTS
        placement = Placement(3, cuts[0], dict(enumerate(cuts)), "sites")
        rows = [*range(30), 1499, 1500, 1501, *(row * row * 7919 for row in range(200, 700))]
        keys = [table << 48 | row for table in range(8) for row in rows]
        assert placement.site_of(np.array(keys)).tolist() == [test_placement.site_by_hand(placement, k) for k in keys]

    def in_folder(check: Callable[[Path], object]) -> Callable[[], object]:
        def run() -> None:
            with tempfile.TemporaryDirectory() as name:
                check(Path(name))

        return run

    def wrong_table_plans() -> None:
        check: Any = test_command.test_a_plan_that_does_not_cover_is_refused
        [mark] = check.pytestmark
        for pieces, says in mark.args[1]:
            check(pieces, says)

    def patched(check: Callable[..., object]) -> Callable[[Path], object]:
        def run(folder: Path) -> None:
            with pytest.MonkeyPatch.context() as patch:
                check(folder, patch)

        return run

    of_fbgemm: dict[str, Callable[[], object]] = {}
    if find_spec("fbgemm_gpu") is not None:
        from tests.placement import test_fbgemm

        arena = test_fbgemm.FbgemmArena(1 << 19)
        of_fbgemm["FBGEMM's operator"] = in_folder(
            patched(lambda _, patch: test_fbgemm.check_step(arena, patch, "rowwise-adagrad"))
        )

    checks: dict[str, Callable[[], object]] = {
        "wrong plans": in_folder(wrong_files),
        "where rows are": where_rows_are,
        "counts of sites": test_store.test_every_row_is_where_the_plan_says_and_is_counted,
        "wrong plans of tables": wrong_table_plans,
        "even rows": test_search.test_small_tables_are_cut_as_they_have_to_be,
        "blocks": test_search.test_blocks_together_take_what_each_takes,
        "TorchRec's names": test_sharding.test_ways_have_torchrecs_names_and_order,
        "what TorchRec cannot run": test_sharding.test_what_torchrec_would_run_otherwise_is_refused,
        "every cell": lambda: [test_search.every_cell(seed, 0.9) for seed in range(6)],
        "all placements": lambda: [test_search.test_no_placement_is_much_better(*of) for of in test_search.SMALL[:3]],
        "pins": test_search.test_what_may_not_move_or_be_cut_stays,
        "nets": test_nets.test_what_a_net_says_is_what_it_is_by_hand,
        "a search by a net": test_nets.test_a_search_goes_by_what_ranks_have_together,
        "a plan that stays": in_folder(lambda folder: test_sealed_json.plan_stays(folder, pytest.MonkeyPatch())),
        "changed plans": in_folder(test_search.test_a_plan_file_comes_back_and_knows_its_tables),
        "costs of a piece": test_search.test_costs_and_cuts_are_those_of_the_piece,
        "every bit": test_store.TestPlacedStore().test_every_bit_comes_back,
        "half loaded": in_folder(test_store.half_loaded),
        "a lost site": in_folder(test_store.lost_site),
        "rows that move": in_folder(lambda folder: test_store.rows_move(folder, test_store.CUTS[::-1])),
        "sites on disk": in_folder(test_store.test_sites_on_disk_take_all_or_nothing_and_know_their_placement),
        "measured": test_measure.measured,
        "mixed": in_folder(test_store.test_sites_of_mixed_kinds_are_frozen_as_on_disk_and_taken_by_any),
        "gone": in_folder(test_store.test_rows_on_disk_whose_neighbours_were_in_memory_are_not_trained_further),
        "kernels": in_folder(test_nets.kernels),
        **of_fbgemm,
    }
    return dict(list(checks.items())[:3]) if sound else checks


def sweep(shift: int) -> dict[str, Callable[[], object]]:
    """Small sweeps, and loops that are wrong; the seed of the batches is shifted."""
    from tests.sweep import (
        test_crews,
        test_epochs,
        test_files,
        test_judged,
        test_race,
        test_refused,
        test_variants,
    )  # fmt: skip
    from tests.sweep.runs import Case, Of, check

    few = (Of(lr=0.3, dropped=3), Of(dropout=0.5, seed=1), Of(rule=Adam(), seed=1), Of(nan=2, seed=2))
    wide = (Of(), Of(dim=6, rule=SGD(momentum=0.9), warm=True), Of(rule={"a": Adagrad(), "*": SGD()}))
    cases = {
        "alike": Case(few, seed=shift, steps=6, own_loop=True, slots=34),
        "lanes": Case((*few, Of(dropout=0.3), Of(dropout=0.2, noise=0.1)), seed=shift, steps=6, form="lanes", slots=34),
        "other banks": Case(wide, seed=shift, steps=4),
        "micro-batches": Case(few[:2], seed=shift, steps=3, accumulate=2, own_loop=True),
    }
    race = (test_race, test_epochs)
    [bodies, *_] = (mark for mark in test_refused.test_a_wrong_loop.pytestmark if mark.name == "parametrize")
    return {
        "race": lambda: [each() for module in race for each in module.FOR_FAULTS],
        "configurations": test_variants.check_configurations,
        **{name: lambda case=case: check(case, plain=False) for name, case in cases.items()},
        "wrong loops": lambda: [test_refused.test_a_wrong_loop(body, says) for body, says in bodies.args[1]],
        "dealt": test_crews.check_dealt,
        "processes": lambda: in_folder(test_crews.check_processes),
        "judged": lambda: in_folder(test_judged.check_judged),
        "files": lambda: [in_folder(test_files.check_end, "csv", "held out", n) for n in (1, 2)],
        "epochs": lambda: [in_folder(check) for check in test_epochs.CHECKS],
        "the last step": lambda: in_folder(test_judged.check_the_last_step),
        "cache": lambda: test_refused.test_a_cache_without_room_for_one_batch_of_every_variant("40B"),
        "shared": lambda: [
            test_refused.test_a_sweep_that_cannot_be_made(*test_refused.REFUSED[n]) for n in range(-2, 0)
        ],
    }


def run_battery(
    shift: int = 0, area: str = "", sound: bool = False, third: int | None = None, first: str = ""
) -> str | None:
    """Return the first check that fails, with its message; None if all pass. sound: no fault is planted, so be brief.

    third: three areas share the battery, and this one runs every third check. first: the check to run before all
    others.
    """
    checks = dict(list(battery(shift).items())[third::3]) if third is not None else battery(shift)
    if area in DISK_AREAS:
        scripts = SCRIPTS if area == "disk" else SCRIPTS[:0:-1]  # the first script hardly touches frozen rows
        checks = {script: lambda script=script: crashes(shift, [script]) for script in scripts}
        if sound:  # tests/store/disk/test_crash.py runs all of them
            checks = {"sound": lambda: crashes(shift, scripts[:1], KINDS[:1])}
    if area == "checkpoints":
        checks = dict(
            list(CHECKS.items())[: 1 if third is not None else None]
        )  # tests/checkpoint/test_saving.py runs all
    if area == "placement":
        checks = placement(sound)
    if area == "trainers":
        checks = trainers(shift)
        if sound:  # tests/test_trainers.py runs more of them
            checks = dict(list(checks.items())[:2])
    if area == "sessions":
        checks = sessions(shift)
        if sound:  # their own tests run more
            checks = {"windows": checks["windows"]}
    if area == "layouts":
        checks = layouts(shift)
        if sound:  # tests/dedup runs more of them
            checks = dict(list(checks.items())[:2])
    if area == "sweep":
        checks = sweep(shift)
    if area == "gpu":
        checks = gpu(
            shift, runs=2 if sound else 12, whole=not sound and not shift
        )  # tests of the device make whole runs
    if first and first not in checks:
        raise LookupError(f"no check is called {first!r}: there are {', '.join(checks)}")
    for name in sorted(checks, key=lambda name: name != first):  # the others keep their order
        try:
            checks[name]()
        except BaseException as error:
            return f"{name}: {type(error).__name__}: {error}"
    return None
