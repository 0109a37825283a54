"""`skirl size`: one pass over the ids of a run, and what it says about caches.

The flags are those of `skirl train`, so one word turns a run into a question. The answer is a sentence with flags to copy;
the curves behind it are in a page that is one file. What is counted is counted by the planner that would train; what is
estimated, the hidden share, says so.
"""

import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from skirl.core.tables import Schema
from skirl.measure.sizing.advice import Advice, Conditions, advise, reductions
from skirl.measure.sizing.curve import KINDS, LEAST, Point, cache_sizes, capacities, curves, runs
from skirl.measure.sizing.overlap import step_that_hides
from skirl.measure.sizing.picture import drawn
from skirl.measure.sizing.survey import Survey
from skirl.store.link import Link
from skirl.tools.progress import Progress, size
from skirl.train.recipe import Recipe

ON_DISK = 1.5
"""Bytes that a disk store holds at most, for each byte of touched rows."""
INDEX_BYTES = 8
"""Memory that a disk store takes for each touched row."""
WINDOW_BYTES = 28
"""Memory that the planner takes for each id and each distinct row of the window, together."""


@dataclass(frozen=True)
class Size(Recipe):
    """How much cache a run needs.

    >>> result = Size("synthetic:tiny", dim=4, batch=64, steps=20, model="dlrm-tiny", quiet=True).run()
    >>> result["curves"]["LRU"][0]["moved"] >= result["curves"]["least (whole run known)"][0]["moved"]
    True
    >>> result["sentence"].startswith("Use --cache ")
    True
    """

    data: Annotated[str, tyro.conf.Positional] = "synthetic:criteo-kaggle"
    """Where batches come from, as --data of skirl train."""
    _: KW_ONLY
    step_ms: float | None = None
    """What a step computes, in milliseconds; with --link it tells how much of the movement would hide."""
    reduce: bool = False
    """Say also what a smaller dim or rows of 16 bits a number would save."""
    page: Path | None = None
    """Write a page with plots to this .html file."""
    json: bool = False
    """Print the result as one line of JSON; progress then goes to the standard error."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_ms is not None and not 0 < self.step_ms < float("inf"):
            raise ValueError(f"step_ms is {self.step_ms}: set it to milliseconds above 0")
        if self.page is not None and self.page.suffix != ".html":
            raise ValueError(f"page is {str(self.page)!r}: name a file that ends in .html")

    def run(self) -> dict[str, Any]:
        """Read the ids once, then plan over them with every cache."""
        with Survey(Schema.of(self.tables())) as survey:
            with self._progress("read ids", self.steps) as progress:
                for number, batch in enumerate(self.stream(), start=1):
                    survey.add(batch.sparse)
                    progress(number, lambda: {"ids": f"{survey.ids:,}", "touched": f"{sum(survey.touched):,}"})
            if not survey.steps:
                raise ValueError(f"{self.data} has no batch of {self.batch:,} samples: set --batch smaller")
            result = self._measured(survey)
        if self.page is not None:
            self.page.parent.mkdir(parents=True, exist_ok=True)
            self.page.write_text(drawn(result).html(), encoding="utf-8")
        return result

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        used = max(1, result["used"])
        lines = {
            "data": f"{result['ids']:,} ids in {result['steps']:,} batches of {self.batch:,} samples",
            "touched": f"{result['touched']:,} of {result['rows']:,} rows, {size(result['bytes']['touched'])} of "
            f"{size(result['bytes']['all'])}",
            "a batch": f"{result['used'] / result['steps']:,.0f} distinct rows on average, {result['largest']:,} at most",
            "working set": ", ".join(
                f"{n:,.0f} rows in {w} batch{'es'[: 2 * (w != 1)]}" for w, n in result["working_set"].items()
            ),
            "skew": ", ".join(f"hottest {share}: {part:.0%}" for share, part in result["hottest"].items())
            + " of all accesses",
            "moved": "rows brought in again, of those that batches use",
        }
        lines["cache"] = "\n".join(_grid(result["curves"], used))
        tiers = result["bytes"]
        lines["device"] = f"{size(tiers['cache'])} of cache, {size(tiers['staging'])} of staging"
        lines["memory"] = f"{size(tiers['planner'])} for the window; {size(tiers['touched'])} more with --store memory"
        lines["disk"] = (
            f"{size(tiers['disk'])} with --store disk:FOLDER, and {size(tiers['index'])} of memory for its index"
        )
        if result["hidden"] is not None:
            lines["hidden"] = (
                f"{result['hidden']:.0%} of the movement, estimated, over {self.link} at {self.step_ms:g} ms"
            )
        if result["step_ms_that_hides"] is not None:
            lines["link"] = f"keeps up where a step computes for {result['step_ms_that_hides']:.2f} ms or more"
        for kind in result["reductions"]:
            lines[kind["rows as"]] = (
                f"{kind['record_bytes']} B a row, {size(kind['touched_bytes'])} of touched rows; the same bytes of cache "
                f"hold {kind['cache_rows']:,}: {size(kind['bytes_a_step'])} a step come in again"
            )
        if self.page is not None:
            lines["page"] = str(self.page)
        lines["advice"] = result["sentence"]
        return lines

    def _measured(self, survey: Survey) -> dict[str, Any]:
        sizes = cache_sizes(survey)
        count = len(list(runs(sizes)))
        with self._progress("plan", count) as progress:
            done = iter(range(1, count + 1))
            found = curves(
                survey,
                sizes,
                self.prefetch,
                lambda name, cache: progress(next(done), lambda: {"cache": f"{cache:,}", "policy": name}),
            )
        records = [4 * self.row_optimizer().width(bank.dim) for bank in survey.schema.banks]
        touched, used = sum(survey.touched), int(survey.used.sum())
        average = float(np.dot(records, survey.touched)) / max(1, touched)
        link = None if self.link is None else Link.parse(self.link)
        step = None if self.step_ms is None else self.step_ms / 1e3
        conditions = Conditions(average, self.prefetch, link, step)
        advice = advise(found, used, touched, conditions)
        chosen = next(p for p in found[f"depth {advice.depth}"] if p.cache == advice.cache)
        tiers = self._tiers(survey, advice, records)
        would = conditions.overlap(chosen)
        return {
            "command": "size",
            "data": self.data,
            "model": self.model,
            "optimizer": self.optimizer,
            "dim": self.dim,
            "batch": self.batch,
            "prefetch": self.prefetch,
            "link": self.link,
            "step_ms": self.step_ms,
            "ids": survey.ids,
            "steps": survey.steps,
            "rows": sum(table.rows for table in survey.schema.tables),
            "touched": touched,
            "used": used,
            "largest": int(survey.used.sum(axis=0).max()),
            "new_a_batch": survey.new.tolist(),
            "working_set": survey.working_set(),
            "hottest": survey.hottest(),
            "tables": [
                {
                    "name": table.name,
                    "rows": table.rows,
                    "touched": table.touched,
                    "accesses": table.accesses,
                    "hottest": table.hottest,
                }
                for table in survey.tables()
            ],
            "curves": {name: [_point(point, average) for point in points] for name, points in found.items()},
            "bytes": tiers,
            "advice": {
                "cache": advice.cache,
                "depth": advice.depth,
                "share_of_touched": advice.share_of_touched,
                "moved": advice.moved,
                "to_least": advice.to_least,
                "lru": advice.lru,
            },
            "hidden": None if would is None else would.hidden,
            "step_ms_that_hides": None
            if link is None
            else step_that_hides(chosen.read * average, chosen.written * average, link) * 1e3,
            "reductions": self._reductions(found, advice, touched, survey.steps) if self.reduce else [],
            "sentence": advice.sentence(tiers["cache"]),
        }

    def _tiers(self, survey: Survey, advice: Advice, records: list[int]) -> dict[str, float]:
        """Bytes on the device, in memory and on disk, with the cache that is advised."""
        slots, staging = capacities(survey, advice.cache, self.prefetch)
        rows = [sum(survey.schema.tables[t].rows for t in bank.tables) for bank in survey.schema.banks]
        touched = float(np.dot(records, survey.touched))
        in_window = min(advice.depth, survey.steps) * (survey.ids + int(survey.used.sum())) / survey.steps
        return {
            "cache": float(np.dot(slots, records)),
            "staging": float(np.dot(staging, records)),
            "planner": WINDOW_BYTES * in_window,
            "touched": touched,
            "all": float(np.dot(rows, records)),
            "disk": ON_DISK * touched,
            "index": float(INDEX_BYTES * sum(survey.touched)),
        }

    def _reductions(
        self, found: dict[str, list[Point]], advice: Advice, touched: int, steps: int
    ) -> list[dict[str, Any]]:
        dims = [dim for dim in (self.dim, self.dim // 2, self.dim // 4) if dim >= 1]
        weights = {dim: self.model_class.row_dim(dim) for dim in dims}
        records = {dim: (weights[dim], self.row_optimizer().state_width(weights[dim])) for dim in dims}
        return reductions(found[f"depth {advice.depth}"], advice.cache, self.dim, records, touched, steps)

    def _progress(self, title: str, steps: int | None) -> Progress:
        return Progress(title, steps=steps, to=sys.stderr if self.json else sys.stdout, quiet=self.quiet)


def _point(point: Point, record_bytes: float) -> dict[str, float]:
    steps = max(1, len(point.fetched))
    return {
        "cache": point.cache,
        "moved": point.moved,
        "moved_a_step": point.moved / steps,
        "written": int(point.written.sum()),
        "bytes_a_step": float((point.read.sum() + point.written.sum()) * record_bytes / steps),
    }


def _grid(found: dict[str, list[dict[str, float]]], used: int) -> list[str]:
    """The curves as text: a line a cache."""
    names = {LEAST: "least"} | {name: name for name in KINDS if name != LEAST}
    lines = [f"{'rows':>12}  " + "  ".join(f"{short:>9}" for short in names.values())]
    for i, point in enumerate(found[LEAST]):
        shares = "  ".join(f"{found[name][i]['moved'] / used:>9.2%}" for name in names)
        lines.append(f"{point['cache']:>12,}  {shares}")
    return lines
