"""The service of a part to its owner, which calls the functions of `FUNCTIONS`, and no others, by PyTorch RPC.

None of them raises: an error comes back as ("error", result of `said`), so that no traceback crosses the network.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from skirl.core.placement import Shard
from skirl.store.base import Frozen, FrozenPart, Layout, SavedRows, Store
from skirl.store.disk.frozen import named, rows_of
from skirl.store.disk.os_files import OsFiles
from skirl.store.remote.wire import NodeError, Taken, said

MOST_BYTES = 256 << 20
"""Most bytes of rows in one call."""
ITERATORS = 64
"""Number of walks over keys that a store of a part remembers. Beyond that, it forgets the oldest."""
Answer = tuple[str, Any]


@dataclass
class CallCounts:
    """The calls, rows and bytes of a part, for its node's metrics."""

    gets: int = 0
    puts: int = 0
    rows_out: int = 0
    rows_in: int = 0
    bytes_out: int = 0
    bytes_in: int = 0


@dataclass
class Held:
    """A store of a part, with the frozen state, laid rows and walks that its owner has begun."""

    store: Store
    taken: Taken
    frozen: Frozen | None = None
    laid: dict[int, list[tuple[NDArray[np.int64], Any]]] = field(default_factory=dict)
    walks: dict[int, Iterator[Any]] = field(default_factory=dict)


class OwnedPart:
    """The part of one owner on one node."""

    def __init__(
        self,
        run: int,
        node: str,
        make: Callable[[int, Layout, dict[int, int] | None], Store],
        room: Callable[[int], None] = lambda more: None,
    ) -> None:
        self.run, self.node = run, node
        self.counts = CallCounts()
        self.left = threading.Event()
        """Set once the owner needs nothing more."""
        self._make, self._room = make, room
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._held: dict[int, Held] = {}
        self._next = 0
        self._jobs: dict[int, tuple[threading.Thread, list[Answer]]] = {}
        self._calls = 0
        self._quiet = threading.Condition(self._lock)
        self._draining = False

    @property
    def rows(self) -> int:
        """Number of rows held."""
        with self._lock:
            held = list(self._held.values())
        return sum(0 if each.store.closed else len(each.store) for each in held)

    def __enter__(self) -> "OwnedPart":
        with self._lock:
            if self._draining:
                raise NodeError(f"{self.node} is being ended: start it again")
            self._calls += 1
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._calls -= 1
            self._quiet.notify_all()

    def drain(self) -> None:
        """Accept no more calls, finish those in progress, and close the stores."""
        with self._lock:
            self._draining = True
            self._quiet.wait_for(lambda: self._calls == 0)
            held = list(self._held.values())
            self._held.clear()
        for each in held:
            if each.frozen is not None:
                each.frozen.release()
            each.store.close()

    def held(self, number: int) -> Held:
        """Return one of the owner's stores."""
        with self._lock:
            found = self._held.get(number)
        if found is None:
            raise NodeError(f"{self.node} has no store {number} of run {self.run}: open it first")
        return found

    def open(self, layout: list[Any], rows: dict[int, int] | None) -> dict[str, Any]:
        """Open a store under the lowest free number."""
        with self._opening:
            with self._lock:
                place = next(n for n in range(len(self._held) + 1) if n not in self._held)
            store = self._make(place, Layout.from_facts(layout), rows)
            with self._lock:
                self._held[place] = Held(store, Taken(self.run))
        return {"store": place, "about": dict(store.about), "durable": store.durable} | _point(store)

    def close(self, number: int) -> None:
        """Close a store, which frees its number."""
        held = self.held(number)
        if held.frozen is not None:
            held.frozen.release()
        held.store.close()
        with self._lock:
            del self._held[number]

    def get(self, number: int, kind: int, keys: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the rows that are held, in the order of `keys`, and a mask of the keys that are. None: all are held."""
        held = self.held(number)
        record, of = self._checked(held, kind, keys)
        rows = torch.empty((len(of), record.width), dtype=getattr(torch, record.dtype))
        out, found = rows.numpy(), np.zeros(len(of), np.bool_)
        held.store._read(kind, of, out, found)
        n = int(np.count_nonzero(found))
        with self._lock:
            self.counts.gets += 1
            self.counts.rows_out += n
            self.counts.bytes_out += n * record.width * rows.element_size()
        if n == len(of):
            return rows, None
        return torch.from_numpy(out[found]) if n else None, torch.from_numpy(found)

    def put(
        self, number: int, run: int, put: int, settled: int, kind: int, keys: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Store rows, unless the number of the put shows that it comes late."""
        held = self.held(number)
        record, of = self._checked(held, kind, keys)
        values = rows.numpy()
        if held.store.layout.kind(of, values) != kind:
            raise ValueError(f"rows are {values.dtype} {list(values.shape)}, and of {record} by their number")
        self._room(values.nbytes)
        held.taken.take(run, put, settled)
        held.store._write(kind, of, values)
        with self._lock:
            self.counts.puts += 1
            self.counts.rows_in += len(of)
            self.counts.bytes_in += values.nbytes

    def _checked(self, held: Held, kind: int, keys: torch.Tensor) -> tuple[Any, NDArray[np.int64]]:
        """Check the keys of a call before anything is allocated. Return their record and the keys."""
        layout = held.store.layout
        if type(kind) is not int or not 0 <= kind < len(layout.kinds):
            raise ValueError(f"kind {kind} of records: this store has {len(layout.kinds)}")
        if not isinstance(keys, torch.Tensor) or keys.dtype != torch.int64 or keys.ndim != 1 or not len(keys):
            raise TypeError(f"keys are {getattr(keys, 'dtype', type(keys).__name__)}: pass some int64 of one dimension")
        record = layout.kinds[kind]
        if (size := len(keys) * record.nbytes) > MOST_BYTES:
            raise ValueError(f"{len(keys)} rows of {record} are {size:,} bytes, a call carries {MOST_BYTES:,}: cut it")
        of = keys.numpy()
        if (stranger := layout.stranger(of, record)) >= 0:
            raise ValueError(f"key {int(of[stranger])} is of a table without records {record}: open the store with it")
        return record, of

    def count(self, number: int) -> int:
        """Return how many rows a store holds."""
        return len(self.held(number).store)

    def bye(self) -> None:
        """Note that the owner needs nothing more."""
        self.left.set()

    def freeze(self, number: int, folder: str, since: Any) -> dict[str, Any]:
        """See `Store.freeze`. The frozen state is kept here for the job "write" and for `release`."""
        held = self.held(number)
        if held.frozen is not None:
            raise ValueError("a frozen state is not released yet: write it or give it up first")
        held.frozen = held.store.freeze(Path(folder), since)
        return _point(held.store)

    def release(self, number: int) -> None:
        """See `Frozen.release`."""
        held = self.held(number)
        frozen, held.frozen = held.frozen, None
        if frozen is not None:
            frozen.release()

    def lay(self, number: int, part: int, keys: torch.Tensor | None, rows: torch.Tensor | None) -> None:
        """Add rows that replace those of a part in the next "thaw". Without any, forget all that were added."""
        held = self.held(number)
        if keys is None or rows is None:
            held.laid.clear()
            return
        self._room(rows.numpy().nbytes)
        held.laid.setdefault(part, []).append((keys.numpy(), rows.numpy()))

    def walk(self, number: int) -> int:
        """Begin to list what is held. `step` returns the list piece by piece."""
        held = self.held(number)
        with self._lock:
            self._next += 1
            walk = self._next
        held.walks[walk] = held.store.held()
        while len(held.walks) > ITERATORS:
            held.walks.pop(next(iter(held.walks)))
        return walk

    def step(self, number: int, walk: int) -> torch.Tensor | None:
        """Return the next keys, or None at the end."""
        walks = self.held(number).walks
        if walk not in walks:
            raise NodeError(f"{self.node} has forgotten a list of keys: begin again")
        found = next(walks[walk], None)
        if found is None:
            del walks[walk]
            return None
        return torch.from_numpy(found)

    # Jobs that may take long: one call begins them and others ask for the outcome, so that each call is short.

    def begin(self, number: int | None, what: str, args: tuple[Any, ...]) -> int:
        """Begin one of `JOBS` on one of the owner's stores. If `number` is None, open a store instead."""
        job = self.open if number is None else functools.partial(JOBS[what], self.held(number))
        outcome: list[Answer] = []

        def work() -> None:
            try:
                with self:
                    outcome.append(("ok", job(*args)))
            except Exception as error:
                outcome.append(("error", said(error)))

        thread = threading.Thread(target=work, name=f"skirl {what}", daemon=True)
        with self._lock:
            self._next += 1
            self._jobs[self._next] = thread, outcome
            started = self._next
        thread.start()
        return started

    def outcome(self, job: int, seconds: float) -> Answer | None:
        """Return the outcome of a job, or None while it runs."""
        with self._lock:
            thread, outcome = self._jobs[job]
        thread.join(min(seconds, 1.0))
        if thread.is_alive():
            return None
        with self._lock:
            del self._jobs[job]
        return outcome[0]


def _point(store: Store) -> dict[str, Any]:
    return {"identity": store.identity, "generation": store.generation}


def _write(held: Held) -> dict[str, Any]:
    if held.frozen is None:
        raise ValueError("there is no frozen state: freeze first")
    return held.frozen.write()


def _describe(held: Held, about: dict[str, str]) -> dict[str, Any]:
    held.store.describe(about)
    return _point(held.store)


def _thaw(
    held: Held,
    folder: str,
    parts: list[tuple[dict[str, Any], list[tuple[dict[str, Any], int]]]],
    identity: str,
    generation: int,
) -> dict[str, Any]:
    """See `Store.thaw`. Each part comes with placements and a site in each, which say which of its rows to take."""
    laid, held.laid = held.laid, {}
    taken = [FrozenPart(facts, laid.get(i, []), Shard.of(shard)) for i, (facts, shard) in enumerate(parts)]
    held.store.thaw(SavedRows(Path(folder), taken, identity, generation))
    return _point(held.store)


def _check(held: Held, folder: str, parts: list[dict[str, Any]]) -> None:
    """Read all rows that "thaw" will read, and raise a CheckpointError if one is damaged."""
    where = Path(folder)
    with named(where, where):
        for facts in parts:
            deque(rows_of(OsFiles(), FrozenPart(facts), held.store.layout, where), maxlen=0)


JOBS: dict[str, Callable[..., Any]] = {
    "write": _write, "describe": _describe, "check": _check, "thaw": _thaw,
}  # fmt: skip

_part: OwnedPart | None = None
"""The part that this process serves."""


def serve(part: OwnedPart | None) -> None:
    """Have this process serve a part from now on. None: no part."""
    global _part
    _part = part


METHODS = ("close", "get", "put", "count", "freeze", "release", "lay", "walk", "step", "begin", "outcome", "bye")
"""The methods of its part that a node's owner may call."""


def call(method: str, *args: Any) -> Answer:
    """Call one of `METHODS`. Return ("ok", result) or ("error", result of `said`)."""
    try:
        if _part is None or method not in METHODS:
            raise NodeError(f"this process serves no rows, or not by {method!r}: install the same version of skirl")
        with _part:
            return "ok", getattr(_part, method)(*args)
    except Exception as error:
        return "error", said(error)


def alive() -> bool:
    """Answer True. This is the only function that nodes call in the owner."""
    return True


FUNCTIONS = (call, alive)
"""All functions that one process may call in another."""
