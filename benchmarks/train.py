"""Claim: skirl trains as fast with a tenth of the rows in its cache as with all, and beside other libraries.

Modes take turns in one process on one stream of batches ("Training beside others" in docs/benchmarks.md). Modes of skirl's
own kernels must agree to the last bit, others to 1e-3.
"""

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from common import FbgemmTables, TorchTables, has_fbgemm, main, result
from skirl.core.batch import Batch
from skirl.core.ids import Ids
from skirl.core.initial import first_rows
from skirl.core.keys import key_of
from skirl.core.optim import SGD
from skirl.core.tables import Schema, Table
from skirl.engine.window import Window
from skirl.engine.work import State, Work
from skirl.models import DLRM
from skirl.models.dlrm import Embeddings
from skirl.nn import current_step as alone
from skirl.nn.collection import EmbeddingBagCollection
from skirl.nn.current_step import CurrentStep
from skirl.oracle.step import Step
from skirl.pipeline.lookahead import Lookahead, lookahead
from skirl.store import Record, open_store
from skirl.tools.machine import cores
from skirl.tools.units import Link
from skirl.train.loop import Done, keys_of, steps
from skirl.train.recipe import Recipe
from tests.store.links import LinkStore

LR = 0.05
FAMILY = ("skirl", "serial", "resident", "lru", "on_demand")
"""Modes that use skirl's own kernels; their losses agree to the last bit."""
AGREE = 1e-3
"""Relative difference of losses allowed for other orders of summation; it was 1.4e-4 after 500 steps of 64 samples."""
RATIOS = {
    "vs_resident": "resident",
    "vs_torch": "torch",
    "vs_fbgemm": "fbgemm",
    "vs_on_demand": "on_demand",
    "vs_lru": "lru",
}


@dataclass(frozen=True)
class ModeSettings:
    """What all modes share."""

    flags: "TrainSpeed"
    tables: Sequence[Table]
    dense_features: int
    batches: Sequence[Batch]
    cache: int
    """Cache size in rows, in modes that have a cache."""
    touched: int
    """Rows that all batches use together."""
    largest: int
    """The most rows that any one batch uses."""
    link: Link


@dataclass
class Slice:
    """Some steps of one mode."""

    seconds: float
    cpu: float
    """CPU seconds of all threads together."""
    received: int
    """Bytes read from the store."""
    sent: int
    """Bytes written to the store."""
    losses: list[float]


class RepeatedBatches:
    """A stream that yields the same, unchanged batches on every pass."""

    yields_fresh = True

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class Mode:
    """A way to hold the rows: a model over some embeddings, and its training loop."""

    def __init__(self, setting: ModeSettings, embeddings: Embeddings) -> None:
        torch.manual_seed(0)
        self.model = DLRM.tiny(embeddings, dense_features=setting.dense_features).to(setting.flags.device)
        self.setting = setting
        self.store: LinkStore | None = None
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self._loop: Iterator[Done] | None = None

    def batches(self) -> Iterable[Batch]:
        """Return the batches that the loop runs over."""
        return RepeatedBatches(self.setting.batches)

    def slice(self, count: int) -> Slice:
        """Run the next `count` steps of the loop. The clock stops once everything that they started is done."""
        if self._loop is None:
            self._loop = steps(self.model, self._optimizer, self.batches())
        self.rest()
        received, sent = self._moved()
        began, spent = time.perf_counter(), time.process_time()
        losses = [next(self._loop).loss_tensor for _ in range(count)]
        self.rest()
        seconds, used = time.perf_counter() - began, time.process_time() - spent
        received_then, sent_then = self._moved()
        return Slice(seconds, used, received_then - received, sent_then - sent, [loss.item() for loss in losses])

    def rest(self) -> None:
        """Wait until nothing is in motion."""
        if self.setting.flags.device != "cpu":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Release everything."""
        self._loop = None

    def _moved(self) -> tuple[int, int]:
        return (self.store.received.nbytes, self.store.sent.nbytes) if self.store is not None else (0, 0)


class WithStore(Mode):
    """Rows in a store, looked up synchronously: through an LRU cache without a lookahead, or as `kind` does it."""

    def __init__(
        self,
        setting: ModeSettings,
        name: str,
        cache: int,
        kind: type[EmbeddingBagCollection] = EmbeddingBagCollection,
    ) -> None:
        store = store_of(setting, name)
        self.embeddings = kind(
            setting.tables, optimizer=SGD(lr=LR), cache=cache, store=store, device=setting.flags.device
        )
        super().__init__(setting, self.embeddings)
        self.store = store

    def close(self) -> None:
        super().close()
        self.embeddings.current.finish()
        self.embeddings.engine.store.close()


class WithLookahead(WithStore):
    """skirl with a lookahead: rows in a store, or all resident.

    serial: fetch rows only when the loop asks for them, and wait until evicted rows are written.
    """

    def __init__(self, setting: ModeSettings, name: str) -> None:
        super().__init__(setting, name, setting.touched if name == "resident" else setting.cache)
        self.serial, depth = name == "serial", setting.flags.depth
        self.ahead: Lookahead = lookahead(
            super().batches(), self.model, depth=depth, prefetch=0 if self.serial else 2
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


class OnDemand(EmbeddingBagCollection):
    """No cache, no lookahead: read, train and write back each batch's distinct rows. New rows are made, not read.

    The planner only names the distinct rows, groups their positions and knows which were used before.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.alone = _NoCache(self.engine)
        self.current = _WritesBack(self.engine, self.pack, self.optimizer, self.anchor, None)


class _NoCache(alone.StepByStep):
    """Steps that fetch every row of a batch that is not new."""

    def step(self, ids: Ids) -> Work:
        engine = self._engine
        self._window = self._window or Window([engine], alone._PLAN)
        work = self._planned(self._window, ids)
        work.steps = [_everything(work.steps[0])]
        engine.fetch(work)
        engine.banks[0].written(engine.banks[0].load(work, work.fetched[0]))  # nothing was evicted
        work.to(State.RESIDENT)
        self._window.executed(work.number + 1)
        return work


class _WritesBack(CurrentStep):
    """A current step that writes the rows of its batch to the store when its backward is done."""

    def backward_done(self, work: Work) -> None:
        super().backward_done(work)
        step = work.steps[0]
        self.engine.store.write(step.keys, self.engine.banks[0].read(step.rows))


def _everything(step: Step) -> Step:
    """Return the same step over an empty cache: it fetches every row that is not new and evicts none."""
    old = ~np.isin(step.rows, step.new_slots)
    none, nowhere = np.empty(0, np.int64), np.empty(0, np.int32)
    return replace(
        step, evict_keys=none, evict_slots=nowhere, fetch_keys=step.keys[old], fetch_slots=step.rows[old],
        forward_step=none, forward_index=nowhere, forward_slots=nowhere, forward_keys=none, hold_from=step.number + 1,
    )  # fmt: skip


def store_of(setting: ModeSettings, name: str) -> LinkStore:
    """Open a mode's store behind the link. If all rows are resident, it is in memory and never asked."""
    spec = setting.flags.store if name != "resident" else "memory"
    folder = "" if spec == "memory" or spec.startswith("rpc:") else f"/{name}"
    records = {t: Record(table.dim) for t, table in enumerate(setting.tables)}
    return LinkStore(open_store(spec + folder, records), setting.link)


def first_weights(tables: Sequence[Table]) -> Iterator[torch.Tensor]:
    """Yield each table's rows, initialised as skirl does it."""
    for number, table in enumerate(tables):
        yield torch.from_numpy(first_rows(key_of(number, np.arange(table.rows)), table.initial, table.dim, 0))


@dataclass(frozen=True)
class TrainSpeed:
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
    modes: str = ""
    """The modes to run, separated by commas; all if not given: skirl, serial, resident, torch, fbgemm, lru, on_demand."""
    threads: int | None = None
    """Compute threads, the same for all modes; torch's choice if not given."""
    rows_scale: float = 1.0
    """Multiply the number of rows of each synthetic table by this."""

    @property
    def names(self) -> list[str]:
        """The modes to run."""
        given = [name.strip() for name in self.modes.split(",") if name.strip()]
        return given or ["skirl", "serial", "resident", "torch", "fbgemm", "lru", "on_demand"]

    def run(self) -> dict[str, Any]:
        """Run all modes in turns and return their figures and ratios."""
        setting = self._setting()
        made: dict[str, Mode] = {}
        slices: dict[str, list[Slice]] = {}
        warm_losses: dict[str, list[float]] = {}
        try:
            for name in self.names:
                mode = self._make(name, setting)
                if mode is not None:
                    made[name], slices[name] = mode, []
                    warm_losses[name] = mode.slice(self.warm).losses
            for number in range(self.rounds):
                order = list(made) if number % 2 else list(made)[::-1]
                for name in order:
                    slices[name].append(made[name].slice(self.slice))
        finally:
            for mode in made.values():
                mode.close()
            if self.store.startswith("disk:"):
                for name in made:
                    shutil.rmtree(Path(self.store.removeprefix("disk:")) / name, ignore_errors=True)
        losses = {name: warm_losses[name] + [x for s in slices[name] for x in s.losses] for name in made}
        return self._figures(setting, slices, losses)

    def _recipe(self, batches: int) -> Recipe:
        """Return a recipe of `skirl train` with the same flags, which checks them."""
        return Recipe.of(
            data=self.data, model="dlrm-tiny", optimizer="sgd", lr=LR, dim=self.dim, batch=self.batch, steps=batches,
            cache=self.cache, depth=self.depth, store=self.store,
            threads=self.threads, device=self.device, rows_scale=self.rows_scale,
        )  # fmt: skip

    def _setting(self) -> ModeSettings:
        # The window must stay full to the end: planning without entering batches would flatter the last rounds.
        recipe = self._recipe(self.warm + self.slice * self.rounds + self.depth + 10)
        recipe.use_threads()
        stream = recipe.stream()
        batches, schema = list(stream), Schema.of(recipe.tables())
        distinct = [np.unique(keys_of(batch.sparse, schema)) for batch in batches]
        touched = len(np.unique(np.concatenate(distinct)))
        return ModeSettings(
            flags=self, tables=recipe.tables(), dense_features=stream.dense_features, batches=batches,
            cache=int(recipe.cache_size(touched)), touched=touched, largest=max(map(len, distinct)),
            link=Link.parse(self.link) if self.link else Link(),
        )  # fmt: skip

    def _make(self, name: str, setting: ModeSettings) -> Mode | None:
        match name:
            case "torch":
                return Mode(setting, TorchTables(setting.tables, first_weights(setting.tables)))
            case "fbgemm":
                weights = first_weights(setting.tables)
                return Mode(setting, FbgemmTables(setting.tables, weights, lr=LR)) if has_fbgemm() else None
            case "lru":
                return WithStore(setting, name, setting.cache)
            case "on_demand":
                return WithStore(setting, name, setting.largest, OnDemand)
            case _:
                return WithLookahead(setting, name)

    def _figures(
        self, setting: ModeSettings, slices: dict[str, list[Slice]], losses: dict[str, list[float]]
    ) -> dict[str, Any]:
        seconds = {name: [s.seconds for s in turns] for name, turns in slices.items()}
        moved = {name: sum(s.received + s.sent for s in turns) for name, turns in slices.items()}
        roofs, parts, spread = None, None, difference(losses)
        if "skirl" in slices and "resident" in slices:
            parts = {
                "compute": seconds["resident"],
                "wire": [max(s.received, s.sent) / setting.link.rate for s in slices["skirl"]],
                "cpu": [s.cpu / cores() for s in slices["skirl"]],
            }
            roofs = [max(each) for each in zip(*parts.values(), strict=True)]
            parts = {name: round(1e3 * median(values) / self.slice, 3) for name, values in parts.items()}
        same = agree(losses)
        return result(
            "train", self, "data dim batch cache depth device link rounds",
            store=self.store.partition(":")[0], cache_rows=setting.cache, touched=setting.touched,
            steps=self.slice * len(next(iter(slices.values()))),
            **{key: paired(seconds.get(name), seconds.get("skirl")) for key, name in RATIOS.items()},
            byte_ratio_on_demand=round(moved["on_demand"] / moved["skirl"], 4)
            if moved.get("skirl") and "on_demand" in moved
            else None,
            vs_roof=paired(roofs, seconds.get("skirl")), serial_vs_roof=paired(seconds.get("serial"), roofs),
            hidden=hidden(seconds.get("serial"), seconds.get("skirl"), roofs), roof=parts, losses_agree=same,
            loss_difference=spread,
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


def paired(above: list[float] | None, below: list[float] | None) -> float | None:
    """Return the median over rounds of the ratio above / below.

    >>> paired([2.0, 4.0, 90.0], [1.0, 2.0, 30.0])
    2.0
    """
    if not above or not below:
        return None
    return round(median(a / b for a, b in zip(above, below, strict=True)), 4)


def hidden(serial: list[float] | None, mine: list[float] | None, roofs: list[float] | None) -> float | None:
    """Return the share of hideable time that was hidden. Uses medians, since one round's difference may be near zero.

    >>> hidden([3.0], [1.2], [1.0])
    0.9
    """
    if not serial or not mine or not roofs or median(serial) <= median(roofs):
        return None
    return round((median(serial) - median(mine)) / (median(serial) - median(roofs)), 4)


def difference(losses: dict[str, list[float]]) -> dict[str, float]:
    """Return the maximum relative difference of each mode's losses from the first mode's; NaN if a loss is NaN."""
    first = np.array(next(iter(losses.values())))
    return {name: float(np.max(np.abs(mine - first) / np.abs(first))) for name, mine in losses.items()}


def agree(losses: dict[str, list[float]]) -> bool:
    """Return whether all modes trained the same model."""
    family = [values for name, values in losses.items() if name in FAMILY]
    return all(values == family[0] for values in family) and max(difference(losses).values()) <= AGREE


if __name__ == "__main__":
    main(TrainSpeed)
