"""The loop's side of the oracle: yields a loader's batches, each with its rows in place.

A pass is an iterator of its own, as a for-loop expects: it knows whether it was interrupted while it brought a batch, and
then refuses to go on, because that batch would be lost without a word. The alternative, putting the batch back, would need
the loader's help.
"""

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from skirl.core.batch import Sparse
from skirl.engine.engine import Engine
from skirl.engine.work import Work
from skirl.nn.collection import collection_of
from skirl.oracle.planner import Depth, Plan
from skirl.pipeline.epoch import Epoch
from skirl.pipeline.loader_watch import Watch
from skirl.pipeline.pipeline import Pipeline
from skirl.pipeline.reader import Place, Reader
from skirl.pipeline.stages import StageHook, Times
from skirl.pipeline.timeline import LOOP, Timeline
from skirl.tools import rng_state
from skirl.tools.interrupts import Hold, uninterrupted


def _sparse_of(batch: Any) -> Sparse:
    return batch.sparse


def lookahead(
    loader: Iterable[Any],
    model: nn.Module,
    *,
    sparse: Callable[[Any], Sparse] = _sparse_of,
    depth: Depth = "auto",
    prefetch: int = 2,
    accumulate: int = 1,
    policy: str = "min",
    ramp: bool = True,
    window_bytes: int | None = None,
    plan_threads: int = 1,
    patience: float = 600.0,
    hook: StageHook | None = None,
    trace: str | Path | None = None,
) -> "Lookahead":
    """Read ahead in a loader, so that each batch's rows are on the device when it is yielded.

    depth: batches the oracle knows, "auto" or "epoch". prefetch: steps ahead that rows travel. accumulate: micro-batches
    that make one Step, updated once. plan_threads: of the oracle, beside those of torch. trace: a file for the timeline of
    the stages, see timeline.py. None of them changes a result, nor does any timing.

    >>> import torch, skirl
    >>> embeddings = skirl.EmbeddingBagCollection([skirl.Table("a", 100, 2)], optimizer=skirl.SGD(lr=0.1), cache=4)
    >>> loader = [skirl.KeyedJagged.one_hot(["a"], torch.tensor([[i % 5]])) for i in range(10)]
    >>> with skirl.lookahead(loader, embeddings, sparse=lambda ids: ids) as batches:
    ...     for ids in batches:
    ...         embeddings(ids)["a"].sum().backward()
    >>> batches.step, embeddings.engine.counters.new, embeddings.engine.counters.fetched
    (10, 5, 1)
    """
    plan = Plan(depth, prefetch, policy, ramp, window_bytes, plan_threads)
    return Lookahead(
        loader, model, plan, sparse=sparse, accumulate=accumulate, patience=patience, hook=hook, trace=trace
    )


class Lookahead:
    """An iterable over a loader's batches; use it in a with-block. Made by `lookahead`."""

    def __init__(
        self,
        loader: Iterable[Any],
        model: nn.Module,
        plan: Plan,
        *,
        sparse: Callable[[Any], Sparse],
        accumulate: int,
        patience: float,
        hook: StageHook | None,
        trace: str | Path | None = None,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate}: set it to 1 or more micro-batches")
        if not patience > 0:
            raise ValueError(f"patience is {patience}: set it to seconds above 0, or to float('inf')")
        self.step = 0
        """Steps begun: 1 while the first batch is in the loop."""
        self.times = Times()
        self._collection = collection_of(model)
        self._plan = plan
        self._accumulate = accumulate
        self._patience = patience
        self._hook = hook
        self._trace = trace
        self._computing: float | None = None
        """Since when the batch in the loop computes, for the timeline."""
        self._watch = Watch(patience)
        self._reader = Reader(loader, sparse, accumulate, self.engine, self._watch, self.times)
        if plan.depth == "epoch" and self._reader.reads_once:
            raise ValueError(
                'depth="epoch" reads the loader twice, and this one is an iterator: pass a list or a DataLoader, '
                'or use depth="auto"'
            )
        weakref.finalize(self, self._watch.abandon)
        self._pipeline: Pipeline | None = None
        self._pass: _Pass | None = None
        self._epoch: Epoch | None = None
        self._work: Work | None = None
        self._micro = 0
        self._entered = False
        self._here = Place()
        """After the batch in the loop,"""
        self._before = self._here
        """and before its step."""
        self._loaded = False
        """`_here` is from a checkpoint: the next pass goes on there."""

    @property
    def engine(self) -> Engine:
        """The rows that the batches use."""
        return self._collection.engine

    @property
    def epochs(self) -> int:
        """Passes over the loader that are complete; a resumed run goes on from those of the run that was saved."""
        return self._here.epochs

    @property
    def ends_step(self) -> bool:
        """Whether the batch in the loop is the last micro-batch of its step: the time for `dense.step()` and a save."""
        return self._work is None or self._micro + 1 == len(self._work.micros)

    @property
    def iterating(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._pipeline is not None

    @property
    def window(self) -> int:
        """Batches that the planner knows now, beyond the one in the loop."""
        return self._pipeline.window if self._pipeline else 0

    def __enter__(self) -> "Lookahead":
        try:
            self._collection.opened(self)
            self._entered = True
            if self._trace is not None:
                self.times.timeline = Timeline(self._trace)
        except BaseException:
            if self._collection.lookahead is self:
                self._entered = False
                self._collection.opened(None)  # interrupted, or no file for the timeline: no __exit__ will follow
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(apply=error is None)
        except Exception as late:
            if error is None or late is error:
                raise
            error.add_note(f"and while closing the lookahead: {late}")

    def close(self, apply: bool = True) -> None:
        """End the pass and let the embeddings go; the with-block does it.

        apply: a step of which only some micro-batches came back is applied, otherwise it never happened.
        """
        with uninterrupted():
            if not self._entered:
                return
            try:
                self._close_pipeline(apply)
            finally:
                self._watch.close()
                self._entered = False
                self._collection.opened(None)
                if self.times.timeline is not None:
                    self.times.timeline.close()
                    self.times.timeline = None

    def __iter__(self) -> "_Pass":
        """Begin a new pass."""
        if not self._entered:
            raise RuntimeError(
                "open the lookahead first: with skirl.lookahead(...) as batches: for batch in batches: ..."
            )
        self.engine.check()
        if not self._collection.training:
            raise RuntimeError(
                "the model is in eval mode, and a lookahead moves rows and trains them: call model.train() first. To "
                "evaluate, iterate over the loader itself: in eval mode the model looks rows up and changes nothing"
            )
        self._reader.check_fresh()
        self._close_pipeline()
        self.engine.forget_split()
        start = rng_state.capture()
        if not self._loaded:
            self._here = replace(self._here, step=self.step, batches=0, loader=None)
        if not self._here.batches:
            self._here = replace(self._here, start=start)
        self._before = self._here
        if self._plan.depth == "epoch":
            self._epoch = self._reader.spool(self._here)
            rng_state.restore(start)  # the first pass never happened: same draws as with any other depth
        if self.times.timeline is not None:
            self.times.timeline.first = self._here.step
        self._reader.begin(self._here)
        with uninterrupted():
            self._pipeline = Pipeline(
                self.engine,
                self._plan,
                patience=self._patience,
                hook=self._hook,
                epoch=self._epoch,
                times=self.times,
            )
            weakref.finalize(self, self._pipeline.abandon)
            self._pass = _Pass(self)
        self._loaded = False
        return self._pass

    def _next_step(self, pipeline: Pipeline, hold: Hold) -> bool:
        """End the step in the loop and bring the next one; False when there is none. Ctrl-C waits, but in `_pull`."""
        self._collection.finish()
        self._work = None
        pipeline.check()
        self.engine.check()
        pipeline.request()
        while pipeline.lacks_batches(hold):
            self._pull(pipeline, hold)
        work = pipeline.next(hold)
        if work is None:
            self._here = Place(self.step, self._here.epochs + 1, loader=self._reader.state_at_end)
            self._close_pipeline()
            return False
        while pipeline.hungry():  # keeps the planner fed while this step computes
            self._pull(pipeline, hold)
        self.step += 1
        self._before = self._here
        self._work, self._micro = work, 0
        return True

    def _pull(self, pipeline: Pipeline, hold: Hold) -> None:
        """Feed one step's micro-batches."""
        micros = self._reader.pull(hold)
        if micros:
            pipeline.feed(micros)
        if len(micros) < self._accumulate:
            pipeline.end()

    def drain(self) -> None:
        """Wait until rows that have left the cache are in the store."""
        if self._pipeline is not None:
            self._pipeline.drain()

    @property
    def idle(self) -> bool:
        """Whether nothing is planned, read or written before the loop goes on: a benchmark starts its clock then."""
        return self._pipeline is None or self._pipeline.idle

    def settle(self) -> None:
        """End the step in the loop, so that rows are as after it; unless its batch was not looked up yet."""
        if not self._begun:
            return
        if not self.ends_step:
            assert self._work is not None
            raise RuntimeError(
                f"micro-batch {self._micro + 1} of {len(self._work.micros)} is in the loop, and rows are updated after the "
                "last: save when batches.ends_step is true"
            )
        self._collection.finish()

    def state_dict(self) -> dict[str, Any]:
        """Where in the data the run is: after the batch in the loop, or before it when it was not looked up yet."""
        place = self._before if self._work is not None and not self._begun else self._here
        return {
            "step": place.step,
            "epochs": place.epochs,
            "batches": place.batches,
            "accumulate": self._accumulate,
            "loader": place.loader,
            "start": place.start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there: the next pass skips what was done of it."""
        self.check_state(state)
        self._here = Place(state["step"], state["epochs"], state["batches"], state["loader"], state["start"])
        self._before, self.step, self._loaded = self._here, state["step"], True

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse a state that this lookahead cannot go on from."""
        if self._pipeline is not None:
            raise RuntimeError(
                "this lookahead is already iterating: load before its loop, or make a new lookahead and load into that"
            )
        if state["accumulate"] != self._accumulate:
            raise ValueError(
                f"the run was saved with accumulate={state['accumulate']}: set it to that, not {self._accumulate}"
            )
        self._reader.check_state(state["loader"])

    @property
    def _begun(self) -> bool:
        """Whether a forward of the step in the loop ran."""
        return self._work is not None and any(micro.entered for micro in self._work.micros)

    def _yielded(self) -> Any:
        assert self._work is not None
        micro = self._work.micros[self._micro]
        self._here = replace(self._here, step=self.step, batches=self._here.batches + 1, loader=micro.loader_state)
        self._collection.expect(self._work, self._micro)
        if self.times.timeline is not None:
            self._computing = time.monotonic()
        return micro.batch

    def _computed(self) -> None:
        """The loop is done with the batch in it."""
        since, self._computing = self._computing, None
        if since is not None and self._work is not None:
            self.times.tell(LOOP, "compute", self._work.number, since, time.monotonic())

    def _close_pipeline(self, apply: bool = True) -> None:
        """End the current pass; what was planned and not executed never happened."""
        self._computed()
        pipeline, self._pipeline, self._pass = self._pipeline, None, None
        if self._work is not None and not (self._begun if apply else self._work.updated):
            self._here = self._before  # the step never happened
        try:
            self._collection.finish(apply)
        finally:
            self._work = None
            self._reader.end()
            try:
                if pipeline is not None:
                    pipeline.close()
            finally:
                if self._epoch is not None:
                    self._epoch.close()
                    self._epoch = None


class _Pass:
    """One pass over the batches: what a for-loop holds."""

    def __init__(self, lookahead: Lookahead) -> None:
        self._lookahead = lookahead
        self._inside = False
        self._ended = False

    def __iter__(self) -> "_Pass":
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        ahead = self._lookahead
        pipeline, work = ahead._pipeline, ahead._work
        if ahead._pass is not self or pipeline is None:
            raise RuntimeError("this pass is over: the lookahead was closed or iterated over anew")
        if self._inside:
            raise RuntimeError(
                "this pass was interrupted or failed while it brought a batch, and cannot go on without losing it: iterate "
                "over the lookahead again to begin anew, or resume from a checkpoint"
            )
        self._inside = True
        ahead._computed()
        if work is not None and ahead._micro + 1 < len(work.micros):
            ahead._micro += 1
        else:
            with uninterrupted() as hold:
                try:
                    self._ended = not ahead._next_step(pipeline, hold)
                finally:
                    ahead._watch.rest(hold)
            if self._ended:
                raise StopIteration
        batch = ahead._yielded()
        self._inside = False
        return batch
