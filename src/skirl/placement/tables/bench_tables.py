"""The parts of `skirl bench place` about tables over ranks: which there are, and what each prints."""

from typing import Any

from skirl.placement.tables import bench_plans, bench_search
from skirl.placement.torchrec import bench as bench_torchrec

PARTS = ("optimum", "tight", "time", "model", "plans", "torchrec")
_TASKS = {"optimum": 200, "tight": 60, "plans": 80, "torchrec": 10}
_SECONDS = 5.0


def measured(part: str, tasks: int | None, seed: int) -> dict[str, Any]:
    """The figures of one part.

    **Arguments**

    - `part`: one of `PARTS`.
    - `tasks`: how many; None: as many as make the figure.
    - `seed`: of chance.
    """
    count = tasks or _TASKS.get(part, 0)
    if part == "optimum":
        return bench_search.optimum(count, seed)
    if part == "tight":
        return bench_search.tight(count, seed, _SECONDS)
    if part == "model":
        return bench_plans.model(seed)
    if part == "plans":
        return bench_plans.plans(count, seed)
    if part == "torchrec":
        return bench_torchrec.measured(count, seed)
    return bench_search.times(seed)


def told(result: dict[str, Any]) -> dict[str, str]:
    """A part's result as people read it.

    **Arguments**

    - `result`: of `measured`.
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
        return {
            kind: f"tau {result[f'{name}tau']:.3f} (measured again {result[f'{name}tau_ceiling']:.3f}), median error "
            f"{result[f'{name}median_error']:.1%} (noise {result[f'{name}median_noise']:.1%}); by dims "
            f"{result[f'{name}dim_error']:.0%}, by ids and dims {result[f'{name}lookup_error']:.0%}"
            for kind, name in (("held-out tables", ""), ("another batch", "other_batch_"))
        } | {"chosen": result["chosen"]}
    if result["part"] == "plans":
        low, high = result["vs_greedy_95"]
        return {
            "greedy": f"{result['vs_greedy']:.3f} of the time of {result['greedy']}, the best single rule ({low:.3f} to "
            f"{high:.3f}); {result['gap_closed']:.0%} of the way to its perfect balance",
            "cells": ", ".join(f"{cell} {ratio:.3f}" for cell, ratio in result["by_cell"].items()),
            "cuts": ", ".join(f"{name} {ratio:.3f}" for name, ratio in result["by_split"].items()),
            "others": ", ".join(f"{name} {ratio:.3f}" for name, ratio in result["vs"].items()),
            "torchrec": ", ".join(
                f"{name.partition(' ')[2]} {ratio:.3f}" for name, ratio in result["vs_torchrec_by"].items()
            )
            + f"; over {result['torchrec_tasks']} of the tasks"
            if result["vs_torchrec_by"]
            else "not installed",
            "exchange": f"{result['exchange_share']:.0%} of the busiest rank's time at most; counted, not measured",
        }
    return {
        f"{of['tables']} on {of['ranks']}": f"{of['seconds']:.1f} s, {of['cut']} cuts, busiest {of['balance']:.3f} of the "
        f"mean; --seconds 1 took {of['one_second_takes']:.2f} s and costs {of['one_second_costs']:.3f} times as much; "
        + _their_time(of)
        for of in result["sizes"]
    } | {"valid": "all" if result["all_valid"] else "NOT ALL"}


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
