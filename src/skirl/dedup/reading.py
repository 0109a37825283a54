"""Measures how fast files of sessions are read on one core, from the file to batches with ids hashed to rows."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from skirl.data.files.columnar import KEY, SLICE
from skirl.data.files.schema import FileSchema
from skirl.data.flags import DataFlags
from skirl.dedup.finish import LAYOUTS
from skirl.dedup.generated import SHIFTS, rows_of_sessions
from skirl.dedup.layout import measured, writer_of
from skirl.dedup.order import groups_of_rows
from skirl.dedup.ordering import shuffled_chunks
from skirl.measure.bench.helpers import Stopwatch

FACTORS = (4.0, 9.0)
PER_SESSION = 16.5
BATCH = 2048
ROWS = "2000000"
"""Number of rows of the tables that ids are hashed to."""


def read(samples: int, rows_scale: float, rounds: int, compression: str) -> dict[str, Any]:
    """Return the reader's rows per second by factor, and the speedup of the `once` layout over the same rows in full.

    **Arguments**

    - `samples`: rows of each file.
    - `rows_scale`: multiplies the number of ids that samples are drawn from.
    - `rounds`: number of times to read each file, in turns.
    - `compression`: compression of the files by session; shuffled rows are written with pyarrow's defaults.
    """
    torch.set_num_threads(1)
    found: dict[str, Any] = {"vs_rows": {}, "vs_shuffled": {}, "rows_a_second": {}}
    for factor in FACTORS:
        rows = rows_of_sessions(samples, (PER_SESSION / factor - 1) / (PER_SESSION - 1), rows_scale)
        with tempfile.TemporaryDirectory() as folder:
            took = _in_turns(_files(Path(folder), rows, ("rows", "once"), compression), rounds)
        for name in ("rows", "shuffled"):
            found[f"vs_{name}"][f"{factor:g}"] = _ratio(took, name, "once")
        found["rows_a_second"][f"{factor:g}"] = {name: round(samples / median(of)) for name, of in took.items()}
        with tempfile.TemporaryDirectory() as folder:
            path = _files(Path(folder), _with_sessions(*rows), ("once",), compression)["once"]
            chunks = shuffled_chunks(f"parquet:{path}", rows=ROWS, batch=BATCH, rounds=rounds)
        found["shuffled_chunks"] = chunks["x"]  # that of the last factor stays
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of_sessions(samples, SHIFTS, rows_scale, "shift")
        took = _in_turns(_files(Path(folder), rows, ("rows", "once", "window"), compression), rounds)
    found |= {"window": _ratio(took, "rows", "window"), "window_vs_once": _ratio(took, "once", "window")}
    found["rows_a_second"]["shifting"] = {name: round(samples / median(of)) for name, of in took.items()}
    return found


def _with_sessions(table: Any, schema: FileSchema, new: np.ndarray) -> tuple[Any, FileSchema, np.ndarray]:
    """Return the same rows with a session column."""
    return table.append_column("session", pa.array(np.cumsum(new))), replace(schema, session="session"), new


def _files(
    folder: Path, rows: tuple[Any, FileSchema, np.ndarray], layouts: Sequence[str], compression: str
) -> dict[str, Path]:
    """Write the same rows in each layout with the same encodings and compression, and shuffled with pyarrow's defaults."""
    table, schema, new = rows
    paths = {}
    dictionaries: list[str] | None = None
    for name in reversed(layouts):  # the smallest layout comes first and decides the encodings
        layout = LAYOUTS[name]
        groups = layout.found(table, schema, new)
        laid, paths[name] = layout.lay(table, groups, new), folder / f"{name}.parquet"
        if dictionaries is None:
            dictionaries = measured(laid.slice(0, SLICE), compression, folder)
        with writer_of(paths[name], laid.schema, layout.schema(schema, groups), compression, dictionaries) as writer:
            for low, high in pairwise(groups_of_rows(new, SLICE)):
                writer.write_table(laid.slice(low, high - low), row_group_size=high - low)
    paths["shuffled"] = folder / "shuffled.parquet"
    shuffled = table.take(np.random.default_rng(0).permutation(len(table)))
    pq.write_table(shuffled.replace_schema_metadata({KEY: schema.toml().encode()}), paths["shuffled"])
    return paths


def _in_turns(paths: Mapping[str, Path], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each file in each round. A first read compiles, and checks that files hold equal rows."""
    first = {name: next(iter(_stream(path))) for name, path in paths.items() if name != "shuffled"}
    plain = [(batch.labels.tolist(), batch.sparse.expanded().values().tolist()) for batch in first.values()]
    if any(one != plain[0] for one in plain):
        raise AssertionError("the files do not hold the same rows: no ratio is given")
    took: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(rounds):
        for name in list(paths)[:: 1 if number % 2 else -1]:
            with Stopwatch() as watch:
                for batch in _stream(paths[name]):
                    assert batch.sparse.stride() <= BATCH
            took[name].append(watch.cpu)
    return took


def _stream(path: Path) -> Any:
    return DataFlags(f"parquet:{path}", batch=BATCH, rows=ROWS).stream()


def _ratio(took: Mapping[str, list[float]], slow: str, fast: str) -> float:
    return round(median(a / b for a, b in zip(took[slow], took[fast], strict=True)), 3)


if __name__ == "__main__":
    print(json.dumps(read(*json.loads(sys.argv[1]))))
