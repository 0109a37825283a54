"""One pass over a loader's batches: the iterator that a for-loop holds, from the pass's beginning to its end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skirl.engine.work import Flight
from skirl.nn.collection import Collection
from skirl.oracle.epoch import Epoch
from skirl.pipeline.agree import ShardsInLoop
from skirl.pipeline.pipeline import Pipeline
from skirl.pipeline.reader import DataPosition, Reader, Watch
from skirl.pipeline.stages import Times
from skirl.pipeline.timeline import LOOP
from skirl.tools.interrupts import Hold, uninterrupted


@dataclass(slots=True)
class InLoop:
    """The step in the loop, and where in the data it is. It outlives the passes of a lookahead."""

    step: int = 0
    here: DataPosition = field(default_factory=DataPosition)
    before: DataPosition = field(default_factory=DataPosition)
    flight: Flight | None = None
    micro: int = 0
    updates: list[bool] | None = None
    """By collection: whether the last whole step updated its rows. None before the first."""
    torn: bool = False
    """True if the step ended when it had updated the rows of only some collections: see `tears`."""

    @property
    def begun(self) -> bool:
        return self.flight is not None and self.flight.begun

    @property
    def ends_step(self) -> bool:
        return self.flight is None or self.micro + 1 == len(self.flight.micros)

    def tears(self, collections: Sequence[Collection]) -> bool:
        """Return whether the rows would be of two steps if the step ended as it is: it has updated some, and not all that
        the last whole step updated. In a first step, all that it looked up have to be. Frozen ones do not count.
        """
        if self.flight is None or not self.flight.applied:
            return False
        needed = [work.begun for work in self.flight.works] if self.updates is None else self.updates
        each = zip(needed, self.flight.works, collections, strict=True)
        return any(need and not work.applied and one.current.trains for need, work, one in each)


class Pass:
    """An iterator over the batches of one pass.

    If it was interrupted while it brought a batch, it refuses to go on, since that batch would be lost.
    """

    def __init__(
        self,
        reader: Reader,
        pipeline: Pipeline,
        epochs: Sequence[Epoch],
        *,
        collections: Sequence[Collection],
        in_loop: InLoop,
        watch: Watch,
        times: Times,
        shards: ShardsInLoop | None = None,
    ) -> None:
        self.pipeline, self._reader, self._epochs, self._collections = pipeline, reader, epochs, collections
        self._in_loop, self._watch, self._times, self._shards = in_loop, watch, times, shards
        self._inside = False
        self._ended = False
        self.closed = False
        self._computing: float | None = None

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self.closed:
            raise RuntimeError("this pass is over: the lookahead was closed or iterated over again")
        if self._inside:
            raise RuntimeError(
                "this pass was interrupted or failed while it brought a batch, and cannot go on without losing it: iterate "
                "over the lookahead again to start over, or resume from a checkpoint"
            )
        self._inside = True
        self._computed()
        if self._shards is not None:
            self._shards.leave()
        if self._in_loop.flight is not None and not self._in_loop.ends_step:
            self._in_loop.micro += 1
        else:
            with uninterrupted() as hold:
                try:
                    self._ended = not self._next_step(hold)
                finally:
                    self._watch.rest(hold)
            if self._ended:
                raise StopIteration
        batch = self._yielded()
        self._inside = False
        return batch

    def close(self, apply: bool = True) -> None:
        if self.closed:
            return
        self.closed = True
        self._computed()
        now, whole = self._in_loop, apply
        if self._shards is not None:
            apply = apply and now.ends_step  # a step counts only if all its shards are there
            self._shards.close()
        if now.flight is not None and not (now.begun if apply else now.flight.applied):
            now.here = now.before  # the step never happened
        now.torn = not apply and now.tears(self._collections)
        try:
            self._finish(apply)
            if whole and self._shards is not None:
                self._shards.left(now.step, None if now.ends_step else now.micro + 1)
        finally:
            now.flight = None
            self._reader.end()
            try:
                self.pipeline.close()
            finally:
                for epoch in self._epochs:
                    epoch.close()

    def _next_step(self, hold: Hold) -> bool:
        """Finish the step in the loop and bring the next one; False if there is none. Ctrl-C waits, save in the loader."""
        now, pipeline = self._in_loop, self.pipeline
        self._finish()
        now.flight = None
        pipeline.check()
        for collection in self._collections:
            collection.engine.check()
        if self._shards is not None:
            self._shards.peers.comes(now.step + 1)
        flight = pipeline.next(hold, self._reader)
        if flight is None:
            now.here = DataPosition(now.step, now.here.epochs + 1, loader=self._reader.state_at_end)
            self.close()
            return False
        now.step += 1
        now.before = now.here
        now.flight, now.micro = flight, 0
        return True

    def _finish(self, apply: bool = True) -> None:
        for collection in self._collections:
            collection.current.finish(apply)
        flight = self._in_loop.flight
        if apply and flight is not None and flight.applied:
            self._in_loop.updates = [work.applied for work in flight.works]

    def _yielded(self) -> Any:
        now = self._in_loop
        assert now.flight is not None
        ids = now.flight.micros[now.micro]
        now.here = replace(now.here, step=now.step, batches=now.here.batches + 1, loader=ids.loader_state)
        for collection, work in zip(self._collections, now.flight.works, strict=True):
            collection.current.expect(work, now.micro)
        if self._shards is not None:
            self._shards.begin(now.step, now.micro)
        if self._times.timeline is not None:
            self._computing = time.monotonic()
        return ids.batch

    def _computed(self) -> None:
        since, self._computing = self._computing, None
        flight = self._in_loop.flight
        if since is not None and flight is not None:
            self._times.tell(LOOP, "compute", flight.number, since, time.monotonic())
