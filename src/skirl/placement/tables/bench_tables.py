"""The parts of `skirl bench place` about tables over ranks, and what each prints."""

from collections.abc import Callable
from typing import Any

from skirl.placement.tables import bench_model, bench_plans, bench_search, bench_transfer
from skirl.placement.tables.backends import check_there, missing
from skirl.placement.tables.named import ON_GPU, OURS, PRODUCTION, Backend
from skirl.placement.torchrec import bench as bench_torchrec
from skirl.placement.torchrec import theirs

PARTS = ("optimum", "tight", "time", "model", "plans", "transfer", "torchrec")
_TASKS = {"model": bench_model.TESTED, "optimum": 200, "tight": 60, "plans": 80, "transfer": 4, "torchrec": 10}
_SECONDS = 5.0
_KINDS = {"additive": "additive", "net": "net", "dim": "dim", "lookup": "lookup"}
_KINDS |= {theirs.NAME: "TorchRec's estimator", f"{theirs.NAME}_fitted": "that fitted"}
"""What predicts, as lines call it; TorchRec's estimator only where it is installed."""


def measured(
    part: str, tasks: int | None, seed: int, backend: Backend = OURS, pool: str = PRODUCTION
) -> dict[str, Any]:
    """Measure one part.

    **Arguments**

    - `part`: one of `PARTS`.
    - `tasks`: number of tasks; None: the number behind the documented figures.
    - `seed`: the random seed.
    - `backend`: the kernels to measure, for parts model and plans; skirl's on the CPU by default.
    - `pool`: the pool of the tables, for these parts.
    """
    count = tasks or _TASKS.get(part, 0)
    check_there(backend)
    if part == "optimum":
        return bench_search.optimum(count, seed)
    if part == "tight":
        return bench_search.tight(count, seed, _SECONDS)
    if part == "model":
        return _with_gpu(backend, lambda of: bench_model.model(seed, of, pool, count))
    if part == "plans":
        return _with_gpu(backend, lambda of: bench_plans.plans(count, seed, of, pool))
    if part == "torchrec":
        return bench_torchrec.measured(count, seed)
    if part == "transfer":
        return bench_transfer.transfer(count, seed)
    return bench_search.times(seed)


def _with_gpu(backend: Backend, measure: Callable[[Backend], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a backend, and in `gpu` those of both that run on a GPU, or why there are none."""
    import torch

    found, gpu = measure(backend), dict[str, Any]()
    if not torch.cuda.is_available():
        return found | {"gpu": "not run (no device)"}
    for other in ON_GPU:
        if other != backend:
            gpu[other] = f"not run ({why})" if (why := missing(other)) is not None else measure(other)
    return found | {"gpu": gpu}


def _gpu(part: str, found: str | dict[str, Any]) -> str:
    """Return the figures of backends on a GPU as a printed line."""
    if isinstance(found, str):
        return found
    names = ("tau", "median_error", "chosen") if part == "model" else ("vs_greedy_compute", "gap_closed")
    said = {
        name: of if isinstance(of, str) else " ".join(f"{key} {_short(of[key])}" for key in names)
        for name, of in found.items()
    }
    return ", ".join(f"{name}: {of}" for name, of in said.items())


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def told(result: dict[str, Any]) -> dict[str, str]:
    """Return a part's result as printed lines, by name.

    **Arguments**

    - `result`: what `measured` returned.
    """
    if result["part"] == "optimum":
        return {
            "optimum": f"{result['over_optimum_mean']:.4f} times in the mean, {result['over_optimum_max']:.3f} at most, "
            f"over {result['tasks']} tasks; {result['with_splits']} plans cut tables",
            "anywhere": f"{result['cuts_anywhere_mean']:.3f} times that optimum with cuts anywhere",
        }
    if result["part"] == "torchrec":
        return bench_torchrec.told(result)
    if result["part"] == "tight":
        others = ", ".join(f"{name} {share:.0%}" for name, share in result["solved_by"].items())
        return {
            "solved": f"{result['solved']:.0%} of {result['tasks']} tasks, at most {result['bytes_over']:,} bytes over; "
            f"with halves only {result['solved_by_halves']:.0%}",
            "others": others,
        }
    if result["part"] == "model":
        lines = {}
        for where, name in (("held-out tables", ""), ("another batch", "other_batch_")):
            of = {
                called: (result[f"{name}{kind}_tau"], result[f"{name}{kind}_median_error"])
                for kind, called in _KINDS.items()
                if f"{name}{kind}_tau" in result
            }
            lines[where] = ", ".join(f"{kind} tau {t:.3f} and error {error:.1%}" for kind, (t, error) in of.items())
            again = f"tau {result[f'{name}tau_ceiling']:.3f}, noise {result[f'{name}median_noise']:.1%}"
            lines[where] += f"; measured again {again}"
        said = f"{result['exchange_error']:.0%} error, repeats vary by {result['exchange_noise']:.0%}"
        lines |= {"exchange": f"{result['exchange']}: {said}", "chosen": f"{result['chosen']}: {result['why']}"}
        return lines | {"gpu": _gpu("model", result["gpu"])}
    if result["part"] == "transfer":
        return {
            name: f"{of['vs_full']:.3f} of the time of plans from full training; error {of['error']:.1%} ({of['chosen']}), "
            f"{of['full_error']:.1%} ({of['full_chosen']})"
            for name, of in result["by_setting"].items()
        } | {"mean": f"{result['vs_full']:.3f}, after {result['calibration_seconds']:.0f} s of calibration"}
    if result["part"] == "plans":
        (low, high), said = result["vs_greedy_95"], result["predicted"]
        return {
            "greedy": f"{result['vs_greedy']:.3f} of the time of {result['greedy']}, the best single rule ({low:.3f} to "
            f"{high:.3f}); {result['gap_closed']:.0%} of the way to its perfect balance",
            "noise": _noise(result),
            "predicted": f"{said['vs_greedy']:.3f} of its time, {said['gap_closed']:.0%} of the way",
            "cells": ", ".join(f"{cell} {ratio:.3f}" for cell, ratio in result["by_cell"].items()),
            "cuts": ", ".join(f"{name} {ratio:.3f}" for name, ratio in result["by_split"].items()),
            "others": ", ".join(f"{name} {ratio:.3f}" for name, ratio in result["vs"].items()),
            "check": f"with --check {result['with_check']:.3f} of the rule's time, {result['check_vs_without']:.3f} of that "
            f"without; {result['gap_closed_with_check']:.0%} of the way",
            "torchrec": ", ".join(
                f"{name.partition(' ')[2]} {ratio:.3f}" for name, ratio in result["vs_torchrec_by"].items()
            )
            + f"; over {result['torchrec_tasks']} of the tasks"
            if result["vs_torchrec_by"]
            else "not installed",
            "exchange": f"{result['exchange_share']:.0%} of the busiest rank's time at most; counted, over 10 Gbit/s",
            "dense": f"with a vector for every sample, as TorchRec sends them, {result['dense']['vs_greedy']:.3f} of the "
            f"rule's time and {result['dense']['vs_row_wise']:.3f} of every table by rows",
            "over gloo": _over_gloo(result["over_gloo"]),
            "apart": f"{result['vs_greedy_compute']:.3f} of the rule's time to compute, where most is computed, and "
            f"{result['vs_greedy_exchange']:.3f} of its exchange, where most is exchanged",
            "gpu": _gpu("plans", result["gpu"]),
        }
    return {
        f"{of['tables']} on {of['ranks']}": f"{of['seconds']:.1f} s ({of['cpu_seconds']:.1f} of CPU; by a net "
        f"{of['net_seconds']:.1f} and {of['net_cpu_seconds']:.1f}), {of['cut']} cuts, busiest {of['balance']:.3f} of the "
        f"mean; --seconds 1 took {of['one_second_takes']:.2f} s and costs {of['one_second_costs']:.3f} times as much; "
        + _their_time(of)
        for of in result["sizes"]
    } | {"valid": "all" if result["all_valid"] else "NOT ALL"}


def _over_gloo(found: dict[str, Any]) -> str:
    if "not_run" in found:
        return f"not run: {found['not_run']}"
    ranks = ", ".join(
        f"{count} ranks vary by {of['noise']:.0%} ({of['kind']}: {of['latency_ms']:.1f} ms and "
        f"{of['bytes_a_second'] / 1e6:,.0f} MB a second)"
        for count, of in found["by_ranks"].items()
    )
    return (
        f"{found['vs_greedy']:.3f} of the rule's time, {found['gap_closed']:.0%} of the way, {found['vs_row_wise']:.3f} of "
        f"every table by rows; {found['exchange_share']:.0%} of the busiest rank's time at most; {ranks}"
    )


def _noise(result: dict[str, Any]) -> str:
    one, other = (f"{of['vs_greedy']:.3f} and {of['gap_closed']:.0%}" for of in result["by_halves"])
    least = result["by_minimum"]
    return (
        f"halves of the rounds differ by {result['noise']:.1%}, and tell {one}, {other}; by the least round "
        f"{least['vs_greedy']:.3f} and {least['gap_closed']:.0%}, halves differ by {least['noise']:.1%}"
    )


def _their_time(of: dict[str, Any]) -> str:
    if of["torchrec_seconds"] is None:
        return "TorchRec is not installed"
    if not of["torchrec_ended"]:
        return f"TorchRec's planner was ended after {of['torchrec_seconds']:.0f} s"
    ms = of["torchrec_ms"]
    what = "found no plan that fits" if ms is None else f"is {of['busiest_ms'] / ms:.3f} of its plan, predicted"
    return f"TorchRec's planner took {of['torchrec_seconds']:.1f} s, and " + (
        f"ours {what}" if ms is not None else what
    )
