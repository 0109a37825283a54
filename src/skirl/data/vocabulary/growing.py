"""An open vocabulary: an id gets a row of its own while training goes on, once it has come often enough."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.inverse import is_shared
from skirl.core.tables import Table
from skirl.data.files.stream import Files
from skirl.data.share import WHOLE, Shards, Share, part_of, shards
from skirl.data.vocabulary.probing import SMALLEST, look_up, places_for, probe
from skirl.data.vocabulary.vocabulary import FIRST
from skirl.tools.jit import kernel
from skirl.tools.shape_of import ANY, COUNT, misfit

SNAPSHOT = 64
"""Batches between two copies of the vocabulary."""


class Kept(np.ndarray):
    """An array that is never written to, so copies of a state share it."""

    def __deepcopy__(self, memo: dict[int, Any] | None) -> "Kept":
        return self


class Growth:
    """The values of one table that are remembered."""

    def __init__(self, rows: int, admit: int) -> None:
        self.limit, self.admit = rows, admit
        self.next = FIRST
        """The next free row."""
        self._admitted = np.zeros(0, np.uint64)
        """The fingerprints that rows were given to, that of row 2 first, and room for more; what stands there stays."""
        self._allocate(SMALLEST)

    def _allocate(self, size: int) -> None:
        self.keys = np.zeros(size, np.uint64)
        self.rows = np.zeros(size, np.int64)
        """Of each key: its row, 0 if it was not admitted."""
        self.counts = np.zeros(size, np.int64)
        self.last = np.zeros(size, np.int64)
        """The batch that had it last."""
        self.used = 0

    def grow(self, fingerprints: np.ndarray, now: int) -> np.ndarray:
        """The rows of a batch's values, in order; those that come often enough are admitted on the way."""
        if 2 * (self.used + len(fingerprints)) > len(self.keys):
            self._refill(self.entries(), self.used + len(fingerprints))
        out = np.empty(len(fingerprints), np.int64)
        self._make_room(len(fingerprints))
        added, self.next = _grow(
            self.keys, self.rows, self.counts, self.last, fingerprints, self.admit, now, self.next, self.limit,
            self._admitted, out,
        )  # fmt: skip
        self.used += added
        return out

    def look_up(self, fingerprints: np.ndarray) -> np.ndarray:
        """The rows of values, as they are; nothing is counted."""
        out = np.empty(len(fingerprints), np.int64)
        look_up(self.keys, self.rows, fingerprints, out)
        return out

    def give(self, admitted: Any) -> None:
        """Take the vocabulary that gave its rows to these values and forgot none; to look up, for counts are gone."""
        given = _numbers({"admitted": admitted}, "admitted").view(np.uint64)
        rows = np.arange(FIRST, FIRST + len(given))
        if len(given) > max(0, self.limit - FIRST) or not given.all() or len(np.unique(given)) < len(given):
            raise ValueError("the state's vocabulary is damaged, its rows are of no such table: use another checkpoint")
        self._refill([given, rows, np.full(len(given), self.admit), np.zeros(len(given), np.int64)])
        self._admitted, self.next = given.copy(), FIRST + len(given)

    def age(self, now: int, stale: int | None) -> None:
        """Forget, now and then, what `stale` batches came without."""
        if stale is not None and now % max(1, stale // 4) == 0:
            self.forget(now - stale)

    def forget(self, before: int) -> None:
        """Drop the values that no batch had since `before`."""
        entries = self.entries()
        stays = entries[3] >= before
        self._refill([array[stays] for array in entries])

    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Fingerprints, rows, counts and last batches of what is remembered."""
        held = np.flatnonzero(self.keys)
        return self.keys[held], self.rows[held], self.counts[held], self.last[held]

    @property
    def admitted(self) -> np.ndarray:
        """The fingerprint of each row that was ever given, that of row 2 first, as int64: of forgotten values too."""
        return self._admitted[: self.next - FIRST].view(np.int64).view(Kept)

    def _make_room(self, more: int) -> None:
        """For that many rows; the arrays of states before keep theirs."""
        needed = min(self.next + more, self.limit) - FIRST
        if needed > len(self._admitted):
            room = np.zeros(min(max(needed, 2 * len(self._admitted)), self.limit - FIRST), np.uint64)
            room[: self.next - FIRST] = self._admitted[: self.next - FIRST]
            self._admitted = room

    def _refill(self, entries: Sequence[np.ndarray], room: int = 0) -> None:
        keys, rows, counts, last = entries
        self._allocate(places_for(max(room, len(keys))))
        _place(self.keys, self.rows, self.counts, self.last, keys, rows, counts, last)
        self.used = len(keys)

    def state_dict(self) -> dict[str, Any]:
        """All of it; arrays that a copy of the state shares."""
        names = ("keys", "rows", "counts", "last")
        arrays = {name: array.view(np.int64).view(Kept) for name, array in zip(names, self.entries())}
        return {**arrays, "next": self.next}

    def load_state_dict(self, state: Mapping[str, Any], admitted: Any) -> None:
        """Go on from there. admitted: what rows were given to, then or later."""
        entries, given = self.checked(state, admitted)
        self._refill(entries)
        self.next = state["next"]
        self._admitted = given[: self.next - FIRST].copy()

    def checked(self, state: Mapping[str, Any], admitted: Any) -> tuple[list[np.ndarray], np.ndarray]:
        """The entries of a state, and what its rows were given to; refused where it is the state of no such vocabulary."""
        keys, rows, counts, last = (_numbers(state, name) for name in ("keys", "rows", "counts", "last"))
        given, free, has_row = _numbers({"admitted": admitted}, "admitted").view(np.uint64), state["next"], rows != 0
        wrong = None
        if len({len(array) for array in (keys, rows, counts, last)}) != 1:
            wrong = "its arrays are of different lengths"
        elif not keys.all() or len(np.unique(keys)) < len(keys):
            wrong = "an id is in it twice, or is none"
        elif type(free) is not int or not FIRST <= free <= max(FIRST, self.limit):
            wrong = f"its next row is {free!r}, of {self.limit:,}"
        elif not free - FIRST <= len(given) <= max(0, self.limit - FIRST):
            wrong = f"it has rows without a value, {len(given):,} values and {free:,} rows"
        elif ((rows[has_row] < FIRST) | (rows[has_row] >= free)).any():
            wrong = f"a row in it is not from {FIRST} to {free - 1}"
        elif (given[rows[has_row] - FIRST] != keys[has_row].view(np.uint64)).any():
            wrong = "a row in it was given to another id"
        elif len(keys) and not (0 <= min(counts.min(), last.min()) <= max(counts.max(), last.max()) < _MOST):
            wrong = "a count in it is below 0, or beyond all that could be counted"
        if wrong is not None:
            raise ValueError(f"the state's vocabulary is damaged, {wrong}: use another checkpoint")
        return [keys.view(np.uint64), rows, counts, last], given


@dataclass
class Growing:
    """Batches of files whose ids get their rows from an open vocabulary; made by `DataFlags.stream` with `--vocab open`."""

    inner: Files
    """Yields fingerprints in the place of rows."""
    admit: int
    stale: int | None
    share: Share = WHOLE
    """What this trainer gets of each batch; its vocabulary grows by all of it."""

    yields_fresh: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.growths: dict[str, Growth] = {}
        self._features = [
            (column.name, column.table or column.name, column.encode == "hash")
            for column in self.inner.encoder.schema.ids
        ]
        self._resume: dict[str, Any] | None = None
        self._begin()
        self._state = self._snapshot()

    def _begin(self) -> None:
        tables = {table for _, table, hashed in self._features if hashed}
        self.growths = {table: Growth(self.inner.encoder.rows[table], self.admit) for table in sorted(tables)}

    # What a model needs to know.

    @property
    def dense_features(self) -> int:
        """Columns of `Batch.dense`."""
        return self.inner.dense_features

    @property
    def labels(self) -> tuple[str, ...]:
        """What is predicted."""
        return self.inner.labels

    @property
    def lists(self) -> tuple[str, ...]:
        """The features with any number of ids a sample, not exactly one."""
        return self.inner.lists

    @property
    def samples(self) -> int | None:
        """Samples of all epochs and trainers, where they were counted."""
        return self.inner.samples

    @property
    def steps(self) -> int | None:
        """Steps of a whole pass; None until it is known, at the latest when the last one is yielded."""
        return self.inner.steps

    @property
    def left_out(self) -> int:
        """Samples at the end of the last epoch that were no whole batch, where batches have shards."""
        return self.inner.left_out

    @property
    def bad_rows(self) -> int:
        """Malformed rows left out so far, in this process."""
        return self.inner.bad_rows

    @property
    def first_bad_row(self) -> str | None:
        """Where the first of them is."""
        return self.inner.first_bad_row

    def tables(self, dim: int) -> list[Table]:
        """The tables that the ids look rows up in."""
        return self.inner.tables(dim)

    @property
    def held_out(self) -> Any:
        """The rows held out, as the vocabulary is where the reader is; see `held_out_at`."""
        return None if self.inner.held is None else HeldOut(self, self.inner.held)

    def held_out_at(self, state: Any) -> Any:
        """The rows held out, as the vocabulary was at a state of this stream, however far it was read ahead."""
        if self.inner.held is None or state is None:
            return self.held_out
        return HeldOut(self.at(state), self.inner.held)

    def at(self, state: Any) -> "Growing":
        """The same stream with its vocabulary as it was at a state."""
        then = replace(self, inner=replace(self.inner, dataset=self.inner.dataset.anew()))
        then.load_state_dict(state)
        batches = iter(then._mapped(then._resume))
        then._again(batches, state["since"])
        return then

    def look_up(self, batch: Batch) -> Batch:
        """A batch of `inner`, its values as the rows that they have; nothing is counted."""
        return self._rows(batch, lambda growth, prints: growth.look_up(prints))

    # What a trainer gets of it.

    def sharded(self, first: int, last: int, of: int) -> "Growing":
        """Only shards first .. last - 1 of `of` of each batch, a micro-batch each; a smaller last batch is left out.

        Every trainer reads all of it: which row a value gets depends on all that came before.
        """
        share = shards(first, last, of, self.inner.batch_size)
        whole = share if share is WHOLE else Shards(first, last, of, cut=False)
        return replace(self, inner=replace(self.inner, dataset=self.inner.dataset.anew(), share=whole), share=share)

    def dealt(self, rank: int, ranks: int) -> NoReturn:
        """Refused: what is evaluated on is held out."""
        raise ValueError("an open vocabulary grows by every batch: deal its held_out, or train on sharded batches")

    # The pass.

    def __iter__(self) -> Iterator[Batch]:
        """All epochs, with an empty vocabulary at first; after `load_state_dict`, from where that state was taken."""
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
        """The batches from a state's snapshot on, their values as rows."""
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
        if is_shared(sparse):  # counts each value as often as it comes
            sparse = KeyedJagged.of(sparse).expanded()
        values = sparse.values().numpy()
        ends = sparse.offsets()[torch.arange(len(self._features) + 1) * len(batch.labels)].tolist()
        out = np.empty(len(values), np.int64)
        for f, (_, table, hashed) in enumerate(self._features):
            part = values[ends[f] : ends[f + 1]]
            out[ends[f] : ends[f + 1]] = rows_of(self.growths[table], part.view(np.uint64)) if hashed else part
        jagged = KeyedJagged(sparse.keys(), torch.from_numpy(out), offsets=sparse.offsets())
        return Batch(batch.dense, jagged, batch.labels)

    # The place.

    def _snapshot(self) -> dict[str, Any]:
        """The vocabulary as it is, and the place in the files."""
        tables = {table: growth.state_dict() for table, growth in self.growths.items()}
        return {
            "files": self.inner.state_dict(),
            "tables": tables,
            "admitted": self._admitted(),
            "since": 0,
            "admit": self.admit,
            "stale": self.stale,
        }

    def _admitted(self) -> dict[str, np.ndarray]:
        """What the rows of each table were given to, up to the batch that was handed out: `skirl export` reads it."""
        return {table: growth.admitted for table, growth in self.growths.items()}

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is, counting the batches handed out, with the vocabulary."""
        return self._state

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse a state of another stream, or of none, saying what is wrong; nothing else happens."""
        grown = isinstance(state, Mapping) and "tables" in state
        self.inner.check_state(state.get("files", {}) if grown else state)
        per_table = dict.fromkeys(self.growths, _TABLE)
        admitted = dict.fromkeys(self.growths, ANY)
        expected = {"files": ANY, "tables": per_table, "admitted": admitted, "since": COUNT, "admit": ANY, "stale": ANY}
        if (wrong := misfit(state, expected)) is not None:
            raise ValueError(f"the state is none of an open vocabulary ({wrong}): give what state_dict() returned")
        for name in ("admit", "stale"):
            if state[name] != getattr(self, name):
                raise ValueError(f"the state is of a stream with {name}={state[name]!r}: set it to that")
        for table, growth in self.growths.items():
            growth.checked(state["tables"][table], state["admitted"][table])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass go on where `state` was taken; refused when it is another stream's."""
        self.check_state(state)
        self.inner.load_state_dict(state["files"])
        state = copy.deepcopy(state)
        for table in state["tables"].values():  # shared by the states of all batches up to the next snapshot
            table |= {name: np.asarray(part).view(Kept) for name, part in table.items() if name != "next"}
        state["admitted"] = {table: np.asarray(part).view(Kept) for table, part in state["admitted"].items()}
        self._resume = self._state = state

    def _again(self, batches: Iterator[Batch], since: int) -> None:
        """Read again the batches that were handed out before."""
        for number in range(since):
            if next(batches, None) is None:
                raise ValueError(
                    f"the state is {since:,} batches after its vocabulary, and there are {number}: use another checkpoint"
                )


_MOST = 1 << 62
"""Beyond any count: there is room to go on."""
_TABLE = {"keys": ANY, "rows": ANY, "counts": ANY, "last": ANY, "next": COUNT}


def _numbers(state: Mapping[str, Any], name: str) -> np.ndarray:
    try:
        array = np.asarray(state[name])
    except (ValueError, OverflowError):  # lists of lists, of other lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype != np.int64):
        raise ValueError(f"the state's vocabulary is damaged, {name} are no whole numbers: use another checkpoint")
    return np.ascontiguousarray(array, np.int64)


@dataclass
class HeldOut:
    """Rows held out, looked up in a vocabulary that they do not change."""

    vocabulary: Growing
    files: Files

    yields_fresh: ClassVar[bool] = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def dealt(self, rank: int, ranks: int) -> "HeldOut":
        """Every `ranks`-th batch from `rank` on; the last one may be empty, where other ranks have one more."""
        return HeldOut(self.vocabulary, self.files.dealt(rank, ranks))

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.files:
            yield self.vocabulary.look_up(batch)


@kernel
def _grow(keys, rows, counts, last, fingerprints, admit, now, free, limit, admitted, out):
    """Rows of values, which are counted; how many were new, and the next free row."""
    added = 0
    for i in range(fingerprints.size):
        key = fingerprints[i]
        if key == 0:
            out[i] = 0
            continue
        place = probe(keys, key)
        if keys[place] == 0:
            keys[place] = key
            added += 1
        counts[place] += 1
        last[place] = now
        if rows[place] == 0 and counts[place] >= admit and free < limit:
            rows[place] = free
            admitted[free - FIRST] = key
            free += 1
        out[i] = rows[place] if rows[place] != 0 else 1
    return added, free


@kernel
def _place(keys, rows, counts, last, from_keys, from_rows, from_counts, from_last):
    for i in range(from_keys.size):
        place = probe(keys, from_keys[i])
        keys[place], rows[place], counts[place], last[place] = from_keys[i], from_rows[i], from_counts[i], from_last[i]
