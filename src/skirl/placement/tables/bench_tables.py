"""The parts of `skirl bench place` about tables over ranks: which there are, and what each prints."""

from typing import Any

from skirl.placement.tables import bench_search

PARTS = ("optimum", "tight", "time")
_TASKS = {"optimum": 200, "tight": 60}
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
    if result["part"] == "tight":
        others = ", ".join(f"{name} {share:.0%}" for name, share in result["solved_by"].items())
        return {
            "solved": f"{result['solved']:.0%} of {result['tasks']} tasks, at most {result['bytes_over']:,} bytes over; "
            f"with halves only {result['solved_by_halves']:.0%}",
            "others": others,
        }
    return {
        f"{of['tables']} on {of['ranks']}": f"{of['seconds']:.1f} s, {of['cut']} cuts, busiest {of['balance']:.3f} of the "
        f"mean; --seconds 1 took {of['one_second_takes']:.2f} s and costs {of['one_second_costs']:.3f} times as much"
        for of in result["sizes"]
    } | {"valid": "all" if result["all_valid"] else "NOT ALL"}
