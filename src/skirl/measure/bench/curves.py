"""CPU time of a skirl step as the work grows: over batch, tables, dim, depth, rows and threads."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from skirl.core.optim import SGD
from skirl.measure.bench.helpers import at_least_one, result
from skirl.train.report.plot import Chart, svg

if TYPE_CHECKING:
    from skirl.core.batch import KeyedJagged

BOUND = 1.2
"""A point may cost at most this many times what linear growth predicts."""
AXES = {
    "batch": (256, 512, 1024, 2048, 4096),
    "tables": (4, 8, 16, 32),
    "dim": (16, 32, 64, 128),
    "depth": (2, 8, 32, 128),
    "rows": (20_000, 200_000, 2_000_000, 20_000_000),
    "threads": (1, 2),
}
GROWS = ("batch", "tables", "dim")
"""Axes along which the work grows in proportion. Along the others a point is also compared with a flat line."""


@dataclass(frozen=True)
class AxisSizes:
    """A size for each axis."""

    batch: int = 1024
    tables: int = 16
    dim: int = 16
    depth: int = 16
    rows: int = 200_000
    """Rows of each table."""
    threads: int = 1


class SkewedIds:
    """Ids for tables of equal size, drawn as u ** 3 of a uniform u: a tenth of the rows gets half of the ids."""

    yields_fresh = True

    def __init__(self, point: AxisSizes, seed: int) -> None:
        self._point = point
        self._names = [f"t{i}" for i in range(point.tables)]
        self._seed = seed

    def __iter__(self) -> "Iterator[KeyedJagged]":
        import torch

        from skirl.core.batch import KeyedJagged

        point, rng = self._point, np.random.default_rng(self._seed)
        while True:
            ids = (point.rows * rng.random((point.batch, point.tables)) ** 3).astype(np.int64)
            yield KeyedJagged.one_hot(self._names, torch.from_numpy(ids))


class CurveRun:
    """skirl at one point, with a cache of four times the ids of a batch or of all rows, whichever is less."""

    def __init__(self, point: AxisSizes, seed: int) -> None:
        import torch

        from skirl.core.tables import Table
        from skirl.nn.collection import EmbeddingBagCollection
        from skirl.pipeline.lookahead import lookahead

        self.point = point
        tables = [Table(f"t{i}", rows=point.rows, dim=point.dim) for i in range(point.tables)]
        cache = min(4 * point.batch * point.tables, point.rows * point.tables)
        self._embeddings = EmbeddingBagCollection(tables, optimizer=SGD(lr=0.01), cache=cache, seed=seed)
        self._drawn = 0.0
        self._ahead = lookahead(self._timed(seed), self._embeddings, sparse=lambda ids: ids, depth=point.depth)
        self._batches = iter(self._ahead.__enter__())
        self._grads = torch.ones(point.batch, point.tables, point.dim)

    def _timed(self, seed: int) -> "_Timed":
        return _Timed(SkewedIds(self.point, seed), self)

    def turn(self, steps: int) -> float:
        """Run some steps and return the CPU seconds per step, not counting the time to draw ids."""
        import torch

        torch.set_num_threads(self.point.threads)
        self._rest()
        began, self._drawn = time.process_time(), 0.0
        for _ in range(steps):
            ids = next(self._batches)
            self._embeddings(ids).stacked().backward(self._grads)
        self._rest()
        return (time.process_time() - began - self._drawn) / steps

    def drew(self, seconds: float) -> None:
        """Add time that was spent drawing ids, which `turn` leaves out."""
        self._drawn += seconds

    def _rest(self) -> None:
        while not self._ahead.idle:
            time.sleep(1e-3)

    def close(self) -> None:
        """Release everything."""
        self._ahead.__exit__(None, None, None)
        self._embeddings.current.finish()
        self._embeddings.engine.store.close()


class _Timed:
    """A stream that tells the run how much CPU time it takes to draw each batch."""

    yields_fresh = True

    def __init__(self, stream: SkewedIds, run: CurveRun) -> None:
        self._stream, self._run = stream, run

    def __iter__(self) -> "Iterator[KeyedJagged]":
        batches = iter(self._stream)
        while True:
            began = time.thread_time()
            batch = next(batches)
            self._run.drew(time.thread_time() - began)
            yield batch


@dataclass(frozen=True)
class Curves:
    """CPU time of a step as batch, tables, dim, depth, rows and threads grow."""

    axes: str = ",".join(AXES)
    """The curves to draw, separated by commas."""
    steps: int = 12
    """Steps in a turn."""
    rounds: int = 5
    """Turns at each point."""
    most: int = 0
    """Take only this many points of each axis, the first ones; 0: all."""
    seed: int = 0
    """Seed of ids and initial rows."""
    plot: Path | None = None
    """An .svg file to write the curves to."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in AXES:
                raise ValueError(f"axes has {name!r}: set it to some of {', '.join(AXES)}")
        at_least_one(self, "steps", "rounds")
        if self.plot is not None and self.plot.suffix != ".svg":
            raise ValueError(f"plot is {str(self.plot)!r}: set it to a file that ends with .svg")

    @property
    def names(self) -> list[str]:
        """The axes to measure."""
        return [name.strip() for name in self.axes.split(",") if name.strip()]

    def run(self) -> dict[str, Any]:
        """Measure every axis and return the curves."""
        import torch

        before = torch.get_num_threads()
        try:
            curves = {name: self._walk(name) for name in self.names}
        finally:
            torch.set_num_threads(before)
        to_linear = {name: round(worst(line, grows=True), 3) for name, line in curves.items()}
        over = [name for name, value in to_linear.items() if value > BOUND]
        if self.plot is not None:
            self.plot.write_text(drawn(curves))
        return result(
            "curves",
            self,
            "steps rounds seed",
            base=asdict(AxisSizes()),
            curves={name: [[x, round(1e3 * cost, 4)] for x, cost in line] for name, line in curves.items()},
            to_linear=to_linear,
            to_flat={n: round(worst(line, grows=False), 3) for n, line in curves.items() if n not in GROWS},
            failed=f"above {BOUND} times linear: {', '.join(over)}" if over else None,
        )

    def _walk(self, axis: str) -> list[tuple[int, float]]:
        values = AXES[axis][: self.most or None]
        runs = [CurveRun(replace(AxisSizes(), **{axis: value}), self.seed) for value in values]
        try:
            for run in runs:  # compiled, window full, cache full
                run.turn(run.point.depth + 16)
            turns = [[run.turn(self.steps) for run in runs] for _ in range(self.rounds)]
        finally:
            for run in runs:
                run.close()
        return [(value, median(costs)) for value, costs in zip(values, zip(*turns))]

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        facts = {}
        for name, line in result["curves"].items():
            points = "   ".join(f"{x:,}: {ms:.2f} ms" for x, ms in line)
            least = f", {result['to_flat'][name]:.2f} of flat" if name in result["to_flat"] else ""
            facts[name] = f"{points}\n{result['to_linear'][name]:.2f} of linear at most{least}"
        return facts


def worst(line: list[tuple[int, float]], grows: bool) -> float:
    """Return the worst ratio of a point's cost to what a smaller one predicts: linear growth if `grows`, else the same.

    >>> worst([(1, 2.0), (2, 5.0)], grows=True), worst([(1, 2.0), (2, 5.0)], grows=False)
    (1.25, 2.5)
    """
    pairs = [(line[i], line[j]) for j in range(len(line)) for i in range(j)]
    return max((cost / before / (x / first if grows else 1) for (first, before), (x, cost) in pairs), default=1.0)


def drawn(curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Return one SVG with a chart per curve, each next to the straight line that it should not exceed."""
    return svg([_chart(name, line) for name, line in curves.items()], width=320, height=250)


def _chart(name: str, line: Sequence[tuple[int, float]]) -> Chart:
    (first, cost), grows = line[0], name in GROWS
    yardstick = [(x, 1e3 * cost * (x / first if grows else 1)) for x, _ in line]
    lines = {"a step": [(x, 1e3 * c) for x, c in line], "~linear" if grows else "~flat": yardstick}
    return Chart(name, name, lines, y="CPU ms")
