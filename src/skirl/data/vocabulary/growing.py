"""An open vocabulary: an id gets a row of its own during training, once it has occurred often enough."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.inverse import given_inverse
from skirl.data.files.stream import Files
from skirl.data.share import WHOLE, Shards, Share, of_batch
from skirl.data.vocabulary.vocabulary import FIRST, keyed
from skirl.tools.hash_index import EMPTY, HashIndex, ask, probe
from skirl.tools.jit import AHEAD, kernel

NUMBERS = ("rows", "counts", "last")
SNAPSHOT = 64  # batches between two snapshots of the vocabulary


class Kept(np.ndarray):
    """An array that is never written to, so deep copies of a state share it."""

    def __deepcopy__(self, memo: dict[int, Any] | None) -> "Kept":
        return self


class Growth:
    """The open vocabulary of one table: its remembered values, their rows (0 if not admitted), counts and last batches."""

    def __init__(self, rows: int, admit: int) -> None:
        self.limit, self.admit = rows, admit
        self.next = FIRST  # free row
        self._admitted = np.zeros(0, np.uint64)
        """The fingerprint of each row given so far, from row 2 on, and room for more. Entries never change."""
        self._hold({name: np.zeros(0, np.int64) for name in ("keys", *NUMBERS)})

    def _hold(self, entries: Mapping[str, np.ndarray]) -> None:
        """Hold these entries and no others: a number for each key, and arrays by that number."""
        self._numbers = HashIndex()
        self._numbers.put(keyed(entries["keys"].view(np.uint64)), np.arange(len(entries["keys"]), dtype=np.int32))
        self._entries = {name: np.array(entries[name]) for name in NUMBERS}

    def _held(self) -> dict[str, np.ndarray]:
        there = self._numbers.keys != EMPTY
        numbers = self._numbers.values[there]
        return {"keys": self._numbers.keys[there] + 1} | {name: of[numbers] for name, of in self._entries.items()}

    def grow(self, fingerprints: np.ndarray, now: int) -> np.ndarray:
        """Count the values of batch `now`, admit those that have occurred often enough, and return the row of each."""
        more, index = len(fingerprints), self._numbers
        index.reserve(more)
        self._entries = {name: _with_room(of, index.count + more) for name, of in self._entries.items()}
        needed = min(self.next + more, self.limit) - FIRST
        self._admitted = _with_room(self._admitted, needed)[: self.limit - FIRST]
        out = np.empty(more, np.int64)
        rows, counts, last = self._entries.values()
        index.count, self.next = _grow(
            index.keys, index.values, index.mask, index.count, rows, counts, last, fingerprints, keyed(fingerprints),
            self.admit, now, self.next, self.limit, self._admitted, out,
        )  # fmt: skip
        return out

    def look_up(self, fingerprints: np.ndarray) -> np.ndarray:
        numbers = self._numbers.get(keyed(fingerprints))
        out = (fingerprints != 0).astype(np.int64)
        known = np.flatnonzero((numbers >= 0) & (out != 0))
        out[known] = np.maximum(self._entries["rows"][numbers[known]], 1)
        return out

    def give(self, admitted: Any) -> None:
        """Become the vocabulary that gave its rows to these values and forgot none. Only for lookups: counts are lost."""
        keys = np.asarray(admitted, np.int64)
        rows = np.arange(FIRST, FIRST + len(keys))
        self._hold({"keys": keys, "rows": rows, "counts": np.full(len(keys), self.admit), "last": np.zeros_like(rows)})
        self._admitted, self.next = keys.view(np.uint64).copy(), FIRST + len(keys)

    def age(self, now: int, stale: int | None) -> None:
        """Forget the values that the last `stale` batches did not contain. Checks only every `stale // 4` batches."""
        if stale is not None and now % max(1, stale // 4) == 0:
            self.forget(now - stale)

    def forget(self, before: int) -> None:
        entries = self._held()
        self._hold({name: array[entries["last"] >= before] for name, array in entries.items()})

    @property
    def admitted(self) -> np.ndarray:
        """The fingerprint of each row ever given, from row 2 on, as int64, with forgotten ones."""
        return self._admitted[: self.next - FIRST].view(np.int64).view(Kept)

    def state_dict(self) -> dict[str, Any]:
        """In arrays that copies of the state share."""
        arrays = {name: array.view(Kept) for name, array in self._held().items()}
        return {**arrays, "next": self.next}

    def load_state_dict(self, state: Mapping[str, Any], admitted: Any) -> None:
        """admitted: the fingerprints that rows were given to, at that time or later."""
        self._hold({name: np.asarray(state[name], np.int64) for name in ("keys", *NUMBERS)})
        self.next = state["next"]
        self._admitted = np.asarray(admitted, np.int64)[: self.next - FIRST].view(np.uint64).copy()


@dataclass
class Growing:
    """Batches of files whose ids get their rows from an open vocabulary; made by `DataFlags.stream` with `--vocab open`.

    What it does not say itself, such as its tables, is as in `inner`.
    """

    inner: Files
    """Yields batches with fingerprints in place of rows."""
    admit: int
    stale: int | None
    share: Share = WHOLE
    """This trainer's part of each batch. Its vocabulary grows by the whole batch."""

    def __post_init__(self) -> None:
        self._features = [
            (column.table or column.name, column.encode == "hash") for column in self.inner.encoder.schema.ids
        ]
        self._resume: dict[str, Any] | None = None
        self._begin()
        self._state = self._snapshot()

    def _begin(self) -> None:
        tables = {table for table, hashed in self._features if hashed}
        self.growths = {table: Growth(self.inner.encoder.rows[table], self.admit) for table in sorted(tables)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("inner"), name)

    @property
    def held_out(self) -> Files | None:
        """The held-out rows, looked up in the vocabulary as it is at the reader's position. See `held_out_at`."""
        return None if self.inner.held_out is None else replace(self.inner.held_out, look_up=self.look_up)

    def held_out_at(self, state: Any) -> Files | None:
        """The held-out rows, looked up in the vocabulary as it was at `state`, however far ahead this stream is."""
        if self.inner.held_out is None or state is None:
            return self.held_out
        return replace(self.inner.held_out, look_up=self.at(state).look_up)

    def at(self, state: Any) -> "Growing":
        """The same stream with its vocabulary as it was at `state`."""
        then = replace(self, inner=replace(self.inner))
        then.load_state_dict(state)
        batches = iter(then._mapped(then._resume))
        then._again(batches, state["since"])
        return then

    def look_up(self, batch: Batch) -> Batch:
        return self._rows(batch, lambda growth, prints: growth.look_up(prints))

    # Parts for several trainers.

    def sharded(self, first: int, last: int, of: int) -> "Growing":
        """Every trainer reads all samples: the row that a value gets depends on all values before it."""
        share = of_batch(first, last, of, self.inner.batch_size)
        whole = share if share is WHOLE else Shards(first, last, of, cut=False)
        return replace(self, inner=replace(self.inner, share=whole), share=share)

    def dealt(self, rank: int, ranks: int) -> NoReturn:
        raise ValueError("an open vocabulary grows by every batch: deal its held_out, or train on sharded batches")

    # Iteration.

    def __iter__(self) -> Iterator[Batch]:
        state, self._resume = self._resume, None
        again = 0 if state is None else state["since"]
        batches = self._mapped(state)
        self._again(batches, again)
        snapshot, since = state, again
        for batch in batches:
            since += 1
            if snapshot is None or since >= SNAPSHOT:
                snapshot, since = self._snapshot(), 0
            [cuts] = self.share.cuts(len(batch.labels), self.inner.batch_size)
            parts = [batch] if self.share is WHOLE else [part_of(batch, low, high) for low, high in cuts]
            yield from parts[:-1]
            self._state = {**snapshot, "since": since, "admitted": self._admitted()}
            yield parts[-1]
        self._begin()
        self._state = self._snapshot()

    def _mapped(self, state: Mapping[str, Any] | None) -> Iterator[Batch]:
        self._begin()
        if state is not None:
            self.inner.load_state_dict(state["files"])
            for table, growth in self.growths.items():
                growth.load_state_dict(state["tables"][table], state["admitted"][table])
        for batch in self.inner:
            now = int(self.inner.state_dict()["batches"])
            for growth in self.growths.values():
                growth.age(now, self.stale)
            yield self._rows(batch, lambda growth, prints, now=now: growth.grow(prints, now))

    def _rows(self, batch: Batch, rows_of: Any) -> Batch:
        sparse = batch.sparse
        if given_inverse(sparse) is not None:  # each occurrence of a value counts
            sparse = KeyedJagged.of(sparse).expanded()
        values = sparse.values().numpy()
        ends = sparse.offsets()[torch.arange(len(self._features) + 1) * len(batch.labels)].tolist()
        out = np.empty(len(values), np.int64)
        for f, (table, hashed) in enumerate(self._features):
            part = values[ends[f] : ends[f + 1]]
            out[ends[f] : ends[f + 1]] = rows_of(self.growths[table], part.view(np.uint64)) if hashed else part
        jagged = KeyedJagged(sparse.keys(), torch.from_numpy(out), offsets=sparse.offsets())
        return Batch(batch.dense, jagged, batch.labels)

    # States.

    def _snapshot(self) -> dict[str, Any]:
        tables = {table: growth.state_dict() for table, growth in self.growths.items()}
        of = {"files": self.inner.state_dict(), "tables": tables, "admitted": self._admitted()}
        return {**of, "since": 0, "admit": self.admit, "stale": self.stale}

    def _admitted(self) -> dict[str, np.ndarray]:
        """`skirl export` reads them."""
        return {table: growth.admitted for table, growth in self.growths.items()}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def check_state(self, state: dict[str, Any]) -> None:
        grown = isinstance(state, Mapping) and "tables" in state
        self.inner.check_state(state.get("files", {}) if grown else state)
        for name in ("admit", "stale"):
            if state[name] != getattr(self, name):
                raise ValueError(f"the state is of a stream with {name}={state[name]!r}: set it to that")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        self.inner.load_state_dict(state["files"])
        state = copy.deepcopy(state)
        for table in state["tables"].values():  # shared by the states of all batches up to the next snapshot
            table |= {name: np.asarray(part).view(Kept) for name, part in table.items() if name != "next"}
        state["admitted"] = {table: np.asarray(part).view(Kept) for table, part in state["admitted"].items()}
        self._resume = self._state = state

    def _again(self, batches: Iterator[Batch], since: int) -> None:
        for number in range(since):
            if next(batches, None) is None:
                raise ValueError(
                    f"the state is {since:,} batches after its vocabulary, and there are {number}: use another checkpoint"
                )


def part_of(batch: Batch, low: int, high: int) -> Batch:
    """Copy samples low .. high - 1 of a batch into a new one."""
    ids = KeyedJagged.of(batch.sparse).samples(low, high)
    return Batch(batch.dense[low:high].clone(), ids, batch.labels[low:high].clone())


def _with_room(array: np.ndarray, size: int) -> np.ndarray:
    """Return an array with zeros behind if it is smaller, a new one: earlier states share the old one."""
    if size <= len(array):
        return array
    return np.concatenate([array, np.zeros(max(size, 2 * len(array)) - len(array), array.dtype)])


@kernel
def _grow(
    keys, values, mask, count, rows, counts, last, fingerprints, wanted, admit, now, free, limit, admitted, out
):  # fmt: skip
    """Count values and fill `out` with their rows. Return how many values there are now, and the next free row."""
    last_one = fingerprints.size - 1
    for i in range(fingerprints.size):
        ask(keys, values, mask, wanted[min(i + AHEAD, last_one)])
        if fingerprints[i] == 0:
            out[i] = 0
            continue
        place = probe(keys, mask, wanted[i])
        if keys[place] != wanted[i]:
            keys[place], values[place] = wanted[i], count
            count += 1
        n = values[place]
        counts[n] += 1
        last[n] = now
        if rows[n] == 0 and counts[n] >= admit and free < limit:
            rows[n] = free
            admitted[free - FIRST] = fingerprints[i]
            free += 1
        out[i] = rows[n] if rows[n] != 0 else 1
    return count, free
