"""A few runs that together cover everything that happens to a row. They take seconds, with or without compiled kernels."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import skirl
from skirl import FTRL, SGD, Adagrad, Adam, Constant, KeyedJagged, Normal, RowwiseAdagrad, Table, Uniform
from skirl.data import Synthetic
from skirl.engine.capacity import DoesNotFit
from skirl.engine.kernels import cpu
from skirl.oracle.bank import BankPlanner
from skirl.oracle.route import FailedElsewhere
from skirl.oracle.seen import Seen
from tests import runs, test_trainers
from tests.checkpoint.checks import CHECKS
from tests.data.test_share import check_shards
from tests.engine.kernels import test_tree
from tests.oracle.execute import Cache
from tests.oracle.traces import SCHEMA, keys_of
from tests.pipeline import test_shards
from tests.runs import Case, Part, Run
from tests.store.disk.crashing import KINDS, SCRIPTS, crash_everywhere, make_small
from tests.sweep import runs as sweeps
from tests.sweep.test_sweep import MIXED
from tests.test_trainers import test_a_step_that_overflows_on_one_trainer_is_skipped_by_all as overflows

TABLES = (
    Table("a", 60, 3, features=("x", "y"), init=Normal(0.5)),
    Table("b", 50_000_000, 4, pooling="mean", init=Uniform(0.5)),
    Table("c", 40, 3, pooling="mean", init=Constant(0.0)),
)
ONE_DIM = (Table("a", 60, 3, features=("x", "y")), Table("c", 40, 3, pooling="mean"))
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
    "lru": Case(
        TABLES, RowwiseAdagrad(lr=0.1, weight_decay=0.01), (Part(0, 14),), policy="lru", prefetch=5, lost=0.2
    ),
    "lfu": Case(ONE_DIM, Adagrad(lr=0.1, clip=0.05), (Part(0, 14),), policy="lfu", dtype=torch.float64),
    "slow writes": Case(ONE_DIM, Adam(lr=0.05), (Part(0, 24),), slow_write=0.03, evaluate=0.2, universe=40, spare=3),
    "two banks": Case(TABLES, SGD(lr=0.1), (Part(0, 24),), slow_write=0.01, sizes=(2, 2), longest=1, prefetch=0, depth=8),
    "long ago": Case(
        ONE_DIM, SGD(lr=0.1), (Part(0, 40),), slow_write=0.02, prefetch=0, sizes=(1, 2), longest=1, depth=2, spare=4,
        universe=12,
    ),
    "tight epoch": Case(ONE_DIM, SGD(lr=0.1), (Part(0, 30),), depth="epoch", universe=60, sizes=(1, 4)),
}  # fmt: skip

TRAINERS = {
    "three trainers": test_trainers.Case(trainers=3, shards=8, optimizer=Adam(lr=0.05), cache=40, steps=4, lost=0.3),
    "rows that return": test_trainers.RETURNING[0],
    "naps": test_trainers.Case(slow=0.003),
}


def too_large(ahead: bool) -> None:
    """Check that one row too many for the cache is refused, in the loop, by the right name."""
    embeddings = skirl.EmbeddingBagCollection([Table("a", 10, 2)], optimizer=SGD(), cache=3)
    batch = KeyedJagged.one_hot(["a"], torch.arange(4).reshape(-1, 1))
    with pytest.raises(DoesNotFit, match="batch 0 needs 4"):
        if not ahead:
            embeddings(batch)
        with skirl.lookahead([batch], embeddings, sparse=lambda ids: ids, timeout=runs.TIMEOUT) as batches:
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


def shards(shift: int) -> None:
    """Run steps of shards, with their dense gradients and random numbers; some shards have no backward."""
    case = test_shards.Case(8, seed=shift, steps=3, lost=0.2, optimizer=SGD(lr=0.1))
    test_shards.check_equal(test_shards.with_skirl(case), test_shards.in_plain_python(case))


def tree(shift: int) -> None:
    """Sum rows that are hot in several micro-batches, and rows without a gradient in some."""
    for hot in (True, False):
        step = test_tree.Step(shift, 3, np.float32, [0, 1, 2, 3, 6], scaled=True, dead=True, hot=hot)
        test_tree.check(step, cpu.update_kernel(None))


def one_process(shift: int) -> dict[str, Callable[[], object]]:
    """Plans, and runs compared with the plain reference."""
    return {
        "plans": lambda: plans(shift),
        "batch too large": lambda: too_large(False),
        "batch too large for a lookahead": lambda: too_large(True),
        **{name: lambda case=case: Run(replace(case, seed=case.seed + shift)).go() for name, case in CASES.items()},
        "shards": lambda: shards(shift),
        "tree": lambda: tree(shift),
    }


def trainers(shift: int) -> dict[str, Callable[[], object]]:
    """Several trainers in threads, compared with the plain reference."""

    def run(case: test_trainers.Case) -> None:
        with pytest.MonkeyPatch.context() as patch:
            test_trainers.check(replace(case, seed=case.seed + shift, timeout=runs.TIMEOUT), patch)

    def too_small() -> None:
        with pytest.raises((DoesNotFit, FailedElsewhere), match=r"rank [01]"):
            test_trainers.together(test_trainers.Case(shards=2, cache=4, depth=1, steps=2, timeout=runs.TIMEOUT))

    return {
        "shards of data": lambda: check_shards(Synthetic("tiny", 8, batches=3), 8, 4, 2),
        "a cache that is too small": too_small,
        **{name: lambda case=case: run(case) for name, case in TRAINERS.items()},
        "a step that overflows": overflows,
    }


def variants(shift: int) -> dict[str, Callable[[], object]]:
    """Variants of a sweep, each compared with its lone run."""

    def resumed() -> None:
        with tempfile.TemporaryDirectory() as folder:
            sweeps.check(replace(case, resumed=3, folder=Path(folder)), plain=False)

    case = sweeps.Case(MIXED, seed=shift)
    return {
        "mixed": lambda: sweeps.check(case),
        "micro-batches": lambda: sweeps.check(replace(case, accumulate=2)),
        "resumed": resumed,
    }


def crashes(shift: int, script: str) -> None:
    """Kill a store on disk, or cut its power, at each call of a workload."""
    memory = Path("/dev/shm")
    folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
    with pytest.MonkeyPatch.context() as patch, folder as name:
        make_small(patch)
        for kind in KINDS:
            crash_everywhere(Path(name), shift, script, kind)


def battery(area: str, shift: int) -> dict[str, Callable[[], object]]:
    """Return the checks that have to catch the faults of an area; `shift` is added to their seeds."""
    if area == "checkpoints":
        return dict(CHECKS)
    if area == "trainers":
        return trainers(shift)
    if area == "sweep":
        return variants(shift)
    if area in ("disk", "frozen"):  # the first script hardly touches frozen rows
        scripts = SCRIPTS if area == "disk" else SCRIPTS[:0:-1]
        return {script: lambda script=script: crashes(shift, script) for script in scripts}
    return one_process(shift)


def first_failure(area: str, shift: int) -> str | None:
    """Return the first check that fails, with its message; None if all pass."""
    for name, check in battery(area, shift).items():
        try:
            check()
        except BaseException as error:
            return f"{name}: {type(error).__name__}: {error}"
    return None
