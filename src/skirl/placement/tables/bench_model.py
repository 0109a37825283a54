"""`skirl bench place --part model`: measure both kinds of costs on tables and batch sizes that neither has seen."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skirl.placement.tables.backends import arena_of
from skirl.placement.tables.calibrate import (
    JUDGING,
    Combination,
    Measured,
    combinations_of,
    costs_of,
    error,
    held_out,
    tau,
    training,
)
from skirl.placement.tables.costs import Costs
from skirl.placement.tables.measure import MeasuredTables, noise_of, rounds_of
from skirl.placement.tables.named import OURS, PRODUCTION, Backend
from skirl.placement.tables.published import pool_of
from skirl.placement.tables.terms import TERMS
from skirl.placement.torchrec import fitted as torchrec_fitted
from skirl.placement.torchrec import theirs

OPTIMIZER = "rowwise-adagrad"
BATCHES = {"": 512, "other_batch_": 768}
"""Samples of a step: a batch size that costs are fitted to, and one that they are not."""
TRAINED, JUDGES, TESTED = 200, 60, 80
ROUNDS = 6
WIRE_RANKS = 2


def fit(
    arena: MeasuredTables, optimizer: str, seed: int, tests: Sequence[Combination] = (), *, count: int = TRAINED,
    judges: int = JUDGES, start: Costs | None = None, batches: Sequence[int] | None = None, backend: Backend = OURS,
) -> tuple[Costs, np.ndarray]:  # fmt: skip
    """Fit costs of this machine. Return them, and rounds of other combinations measured in turn with those of the fit.

    **Arguments**

    - `arena`: the arena to measure in.
    - `optimizer`: the row optimizer.
    - `seed`: the random seed.
    - `tests`: the other combinations.
    - `count`, `judges`: number of combinations to learn from, and to choose the kind by.
    - `start`: costs to start from.
    - `batches`: batch sizes to measure; those of `skirl place costs` if not given.
    - `backend`: the kernels that the arena runs; skirl's on the CPU by default.
    """
    more = () if batches is None else (batches,)
    learned, judging = training(optimizer, count, seed, *more), held_out(optimizer, judges, seed, *more)
    rounds = rounds_of(arena, [c.ready(arena) for c in (*learned, *judging, *tests)], ROUNDS, seed)
    ms, mine = rounds.min(axis=0), len(learned) + len(judging)
    parts = Measured(learned, ms[: len(learned)]), Measured(judging, ms[len(learned) : mine])
    costs = costs_of(*parts, seed, start, backend)
    return replace(costs, noise=noise_of(rounds[:, :mine])), rounds[:, mine:]


def model(seed: int, backend: Backend = OURS, pool: str = PRODUCTION, tested: int = TESTED) -> dict[str, Any]:
    """Measure how far predictions are off for held-out tables, at a batch size that costs are fitted to and at another.

    **Arguments**

    - `seed`: the random seed.
    - `backend`: the kernels to measure; skirl's on the CPU by default.
    - `pool`: the pool of the held-out tables; costs are fitted to generated ones.
    - `tested`: held-out combinations of each batch size; those that are learned from and that judge are in proportion.
    """
    tests = {}
    for name, batch in BATCHES.items():
        tables = pool_of(pool, tested, batch=batch, max_dim=128, seed=seed + 1000 + batch, optimizer=OPTIMIZER)
        tests[name] = combinations_of(tables, tested, np.random.default_rng([seed, batch]))
    flat = [c for some in tests.values() for c in some]
    count, judges = (max(of * tested // TESTED, JUDGING) for of in (TRAINED, JUDGES))
    costs, all_rounds = fit(arena_of(backend), OPTIMIZER, seed, flat, count=count, judges=judges, backend=backend)
    found: dict[str, Any] = {}
    for n, (name, some) in enumerate(tests.items()):
        rounds = all_rounds[:, n * tested : (n + 1) * tested]
        found |= compared(name, costs, Measured(some, rounds.min(axis=0)), rounds)
    facts = {"trained": count, "judges": judges, "tested": tested, "noise": costs.noise}
    return facts | found | {"chosen": costs.kind, "why": costs.report["why"]} | exchange(seed)


def compared(name: str, costs: Costs, tests: Measured, rounds: np.ndarray) -> dict[str, Any]:
    """Return the figures of one batch size: of the chosen kind, of both kinds, of simple rules, and of measuring again.

    **Arguments**

    - `name`: prefix of the figures' names.
    - `costs`: costs of both kinds.
    - `tests`: the measured combinations.
    - `rounds`: rounds of their measurement.
    """
    ms, sets = tests.ms, [combination.pieces for combination in tests.combinations]
    said: dict[str, np.ndarray] = {"": costs.together(sets)}
    said |= {f"{kind}_": replace(costs, kind=kind).together(sets) for kind in ("additive", "net")}
    terms = np.array([combination.terms() for combination in tests.combinations])
    dims = np.array([sum(dim for *_, dim in of) for of in sets])
    for rule, sums in (("dim_", dims), ("lookup_", terms[:, TERMS.index("ids*dim")])):
        said[rule] = sums * np.median(ms / sums)
    if theirs.there():
        config = torchrec_fitted.hardware_config(replace(costs, kind="additive"), OPTIMIZER)
        said |= theirs.said_of(sets, ms, config)
    found = {f"{name}tau_ceiling": tau(rounds[::2].min(axis=0), rounds[1::2].min(axis=0))}
    found[f"{name}median_noise"] = noise_of(rounds)
    for kind, of in said.items():
        found |= {f"{name}{kind}tau": tau(of, ms), f"{name}{kind}median_error": error(of, ms)}
    return found


def exchange(seed: int) -> dict[str, Any]:
    """Measure how well a latency and a rate, or nets, predict an exchange; "unvalidated" if repeats vary too much.

    **Arguments**

    - `seed`: the random seed.
    """
    from skirl.placement.tables import wire_fit

    said = wire_fit.measured(WIRE_RANKS, max(BATCHES.values()), seed).said()
    return {"exchange": said.pop("kind")} | {f"exchange_{name}": of for name, of in said.items()}
