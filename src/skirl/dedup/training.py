"""Measures what training gains if files and batches store repeated lists once, from the file to the updated row."""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from skirl.dedup.generated import SHIFTS
from skirl.measure.bench.helpers import Stopwatch, child

LISTS = {"dcat": 3, "dlrm": 6, "din": 3}
"""Number of lists in a sample, by model; the first is the history that dcat and din attend to."""
TRAINED = {"dcat": "dcat", "dlrm": "dlrm-tiny", "din": "din"}
"""Values of `--model`."""
OFTEN = {"dcat": 1, "dlrm": 5, "din": 2}
"""Factor on the number of rounds; higher for models with shorter passes."""


@dataclass(frozen=True)
class Training:
    """Measures the CPU time of training on two files of the same samples: with lists once, and with all lists in full.

    **Arguments**

    - `factor`: how often a list repeats, on average; 0 for lists that shift, as windows and with each list once.
    - `models`: names in `LISTS`.
    - `batch`: samples per batch.
    - `steps`: batches of a file. A pass reads all of it and includes planning, lookups, the model and updates.
    - `ids`: average number of ids of a list.
    - `dim`: numbers in a row.
    - `rows`: rows of each table.
    - `rounds`: timed passes of each side, in turns; several times as many if a pass is short.
    """

    factor: tuple[float, ...]
    models: tuple[str, ...]
    batch: int
    steps: int
    ids: int
    dim: int
    rows: int
    rounds: int

    def run(self) -> dict[str, Any]:
        """Measure each model in its own process. Return figures by name, model and factor."""
        found: dict[str, Any] = {}
        for model in self.models:
            flags = json.dumps({**asdict(self), "models": [model]})
            for name, by_factor in child(["-m", "skirl.dedup.training", flags], {}).items():
                found.setdefault(name, {})[model] = by_factor
        return found

    def measure(self) -> dict[str, Any]:
        """Measure the one model in this process. Return figures by name and factor."""
        import torch

        torch.set_num_threads(1)
        found: dict[str, dict[str, Any]] = {}
        for factor in self.factor:
            with tempfile.TemporaryDirectory() as folder:
                for name, value in self._case(factor, Path(folder)).items():
                    found.setdefault(name, {})[f"{factor:g}"] = value
            print(f"{self.models[0]}, factor {factor:g}: {found['x'][f'{factor:g}']}", file=sys.stderr, flush=True)
        return found

    def _case(self, factor: float, folder: Path) -> dict[str, Any]:
        """Return medians over rounds. A factor of 0 stands for lists that shift, as windows and with each list once."""
        data = sessions(factor, self, LISTS[self.models[0]])
        slow, fast = layouts = ("rows", "once") if factor else ("once", "window")
        achieved = written(folder, data, self.batch * self.steps, layouts)
        took = self._took(folder, layouts)
        ratios = [a / b for a, b in zip(took[slow], took[fast], strict=True)]
        return {
            "x": round(median(ratios), 3),
            "spread": [round(min(ratios), 3), round(max(ratios), 3)],
            "ms": round(median(took[fast]) / self.steps * 1e3, 2),
            f"ms_{slow}": round(median(took[slow]) / self.steps * 1e3, 2),
            "achieved": achieved,
        }

    def _took(self, folder: Path, layouts: Sequence[str]) -> dict[str, list[float]]:
        """Return the CPU seconds of each pass. The first of each side compiles, makes rows and is compared, not timed."""
        model = self.models[0]
        sides = {layout: _Side(folder / f"{layout}.parquet", TRAINED[model], self) for layout in layouts}
        losses = {layout: side.trained()[0] for layout, side in sides.items()}
        if not np.allclose(*losses.values(), rtol=1e-3):
            raise AssertionError(f"losses differ ({losses}): no ratio is given")
        took: dict[str, list[float]] = {layout: [] for layout in sides}
        for number in range(self.rounds * OFTEN[model]):
            for layout in list(sides)[:: 1 if number % 2 else -1]:
                took[layout].append(sides[layout].trained()[1])
        return took


class _Side:
    """A model that is trained repeatedly on one of the files."""

    def __init__(self, path: Path, model: str, bench: Training) -> None:
        from skirl.train.recipe import Recipe

        self.recipe = Recipe.of(
            data=f"parquet:{path}", model=model, dim=bench.dim, batch=bench.batch, rows=str(bench.rows), cache="100%",
            depth=2, threads=1,
        )  # fmt: skip
        self.model, self.dense = self.recipe.model_over(self.recipe.embeddings("100%"))

    def trained(self) -> tuple[list[float], float]:
        """Train on the file once. Return the losses and the CPU seconds."""
        from skirl.train.loop import steps

        with Stopwatch() as watch, self.recipe.lookahead(self.model) as batches:
            losses = [done.loss for done in steps(self.model, self.dense, batches)]
        return losses, watch.cpu


def sessions(factor: float, bench: Training, lists: int) -> Any:
    """Return the stream of a file's samples, whose lists repeat `factor` times on average. Factor 0: their lists shift."""
    from skirl.data.sessions import Sessions

    if not factor:
        return Sessions(
            batch_size=bench.batch * bench.steps, batches=1, pooling_factor=bench.ids, histories=lists, change=SHIFTS,
            drift="shift", once=False,
        )  # fmt: skip
    per_session = 16.5 if factor > 1 else 1.0
    if factor > per_session:
        raise ValueError(f"factor is {factor:g}: set it to at most {per_session:g}, the samples of a session")
    change = (per_session / factor - 1) / (per_session - 1) if factor > 1 else 0.0
    return Sessions(
        batch_size=bench.batch * bench.steps, batches=1, pooling_factor=bench.ids, histories=lists,
        per_session=per_session, change=change, once=False,
    )  # fmt: skip


def written(folder: Path, data: Any, samples: int, layouts: Sequence[str] = ("rows", "once")) -> float:
    """Write the same samples to a file for each layout, LAYOUT.parquet. Return the ratio of all ids to those in the last.

    **Arguments**

    - `folder`: where to write.
    - `data`: the stream; its first batch is written.
    - `samples`: rows of a row group.
    - `layouts`: those of `skirl convert`.
    """
    import pyarrow as pa

    from skirl.data.files.schema import Dense, FileSchema, Id, Label
    from skirl.dedup.finish import LAYOUTS
    from skirl.dedup.generated import columns_of
    from skirl.dedup.layout import writer_of

    batch = next(iter(data))
    sparse = batch.sparse
    columns: dict[str, Any] = {"label": pa.array(batch.labels.numpy())}
    dense = [Dense(f"dense_{k}") for k in range(batch.dense.shape[1])]
    columns |= {of.name: pa.array(batch.dense[:, k].contiguous().numpy()) for k, of in enumerate(dense)}
    features = columns_of(sparse, data.lists)
    columns |= features
    ids = [
        Id(name, type="int", list=name in data.lists, table="item" if name == data.lists[0] else "")
        for name in features
    ]
    users = columns["user"].to_numpy()
    new = np.concatenate([[True], users[1:] != users[:-1]])
    table, schema = pa.table(columns), FileSchema((Label("label"),), tuple(dense), tuple(ids))
    rows = table
    for name in layouts:
        layout = LAYOUTS[name]
        groups = layout.found(table, schema, new)
        rows = layout.lay(table, groups, new)
        with writer_of(folder / f"{name}.parquet", rows.schema, layout.schema(schema, groups), "zstd", []) as writer:
            writer.write_table(rows, row_group_size=samples)
    left = sum(len(rows.column(name).combine_chunks().flatten()) for name in data.lists)
    whole = sum(len(table.column(name).combine_chunks().flatten()) for name in data.lists)
    return round(whole / left, 2)


def described(train: dict[str, Any]) -> dict[str, str]:
    """Return the result as labelled lines for people to read.

    **Arguments**

    - `train`: what `run` returned.
    """
    told = {}
    for model, by_factor in train["x"].items():
        for factor, x in by_factor.items():
            low, high = train["spread"][model][factor]
            ms, plain = train["ms"][model][factor], train["ms_rows"][model][factor]
            told[f"{model}, factor {factor}"] = (
                f"{x:.2f} times as fast as with all lists in full ({low:.2f} to {high:.2f}); {ms:.0f} ms a step, {plain:.0f}"
            )
    return told


if __name__ == "__main__":
    flags: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(sys.argv[1]).items()
    }
    print(json.dumps(Training(**flags).measure()))
