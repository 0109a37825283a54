"""Runs of `skirl bench place`: one small job over any store, recording what each site sees. One may be killed."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from skirl.checkpoint import load, save
from skirl.core.batch import KeyedJagged, Sparse
from skirl.core.keys import table_of
from skirl.core.optim import RowwiseAdagrad
from skirl.core.placement import Cut
from skirl.core.placement_plan import PlacedTable, PlacementPlan, Site
from skirl.core.tables import Table
from skirl.data.synthetic import Synthetic
from skirl.nn.collection import EmbeddingBagCollection
from skirl.oracle.options import Plan
from skirl.pipeline.lookahead import lookahead
from skirl.placement.loads import Loads, plan_run
from skirl.store import Layout, Store
from skirl.store.base import Rows
from skirl.store.memory.store import MemoryStore
from skirl.train.scored import Fresh

DIMS = {"criteo-kaggle": (16,), "mixed": (8, 16, 32)}
"""Dims that tables take in turn, by the kind of job."""


@dataclass(frozen=True)
class RowsJob:
    """A job that trains rows alone, with the sum of their squares as the loss.

    **Arguments**

    - `kind`: key into `DIMS`.
    - `batch`, `steps`, `rows_scale`, `seed`: of the data, which is modelled on Criteo Kaggle.
    - `cache`: cache size in rows.
    - `depth`: batches that the oracle reads ahead.
    - `ranked`: whether rows are numbered as `skirl vocab` numbers them, the most frequent first.
    """

    kind: str
    batch: int
    steps: int
    rows_scale: float
    cache: int
    depth: int = 50
    seed: int = 0
    ranked: bool = False

    def tables(self) -> list[Table]:
        """Return all tables."""
        dims = DIMS[self.kind]
        return [replace(t, dim=dims[n % len(dims)]) for n, t in enumerate(self.data().tables(dims[0]))]

    def data(self) -> Synthetic:
        """Return the source of batches."""
        return Synthetic(
            "criteo-kaggle", batch_size=self.batch, batches=self.steps, seed=self.seed, rows_scale=self.rows_scale
        )

    def batches(self) -> list[KeyedJagged]:
        """Return the ids of all batches."""
        names = [table.name for table in self.tables()]
        ids = [columns(batch.sparse) for batch in self.data()]
        if self.ranked:
            every = np.concatenate(ids)
            for column in range(len(names)):
                found, counts = np.unique(every[:, column], return_counts=True)
                rank = np.empty(len(found), np.int64)
                rank[np.argsort(-counts, kind="stable")] = np.arange(len(found))
                for of in ids:
                    of[:, column] = rank[np.searchsorted(found, of[:, column])]
        return [KeyedJagged.one_hot(names, torch.from_numpy(of)) for of in ids]

    def embeddings(self, store: "Store | str", resume: bool = False) -> EmbeddingBagCollection:
        """Return the embeddings, with a cache in front of the store."""
        return EmbeddingBagCollection(
            self.tables(),
            optimizer=RowwiseAdagrad(lr=0.02),
            cache=self.cache,
            store=store,
            seed=self.seed,
            resume=resume,
        )


def columns(sparse: Any) -> NDArray[np.int64]:
    """Return the ids of a batch whose features have one id per sample, [batch, features].

    **Arguments**

    - `sparse`: the batch.
    """
    return sparse.values().numpy().astype(np.int64).reshape(len(sparse.keys()), -1).T.copy()


def counted(job: RowsJob, batches: Sequence[Any]) -> Loads:
    """Plan the run, and return what each step moves.

    **Arguments**

    - `job`, `batches`: what to train.
    """
    embeddings = job.embeddings("memory")
    engine = embeddings.engine
    loads = Loads(len(engine.schema.tables), engine.record_bytes)
    for moves in plan_run(engine, batches, Plan(job.depth)):
        loads.add(moves)
    embeddings.close()
    return loads


def plan_of(job: RowsJob, sites: int, cuts: Sequence[Cut]) -> PlacementPlan:
    """Return a plan with these cuts, over sites in memory.

    **Arguments**

    - `job`: the job whose tables are placed.
    - `sites`: number of sites.
    - `cuts`: the cut of each table.
    """
    tables = (PlacedTable(t.name, t.rows, t.dim, cut) for t, cut in zip(job.tables(), cuts, strict=True))
    return PlacementPlan(tuple(Site(f"site-{n}") for n in range(sites)), tuple(tables))


def layout_of(job: RowsJob) -> Layout:
    """Return the layout of the records of a job's tables.

    **Arguments**

    - `job`: the job whose tables are stored.
    """
    embeddings = job.embeddings("memory")
    layout = embeddings.engine.store.layout
    embeddings.close()
    return layout


class RecordingSite(MemoryStore):
    """A site that records each read and write: number of rows, bytes, and a digest of which rows.

    Two threads call it, so calls of neighbouring steps may swap places; the digest tells which step a call belongs to.
    """

    def __init__(self, layout: Any) -> None:
        super().__init__(layout)
        self.reads: list[tuple[int, int, bytes]] = []
        self.writes: list[tuple[int, int, bytes]] = []

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        super()._read(kind, keys, out, found)
        self.reads.append(load_of(keys[found], out.itemsize * out.shape[1]))

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        super()._write(kind, keys, rows)
        self.writes.append(load_of(keys, rows.itemsize * rows.shape[1]))


def load_of(keys: NDArray[np.int64], nbytes: int) -> tuple[int, int, bytes]:
    """Return the number of rows, their bytes, and a digest of which rows they are.

    **Arguments**

    - `keys`: keys of the rows.
    - `nbytes`: bytes of one row.
    """
    return len(keys), len(keys) * nbytes, blake2b(np.sort(keys).tobytes(), digest_size=8).digest()


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    **Arguments**

    - `losses`: loss of each step.
    - `rows`: a digest of all rows with their state.
    - `seconds`: duration of the training loop.
    """

    losses: list[float]
    rows: str
    seconds: float


def trained(
    job: RowsJob,
    embeddings: EmbeddingBagCollection,
    batches: Sequence[Sparse],
    *,
    folder: Path | None = None,
    kill_at: int | None = None,
    compute: float = 0.0,
    before_flush: Any = None,
) -> Outcome:
    """Train to the end, or until this process is killed.

    **Arguments**

    - `job`: what to train.
    - `embeddings`: its embeddings.
    - `batches`: batches of the whole run.
    - `folder`: a checkpoint folder: loaded if it exists, and saved every 5 steps.
    - `kill_at`: the step in which this process kills itself.
    - `compute`: seconds that each step sleeps, to stand for computation.
    - `before_flush`: called after the last step, before the flush.
    """
    losses: list[float] = []
    with lookahead(Fresh(batches), embeddings, sparse=lambda ids: ids, depth=job.depth) as steps:
        if folder is not None and folder.exists():
            load(folder, model=embeddings, data=steps)
        began = time.perf_counter()
        for ids in steps:
            out = embeddings(ids)
            loss = torch.stack([out[table.name].square().sum() for table in embeddings.engine.schema.tables]).sum()
            loss.backward()
            losses.append(float(loss.detach()))
            if compute:
                time.sleep(compute)
            if folder is not None and steps.step % 5 == 0:
                save(folder, model=embeddings, data=steps)
            if steps.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    seconds = time.perf_counter() - began
    if before_flush is not None:
        before_flush()
    embeddings.flush()
    return Outcome(losses, _digest(embeddings), seconds)


def _digest(embeddings: EmbeddingBagCollection) -> str:
    store, digest = embeddings.engine.store, blake2b(digest_size=16)
    keys = np.sort(np.concatenate([np.empty(0, np.int64), *store.keys()]))
    for record in store.layout.kinds:
        tables = [number for number, of in store.layout.records.items() if of == record]
        mine = keys[np.isin(table_of(keys), tables)]
        rows: Any = np.empty((len(mine), record.width), record.dtype)
        assert store.read(mine, rows).all()
        digest.update(mine.tobytes() + rows.tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    said = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    the_job = RowsJob(**said["job"])
    made = the_job.embeddings(said["store"])
    trained(the_job, made, the_job.batches(), folder=Path(said["folder"]), kill_at=said["kill_at"])
