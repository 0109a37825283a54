"""Measures what windows gain in lookups of lists that shift, over each distinct list once."""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from skirl.dedup.generated import SHIFTS
from skirl.measure.bench.helpers import Stopwatch, child

DISTINCT = 3
"""Batches that the sides take turns on."""


@dataclass(frozen=True)
class Shifting:
    """Measures the CPU time of an `EmbeddingCollection`'s step and of its lists' sums, on windows and on distinct lists.

    **Arguments**

    - `batch`: samples per batch.
    - `lists`: lists in a sample, each of which shifts in every second sample.
    - `ids`: average number of ids of a list.
    - `dim`: numbers in a row.
    - `rows`: rows of each table.
    - `rounds`: timed steps of each side, in turns.
    """

    batch: int
    lists: int
    ids: int
    dim: int
    rows: int
    rounds: int

    def run(self) -> dict[str, Any]:
        """Measure in a process of its own."""
        return child(["-m", "skirl.dedup.shifting", json.dumps(asdict(self))], {})

    def measure(self) -> dict[str, Any]:
        """Measure in this process. Return medians over the rounds; an untimed step on each batch compiles and makes rows."""
        import torch

        torch.set_num_threads(1)
        batches = self._batches()
        sides = [_Side(self, of) for of in (batches, [ids.without_windows() for ids in batches])]
        took: list[list[float]] = [[], []]
        for number in range(-DISTINCT, self.rounds):
            outs = {}
            for place in (0, 1)[:: 1 if number % 2 else -1]:
                with Stopwatch() as watch:
                    outs[place] = sides[place].step(number % DISTINCT)
                if number >= 0:
                    took[place].append(watch.cpu)
            if any(not torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in zip(*outs.values())):
                raise AssertionError("sums of windows and of lists differ: no ratio is given")
        windows, lists = took
        return {
            "lookup_x": round(median(b / a for a, b in zip(windows, lists, strict=True)), 3),
            "lookup_ms": round(median(windows) * 1e3, 2),
            "lookup_ms_once": round(median(lists) * 1e3, 2),
            "lookup_ids": len(batches[0].values()),
            "lookup_ids_once": len(batches[0].without_windows().values()),
        }

    def _batches(self) -> list[Any]:
        """Return lists of batches as the reader gives them."""
        from skirl.data.flags import DataFlags
        from skirl.data.sessions import ITEMS, Sessions
        from skirl.dedup.training import written

        samples = self.batch * DISTINCT
        data = Sessions(
            batch_size=samples, batches=1, pooling_factor=self.ids, histories=self.lists, change=SHIFTS, drift="shift",
            once=False, rows_scale=self.rows / ITEMS,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            written(Path(folder), data, samples, ["window"])
            stream = DataFlags(
                f"parquet:{Path(folder, 'window.parquet')}", batch=self.batch, rows=str(self.rows)
            ).stream()
            return [batch.sparse.select(data.lists) for batch in stream]


class _Side:
    """A collection that looks up the same batches repeatedly."""

    def __init__(self, bench: Shifting, batches: list[Any]) -> None:
        import torch

        from skirl.core.optim import RowwiseAdagrad
        from skirl.core.tables import Table
        from skirl.nn.collection import EmbeddingCollection

        self.batches, self.names = batches, list(batches[0].keys())
        tables = [Table(name, bench.rows, bench.dim) for name in self.names]
        self.embeddings = EmbeddingCollection(
            tables, optimizer=RowwiseAdagrad(lr=0.01), cache=bench.rows * len(self.names)
        )
        lists = bench.lists * bench.batch
        self.grad = torch.empty(lists, bench.dim).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))

    def step(self, at: int) -> Any:
        """Look a batch up, sum its lists and train its rows. Return the sums."""
        import torch

        from skirl.models.window_sums import window_sums

        out = self.embeddings(self.batches[at])
        sums = torch.cat([window_sums(out.windows(name)) for name in self.names])
        sums.backward(self.grad[: len(sums)])
        return sums.detach()


def told_of(window: dict[str, Any]) -> dict[str, str]:
    """Return the result as labelled lines for people to read.

    **Arguments**

    - `window`: what `run` returned, and `train_x` if training was measured.
    """
    told = {}
    if "lookup_x" in window:
        told["windows, lookup"] = (
            f"{window['lookup_x']:.2f} times as fast as with each distinct list once: {window['lookup_ids']:,} ids of "
            f"{window['lookup_ids_once']:,}; {window['lookup_ms']:.0f} ms a step, {window['lookup_ms_once']:.0f}"
        )
    for model, x in window.get("train_x", {}).items():
        low, high = window["train_spread"][model]
        told[f"windows, {model}"] = f"{x:.2f} times as fast as with each distinct list once ({low:.2f} to {high:.2f})"
    return told


if __name__ == "__main__":
    print(json.dumps(Shifting(**json.loads(sys.argv[1])).measure()))
