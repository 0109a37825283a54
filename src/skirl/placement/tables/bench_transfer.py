"""`skirl bench place --part transfer`: use the costs of one setting in others, after a minute of calibration."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skirl.placement.tables.bench_plans import BATCH, FULL, SEARCH
from skirl.placement.tables.bench_search import LINK, problem_of
from skirl.placement.tables.calibrate import Measured, costs_of, held_out, training
from skirl.placement.tables.costs import Costs, shipped
from skirl.placement.tables.measure import MeasuredTables, rounds_of
from skirl.placement.tables.pool import pool, task
from skirl.placement.tables.search import search
from skirl.placement.tables.timed import measure

MINUTE = 60.0
RANKS, DIM = 4, 128
CALIBRATED, TRAINED, JUDGES, ROUNDS = 60, 200, 50, 5


@dataclass(frozen=True)
class TransferSetting:
    """A setting for costs. Bundled ones are of three optimizers, batches of 256 to 1024, one thread and wide loops.

    **Arguments**

    - `optimizer`: the row optimizer.
    - `batch`: samples of the tasks and of what is measured.
    - `threads`: threads of a rank.
    - `plain`: whether rows take the plain loops.
    """

    optimizer: str = "rowwise-adagrad"
    batch: int = BATCH
    threads: int = 1
    plain: bool = False


SETTINGS = {
    "adam, batch of 128": TransferSetting(optimizer="adam", batch=128),
    "two threads": TransferSetting(threads=2),
    "plain loops": TransferSetting(plain=True),
}


def transfer(tasks: int, seed: int) -> dict[str, Any]:
    """Measure the busiest rank under plans by calibrated costs, against plans by costs that were trained there in full.

    **Arguments**

    - `tasks`: number of tasks of each setting.
    - `seed`: the random seed.
    """
    by_setting, seconds = {}, []
    for name, setting in SETTINGS.items():
        found = _setting(setting, tasks, seed)
        seconds.append(found.pop("seconds"))
        by_setting[name] = found
    vs = {kind: [of[kind] for of in by_setting.values()] for kind in ("vs_full", "as_shipped")}
    return {
        "tasks": tasks * len(SETTINGS),
        "vs_full": float(np.mean(vs["vs_full"])),
        "vs_full_worst": max(vs["vs_full"]),
        "as_shipped_vs_full": float(np.mean([of for of in vs["as_shipped"] if of is not None])),
        "calibration_seconds": max(seconds),
        "noise": max(of["noise"] for of in by_setting.values()),
        "by_setting": by_setting,
    }


def _setting(setting: TransferSetting, tasks: int, seed: int) -> dict[str, Any]:
    arena = MeasuredTables(plain=setting.plain, threads=setting.threads)
    bundle = shipped(LINK, RANKS)
    near = (setting.batch // 2, setting.batch, 2 * setting.batch)
    began = time.monotonic()
    calibrated = _costs(arena, setting, near, CALIBRATED, CALIBRATED // 4, seed, bundle, until=began + MINUTE)
    seconds = time.monotonic() - began
    full = _costs(arena, setting, near, TRAINED, JUDGES, seed + 1, None, until=np.inf)
    kinds: dict[str, Costs] = {"calibrated": calibrated, "full": full}
    if setting.optimizer in bundle.ms:
        kinds["shipped"] = bundle
    rng, ratios, noise = np.random.default_rng(seed), list[Mapping[str, float]](), list[float]()
    made = pool(150, batch=setting.batch, max_dim=DIM, seed=seed + 2000, optimizer=setting.optimizer)
    for _ in range(tasks):
        of = task(made, int(rng.integers(10, 41)), RANKS, rng, full=FULL)
        problems = {
            name: problem_of(of, costs=replace(of_costs, link=LINK, ranks=RANKS)) for name, of_costs in kinds.items()
        }
        placed = {name: search(problem, seconds=SEARCH, seed=seed).placed for name, problem in problems.items()}
        timed = measure(arena, of, problems["full"], placed, seed)
        times = timed.times()
        noise.append(timed.noise())
        ratios.append({name: busiest / times["full"][0] for name, (busiest, *_) in times.items()})
    mean = {name: float(np.mean([ratio[name] for ratio in ratios])) for name in kinds}
    return {
        "vs_full": mean["calibrated"], "as_shipped": mean.get("shipped"), "seconds": seconds,
        "noise": float(np.median(noise)),
        "chosen": calibrated.kind, "error": calibrated.report[calibrated.kind]["median_error"],
        "full_chosen": full.kind, "full_error": full.report[full.kind]["median_error"],
    }  # fmt: skip


def _costs(
    arena: MeasuredTables, setting: TransferSetting, batches: tuple[int, ...], count: int, judges: int, seed: int,
    start: Costs | None, *, until: float,
) -> Costs:  # fmt: skip
    learned = training(setting.optimizer, count, seed, batches)
    judging = held_out(setting.optimizer, judges, seed, batches[:2])
    ready = [c.ready(arena) for c in (*learned, *judging)]
    ms = rounds_of(arena, ready, ROUNDS, seed, late=lambda: time.monotonic() > until - MINUTE / 6).min(axis=0)
    return costs_of(Measured(learned, ms[:count]), Measured(judging, ms[count:]), seed, start)
