"""Batches for evaluation. The rows of each next batch are looked up while the model computes. Nothing changes
meanwhile, so they are the same as if they were looked up later.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from torch import nn

from skirl.core.batch import Batch, Sparse
from skirl.nn.collection import Collection, collection_of
from skirl.nn.lookup import EarlyLookup
from skirl.pipeline.batch_copy import own


class Ahead:
    """A thread that looks up the ids of one batch after another.

    >>> import torch, skirl
    >>> rows = skirl.EmbeddingBagCollection([skirl.Table("a", 100, 2)], optimizer=skirl.SGD(lr=0.1), cache=4).eval()
    >>> ids = [skirl.KeyedJagged.one_hot(["a"], torch.tensor([[i]])) for i in range(3)]
    >>> loader = [Batch(torch.zeros(1, 0), one, torch.zeros(1)) for one in ids]
    >>> with read_ahead(rows, loader) as batches:
    ...     found = [rows(batch.sparse)["a"] for batch in batches]
    >>> all(torch.equal(one, rows(batch.sparse)["a"]) for one, batch in zip(found, loader, strict=True))
    True
    """

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._asked: SimpleQueue[tuple[Sparse, EarlyLookup] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="skirl-evaluation")
        self._thread.start()

    def ask(self, sparse: Sparse) -> EarlyLookup:
        """Begin to look ids up. The result is there later."""
        found = EarlyLookup(sparse)
        self._asked.put((sparse, found))
        return found

    def close(self) -> None:
        """End the thread, once it has finished its work."""
        self._asked.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            sparse, found = asked
            try:
                found.result.set_result(self._collection.looked_up(sparse))
            except BaseException as error:
                found.result.set_exception(error)


@contextmanager
def read_ahead(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
    """Yield the same batches. The rows come early if the model has one collection and gives it `batch.sparse` unchanged."""
    if sum(isinstance(module, Collection) for module in model.modules()) != 1:
        yield iter(batches)
        return
    collection = collection_of(model)
    if not collection.engine.rows.local:  # all trainers look up together, in the order of the loop
        yield iter(batches)
        return
    if collection.lookahead is not None:
        collection.lookahead.drain()
    ahead = Ahead(collection)
    try:
        yield _in_turn(collection, ahead, batches)
    finally:
        collection.early.__dict__.clear()
        ahead.close()


def _in_turn(collection: Collection, ahead: Ahead, batches: Iterable[Batch]) -> Iterator[Batch]:
    fresh = getattr(batches, "yields_fresh", False)
    before: tuple[Batch, EarlyLookup | None] | None = None
    wanted = True  # until the model gives its embeddings something other than batch.sparse
    for batch in batches:
        batch = batch if fresh else own(batch)  # the loader may reuse its buffers
        found = ahead.ask(batch.sparse) if wanted else None
        if before is not None:
            yield from _given(collection, *before)
            wanted = before[1] is not None and not before[1].refused
        before = batch, found
    if before is not None:
        yield from _given(collection, *before)


def _given(collection: Collection, batch: Batch, found: EarlyLookup | None) -> Iterator[Batch]:
    collection.early.found = found
    yield batch
