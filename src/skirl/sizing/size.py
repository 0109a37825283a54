"""One pass over a run's ids and what it says about caches, counted by the planner that training would use."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from skirl.core.keys import MAX_ROWS
from skirl.core.optim import row_optimizer
from skirl.core.tables import Schema
from skirl.data.flags import DataFlags
from skirl.engine.capacity import Room
from skirl.models.flags import ModelFlags
from skirl.sizing.advice import Advice, Conditions, advise
from skirl.sizing.curve import Point, cache_sizes, capacities, curves, runs
from skirl.sizing.survey import Survey
from skirl.tools.progress import progress_of
from skirl.tools.units import Link
from skirl.train.flags import MovementFlags, OptimizerFlags

ON_DISK = 1.5
"""Maximum bytes in a disk store per byte of touched rows."""
INDEX_BYTES = 8
"""Bytes of memory that a disk store takes per touched row."""
WINDOW_BYTES = 28
"""Bytes of memory that the planner takes per id, and per distinct row of a batch, in the window."""


@dataclass(frozen=True)
class Sizing:
    """A question about caches; the fields are the flags of `skirl size`."""

    data: DataFlags
    model: ModelFlags
    optimizer: OptimizerFlags
    movement: MovementFlags
    link: str | None
    step_ms: float | None

    def answer(self) -> dict[str, Any]:
        """Read the ids once, then plan over them with every cache."""
        stream = self.data.stream()
        tables = stream.tables(self.model.row_dim)
        with Survey(Schema.of(tables)) as survey:
            with progress_of("read ids", self.data.steps) as progress:
                for number, batch in enumerate(stream, start=1):
                    survey.add(batch.sparse)
                    progress(number, lambda: {"ids": f"{survey.ids:,}", "touched": f"{sum(survey.touched):,}"})
            if not survey.steps:
                raise ValueError(f"{self.data.data} has no batch of {self.data.batch:,} samples: set --batch smaller")
            return self._measured(survey)

    def _measured(self, survey: Survey) -> dict[str, Any]:
        sizes = cache_sizes(survey)
        count = len(list(runs(sizes)))
        with progress_of("plan", count) as progress:
            done = iter(range(1, count + 1))
            found = curves(
                survey,
                sizes,
                self.movement.prefetch,
                lambda name, cache: progress(next(done), lambda: {"cache": f"{cache:,}", "policy": name}),
            )
        optimizer = row_optimizer(self.optimizer.optimizer)()
        records = [4 * optimizer.width(bank.dim) for bank in survey.schema.banks]
        touched, used = sum(survey.touched), int(survey.used.sum())
        average = float(np.dot(records, survey.touched)) / max(1, touched)
        link = None if self.link is None else Link.parse(self.link)
        step = None if self.step_ms is None else self.step_ms / 1e3
        conditions = Conditions(average, link, step)
        advice = advise(found, used, touched, conditions)
        chosen = next(p for p in found[f"depth {advice.depth}"] if p.cache == advice.cache)
        tiers = self._tiers(survey, advice, records)
        hides = conditions.step_that_hides(chosen)
        least, least_bytes = _holding_every_batch(survey, records)
        return {
            "command": "size",
            "data": self.data.data,
            "model": self.model.model,
            "optimizer": self.optimizer.optimizer,
            "dim": self.model.dim,
            "batch": self.data.batch,
            "prefetch": self.movement.prefetch,
            "link": self.link,
            "step_ms": self.step_ms,
            "ids": survey.ids,
            "steps": survey.steps,
            "rows": sum(table.rows for table in survey.schema.tables),
            "touched": touched,
            "used": used,
            "largest": int(survey.used.sum(axis=0).max()),
            "least_cache": least,
            "least_cache_bytes": least_bytes,
            "curves": {name: [_point(point, average) for point in points] for name, points in found.items()},
            "bytes": tiers,
            "advice": {name: value for name, value in asdict(advice).items() if name != "why"},
            "step_ms_that_hides": None if hides is None else 1e3 * hides,
            "sentence": advice.sentence(tiers["cache"]),
        }

    def _tiers(self, survey: Survey, advice: Advice, records: list[int]) -> dict[str, float]:
        """Return the bytes on the device, in memory and on disk with the advised cache."""
        slots, staging = capacities(survey, advice.cache, self.movement.prefetch)
        rows = [sum(survey.schema.tables[t].rows for t in bank.tables) for bank in survey.schema.banks]
        touched = float(np.dot(records, survey.touched))
        share = min(advice.depth, survey.steps) / survey.steps
        return {
            "cache": float(np.dot(slots, records)),
            "staging": float(np.dot(staging, records)),
            "planner": WINDOW_BYTES * share * (survey.ids + int(survey.used.sum())),
            "touched": touched,
            "all": float(np.dot(rows, records)),
            "disk": ON_DISK * touched,
            "index": float(INDEX_BYTES * sum(survey.touched)),
        }


def _holding_every_batch(survey: Survey, records: list[int]) -> tuple[int, int]:
    """Return the least cache that surely runs, in rows and in bytes. Bytes include the half that staging may take."""
    banks = len(records)
    rows, dims = [MAX_ROWS] * banks, [bank.dim for bank in survey.schema.banks]
    in_rows, in_bytes = Room("", 0, None, [1] * banks, rows, dims), Room("", 0, 0, records, rows, dims)
    least, least_bytes = (room.enough(int(room.needs(survey.used.T).max())) for room in (in_rows, in_bytes))
    return least, least_bytes


def _point(point: Point, record_bytes: float) -> dict[str, float]:
    steps = max(1, len(point.fetched))
    return {
        "cache": point.cache,
        "moved": point.moved,
        "moved_a_step": point.moved / steps,
        "written": int(point.written.sum()),
        "bytes_a_step": float((point.read.sum() + point.written.sum()) * record_bytes / steps),
    }
