"""The reader: takes batches from the user's loader, says if one does not come, and knows where in the loader a run is."""

import copy
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch

from skirl.core.batch import Sparse
from skirl.core.ids import BadIds, BankIds, Ids, Resolver, capture, hashes_of
from skirl.oracle.epoch import Epoch
from skirl.oracle.planner import Vote
from skirl.oracle.route import Route
from skirl.pipeline.stages import LOOP, StageStuck, Times, seconds
from skirl.tools import rng_state
from skirl.tools.interrupts import Hold

log = logging.getLogger("skirl")

_END = object()
_MOST_PARTS = 10_000
"""Parts of a batch that are looked at for tensors."""


class Watch:
    """Watches the reads of one pass over a loader, which runs in the loop's own thread. A thread reports one that takes
    longer than the timeout. When the loader returns, the loop gets `StageStuck`."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._now: tuple[int, float] | None = None
        """The batch that is being read and since when. Set as one tuple, so that it needs no lock."""
        self._watcher: threading.Thread | None = None

    @contextmanager
    def held_back(self) -> Iterator[Hold]:
        """Hold interrupts back in this block but for `reading`, which one may leave before its end."""
        with Hold() as hold:
            try:
                yield hold
            finally:
                self._rest(hold)

    @contextmanager
    def reading(self, hold: Hold, number: int) -> Iterator[None]:
        if self._watcher is None and isfinite(self._timeout):
            self._watcher = threading.Thread(target=self._watch, name="skirl-watch", daemon=True)
            self._watcher.start()
        self._now = number, time.monotonic()
        try:
            with hold.released():
                yield
            self._check()
        finally:
            self._rest(hold)

    def moved(self, number: int) -> None:
        """Note inside `reading` that the loader has reached this batch."""
        self._check()
        self._now = number, time.monotonic()

    def _rest(self, hold: Hold) -> None:
        hold.resume()
        self._now = None

    def close(self) -> None:
        """Let the thread end, soon. It takes no lock, so the garbage collector may call this anywhere."""
        self._watcher = None

    def _check(self) -> None:
        assert self._now is not None
        number, began = self._now
        took = time.monotonic() - began
        if took > self._timeout:
            raise StageStuck(
                f"the loader took {seconds(took)} for batch {number}, and timeout is {seconds(self._timeout)}: fix the "
                "loader, or raise lookahead(timeout=...) if it is only slow"
            )

    def _watch(self) -> None:
        told = None
        while self._watcher is threading.current_thread():
            time.sleep(min(0.1, self._timeout / 4))
            now = self._now
            if now is None or now is told or time.monotonic() - now[1] <= self._timeout:
                continue
            told = now
            with suppress(AttributeError, OSError, RuntimeError, ValueError):  # without a terminal there may be no file
                faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
            log.error(
                "the loader has been at batch %d for %s; the stacks of all threads are on stderr. If it hangs, stop it with "
                "Ctrl-C or `kill %d`; if it is only slow, raise lookahead(timeout=...)",
                now[0], seconds(time.monotonic() - now[1]), os.getpid(),
            )  # fmt: skip


@dataclass(frozen=True)
class DataPosition:
    """Where in the data a run is, counted in batches that the loop was given, not in those of the window."""

    step: int = 0
    epochs: int = 0
    batches: int = 0
    loader: Any = None
    start: dict[str, Any] | None = None
    """The random generators' states when this pass began: a DataLoader draws its order from them."""


class Reader:
    """Batches of one loader, `accumulate` of them for each shard of a step."""

    def __init__(
        self,
        loader: Iterable[Any],
        sparse: Callable[[Any], Sparse],
        accumulate: int,
        resolvers: Sequence[Resolver],
        watch: Watch,
        times: Times,
        shards: int = 1,
        whole: bool = False,
    ) -> None:
        self.state_at_end: Any = None
        self._loader = loader
        self._sparse = sparse
        self.micros = accumulate * shards
        self._shards = shards
        self._whole_steps = whole or shards > 1
        self._resolvers = resolvers
        self._features = [name for resolver in resolvers for name in resolver.schema.features]
        self._watch = watch
        self._times = times
        self._read = 0
        """Batches read in this pass; for an iterator, in all passes."""
        self._source: Iterator[Any] | None = None
        self._order: list[int] | None = None
        """A digest of each step's ids in the first of two passes."""

    @property
    def reads_once(self) -> bool:
        return hasattr(self._loader, "__next__")

    def check_fresh(self) -> None:
        if self._read and self.reads_once:
            raise RuntimeError(
                "the loader is an iterator: batches that were read ahead are gone from it. Go on with the same pass (keep "
                "iter(batches)), or pass a list or a DataLoader to lookahead"
            )

    def check_state(self, state: Any) -> None:
        """Let a loader with `check_state` refuse the state of another stream, before anything is restored."""
        if state is not None and hasattr(self._loader, "check_state"):
            self._loader.check_state(state)  # type: ignore[attr-defined]

    def begin(self, place: DataPosition) -> None:
        self._read = 0
        with self._watch.held_back() as hold, self._watch.reading(hold, 0):
            self._source = self._open(place)

    def end(self) -> None:
        self._source = None

    def pull(self, hold: Hold) -> list[Ids]:
        """Read one step's micro-batches; fewer than `micros` if the loader has no more."""
        assert self._source is not None
        started, first = time.monotonic(), self._read
        batches: list[Ids] = []
        while len(batches) < self.micros:
            with self._watch.reading(hold, self._read):
                batch = next(self._source, _END)
            if batch is _END:
                break
            # Ctrl-C waits here: it would leave torch's bookkeeping in the middle of a copy.
            batches.append(self._take(batch))
            self._read += 1
        if self._whole_steps:
            batches = self._whole(batches, hold)
        if self._order is not None and batches:
            self._check_order(self._order, first // self.micros, batches)
        ended = time.monotonic()
        self._times.read += ended - started
        self._times.timeline.add(LOOP, "read", first // self.micros, started, ended)
        if len(batches) < self.micros:
            self.state_at_end = self._loader_state()
        return batches

    def _whole(self, shards: list[Ids], hold: Hold) -> list[Ids]:
        assert self._source is not None
        if len(shards) == self.micros:
            if len({shard.samples for shard in shards}) == 1:
                return shards
            with self._watch.reading(hold, self._read):
                if next(self._source, _END) is not _END:
                    sizes = ", ".join(str(shard.samples) for shard in shards)
                    raise ValueError(
                        f"batches {self._read - len(shards)} to {self._read - 1} are the shards of one step and have "
                        f"{sizes} samples: have the loader yield batches of one size, as a DataLoader does with "
                        "drop_last=True"
                    )
        if shards and self._order is None:  # else a first pass has said so
            log.warning(
                "the last %d samples of the pass are left out: a step of %d shards needs %d batches of equal size",
                sum(shard.samples for shard in shards), self._shards, self.micros,
            )  # fmt: skip
        return []

    def _check_order(self, order: list[int], number: int, step: list[Ids]) -> None:
        if number >= len(order) or self._digest(step) != order[number]:
            raise ValueError(
                f'depth="epoch": a pass differs from the first at batch {number}. The loader must yield the same batches '
                "in the same order each time; fix its seed, or use depth='auto'"
            )

    def _digest(self, step: list[Ids]) -> int:
        """Return a digest that differs if an id, its feature or its bag does."""
        return hash(tuple(ids.hashes[name][0] for ids in step for name in self._features))

    def _take(self, batch: Any) -> Ids:
        if not getattr(self._loader, "yields_fresh", False):
            try:
                batch = own(batch)
            except Exception as error:
                raise TypeError(
                    f"a batch of type {type(batch).__name__} cannot be copied ({error}): if the loader never reuses "
                    "what it yields, set loader.yields_fresh = True"
                ) from error
        sparse = self._sparse(batch)
        try:
            ids = capture(sparse, self._features, copy=False)
        except (TypeError, ValueError) as error:
            raise type(error)(f"batch {self._read}: {error}") from None
        ids.hashes = hashes_of(ids)
        ids.nbytes = weigh([batch, sparse])  # what `sparse` found in the batch counts once
        ids.batch, ids.loader_state = batch, self._loader_state()
        return ids

    def _loader_state(self) -> Any:
        """Return the loader's own state now. It is a copy, since the loader may go on changing its dict."""
        if not hasattr(self._loader, "state_dict"):
            return None
        return copy.deepcopy(self._loader.state_dict())  # type: ignore[attr-defined]

    def _open(self, place: DataPosition) -> Iterator[Any]:
        if not hasattr(self._loader, "__iter__") and not hasattr(self._loader, "__getitem__"):
            raise TypeError(
                f"the loader is of type {type(self._loader).__name__}, which has no batches: pass an iterable of batches, "
                "such as a DataLoader or a list"
            )
        known = place.loader is not None and hasattr(self._loader, "load_state_dict")
        if known:
            self._loader.load_state_dict(copy.deepcopy(place.loader))  # type: ignore[attr-defined]
        if not place.batches:
            return iter(self._loader)
        # The pass began before. Opening it draws the same numbers as then, and the run's own draws are not affected.
        now = rng_state.capture()
        try:
            if place.start is not None:
                rng_state.restore(place.start)
            source = iter(self._loader)
            if not known:
                self._skip(source, place.batches)
        finally:
            rng_state.restore(now)
        return source

    def _skip(self, source: Iterator[Any], batches: int) -> None:
        log.warning("resuming: skipping %d batches of the loader, which has no state_dict", batches)
        end = object()
        for number in range(batches):
            self._watch.moved(number)
            if next(source, end) is end:
                raise ValueError(
                    f"the loader ends at batch {number}, but the run was saved after {batches} batches of the pass: resume "
                    "with the same data"
                )

    def spool(self, place: DataPosition, route: Route) -> Epoch:
        """Read a whole pass, and return the next uses of its rows. From now on, passes must have the same ids."""
        epoch = Epoch([resolver.schema for resolver in self._resolvers])
        order, self._order = list[int](), None
        try:
            self.begin(place)
            with self._watch.held_back() as hold:
                while step := self.pull(hold):
                    checked = self._checked(step, route)
                    banks = [BankIds.joined(parts) for of in checked for parts in zip(*(ids.banks for ids in of))]
                    order.append(self._digest(step))
                    with hold.released():
                        joined = route.batch(banks, Vote(0, 0), [of for of in checked for _ in of[0].banks])
                    if joined is not None:  # else another trainer has no more
                        epoch.add(joined.banks)
                    if len(step) < self.micros:
                        break
            route.end(Vote(0, 0))
            epoch.scan()
        except BaseException:
            epoch.close()
            raise
        self._order = order
        return epoch

    def _checked(self, step: list[Ids], route: Route) -> list[list[Ids]]:
        try:
            return [[resolver.check(ids) for ids in step] for resolver in self._resolvers]
        except BadIds as error:
            route.fail(error)  # the other trainers end as well


def own(batch: Any) -> Any:
    """Return a copy that shares nothing with the batch."""
    memo: dict[int, Any] = {}
    for part in _leaves(batch):
        if type(part) is torch.Tensor and part.layout == torch.strided:
            memo[id(part)] = part.detach().clone().requires_grad_(part.requires_grad)
    return copy.deepcopy(batch, memo)


def weigh(batch: Any) -> int:
    """Return the bytes of a batch's tensors and arrays, as far as they are found in containers and attributes."""
    return sum(map(_bytes_of, _leaves(batch)))


def _leaves(batch: Any) -> Iterator[Any]:
    looked_at, left = set(), [batch]
    while left and len(looked_at) < _MOST_PARTS:
        part = left.pop()
        if part is None or isinstance(part, bool | int | float | str | type) or id(part) in looked_at:
            continue
        looked_at.add(id(part))
        if isinstance(part, torch.Tensor | np.ndarray | np.generic | bytes | bytearray):
            yield part
        elif isinstance(part, dict):
            left.extend(part.values())
        elif isinstance(part, list | tuple | set | frozenset):
            left.extend(part)
        else:
            left.extend(_attributes(part))


def _attributes(part: Any) -> Iterable[Any]:
    if hasattr(part, "__dict__"):
        return vars(part).values()
    slots = getattr(type(part), "__slots__", ())
    return [getattr(part, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]


def _bytes_of(part: Any) -> int:
    if isinstance(part, torch.Tensor):
        return part.numel() * part.element_size()  # nbytes is not defined for sparse ones
    return len(part) if isinstance(part, bytes | bytearray) else part.nbytes
