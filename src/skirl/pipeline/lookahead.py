"""The loop's side of the oracle: `lookahead` yields a loader's batches, each with its rows in place."""

import logging
import time
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import nn

from skirl.core.batch import Sparse
from skirl.core.tree import block_of, check_shards
from skirl.engine.engine import Engine
from skirl.engine.window import Window
from skirl.engine.work import State, Work
from skirl.nn.collection import Collection, collections_of, refuse_copies
from skirl.oracle.epoch import Epoch
from skirl.oracle.planner import Depth, Plan
from skirl.oracle.route import Route
from skirl.peers.base import PeerError, said_of
from skirl.pipeline.pipeline import Pipeline
from skirl.pipeline.reader import DataPosition, Reader, Watch
from skirl.pipeline.shards import Shards
from skirl.pipeline.stages import LOOP, StageHook, Timeline, Times, keep_rows
from skirl.tools import rng_state
from skirl.tools.interrupts import Hold

log = logging.getLogger("skirl")
NAMED_WITHIN = 30.0
"""Seconds within which a trainer that is lost has been named."""


def sparse_of(batch: Any) -> Sparse:
    try:
        return batch.sparse
    except AttributeError as error:
        if error.name != "sparse" or error.obj is not batch:  # of a property of the user's
            raise
        return batch


class OnePlan(Protocol):
    """Several models whose rows move by one plan: a `skirl.Sweep`."""

    def in_their_place(self) -> Collection: ...


def lookahead(
    loader: Iterable[Any],
    model: nn.Module | OnePlan,
    *,
    sparse: Callable[[Any], Sparse] = sparse_of,
    depth: Depth = "auto",
    prefetch: int = 2,
    accumulate: int = 1,
    shards: int | None = None,
    policy: str = "min",
    ramp: bool = True,
    window_bytes: int | None = None,
    timeout: float = 600.0,
    trace: str | Path | None = None,
) -> "Lookahead":
    """Read ahead in a loader, so that each batch's rows are on the device when it is yielded.

    Only `accumulate` and `shards` change results.

    **Arguments**

    - `loader`: iterable of batches: a DataLoader, a list, anything.
    - `model`: the model with the embeddings: one collection or several, each of which looks its features up in the same
      batch. Or a `skirl.Sweep`, whose variants all get the same batches.
    - `sparse`: returns a batch's ids; by default `batch.sparse`, as in `skirl.Batch`, or the batch itself.
    - `depth`: batches that the oracle knows. "auto" reads until the window has four times the cache in rows, which
      comes within a few percent of the fewest possible fetches; "epoch" knows all, and reads the loader twice.
    - `prefetch`: how many steps ahead rows travel; 2 hides a store that takes as long as a step.
    - `accumulate`: micro-batches in a step, whose gradients are summed, as in a plain loop: divide each loss by
      `accumulate` for the mean. Rows are updated once, after the last one's backward.
    - `shards`: number of equal parts of a step's samples, a power of two; the step's loss is the mean over them. The
      loader yields these parts one after the other, and the loop's body runs for each as for a batch. Rows are updated
      after the last backward, and `step()` of a dense optimizer does nothing until then. The bits depend on this
      number, and not on which trainer computes which part: with several trainers, each has some of the parts, and its
      loader yields these. By default 1 or, with several trainers, their number rounded up to a power of two.
    - `policy`: which rows leave: "min", which fetches the fewest, or "lru", "lfu", "ttl" for comparison.
    - `ramp`: begin with a window of 8 batches that grows, so that training starts at once; False waits for the whole window.
    - `window_bytes`: memory that the window's batches may take. By default 1 GiB, or no limit if `depth` is a number.
    - `timeout`: seconds that a loader or a store may take for one batch before it counts as hanging. Ten minutes by
      default, since a slow one must not end a run.
    - `trace`: file for the timeline of the stages, which chrome://tracing and Perfetto can show. None writes none: it
      grows with every step.

    >>> import torch, skirl
    >>> embeddings = skirl.EmbeddingBagCollection([skirl.Table("a", 100, 2)], optimizer=skirl.SGD(lr=0.1), cache=4)
    >>> loader = [skirl.KeyedJagged.one_hot(["a"], torch.tensor([[i % 5]])) for i in range(10)]
    >>> with skirl.lookahead(loader, embeddings, sparse=lambda ids: ids) as batches:
    ...     for ids in batches:
    ...         embeddings(ids)["a"].sum().backward()
    >>> batches.step, embeddings.engine.counters.new, embeddings.engine.counters.fetched
    (10, 5, 1)
    """
    plan = Plan(depth, prefetch, policy, ramp, window_bytes)
    return Lookahead(
        loader, model, plan, sparse=sparse, accumulate=accumulate, shards=shards, timeout=timeout, trace=trace
    )


@dataclass(slots=True)
class InLoop:
    """The step in the loop, and where in the data it is. It outlives the passes of a lookahead."""

    step: int = 0
    here: DataPosition = field(default_factory=DataPosition)
    before: DataPosition = field(default_factory=DataPosition)
    works: Sequence[Work] = ()
    """By collection; none if no step is in the loop."""
    micro: int = 0
    updates: list[bool] | None = None
    """By collection: whether the last whole step updated its rows. None before the first."""
    torn: bool = False
    """True if the step ended when it had updated the rows of only some collections: see `tears`."""

    @property
    def applied(self) -> bool:
        return any(work.applied for work in self.works)

    @property
    def begun(self) -> bool:
        return any(work.begun for work in self.works)

    @property
    def ends_step(self) -> bool:
        return not self.works or self.micro + 1 == len(self.works[0].micros)

    def tears(self, collections: Sequence[Collection]) -> bool:
        """Return whether the rows would be of two steps if the step ended as it is: it has updated some, and not all
        that the last whole step updated. In a first step, all that it looked up have to be. Frozen ones do not
        count."""
        if not self.applied:
            return False
        needed = [work.begun for work in self.works] if self.updates is None else self.updates
        each = zip(needed, self.works, collections, strict=True)
        return any(need and not work.applied and one.current.trains for need, work, one in each)


class Pass:
    """An iterator over the batches of one pass. Interrupted while it brings a batch, it refuses to go on: that one is
    lost."""

    def __init__(self, ahead: "Lookahead", pipeline: Pipeline) -> None:
        self._ahead, self.pipeline = ahead, pipeline
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
        if self._ahead._in_shards is not None:
            self._ahead._in_shards.leave()
        if not self._ahead._in_loop.ends_step:
            self._ahead._in_loop.micro += 1
        else:
            with self._ahead._watch.held_back() as hold:
                self._ended = not self._next_step(hold)
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
        now, whole = self._ahead._in_loop, apply
        if self._ahead._in_shards is not None:
            apply = apply and now.ends_step  # a step counts only if all its shards are there
            self._ahead._in_shards.close()
        if now.works and not (now.begun if apply else now.applied):
            now.here = now.before  # the step never happened
        now.torn = not apply and now.tears(self._ahead.collections)
        try:
            self._finish(apply)
            if whole and self._ahead._in_shards is not None:
                self._ahead._in_shards.left(now.step, None if now.ends_step else now.micro + 1)
        finally:
            now.works = ()
            self._ahead._reader.end()
            self.pipeline.close()

    def _next_step(self, hold: Hold) -> bool:
        """Finish the step in the loop and bring the next one; False if there is none. Ctrl-C waits, save in the loader."""
        now, pipeline = self._ahead._in_loop, self.pipeline
        self._say_forgotten()
        self._finish()
        now.works = ()
        pipeline.stages.check()
        for collection in self._ahead.collections:
            collection.engine.check()
        if self._ahead._in_shards is not None:
            self._ahead._in_shards.peers.comes(now.step + 1)
        works = pipeline.next(hold, self._ahead._reader)
        if works is None:
            now.here = DataPosition(now.step, now.here.epochs + 1, loader=self._ahead._reader.state_at_end)
            self.close()
            return False
        now.step += 1
        now.before = now.here
        now.works, now.micro = works, 0
        return True

    def _say_forgotten(self) -> None:
        """Warn once of a step that looked up rows to train, and had no backward."""
        works = self._ahead._in_loop.works
        looked = [one.current for one, work in zip(self._ahead.collections, works) if work.state == State.FORWARD]
        returned = any(work.returned for work in works)  # then the loop means to leave the others out
        if not (self._ahead._told_forgotten or returned) and any(current.trains for current in looked):
            self._ahead._told_forgotten = True
            log.warning(
                "step %s looked rows up and had no backward: they are not trained. Call loss.backward() before the next "
                "batch; to look rows up only, call model.eval() and iterate over the loader itself",
                f"{self._ahead.step:,}",
            )

    def _finish(self, apply: bool = True) -> None:
        for collection in self._ahead.collections:
            collection.current.finish(apply)
        now = self._ahead._in_loop
        if apply and now.applied:
            now.updates = [work.applied for work in now.works]

    def _yielded(self) -> Any:
        now = self._ahead._in_loop
        ids = now.works[0].micros[now.micro]
        now.here = replace(now.here, step=now.step, batches=now.here.batches + 1, loader=ids.loader_state)
        for collection, work in zip(self._ahead.collections, now.works, strict=True):
            collection.current.expect(work, now.micro)
        if self._ahead._in_shards is not None:
            self._ahead._in_shards.begin(now.step, now.micro)
        self._computing = time.monotonic()
        return ids.batch

    def _computed(self) -> None:
        since, self._computing = self._computing, None
        works = self._ahead._in_loop.works
        if since is not None and works:
            self._ahead.times.timeline.add(LOOP, "compute", works[0].number, since, time.monotonic())


class Lookahead:
    """An iterable over a loader's batches; use it in a with-block. Made by `lookahead`, which documents the arguments."""

    hook: StageHook | None = None
    """Called before everything that a stage does; for `skirl verify` and tests."""

    def __init__(
        self,
        loader: Iterable[Any],
        model: nn.Module | OnePlan,
        plan: Plan,
        *,
        sparse: Callable[[Any], Sparse],
        accumulate: int,
        timeout: float,
        shards: int | None = 1,
        trace: str | Path | None = None,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate}: set it to 1 or more micro-batches")
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}: set it to seconds above 0, or to float('inf')")
        self.times = Times()
        self.collections = _collections(model)
        """The collections whose rows the batches use."""
        self.sparse = sparse
        self._plan = plan
        self._accumulate = accumulate
        rows = self.engines[0].rows
        self._peers, size = rows.peers, rows.peers.size
        shards = 1 << (size - 1).bit_length() if shards is None else shards
        check_shards(shards)
        if shards < size:
            raise ValueError(f"{size} trainers share {shards} shards: set shards to a power of two of at least {size}")
        self._shards = shards
        self._mine = block_of(self._peers.rank, size, shards)
        # A stage that waits for another trainer counts as stuck only after that trainer was named.
        self._timeout = timeout if rows.local else max(timeout, self._peers.timeout + NAMED_WITHIN)
        self._trace = trace
        self._watch = Watch(timeout)
        resolvers = [collection.engine.resolver for collection in self.collections]
        self._reader = Reader(
            loader, sparse, accumulate, resolvers, self._watch, self.times, len(self._mine), whole=shards > 1
        )
        self._in_shards = None
        if shards > 1:
            if not isinstance(model, nn.Module):
                raise ValueError(f"shards is {shards}, but steps of a sweep have one shard: leave shards out")
            self._in_shards = Shards(model, shards, accumulate, self.engines[0].packs[0].seed, self._mine, self._peers)
        if plan.depth == "epoch" and self._reader.reads_once:
            raise ValueError(
                'depth="epoch" reads the loader twice, and this one is an iterator: pass a list or a DataLoader, '
                'or use depth="auto"'
            )
        weakref.finalize(self, self._watch.close)
        self._pass: Pass | None = None
        self._epoch: Epoch | None = None
        self._entered = False
        self._in_loop = InLoop()
        self._told_forgotten = False
        self._loaded = False
        """True if the place in the data was loaded from a checkpoint. The next pass goes on there."""

    @property
    def engines(self) -> list[Engine]:
        """The engines of all collections, which hold the rows that the batches use."""
        return [collection.engine for collection in self.collections]

    @property
    def step(self) -> int:
        """Number of steps begun: 1 while the first batch is in the loop."""
        return self._in_loop.step

    @property
    def epochs(self) -> int:
        """Number of complete passes over the loader. A resumed run counts on from those of the run that was saved."""
        return self._in_loop.here.epochs

    @property
    def micros(self) -> int:
        """Number of batches that the loader yields for one step: micro-batches of the shards that this trainer has."""
        return self._reader.micros

    @property
    def ends_step(self) -> bool:
        """True if the batch in the loop is the last micro-batch of its step: the time for `dense.step()` and for a save."""
        return self._in_loop.ends_step

    @property
    def iterating(self) -> bool:
        """True if a pass has begun and not ended."""
        return self._pipeline is not None

    @property
    def window(self) -> int:
        """Number of batches that the planner knows now, beyond the one in the loop."""
        return len(self._pipeline.window) if self._pipeline else 0

    def __enter__(self) -> "Lookahead":
        try:
            for collection in self.collections:
                collection.opened(self)
            self._entered = True
            self.times.timeline = Timeline(self._trace)
        except BaseException:
            self._let_go()  # interrupted, or no file for the timeline: no __exit__ will follow
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            said = f"{said_of(error)} (in step {self.step:,})" if self.iterating and self.step else error
            self._peers.fail(said)  # others wait for this trainer, and its stages wait for them
        pipeline = self._pipeline
        try:
            self.close(apply=error is None)
        except Exception as late:
            if error is None or late is error:
                raise
            error.add_note(f"and while closing the lookahead: {late}")
        own = pipeline and pipeline.stages.failure
        if own and isinstance(error, PeerError) and not isinstance(own, PeerError):
            raise own from error  # another trainer heard of this one's failure first, and ended the job

    def close(self, apply: bool = True) -> None:
        """End the pass and release the embeddings; the with-block does this.

        **Arguments**

        - `apply`: whether a step that has the backward of only some micro-batches is applied, as it is by default.
          Otherwise, it never happened.
        """
        with Hold() as hold:
            if not self._entered:
                return
            try:
                self._end_pass(apply)
            finally:
                self._watch.close()
                self._let_go()
                self.times.timeline.close()
            keep_rows(self.engines, self._in_loop.torn, whole=apply or self._peers.size == 1, hold=hold)

    def _let_go(self) -> None:
        self._entered = False
        for collection in self.collections:
            if collection.lookahead is self:
                collection.opened(None)

    def __iter__(self) -> Pass:
        if not self._entered:
            raise RuntimeError(
                "the lookahead is not open: write `with skirl.lookahead(...) as batches:` around the loop over it"
            )
        for collection in self.collections:
            collection.engine.check()
            if not collection.training:
                raise RuntimeError(
                    "the model is in eval mode, and a lookahead moves rows and trains them: call model.train() first. To "
                    "evaluate, iterate over the loader itself: in eval mode the model looks rows up and changes nothing"
                )
        if self._in_shards is not None:
            self._in_shards.check()
        self._reader.check_fresh()
        self._end_pass()
        for engine in self.engines:
            engine.forget_split()
        start, now = rng_state.capture(), self._in_loop
        if not self._loaded:
            now.here = replace(now.here, step=now.step, batches=0, loader=None)
        if not now.here.batches:
            now.here = replace(now.here, start=start)
        now.before = now.here
        if self._plan.depth == "epoch":
            self._epoch = self._reader.spool(now.here, self._route())
            rng_state.restore(start)  # as if the first pass never happened: same draws as with any other depth
        self.times.timeline.first = now.here.step
        self._reader.begin(now.here)
        with Hold():
            window = Window(self.engines, self._plan, self._epoch, self._shards, self._route(), self._mine)
            pipeline = Pipeline(
                self.engines, window, self._plan.prefetch, timeout=self._timeout, hook=self.hook, times=self.times
            )
            weakref.finalize(self, pipeline.stages.abandon)
            self._pass = Pass(self, pipeline)
            if self._in_shards is not None:
                self._in_shards.open()
        self._loaded = False
        return self._pass

    def _route(self) -> Route:
        return self.engines[0].rows.route(
            [(engine.schema, engine.rows.whole) for engine in self.engines], self._in_loop.here.step + 1
        )

    def drain(self) -> None:
        """Wait until rows that have left the cache are in the store."""
        if self._pipeline is not None:
            self._pipeline.drain()

    def all_wait(self, but: Container[str]) -> bool:
        """Return whether the loop ("load") and all stages but these have gone as far as they can."""
        return self._pipeline is None or self._pipeline.stages.all_wait(but)

    def renew(self) -> None:
        """Drop the caches as soon as no step needs them as they are, and split them anew."""
        if self._pipeline is not None:
            self._pipeline.renew()
        else:
            for engine in self.engines:
                engine.drop_caches()

    def reduce(self) -> None:
        """Put the dense gradients of the step in place, for a loop that clips them and may skip a shard's backward.

        The last shard's backward does so by itself. Before the last shard, and without shards, this does nothing.
        """
        if self._in_shards is not None:
            self._in_shards.complete()

    def settle(self) -> None:
        """Finish the step in the loop, so that rows are as after it. Do nothing if its batch was not looked up yet."""
        now = self._in_loop
        if not now.begun:
            return
        if not now.ends_step:
            raise RuntimeError(
                f"micro-batch {now.micro + 1} of {len(now.works[0].micros)} is in the loop, and rows are updated after the "
                "last: save when batches.ends_step is true"
            )
        for collection in self.collections:
            collection.current.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return where in the data the run is: after the batch in the loop, or before it if it was not looked up yet."""
        now = self._in_loop
        place = now.before if now.works and not now.begun else now.here
        return {
            "step": place.step,
            "epochs": place.epochs,
            "batches": self._of_all(place.batches),
            "accumulate": self._accumulate,
            "shards": self._shards,
            "loader": place.loader,
            "start": place.start,
        }

    def _of_all(self, batches: int) -> int:
        """Return how many batches all trainers have had if this one has had `batches`. They share whole steps."""
        steps, rest = divmod(batches, self._reader.micros)
        return steps * self._shards * self._accumulate + rest

    def _own(self, batches: int) -> int:
        steps, rest = divmod(batches, self._shards * self._accumulate)
        return steps * self._reader.micros + rest

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state: the next pass skips what was done of it.

        **Arguments**

        - `state`: what `state_dict` returned.
        """
        self.check_state(state)
        here = DataPosition(
            state["step"], state["epochs"], self._own(state["batches"]), state["loader"], state["start"]
        )
        self._in_loop, self._loaded = InLoop(state["step"], here, here), True

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if this lookahead cannot go on from a state. Nothing else happens."""
        if self.iterating:
            raise RuntimeError(
                "this lookahead is already iterating: load before its loop, or make a new lookahead and load into that"
            )
        if state["accumulate"] != self._accumulate:
            raise ValueError(
                f"the run was saved with accumulate={state['accumulate']}: set it to that, not {self._accumulate}"
            )
        if (shards := state.get("shards", 1)) != self._shards:
            raise ValueError(f"the run was saved with shards={shards}: set it to that, not {self._shards}")
        self._reader.check_state(state["loader"])

    @property
    def _pipeline(self) -> Pipeline | None:
        return self._pass.pipeline if self._pass is not None and not self._pass.closed else None

    def _end_pass(self, apply: bool = True) -> None:
        one, self._pass = self._pass, None
        try:
            if one is not None:
                one.close(apply)
        finally:
            if self._epoch is not None:  # also if something failed between reading it and the pass
                self._epoch.close()
            self._epoch = None


def _collections(model: nn.Module | OnePlan) -> list[Collection]:
    if not isinstance(model, nn.Module):
        if not hasattr(model, "in_their_place"):
            raise TypeError(
                f"the model is a {type(model).__name__}: call skirl.lookahead(loader, model), in this order"
            )
        return [model.in_their_place()]
    refuse_copies(model)
    return list(collections_of(model).values())
