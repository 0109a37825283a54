"""Claim: lists that repeat are read, looked up and trained on once ("Lists that repeat" in docs/benchmarks.md).

`lookup`: the embedding step of batches with each list once, all rows resident, against the same expanded (`x`) and against
FBGEMM's operator on these (`vs_fbgemm`). `train`: from the file to the updated row, on files with lists once and with all
lists. `reader`: from the file to batches with hashed ids. Ratios are of CPU time on one core, medians over rounds in which
the sides take turns; above 1, lists once are faster.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from common import Bench, FbgemmTables, has_fbgemm, in_turns, main, measured, ratio, result
from skirl.core.batch import KeyedJagged
from skirl.core.once import find
from skirl.core.optim import RowwiseAdagrad
from skirl.core.tables import Table
from skirl.data.files.columnar import KEY
from skirl.data.files.schema import Dense, FileSchema, Id, Label
from skirl.data.flags import DataFlags
from skirl.data.synthetic import ITEMS, Sessions
from skirl.dedup.by_session import convert_by_session
from skirl.dedup.sessions import Sessions as by_session
from skirl.nn.collection import EmbeddingBagCollection
from skirl.train.loop import steps
from skirl.train.recipe import Recipe

Part = Literal["lookup", "train", "reader"]
MODELS = {"dcat": ("dcat", 3, 1), "dlrm": ("dlrm-tiny", 6, 5), "din": ("din", 3, 2)}
"""By model: its --model, the lists of a sample (dcat and din attend to one), and a factor on rounds, for short passes."""


@dataclass(frozen=True)
class Dedup(Bench):
    """Measures the gain from storing repeated lists once."""

    part: tuple[Part, ...] = ("lookup", "train", "reader")
    """What to measure, each in processes of its own."""
    factor: tuple[float, ...] = (1.0, 1.2, 4.0, 8.0)
    """Average number of times that a list occurs in a batch; the reader has 4 and 9."""
    batch: int = 2048
    """Samples in a batch of lookup, with six lists."""
    ids: int = 75
    """Ids in a list, on average."""
    dim: int = 64
    """Numbers in a row."""
    rows: int = 200_000
    """Rows in each list's table."""
    rounds: int = 9
    """Timed steps or passes per side; training has a third of them."""
    train_batch: int = 1024
    """Samples in a batch of train; a file has three batches."""
    samples: int = 60_000
    """For reader: samples in a file."""

    def run(self) -> dict[str, Any]:
        names = [field.name for field in fields(Dedup) if field.name not in ("json", "record")]
        flags = {name: getattr(self, name) for name in names}
        found: dict[str, Any] = {}
        for part in self.part:
            models = MODELS if part == "train" else (None,)
            each = {model: measured(__file__, [flags, part, model]) for model in models}
            found[part] = each if part == "train" else each[None]
        return result("dedup", self, " ".join(flags), **found, fbgemm=has_fbgemm())


def of_part(flags: dict[str, Any], part: Part, model: str | None) -> dict[str, Any]:
    """Measure a part in this process. Return figures by name and factor."""
    torch.set_num_threads(1)
    bench, found = Dedup(**flags), dict[str, dict[str, Any]]()
    for factor in (4.0, 9.0) if part == "reader" else bench.factor:
        if part == "lookup":
            facts = Step(bench, factor).measure()
        else:
            facts = read(bench, factor) if model is None else trained(bench, factor, *MODELS[model])
        for name, value in facts.items():
            found.setdefault(name, {})[f"{factor:g}"] = value
    return found


def sessions(factor: float, batch: int, lists: int, ids: int, rows_scale: float = 1.0) -> Sessions:
    """Return a stream of sessions whose lists repeat `factor` times on average, all of them in full."""
    per_session = 16.5 if factor > 1 else 1.0
    change = (per_session / factor - 1) / (per_session - 1) if factor > 1 else 0.0
    return Sessions(
        batch_size=batch, pooling_factor=ids, histories=lists, per_session=per_session, change=change, once=False,
        rows_scale=rows_scale,
    )  # fmt: skip


class Step:
    """The embedding step: planner, forward and backward of a collection with all rows resident."""

    def __init__(self, bench: Dedup, factor: float) -> None:
        data = sessions(factor, bench.batch, 6, bench.ids, bench.rows / ITEMS)
        self.rounds, self.tables = bench.rounds, [Table(name, data.rows["item"], bench.dim) for name in data.lists]
        self.plain = [data.batch(number).sparse.select(data.lists) for number in range(3)]
        self.once = [find(ids) for ids in self.plain]
        cache = sum(table.rows for table in self.tables)
        self.ours = [EmbeddingBagCollection(self.tables, optimizer=RowwiseAdagrad(lr=0.01), cache=cache) for _ in "ab"]
        self.other = FbgemmTables(self.tables, (), lr=0.01, rowwise=True, eps=1e-8) if has_fbgemm() else None
        draw = torch.Generator().manual_seed(0)
        self.grad = torch.empty(bench.batch, len(self.tables), bench.dim).uniform_(-1, 1, generator=draw)

    def measure(self) -> dict[str, Any]:
        """Return medians over rounds, after a step on each batch that compiles, makes the rows and is compared."""
        sides = [*zip(self.ours, (self.plain, self.once), strict=True)]
        sides += [(self.other, self.plain)] if self.other else []
        for at in range(len(self.plain)):
            full, once, *_ = [self._step(side, batches[at]) for side, batches in sides]
            torch.testing.assert_close(full, once, rtol=1e-3, atol=1e-4)
        turns = {k: cycle(batches) for k, (_, batches) in enumerate(sides)}
        over = cpu_ratio({k: lambda k=k: self._step(sides[k][0], next(turns[k])) for k in turns}, self.rounds)
        return {"x": over[0], "vs_fbgemm": over[2] if self.other else None}

    def _step(self, side: Any, ids: KeyedJagged) -> torch.Tensor:
        out = side(ids).stacked()
        out.backward(self.grad)
        return out.detach()


def files(folder: Path, data: Sessions, tables: str = "") -> dict[str, Path]:
    """Write the first batch of a stream as `skirl convert` does: shuffled, and by session with lists once and in full."""
    batch = next(iter(data))
    columns: dict[str, Any] = {"label": pa.array(batch.labels.numpy())}
    columns |= {f"dense_{k}": pa.array(np.ascontiguousarray(batch.dense[:, k])) for k in range(batch.dense.shape[1])}
    dense, ids = tuple(Dense(name) for name in list(columns)[1:]), []
    for name in list(batch.sparse.keys()):
        own, lists = batch.sparse.select([name]), name in data.lists
        offsets = own.offsets().numpy().astype(np.int32)
        columns[name] = pa.ListArray.from_arrays(offsets, own.values().numpy()) if lists else own.values().numpy()
        ids.append(Id(name, type="int", list=lists, table=tables if name == data.lists[0] else ""))
    users = columns["user"]
    columns |= {"session": np.cumsum(np.append(True, users[1:] != users[:-1])), "time": np.arange(len(users))}
    schema = FileSchema((Label("label"),), dense, tuple(ids), session="session", time="time")
    table = pa.table(columns).take(np.random.default_rng(0).permutation(len(users)))
    whole, paths = folder / "whole.parquet", {name: folder / name for name in ("once", "rows")}
    pq.write_table(table.replace_schema_metadata({KEY: schema.toml().encode()}), whole)
    source = DataFlags(f"parquet:{whole}")
    for name in ("once", "rows"):
        convert_by_session(source.files(), str(paths[name]), by_session(layout=name))
    return paths


def read(bench: Dedup, factor: float) -> dict[str, Any]:
    """Return how fast files of the same samples are read, after a first read that compiles and compares them."""

    def stream(path: Path) -> Any:
        return DataFlags(f"parquet:{path}", batch=2048, rows="2000000").stream()

    with tempfile.TemporaryDirectory() as folder:
        paths = files(Path(folder), sessions(factor, bench.samples, 3, bench.ids, 100.0))
        first = [next(iter(stream(paths[name]))).sparse.expanded().values() for name in ("once", "rows")]
        assert torch.equal(*first), "the files do not hold the same rows: no ratio is given"
        sides = {name: lambda name=name: sum(1 for _ in stream(paths[name])) for name in ("rows", "once")}
        return {"vs_rows": cpu_ratio(sides, bench.rounds)[0]}


def trained(bench: Dedup, factor: float, model: str, lists: int, often: int) -> dict[str, Any]:
    """Return how fast a model trains on both files: reading, planning, lookups, the model and updates."""
    losses: dict[str, list[float]] = {}

    def side(path: Path) -> Callable[[], Any]:
        recipe = Recipe.of(
            data=f"parquet:{path}", model=model, dim=bench.dim, batch=bench.train_batch, rows=str(bench.rows),
            cache="100%", depth=2, threads=1,
        )  # fmt: skip
        of, dense = recipe.model_over(recipe.embeddings("100%"))

        def once_over() -> None:
            with recipe.lookahead(of) as batches:
                losses.setdefault(path.stem, [done.loss for done in steps(of, dense, batches)])

        return once_over

    with tempfile.TemporaryDirectory() as folder:
        paths = files(Path(folder), sessions(factor, 3 * bench.train_batch, lists, bench.ids), "item")
        sides = {name: side(paths[name]) for name in ("rows", "once")}
        over = cpu_ratio(sides, max(1, bench.rounds // 3) * often)
    np.testing.assert_allclose(*losses.values(), rtol=1e-3)
    return {"x": over[0]}


def cpu_ratio(sides: Mapping[Any, Callable[[], Any]], rounds: int) -> list[float | None]:
    """Return the CPU time of each side over that of the second, in turns."""
    took = [[watch.cpu for watch in of] for of in in_turns(sides, rounds).values()]
    return [ratio(of, took[1]) for of in took]


if __name__ == "__main__":
    main(Dedup, of_part)
