"""The ways to hold a model's rows that `skirl bench train` compares, over one model and one stream of batches."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from skirl.core.batch import Batch, moved
from skirl.core.ids import Captured
from skirl.core.initial import InitialTable, fill
from skirl.core.keys import key_of
from skirl.core.optim import SGD
from skirl.core.tables import Schema, Table
from skirl.engine.device import torch_device
from skirl.engine.work import Micro, Work
from skirl.measure.bench.others import fbgemm, has_fbgemm
from skirl.models import DLRM
from skirl.models.dlrm import Embeddings
from skirl.nn import alone
from skirl.nn.collection import EmbeddingBagCollection
from skirl.nn.current_step import CurrentStep
from skirl.oracle.step import Step
from skirl.pipeline.lookahead import Lookahead, lookahead
from skirl.store import Link, LinkStore, Record, open_store
from skirl.store.remote.started import cpu_of, family
from skirl.train.done import Done
from skirl.train.train import steps

MODELS = {"tiny": DLRM.tiny, "dlrm": DLRM.paper}


@dataclass(frozen=True)
class ModeSettings:
    """The settings that all modes share."""

    model: str
    tables: Sequence[Table]
    dense_features: int
    batches: Sequence[Batch]
    lr: float
    seed: int
    depth: int
    prefetch: int
    cache: int
    """Cache size in rows, in modes that have a cache."""
    touched: int
    """Rows that all batches use together."""
    largest: int
    """The most rows that any one batch uses."""
    link: Link
    store: str
    """memory, disk:FOLDER (each mode gets a folder of its own in it), or memory nodes."""
    device: str = "cpu"
    wire: Link | None = None
    """The real network to memory nodes, not emulated."""
    beside: int = 0
    """A process on this machine that serves rows, 0 for none. Its CPU time and its children's count as the mode's own."""

    @property
    def dim(self) -> int:
        """Numbers in a row's vector; SGD's records hold nothing else."""
        return self.tables[0].dim

    def embeddings(self, kind: type[EmbeddingBagCollection], cache: int, store: LinkStore) -> EmbeddingBagCollection:
        """Return the embeddings of a mode."""
        return kind(
            self.tables, optimizer=SGD(lr=self.lr), cache=cache, store=store, seed=self.seed, device=self.device
        )  # fmt: skip

    @property
    def layout(self) -> dict[int, Record]:
        """The records of the store, by table."""
        return {t: Record(self.dim) for t in range(len(self.tables))}


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
    calls: int
    others: float
    """Average number of cores that other processes kept busy meanwhile."""
    losses: list[float]


class RepeatedBatches:
    """A stream that yields the same, unchanged batches on every pass."""

    yields_fresh = True

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


class Mode:
    """A way to hold the rows: a model over some embeddings, and its training loop."""

    def __init__(self, setting: ModeSettings, embeddings: Embeddings) -> None:
        torch.manual_seed(setting.seed)
        self._at = torch_device(setting.device)
        self.model = MODELS[setting.model](embeddings, dense_features=setting.dense_features).to(self._at)
        self.setting = setting
        self.store: LinkStore | None = None
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=setting.lr)
        self._loop: Iterator[Done] | None = None

    def batches(self) -> Iterable[Batch]:
        """Return the batches that the loop runs over."""
        return RepeatedBatches(self.setting.batches)

    def slice(self, count: int) -> Slice:
        """Run the next `count` steps of the loop. The clock stops once everything that they started is done."""
        if self._loop is None:
            self._loop = steps(self.model, self._optimizer, self.batches())
        self.rest()
        (received, sent, calls), busy = self._moved(), machine_busy()
        served, spent = self._served(), time.process_time()
        began = time.perf_counter()
        losses = [next(self._loop).loss_tensor for _ in range(count)]
        self.rest()
        if self._at.type == "cuda":
            torch.cuda.synchronize(self._at)
        seconds, used = time.perf_counter() - began, time.process_time() - spent + self._served() - served
        others = max(0.0, machine_busy() - busy - used) / seconds
        received_then, sent_then, calls_then = self._moved()
        numbers = [loss.item() for loss in losses]
        return Slice(seconds, used, received_then - received, sent_then - sent, calls_then - calls, others, numbers)

    def rest(self) -> None:
        """Wait until nothing is in motion."""

    def close(self) -> None:
        """Release everything."""
        self._loop = None

    def _served(self) -> float:
        """Return the CPU seconds used so far by the process that serves rows on this machine, and its children."""
        return cpu_of(family(self.setting.beside)) if self.setting.beside else 0.0

    def _moved(self) -> tuple[int, int, int]:
        if self.store is None:
            return 0, 0, 0
        received, sent = self.store.received, self.store.sent
        return received.nbytes, sent.nbytes, received.calls + sent.calls


class WithoutLookahead(Mode):
    """Rows in a store, looked up synchronously: through an LRU cache without a lookahead, or as `kind` does it."""

    def __init__(
        self, setting: ModeSettings, name: str, kind: type[EmbeddingBagCollection] = EmbeddingBagCollection
    ) -> None:
        store = store_of(setting, name)
        cache = setting.largest if kind is OnDemand else setting.cache
        embeddings = setting.embeddings(kind, cache, store)
        super().__init__(setting, embeddings)
        self.store, self.embeddings = store, embeddings

    def close(self) -> None:
        super().close()
        self.embeddings.current.finish()
        self.embeddings.engine.store.close()


class WithLookahead(Mode):
    """skirl with a lookahead: rows in a store, or all resident.

    serial: fetch rows only when the loop asks for them, and wait until evicted rows are written.
    """

    def __init__(self, setting: ModeSettings, name: str, *, resident: bool = False, serial: bool = False) -> None:
        store = store_of(setting, name, resident)
        cache = setting.touched if resident else setting.cache
        embeddings = setting.embeddings(EmbeddingBagCollection, cache, store)
        super().__init__(setting, embeddings)
        self.store, self.embeddings = store, embeddings
        self.serial = serial
        self.ahead: Lookahead = lookahead(
            RepeatedBatches(setting.batches),
            self.model,
            depth=setting.depth,
            prefetch=0 if serial else setting.prefetch,
        ).__enter__()

    def batches(self) -> Iterator[Batch]:
        for batch in self.ahead:
            if self.serial:
                self.ahead.drain()
            yield batch

    def rest(self) -> None:
        while not self.ahead.idle:
            time.sleep(1e-4)

    def close(self) -> None:
        super().close()
        self.ahead.__exit__(None, None, None)
        self.embeddings.engine.store.close()


class OnDemand(EmbeddingBagCollection):
    """No cache, no lookahead: read, train and write back each batch's distinct rows. New rows are made, not read.

    The planner only names the distinct rows, groups their positions and knows which were used before.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.alone = _NoCache(self.engine)
        self.current = _WritesBack(self.engine, self.optimizer, self.anchor, self.same, None)


class _NoCache(alone.StepByStep):
    """Steps that fetch every row of a batch that is not new."""

    def step(self, captured: Captured) -> Work:
        engine, micro = self._engine, Micro.of(captured, self._engine.resolver)
        most = [max(ids.count for ids in micro.ids)]
        engine.make_caches(most, most, 4)
        work = self._next(micro)
        work.steps = [_everything(work.steps[0])]
        engine.fetch(work)
        engine.banks[0].written(engine.banks[0].load(work, work.fetched[0]))  # nothing was evicted
        self._steps += 1
        self._begun.executed(self._steps)
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


class TorchTables(nn.Module):
    """All rows in one nn.EmbeddingBag per table, with sparse gradients."""

    def __init__(self, tables: Sequence[Table], seed: int) -> None:
        super().__init__()
        self.tables = tables
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(t.rows, t.dim, mode="sum", sparse=True, _weight=weights)
            for t, weights in zip(tables, first_weights(tables, seed))
        )

    def forward(self, sparse: Any) -> Any:
        features = len(sparse.keys())
        offsets = sparse.offsets()
        batch = (len(offsets) - 1) // features
        at = next(self.bags.parameters()).device
        ids, on_device = (moved(part, at) for part in (sparse.values(), offsets))
        vectors = []
        for i, bag in enumerate(self.bags):
            begins = on_device[i * batch : (i + 1) * batch]
            first, last = int(offsets[i * batch]), int(offsets[(i + 1) * batch])
            vectors.append(bag(ids[first:last], begins - first))
        return SimpleNamespace(stacked=lambda: torch.stack(vectors, dim=1))


class FbgemmTables(nn.Module):
    """All rows in FBGEMM's table-batched operator, whose backward applies SGD."""

    def __init__(self, tables: Sequence[Table], seed: int, lr: float) -> None:
        super().__init__()
        self.tables = tables
        self.rows = fbgemm(tables, lr=lr)
        for table, weights in zip(self.rows.split_embedding_weights(), first_weights(tables, seed)):
            table.copy_(weights)

    def forward(self, sparse: Any) -> Any:
        flat = self.rows(sparse.values(), sparse.offsets())
        return SimpleNamespace(stacked=lambda: flat.view(len(flat), len(self.tables), -1))


def machine_busy() -> float:
    """Return the CPU seconds that all cores of this machine have worked since boot; 0 if the system does not say."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, soft = (int(word) for word in words[:7])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def fbgemm_or_none(setting: ModeSettings) -> Mode | None:
    """Return the FBGEMM mode, or None if FBGEMM is not installed."""
    return Mode(setting, FbgemmTables(setting.tables, setting.seed, setting.lr)) if has_fbgemm() else None


def store_of(setting: ModeSettings, name: str, resident: bool = False) -> LinkStore:
    """Open a mode's store behind the link. If all rows are resident, it is in memory and never asked."""
    spec = setting.store
    own = spec if spec == "memory" or spec.startswith("rpc:") else f"{spec}/{name}"
    inner = open_store("memory" if resident else own, setting.layout)
    return LinkStore(inner, setting.link)


def first_weights(tables: Sequence[Table], seed: int) -> Iterator[torch.Tensor]:
    """Yield each table's rows, initialised as skirl does it."""
    initial = InitialTable.of([t.initial for t in tables], np.dtype(np.float32))
    for number, table in enumerate(tables):
        out = np.empty((table.rows, table.dim), np.float32)
        for begin in range(0, table.rows, 1 << 20):
            part = out[begin : begin + (1 << 20)]
            keys = key_of(number, np.arange(begin, begin + len(part)))
            slots = np.arange(len(part), dtype=np.int32)
            fill(keys, slots, part, table.dim, seed, initial.kind, initial.scale, initial.quantiles, 0.0, 0, len(part))
        yield torch.from_numpy(out)


def rows_of(batches: Sequence[Batch], schema: Schema) -> tuple[int, list[int]]:
    """Return how many distinct rows all batches use together, and how many each of them uses."""
    from skirl.train.touched import keys_of

    distinct = [np.unique(keys_of(batch.sparse, schema)) for batch in batches]
    return len(np.unique(np.concatenate(distinct))), [len(keys) for keys in distinct]
