"""Claim: skirl trains as fast with a tenth of the rows in its cache as with all, and beside other libraries.

Modes take turns in one process on one stream of batches ("Training beside others" in docs/benchmarks.md). Modes of skirl's
own kernels must agree to the last bit, others to 1e-3.
"""

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from common import Bench, FbgemmTables, RepeatedBatches, Stopwatch, TorchTables, has_fbgemm, main, ratio, result
from skirl.core.batch import Batch
from skirl.core.initial import first_rows
from skirl.core.keys import key_of
from skirl.core.optim import SGD
from skirl.core.tables import Schema, Table
from skirl.models import DLRM
from skirl.models.dlrm import Embeddings
from skirl.nn.collection import EmbeddingBagCollection
from skirl.pipeline.lookahead import lookahead
from skirl.store import Record, open_store
from skirl.tools.machine import cores
from skirl.tools.units import Link
from skirl.train.loop import Done, keys_of, steps
from skirl.train.recipe import Recipe
from tests.store.links import SlowRows

LR = 0.05
FAMILY = ("skirl", "serial", "resident", "lru", "on_demand")
"""Modes that use skirl's own kernels; their losses agree to the last bit."""
AGREE = 1e-3
"""Relative difference of losses allowed for other orders of summation; it was 1.4e-4 after 500 steps of 64 samples."""


class Setting:
    def __init__(self, flags: "TrainSpeed") -> None:
        # The window must stay full to the end: planning without entering batches would flatter the last rounds.
        count = flags.warm + flags.slice * flags.rounds + flags.depth + 10
        recipe = Recipe.of(
            data=flags.data, model="dlrm-tiny", optimizer="sgd", lr=LR, dim=flags.dim, batch=flags.batch, steps=count,
            cache=flags.cache, depth=flags.depth, store=flags.store,
            threads=flags.threads, device=flags.device, rows_scale=flags.rows_scale,
        )  # fmt: skip
        recipe.use_threads()
        stream = recipe.stream()
        self.flags, self.tables, self.dense_features = flags, recipe.tables(), stream.dense_features
        self.batches = RepeatedBatches(list(stream))
        schema = Schema.of(self.tables)
        distinct = [np.unique(keys_of(batch.sparse, schema)) for batch in self.batches]
        self.touched = len(np.unique(np.concatenate(distinct)))
        self.largest = max(map(len, distinct))
        """The most rows that any one batch uses."""
        self.cache = int(recipe.cache_size(self.touched))
        self.link = Link.parse(flags.link) if flags.link else Link()


@dataclass
class Slice:
    seconds: float
    cpu: float
    received: int
    """Bytes from the store."""
    sent: int
    losses: list[float]


class Mode:
    """A way to hold the rows: a model over some embeddings, and its training loop."""

    link: SlowRows | None = None

    def __init__(self, setting: Setting, embeddings: Embeddings) -> None:
        torch.manual_seed(0)
        self.model = DLRM.tiny(embeddings, dense_features=setting.dense_features).to(setting.flags.device)
        self.setting = setting
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self._loop: Iterator[Done] | None = None

    def batches(self) -> Iterable[Batch]:
        return self.setting.batches

    def slice(self, count: int) -> Slice:
        """Run the next `count` steps of the loop. The clock stops once everything that they started is done."""
        if self._loop is None:
            self._loop = steps(self.model, self._optimizer, self.batches())
        self.rest()
        received, sent = self._moved()
        with Stopwatch() as watch:
            losses = [next(self._loop).loss_tensor for _ in range(count)]
            self.rest()
        received_then, sent_then = self._moved()
        moved = received_then - received, sent_then - sent
        return Slice(watch.seconds, watch.cpu, *moved, [loss.item() for loss in losses])

    def rest(self) -> None:
        """Wait until nothing is in motion."""
        if self.setting.flags.device != "cpu":
            torch.cuda.synchronize()

    def close(self) -> None:
        self._loop = None

    def _moved(self) -> tuple[int, int]:
        return (self.link.received.nbytes, self.link.sent.nbytes) if self.link is not None else (0, 0)


class WithStore(Mode):
    """Rows in a store, looked up without a lookahead, through an LRU cache. If all are resident, it is never asked."""

    def __init__(self, setting: Setting, name: str) -> None:
        spec = setting.flags.store if name != "resident" else "memory"
        records = {t: Record(table.dim) for t, table in enumerate(setting.tables)}
        store = open_store(spec if spec == "memory" else f"{spec}/{name}", records)
        self.link = SlowRows(store, setting.link)
        cache = {"resident": setting.touched, "on_demand": setting.largest}.get(name, setting.cache)
        self.embeddings = EmbeddingBagCollection(
            setting.tables, optimizer=SGD(lr=LR), cache=cache, store=store, device=setting.flags.device
        )
        super().__init__(setting, self.embeddings)

    def close(self) -> None:
        super().close()
        self.embeddings.current.finish()
        self.embeddings.engine.store.close()


class OnDemand(WithStore):
    """No cache: each batch's distinct rows are read, unless they are new, trained, and written back."""

    def batches(self) -> Iterator[Batch]:
        for batch in super().batches():
            yield batch
            self.embeddings.engine.drop_caches()
            self.embeddings.alone.forget()


class WithLookahead(WithStore):
    """skirl with a lookahead: rows in a store, or all resident.

    serial: fetch rows only when the loop asks for them, and wait until evicted rows are written.
    """

    def __init__(self, setting: Setting, name: str) -> None:
        super().__init__(setting, name)
        self.serial = name == "serial"
        self.ahead = lookahead(
            super().batches(), self.model, depth=setting.flags.depth, prefetch=0 if self.serial else 2
        ).__enter__()

    def batches(self) -> Iterator[Batch]:
        for batch in self.ahead:
            if self.serial:
                self.ahead.drain()
            yield batch

    def rest(self) -> None:
        super().rest()
        stages = self.ahead._pipeline and self.ahead._pipeline.stages
        while stages and stages.failure is None and not stages.all_wait(("load",)):
            time.sleep(1e-4)

    def close(self) -> None:
        self._loop = None
        self.ahead.__exit__(None, None, None)
        self.embeddings.engine.store.close()


def first_weights(tables: Sequence[Table]) -> Iterator[torch.Tensor]:
    """Yield each table's rows, initialised as skirl does it."""
    for number, table in enumerate(tables):
        yield torch.from_numpy(first_rows(key_of(number, np.arange(table.rows)), table.initial, table.dim, 0))


@dataclass(frozen=True)
class TrainSpeed(Bench):
    """Samples per second of skirl, and of all rows resident, torch, FBGEMM, an LRU cache and rows on demand."""

    data: str = "synthetic:criteo-kaggle"
    """Where batches come from: synthetic:NAME, where NAME is tiny, avazu, criteo-kaggle or criteo-terabyte."""
    dim: int = 16
    """Numbers in a row."""
    batch: int = 2048
    """Samples in a step."""
    cache: str = "touched:10%"
    """Rows on the device, for skirl and the LRU cache: a number, or a share of the rows that the run touches."""
    depth: int = 64
    """Batches that the oracle reads ahead."""
    device: str = "cpu"
    """cpu or cuda: of all modes, the model too."""
    store: str = "memory"
    """Where the rows outside the cache are: memory, or disk:FOLDER, where each mode gets a folder that is removed at
    the end."""
    link: str | None = None
    """Emulate a link between cache and store: RATE,DELAY such as 1Gbit,100us."""
    warm: int = 48
    """Steps before the first slice."""
    slice: int = 12
    """Steps of a mode before the next one takes its turn."""
    rounds: int = 8
    """Turns of each mode."""
    modes: str = "skirl,serial,resident,torch,fbgemm,lru,on_demand"
    """The modes to run."""
    threads: int | None = None
    """Compute threads, the same for all modes; torch's choice if not given."""
    rows_scale: float = 1.0
    """Multiply the number of rows of each synthetic table by this."""

    def run(self) -> dict[str, Any]:
        setting = Setting(self)
        made: dict[str, Mode] = {}
        try:
            for name in self.modes.split(","):
                if name != "fbgemm" or has_fbgemm():
                    made[name] = self._make(name, setting)
            losses = {name: mode.slice(self.warm).losses for name, mode in made.items()}
            slices: dict[str, list[Slice]] = {name: [] for name in made}
            for number in range(self.rounds):
                for name in list(made)[:: 1 if number % 2 else -1]:
                    slices[name].append(made[name].slice(self.slice))
                    losses[name] += slices[name][-1].losses
        finally:
            for mode in made.values():
                mode.close()
            if self.store.startswith("disk:"):
                for name in made:
                    shutil.rmtree(Path(self.store.removeprefix("disk:")) / name, ignore_errors=True)
        return self._figures(setting, slices, losses)

    def _make(self, name: str, setting: Setting) -> Mode:
        match name:
            case "torch":
                return Mode(setting, TorchTables(setting.tables, first_weights(setting.tables)))
            case "fbgemm":
                return Mode(setting, FbgemmTables(setting.tables, first_weights(setting.tables), lr=LR))
            case "lru":
                return WithStore(setting, name)
            case "on_demand":
                return OnDemand(setting, name)
            case _:
                return WithLookahead(setting, name)

    def _figures(
        self, setting: Setting, slices: dict[str, list[Slice]], losses: dict[str, list[float]]
    ) -> dict[str, Any]:
        seconds = {name: [s.seconds for s in turns] for name, turns in slices.items()}
        moved = {name: sum(s.received + s.sent for s in turns) for name, turns in slices.items()}
        skirl, serial, parts, roofs, hidden = seconds.get("skirl"), seconds.get("serial"), None, None, None
        if skirl and "resident" in slices:
            parts = {
                "compute": seconds["resident"],
                "wire": [max(s.received, s.sent) / setting.link.rate for s in slices["skirl"]],
                "cpu": [s.cpu / cores() for s in slices["skirl"]],
            }
            roofs = [max(each) for each in zip(*parts.values(), strict=True)]
            parts = {name: round(1e3 * median(values) / self.slice, 3) for name, values in parts.items()}
            if serial and (most := median(serial) - median(roofs)) > 0:  # one round's difference may be near zero
                hidden = round((median(serial) - median(skirl)) / most, 4)
        first = np.array(next(iter(losses.values())))
        spread = {name: float(np.max(np.abs(mine - first) / np.abs(first))) for name, mine in losses.items()}
        family = [values for name, values in losses.items() if name in FAMILY]
        same = all(values == family[0] for values in family) and max(spread.values()) <= AGREE
        return result(
            "train", self, "data dim batch cache depth device link rounds",
            store=self.store.partition(":")[0], cache_rows=setting.cache, touched=setting.touched,
            steps=self.slice * self.rounds,
            **{
                f"vs_{name}": ratio(seconds.get(name), skirl)
                for name in ("resident", "torch", "fbgemm", "on_demand", "lru")
            },
            byte_ratio_on_demand=round(moved["on_demand"] / moved["skirl"], 4)
            if moved.get("skirl") and "on_demand" in moved
            else None,
            vs_roof=ratio(roofs, skirl), serial_vs_roof=ratio(serial, roofs), hidden=hidden, roof=parts,
            losses_agree=same, loss_difference=spread,
            modes={
                name: {
                    "samples_per_s": round(self.batch * self.slice / median(seconds[name])),
                    "ms_per_step": round(1e3 * median(seconds[name]) / self.slice, 3),
                    "bytes_received": sum(s.received for s in turns),
                    "bytes_sent": sum(s.sent for s in turns),
                }
                for name, turns in slices.items()
            },
            failed=None if same else f"losses differ: {spread}",
        )  # fmt: skip


if __name__ == "__main__":
    main(TrainSpeed)
