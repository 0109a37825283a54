"""Batches out of files: epochs, windows that are shuffled, and a place to go on from.

    parts -> encoded pieces -> windows of rows -> (permuted) -> batches

A window is a whole number of batches (one, where nothing is shuffled), and what is in it is permuted by a stream of
random numbers that (seed, epoch, window) names. So a state is a few numbers: where the window begins and which batch of
it comes next. A buffer that gives a random row for each one that enters it would mix a little farther, and its state
would be the rows in it.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.find import find
from skirl.core.tables import Table
from skirl.data.files.dataset import START, Dataset, Part, Place
from skirl.data.files.encode import Encoder
from skirl.data.files.encoded import Encoded, gather_from, sharing, taken
from skirl.data.files.identity import check_identity, identity_of
from skirl.data.files.windows import Windows, cut, partial_windows, whole_windows
from skirl.data.files.workers import Range, pieces
from skirl.data.share import WHOLE, Shards, Share, Turn, shards
from skirl.tools.progress import malformed
from skirl.tools.shape_of import ANY, COUNT, misfit

logger = logging.getLogger("skirl")


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
    most_rows: int | None = None
    """Of a session that change places together in it, 0 for all of them; None: each row by itself."""
    find_repeats: bool = False
    """Whether lists that repeat in a batch are looked for, where files do not leave them out."""
    seed: int = 0
    workers: int = 0
    begin: Place = START
    end: Place | None = None
    """The rows that are read: from `begin` to before `end`, or to the last."""
    held: "Files | None" = None
    """The rows held out."""
    rows_of_epoch: int | None = None
    """Samples of an epoch, if they were counted."""
    share: Share = WHOLE
    """What this trainer reads of each step."""

    yields_fresh: ClassVar[bool] = True

    bad_rows: int = field(default=0, init=False)
    """Malformed rows left out so far, in this process; those of the first epoch, for they are the same in each."""
    reached: Part | None = field(default=None, init=False)
    """The part that `pieces` came to last."""
    left_out: int = field(default=0, init=False)
    """Samples at the end of an epoch that are no whole batch, where batches have shards; of the last epoch that ended."""
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
        """Samples of all epochs and trainers, where they were counted, no malformed row can be left out, and no `batches`
        ends them before."""
        if self.rows_of_epoch is None or self.batches is not None or self.encoder.skip:
            return None
        return (self.rows_of_epoch - self.share.left_out(self.rows_of_epoch, self.batch_size)) * self.epochs

    @property
    def steps(self) -> int | None:
        """Steps of a whole pass; None until it is known, at the latest when the last one is yielded."""
        if self._steps is None and self.samples is not None and self.rows_of_epoch is not None:
            return len(self.share.cuts(self.rows_of_epoch, self.batch_size)) * self.epochs
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

    # What a trainer reads of it.

    def sharded(self, first: int, last: int, of: int) -> "Files":
        """Only shards first .. last - 1 of `of` of each batch, a micro-batch each; a smaller last batch is left out.

        No value of the other shards is parsed, but where malformed rows are skipped or rows are chosen by time: which row is
        which sample then depends on all of them.
        """
        return replace(self, dataset=self.dataset.anew(), share=shards(first, last, of, self.batch_size))

    def dealt(self, rank: int, ranks: int) -> "Files":
        """Every `ranks`-th batch from `rank` on; the last one may be empty, where other ranks have one more."""
        return replace(self, dataset=self.dataset.anew(), share=Turn(rank, ranks))

    # The pass.

    def __iter__(self) -> Iterator[Batch]:
        """All epochs; the first pass after `load_state_dict` goes on where that state was taken."""
        state, self._resume = self._resume or self._start(), None
        self._steps = None
        ahead: tuple[list[Batch], dict[str, int]] | None = None
        if self.batches is None or state["batches"] < self.batches:
            for step, after in self._all(state):
                if ahead is not None:
                    yield from self._step(*ahead)
                ahead = step, after
                if self.batches is not None and after["batches"] >= self.batches:
                    break
        if ahead is not None:  # one step is held back, to know of the last one that it is
            self._steps = ahead[1]["batches"]
            yield from self._step(*ahead)
        self._state = self._start()

    def _step(self, batches: list[Batch], after: dict[str, int]) -> Iterator[Batch]:
        """The batches of a step, which is counted when the last one is handed out."""
        yield from batches[:-1]
        self._state = after
        yield batches[-1]

    def pieces(self, *, expanded: bool = True) -> Iterator[Encoded]:
        """The rows of one epoch in order, as they come out of the files. expanded: with a list for each row."""
        self.bad_rows, self._first_bad = 0, None
        source = pieces(self.dataset, self.encoder, [Range(self.begin, self.end)], self.workers)
        try:
            for found in iter(lambda: next(source), None):
                self._count_bad(*found)
                self.reached = found[1]
                yield found[0].expanded() if expanded else found[0]
        finally:
            source.close()

    def _start(self) -> dict[str, int]:
        return {
            "epoch": 0, "file": self.begin.file, "part": self.begin.part, "row": self.begin.row, "window": 0, "next": 0,
            "batches": 0,
        }  # fmt: skip

    def _all(self, state: dict[str, int]) -> Iterator[tuple[list[Batch], dict[str, int]]]:
        """The batches of each step, with the state after it."""
        done, skip, first = state["batches"], state["next"], state["epoch"]
        begin, window = Place(state["file"], state["part"], state["row"]), state["window"]
        together = self.share.batches * self.batch_size
        size = max(1, -(-self.shuffle // together)) * together
        # Which row is which sample is known in advance, unless rows can be left out.
        some = self.share.partial and not self.encoder.skip and self.encoder.keep is None and self.most_rows is None
        ranges: list[Range] = []
        for epoch in range(first, self.epochs):
            here = (begin, window) if epoch == first else (self.begin, 0)
            order = (self.seed, epoch) if self.shuffle else None
            windows = Windows(self.share, self.batch_size, size, here[1], order, self.most_rows)
            ranges.append(Range(here[0], self.end, windows, some))
        source = pieces(self.dataset, self.encoder, ranges, self.workers)
        try:
            for epoch, windows in enumerate((r.windows for r in ranges), start=first):
                assert windows is not None
                empty, left_out, n = not skip, 0, 0
                found = self._counted(source, epoch == 0)
                cut_out = partial_windows(found, size) if some else whole_windows(found, size)
                for number, (rows, n, place) in enumerate(cut_out, start=windows.number):
                    steps, samples = windows.samples(number, n, rows.sessions)
                    left_out = self.share.left_out(n, self.batch_size)
                    if some:
                        samples = np.searchsorted(np.sort(samples), samples)
                    if self.shuffle or len(samples) < len(rows):
                        rows = taken(rows, samples)
                    here = {"epoch": epoch, "file": place.file, "part": place.part, "row": place.row, "window": number}
                    at = 0
                    for index, cuts in enumerate(steps):
                        batches = []
                        for low, high in cuts:
                            if index >= skip:
                                batches.append(self.batch_of(rows, at, at + high - low))
                            at += high - low
                        if batches:
                            done += 1
                            yield batches, {**here, "next": index + 1, "batches": done}
                        empty = False
                    skip = 0
                self._note(left_out)
                if empty:
                    self.refuse_empty(n)
        finally:
            source.close()

    def _counted(self, source: Iterator[tuple[Encoded, Part] | None], count: bool) -> Iterator[tuple[Encoded, Part]]:
        """The pieces of one epoch, their malformed rows counted."""
        for found in iter(lambda: next(source), None):
            if count:
                self._count_bad(*found)
            yield found

    def _note(self, left_out: int) -> None:
        """Say, once and on one trainer, that an epoch did not end with a whole batch."""
        if left_out and not self.left_out and isinstance(self.share, Shards) and self.share.first == 0:
            logger.warning(
                "the last %s samples of an epoch are left out: they do not fill the %d shards of a batch of %s samples",
                f"{left_out:,}",
                self.share.of,
                f"{self.batch_size:,}",
            )
        self.left_out = left_out

    def refuse_empty(self, rows: int = 0) -> NoReturn:
        """Say that there is nothing to read, or fewer rows than a batch of shards has."""
        if rows:
            raise ValueError(
                f"{self.dataset.paths[0]}: there are {rows:,} rows, fewer than the {self.batch_size:,} of a batch, whose "
                f"shards all have to be there: set batch to {rows:,} or less"
            )
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
        """Rows low .. high - 1 as a batch; lists that files leave out where they repeat are in it once, where that pays."""
        part = cut(rows, low, high, copy=False)
        names = [column.name for column in self.encoder.schema.ids]
        part, inverses = sharing(part, names)
        counts = [
            len(ids) if sizes is None or part.start(f) is None else int(sizes.sum())
            for f, (ids, sizes) in enumerate(zip(part.ids, part.lengths))
        ]
        total, at = sum(counts), 0
        values = np.empty(total, np.int64)
        for f, (ids, count) in enumerate(zip(part.ids, counts)):
            own, starts = values[at : at + count], part.start(f)
            if starts is None:
                own[:] = ids
            else:
                gather_from(ids, starts, part.lengths[f], own)
            at += count
        jagged: dict[str, Any] = {}
        if all(sizes is None for sizes in part.lengths):
            jagged["offsets"] = torch.from_numpy(np.arange(total + 1, dtype=np.int32))
        else:
            ones = np.ones(len(part), np.int64)
            sizes = [ones if s is None else s for s in part.lengths]
            jagged["lengths"] = torch.from_numpy(np.concatenate(sizes))
            if inverses:
                of = {group: torch.from_numpy(inverse) for group, inverse in inverses.items()}
                jagged |= {"strides": [len(each) for each in sizes], "inverse": of}
        sparse = KeyedJagged(names, torch.from_numpy(values), **jagged)
        if self.find_repeats:
            sparse = find(sparse)
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
                most_rows=self.most_rows,
                find_repeats=self.find_repeats,
            )
        return self._of
