"""The list of a model's tables, from the batches of a run."""

from pathlib import Path
from typing import Any, TextIO

import numpy as np

from skirl.core.keys import ROW_BITS
from skirl.core.tables import Schema
from skirl.data.flags import DataFlags
from skirl.models.flags import ModelFlags
from skirl.placement.tables.published import published
from skirl.placement.tables.spec import BINS, TableSpec, reuse_of, specs_text
from skirl.tools.os_errors import writing
from skirl.tools.progress import Progress
from skirl.train.flags import OptimizerFlags
from skirl.train.recipe import Recipe
from skirl.train.touched import keys_of


def listed(
    data: DataFlags, model: ModelFlags, optimizer: OptimizerFlags, out: Path, *, quiet: bool, to: TextIO
) -> dict[str, Any]:
    """Count what each batch looks up in each table, and write the list.

    **Arguments**

    - `data`, `model`, `optimizer`: flags of the run.
    - `out`: the file to write.
    - `quiet`: whether to hide progress.
    - `to`: where to show it.
    """
    recipe = Recipe(data=data, model=model, optimizer=optimizer)
    schema, stream = Schema.of(list(recipe.tables())), recipe.stream()
    ids, distinct = np.zeros(len(schema.tables)), np.zeros(len(schema.tables))
    reuse = np.zeros((len(schema.tables), BINS))
    batches = 0
    with Progress("read", steps=stream.steps, to=to, quiet=quiet) as progress:
        for batch in stream:
            batches += 1
            keys, counts = np.unique(keys_of(batch.sparse, schema), return_counts=True)
            table = keys >> ROW_BITS
            for n in np.unique(table).tolist():
                mine = counts[table == n]
                ids[n] += mine.sum()
                distinct[n] += len(mine)
                reuse[n] += len(mine) * np.array(reuse_of(mine))
            progress(batches, lambda: {"rows": f"{len(keys):,}"})  # noqa: B023
    if not batches:
        raise ValueError(f"{data.data} has no batch of {data.batch:,} samples: set --batch smaller")
    specs = [
        TableSpec(
            t.name, t.rows, t.dim, data.batch, float(ids[n] / batches), float(distinct[n] / batches),
            tuple((reuse[n] / max(1, distinct[n])).tolist()), optimizer.optimizer,
        )
        for n, t in enumerate(schema.tables)
    ]  # fmt: skip
    return _written(specs, out, batches)


def listed_pool(name: str, batch: int, dim: int, optimizer: str, seed: int, out: Path) -> dict[str, Any]:
    """Write the list of a published pool's tables.

    **Arguments**

    - `name`: name of the pool.
    - `batch`: samples of a step.
    - `dim`: numbers in a row of each table.
    - `optimizer`: the row optimizer.
    - `seed`: the random seed.
    - `out`: the file to write.
    """
    made = published(name, batch=batch, dims=[dim], seed=seed, optimizer=optimizer)
    return _written([of.spec for of in made], out, 0)


def _written(specs: list[TableSpec], out: Path, batches: int) -> dict[str, Any]:
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(specs_text(specs) + "\n", encoding="utf-8")
    return {
        "batches": batches, "tables": len(specs), "out": str(out), "ids": sum(spec.ids for spec in specs),
        "distinct": sum(spec.distinct for spec in specs),
    }  # fmt: skip
