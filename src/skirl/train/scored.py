"""The logits of batches, several computed at once, with the same bits as one after the other."""

import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from skirl.core.batch import Batch
from skirl.nn.collection import collections_of
from skirl.tools.in_thread import in_thread
from skirl.tools.side_by_side import side_by_side
from skirl.train.evaluation import evaluating, predicted
from skirl.train.forked import Forked

Scored = tuple[Batch, Tensor]


def scored(
    model: nn.Module, batches: Iterable[Batch], threads: int, team: Forked | None = None
) -> Generator[Scored, None, None]:
    """Yield each batch with its logits, as `predicted` does.

    Threads that share a batch of a thousand samples wait for each other at each small layer. So each computes a batch of
    its own, if the first batch gets the same bits either way. A batch of another size uses all threads, as does any batch
    of a sequence model, whose shapes depend on more than the size. Processes do the same without sharing a GIL.
    """
    if team is not None:
        yield from _by_processes(team, model, batches, threads)
        return
    apart = all(each.engine.device.by_any_thread and each.pooled for each in collections_of(model).values())
    before = torch.get_num_threads()
    try:
        with evaluating(model, batches) as found:
            torch.set_num_threads(1 if apart else threads)
            if (first := next(found, None)) is None:
                return
            alone = logits = _computed(model, first)
            if apart and threads > 1:
                torch.set_num_threads(threads)
                logits = _computed(model, first)
            yield first, logits
            if threads == 1 or not apart or not torch.equal(alone, logits):
                yield from ((batch, _computed(model, batch)) for batch in found)
                return
            torch.set_num_threads(1)  # for each of the threads that begin now
            with side_by_side(_Each(model, len(logits), threads), found, threads) as results:
                yield from results
    finally:
        torch.set_num_threads(before)


def _by_processes(
    team: Forked, model: nn.Module, batches: Iterable[Batch], threads: int
) -> Generator[Scored, None, None]:
    before, source = torch.get_num_threads(), iter(batches)
    if (first := next(source, None)) is None:
        return
    try:
        with evaluating(model, (), thread=False):
            torch.set_num_threads(1)
            alone = _computed(model, first)
            torch.set_num_threads(threads)
            logits = _computed(model, first)
            yield first, logits
            if torch.equal(alone, logits):
                yield from _received(team, model, source, len(logits))
                return
        yield from predicted(model, Fresh(source))
    finally:
        torch.set_num_threads(before)


def _received(team: Forked, model: nn.Module, source: Iterator[Batch], size: int) -> Generator[Scored, None, None]:
    def sent() -> Iterator[tuple[int | None, Batch]]:
        turn = 0
        for batch in source:
            if len(batch.labels) != size:
                yield None, batch
                continue
            team.send(turn, batch)
            yield turn, batch
            turn += 1
        team.end()

    # A process begins a batch once it has the next. The other places keep batches ready, in case the reader stalls.
    with in_thread(sent(), room=4 * len(team)) as given:
        try:
            for turn, batch in given:
                yield batch, _computed(model, batch) if turn is None else torch.from_numpy(team.receive(turn))
        finally:
            team.stop()  # or the sending thread may wait for the processes


class Fresh:
    """Batches that have memory of their own and say so, so that looking ids up early needs no copy."""

    yields_fresh = True

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class _Each:
    """Computes batches in several threads at once."""

    def __init__(self, model: nn.Module, size: int, threads: int) -> None:
        self._model, self._size, self._threads = model, size, threads
        self._odd = threading.Lock()

    def __call__(self, batch: Batch) -> Scored:
        if len(batch.labels) == self._size:
            return batch, _computed(self._model, batch)
        with self._odd:
            torch.set_num_threads(self._threads)
            try:
                return batch, _computed(self._model, batch)
            finally:
                torch.set_num_threads(1)


def _computed(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model(batch)
