"""Batches out of files: epochs, windows that are shuffled, and a place to go on from.

    parts -> encoded pieces -> windows of rows -> (permuted) -> batches

A window is a whole number of batches (one, where nothing is shuffled), and what is in it is permuted by a stream of
random numbers that (seed, epoch, window) names. So a state is a few numbers: where the window begins and which batch of
it comes next. A buffer that gives a random row for each one that enters it would mix a little farther, and its state
would be the rows in it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import numpy as np
import pyarrow as pa
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.tables import Table
from skirl.data.files.dataset import START, Dataset, Part, Place
from skirl.data.files.encode import Encoded, Encoder, taken
from skirl.data.files.identity import check_identity, identity_of
from skirl.data.files.workers import pieces
from skirl.data.skew import named, unit
from skirl.tools.jit import kernel
from skirl.tools.progress import malformed
from skirl.tools.shape_of import ANY, COUNT, misfit


@dataclass
class Files:
    """An iterable of batches out of files; made by `DataFlags.stream`."""

    dataset: Dataset
    encoder: Encoder
    batch_size: int
    epochs: int = 1
    batches: int | None = None
    """Where the stream ends at the latest."""
    shuffle: int = 0
    """Rows in a window that is shuffled; 0: none is."""
    seed: int = 0
    workers: int = 0
    begin: Place = START
    end: Place | None = None
    """The rows that are read: from `begin` to before `end`, or to the last."""
    held: "Files | None" = None
    """The rows held out."""
    rows_of_epoch: int | None = None
    """Samples of an epoch, if they were counted."""

    yields_fresh: ClassVar[bool] = True

    bad_rows: int = field(default=0, init=False)
    """Malformed rows left out so far, in this process; those of the first epoch, for they are the same in each."""
    _first_bad: tuple[Part, int] | None = field(default=None, init=False, repr=False)
    _of: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _steps: int | None = field(default=None, init=False)
    _state: dict[str, int] = field(default_factory=dict, init=False)
    _resume: dict[str, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._state = self._start()

    # What a model needs to know.

    @property
    def dense_features(self) -> int:
        """Columns of `Batch.dense`."""
        return self.encoder.schema.dense_features

    @property
    def labels(self) -> tuple[str, ...]:
        """What is predicted."""
        return tuple(label.name for label in self.encoder.schema.labels)

    @property
    def lists(self) -> tuple[str, ...]:
        """The features with any number of ids a sample, not exactly one."""
        return tuple(column.name for column in self.encoder.schema.ids if column.list)

    def held_out_at(self, state: Any) -> "Files | None":
        """The same: what is held out does not depend on where a run is."""
        return self.held_out

    def tables(self, dim: int) -> list[Table]:
        """The tables that the ids look rows up in."""
        return self.encoder.schema.tables(dim, self.encoder.rows)

    @property
    def held_out(self) -> "Files | None":
        """The rows held out for evaluation: one pass over them, in order."""
        return self.held

    @property
    def samples(self) -> int | None:
        """Samples of all epochs, where they were counted, no row can be left out, and no `batches` ends them before."""
        if self.rows_of_epoch is None or self.batches is not None or self.encoder.skip:
            return None
        return self.rows_of_epoch * self.epochs

    @property
    def steps(self) -> int | None:
        """Batches of a whole pass; None until it is known, at the latest when the last one is yielded."""
        if self._steps is None and self.samples is not None and self.rows_of_epoch is not None:
            return -(-self.rows_of_epoch // self.batch_size) * self.epochs
        return self._steps

    @property
    def first_bad_row(self) -> str | None:
        """Where the first malformed row is that was left out: "line 17 of part-3"."""
        if self._first_bad is None:
            return None
        part, row = self._first_bad
        dataset = self.dataset.anew()  # lines are counted from the begin of the file, whatever is being read of it
        try:
            return f"{dataset.read(part).where(row)} of {dataset.paths[part.file]}"
        finally:
            dataset.close()

    # The pass.

    def __iter__(self) -> Iterator[Batch]:
        """All epochs; the first pass after `load_state_dict` goes on where that state was taken."""
        state, self._resume = self._resume or self._start(), None
        self._steps = None
        ahead: tuple[Batch, dict[str, int]] | None = None
        if self.batches is None or state["batches"] < self.batches:
            for batch, after in self._all(state):
                if ahead is not None:
                    self._state = ahead[1]
                    yield ahead[0]
                ahead = batch, after
                if self.batches is not None and after["batches"] >= self.batches:
                    break
        if ahead is not None:  # one batch is held back, to know of the last one that it is
            self._state = ahead[1]
            self._steps = ahead[1]["batches"]
            yield ahead[0]
        self._state = self._start()

    def pieces(self) -> Iterator[Encoded]:
        """The rows of one epoch in order, as they come out of the files."""
        self.bad_rows, self._first_bad = 0, None
        source = pieces(self.dataset, self.encoder, [(self.begin, self.end)], self.workers)
        try:
            for found in iter(lambda: next(source), None):
                self._count_bad(*found)
                yield found[0]
        finally:
            source.close()

    def _start(self) -> dict[str, int]:
        return {
            "epoch": 0, "file": self.begin.file, "part": self.begin.part, "row": self.begin.row, "window": 0, "next": 0,
            "batches": 0,
        }  # fmt: skip

    def _all(self, state: dict[str, int]) -> Iterator[tuple[Batch, dict[str, int]]]:
        """Each batch with the state after it."""
        done, skip, first = state["batches"], state["next"], state["epoch"]
        begin, window = Place(state["file"], state["part"], state["row"]), state["window"]
        ranges = [(begin if epoch == first else self.begin, self.end) for epoch in range(first, self.epochs)]
        source = pieces(self.dataset, self.encoder, ranges, self.workers)
        try:
            for epoch in range(first, self.epochs):
                empty = True
                for rows, place in self._windows(source, epoch == 0):
                    n = len(rows)
                    if self.shuffle:
                        rows = taken(rows, permutation(n, named(self.seed, epoch, window)))
                    here = {"epoch": epoch, "file": place.file, "part": place.part, "row": place.row, "window": window}
                    for number, low in enumerate(range(0, n, self.batch_size)):
                        if number >= skip:
                            done += 1
                            batch = self.batch_of(rows, low, min(low + self.batch_size, n))
                            yield batch, {**here, "next": number + 1, "batches": done}
                    empty, skip, window = False, 0, window + 1
                if empty:
                    self.refuse_empty()
                window = 0
        finally:
            source.close()

    def _windows(self, source: Iterator[tuple[Encoded, Part] | None], count: bool) -> Iterator[tuple[Encoded, Place]]:
        """The windows of one epoch, each with the place where it begins."""
        size = max(1, -(-self.shuffle // self.batch_size)) * self.batch_size
        kept: list[tuple[Encoded, Part]] = []
        rows = 0
        for found in iter(lambda: next(source), None):
            if count:
                self._count_bad(*found)
            if len(found[0]):
                kept.append(found)
                rows += len(found[0])
            while rows >= size:
                window, kept = _cut(kept, size)
                rows -= size
                yield window
        if rows:
            yield _cut(kept, rows)[0]

    def refuse_empty(self) -> NoReturn:
        """Say that there is nothing to read."""
        raise ValueError(
            f"{self.dataset.paths[0]}: no row is left to read"
            + (f" (left out: {malformed(self.bad_rows, self.first_bad_row)})" if self.bad_rows else "")
            + ": give other files, "
            + ("mend what is malformed, " if self.bad_rows else "")
            + "or hold out less"
        )

    def _count_bad(self, piece: Encoded, part: Part) -> None:
        self.bad_rows += piece.bad
        if piece.bad and self._first_bad is None:
            self._first_bad = part, piece.first_bad

    def batch_of(self, rows: Encoded, low: int, high: int) -> Batch:
        """Rows low .. high - 1 as a batch."""
        part = cut(rows, low, high)
        names = [column.name for column in self.encoder.schema.ids]
        total = sum(len(ids) for ids in part.ids)
        values = np.empty(total, np.int64)
        at = 0
        for ids in part.ids:
            values[at : at + len(ids)] = ids
            at += len(ids)
        if all(sizes is None for sizes in part.lengths):
            jagged = {"offsets": torch.from_numpy(np.arange(total + 1, dtype=np.int32))}
        else:
            ones = np.ones(len(part), np.int64)
            jagged = {"lengths": torch.from_numpy(np.concatenate([ones if s is None else s for s in part.lengths]))}
        sparse = KeyedJagged(names, torch.from_numpy(values), **jagged)
        labels = part.labels[:, 0] if part.labels.shape[1] == 1 else part.labels
        return Batch(torch.from_numpy(part.dense.copy()), sparse, torch.from_numpy(labels.copy()))

    # The place.

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is, counting the batches handed out, and of what stream."""
        return dict(self._state) | {"stream": dict(self._identity())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass go on where `state` was taken; refused when it is another stream's."""
        self.check_state(state)
        self._resume = {name: state[name] for name in self._start()}
        self._state = dict(self._resume)

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse a state of another stream, saying what differs; nothing else happens."""
        if not isinstance(state, Mapping) or "stream" not in state:
            grown = isinstance(state, Mapping) and "tables" in state
            then = "set vocab to open" if grown else "set data to what it was"
            raise ValueError(f"the state is of {'an open vocabulary' if grown else 'no files'}: {then}")
        form = dict.fromkeys(self._start(), COUNT) | {"stream": {...: ANY}}
        if (wrong := misfit(state, form)) is not None:
            raise ValueError(f"the state is not one of a stream over files ({wrong}): give what state_dict() returned")
        check_identity(state["stream"], self._identity())
        if state["file"] > len(self.dataset.paths):
            raise ValueError(f"the state is in file {state['file']}, of {len(self.dataset.paths)}: use another")

    def _identity(self) -> dict[str, Any]:
        if not self._of:  # once: a state is asked for at each batch
            self._of = identity_of(
                self.encoder,
                self.dataset.paths,
                (self.begin, self.end),
                batch_size=self.batch_size,
                shuffle=self.shuffle,
                seed=self.seed,
            )
        return self._of


def cut(rows: Encoded, low: int, high: int) -> Encoded:
    """Rows low .. high - 1, as views."""
    ids, lengths = [], []
    for values, sizes in zip(rows.ids, rows.lengths):
        if sizes is None:
            ids.append(values[low:high])
            lengths.append(None)
        else:
            begin = int(sizes[:low].sum())
            ids.append(values[begin : begin + int(sizes[low:high].sum())])
            lengths.append(sizes[low:high])
    kept = [column.slice(low, high - low) for column in rows.kept]
    return Encoded(
        rows.labels[low:high],
        rows.dense[low:high],
        ids,
        lengths,
        rows.places[low:high],
        rows.bad,
        rows.first_bad,
        rows.fingerprints,
        kept,
    )


def joined(pieces: list[Encoded]) -> Encoded:
    """Pieces one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    features = range(len(pieces[0].ids))
    return Encoded(
        np.concatenate([p.labels for p in pieces]),
        np.concatenate([p.dense for p in pieces]),
        [np.concatenate([p.ids[f] for p in pieces]) for f in features],
        [_all_or_none([p.lengths[f] for p in pieces]) for f in features],
        np.concatenate([p.places for p in pieces]),
        fingerprints=pieces[0].fingerprints,
        kept=[_one([p.kept[c] for p in pieces]) for c in range(len(pieces[0].kept))],
    )


def _one(arrays: list[Any]) -> Any:
    """Arrow arrays one after the other; of files that hold other types of texts or numbers, as the first has them."""
    return pa.concat_arrays([array.cast(arrays[0].type) for array in arrays])


def _all_or_none(lengths: list[np.ndarray | None]) -> np.ndarray | None:
    known = [sizes for sizes in lengths if sizes is not None]
    return np.concatenate(known) if known else None


def _cut(kept: list[tuple[Encoded, Part]], size: int) -> tuple[tuple[Encoded, Place], list[tuple[Encoded, Part]]]:
    """The first `size` rows of pieces and where they begin; what is left."""
    first, part = kept[0]
    place = Place(part.file, part.part, int(first.places[0]))
    taken_, left = [], []
    for piece, part in kept:
        if size >= len(piece):
            taken_.append(piece)
            size -= len(piece)
        elif size > 0:
            taken_.append(cut(piece, 0, size))
            left.append((cut(piece, size, len(piece)), part))
            size = 0
        else:
            left.append((piece, part))
    return (joined(taken_), place), left


@kernel
def permutation(n, stream):
    """The numbers 0 .. n - 1 in an order that the stream names, whatever NumPy's release.

    >>> sorted(permutation(4, np.uint64(7)).tolist())
    [0, 1, 2, 3]
    """
    order = np.arange(n)
    for i in range(n - 1, 0, -1):
        j = int(unit(stream, np.uint64(i)) * (i + 1))
        order[i], order[j] = order[j], order[i]
    return order
