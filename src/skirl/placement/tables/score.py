"""`skirl place score`: predict the times of an existing plan of tables, and of one that a search finds to compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tyro.conf import Positional

from skirl.placement.flags import parsed_bytes, parsed_rate
from skirl.placement.tables.named import OURS, Backend
from skirl.tools.progress import size

_SHOWN = 8
"""Most tables of a rank that are printed."""
_UNFIT = "the plan exceeds the memory of a rank by {}: set --memory higher, or make another plan"
_GAIN = 0.0005
"""Smaller gains are not told: they would be printed as 0.0%."""


@dataclass(frozen=True)
class ScoreTables:
    """Predict the times of a plan of tables over ranks, made by skirl or by TorchRec's planner."""

    common: ClassVar[tuple[str, ...]] = ("plan", "tables", "memory", "seconds")

    plan: Positional[Path]
    """The JSON file of the plan, as `skirl place tables` or skirl.torchrec.table_plan writes it."""
    tables: Positional[Path]
    """The JSON file that lists the tables."""
    memory: str | None = None
    """The most memory that the tables of each rank may take with their optimizer state, such as 16GB. No limit if not
    given."""
    link: str = "10Gbit"
    """The rate at which each rank exchanges pooled rows, in each direction."""
    costs: Path | None = None
    """Costs of parts of tables, as `skirl place costs` writes them; those that come with skirl if not given."""
    backend: Backend = OURS
    """The kernels that the costs are of: skirl's or FBGEMM's operator, on a CPU or a GPU."""
    even_rows: bool = False
    """Have the search cut rows only evenly over all ranks, as TorchRec does."""
    seconds: float = 5.0
    """Seconds to search for a plan to compare with; 0: none."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < float("inf"):
            raise ValueError(f"seconds is {self.seconds}: set it to 0 or more")
        if self.memory is not None and parsed_bytes(self.memory) < 1:
            raise ValueError(f"memory is {self.memory!r}: set it to a size like 16GB")
        parsed_rate(self.link, "link")

    def run(self) -> dict[str, Any]:
        """Predict the plan's times, and search for a plan to compare with."""
        from skirl.placement.tables.costs import costs_for
        from skirl.placement.tables.place import over_caps, planned
        from skirl.placement.tables.plan_file import TablePlan
        from skirl.placement.tables.plan_report import parts_of
        from skirl.placement.tables.problem import UNBOUND, Problem, Ranks, canonical
        from skirl.placement.tables.spec import read_specs

        plan, specs = TablePlan.load(self.plan), read_specs(self.tables)
        plan.check(specs)
        ranks = Ranks.like(plan.ranks, UNBOUND if self.memory is None else parsed_bytes(self.memory))
        link = parsed_rate(self.link, "link")
        costs = costs_for(self.backend, self.costs, link=link, ranks=plan.ranks)
        problem = Problem([specs[n] for n in canonical(specs)], ranks, costs)
        placed, searched, why, took = plan.placed(problem), None, None, 0.0
        if self.seconds:
            try:
                found = planned(specs, ranks, costs, seconds=self.seconds, even_rows=self.even_rows)[1]
                searched, took = float(found.placed.load.max()), found.seconds
            except ValueError as error:
                why = str(error)
        over = max(over_caps(problem, placed))
        load, parts = placed.load, parts_of(problem, placed, None, None)
        ranks_said = [
            {
                "rank": part["rank"],
                "tables": [plan.said(n) for n, of in enumerate(plan.pieces) if any(at == part["rank"] for _, at in of)],
                "bytes": part["bytes"],
                "compute_ms": part["compute_ms"],
                "exchange_ms": part["forward_ms"] + part["backward_ms"],
            }
            for part in parts
        ]
        return {
            "plan": str(self.plan), "tables": len(specs), "cut": sum(len(pieces) > 1 for pieces in plan.pieces),
            "ranks": ranks_said,
            "busiest": int(load.argmax()), "busiest_ms": float(load.max()), "balance": float(load.max() / load.mean()),
            "bytes_over": over, "searched_ms": searched, "seconds": took, "why": why,
            "failed": _UNFIT.format(size(over)) if over else None,
        }  # fmt: skip

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as printed lines, by name."""
        lines = {"plan": f"{result['plan']}: {result['tables']:,} tables, {result['cut']:,} of them cut"}
        for rank in result["ranks"]:
            names = rank["tables"]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines[f"rank {rank['rank']}"] = (
                f"{size(rank['bytes'])}; a step computes {rank['compute_ms']:.3f} ms and exchanges "
                f"{rank['exchange_ms']:.3f} ms\n{', '.join(names[:_SHOWN])}{more}"
            )
        lines["busiest"] = (
            f"rank {result['busiest']}, {result['busiest_ms']:.3f} ms predicted, {result['balance'] - 1:.1%} above the mean"
        )
        if result["searched_ms"] is not None:
            gain = 1 - result["searched_ms"] / result["busiest_ms"]
            faster = f"{result['searched_ms']:.3f} ms, {gain:.1%} less" if gain >= _GAIN else "no faster plan"
            lines["search"] = f"a search of {result['seconds']:.1f} s finds {faster}"
        elif result["why"] is not None:
            lines["search"] = result["why"]
        return lines
