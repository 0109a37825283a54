"""Batches from files: epochs, shuffled windows, and a position to resume from.

Parts become encoded pieces, these windows of rows, which are permuted, and these batches."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from skirl.core.batch import Batch
from skirl.core.once import find
from skirl.core.tables import Table
from skirl.data.files.column import Column, Encoded
from skirl.data.files.columns import sessions_of
from skirl.data.files.dataset import START, Dataset, FilePart, RowPosition, chunks_of, in_windows, permutation, pieces
from skirl.data.files.encode import Encoder
from skirl.data.files.hashing import named
from skirl.data.share import WHOLE, Shards, Share, Turn, of_batch

logger = logging.getLogger("skirl")
_FLAGS = {"reads": "valid", "rows_of": "vocab", "schema": "schema and rows", "sessions": "session-order"}
"""The flags of what identifies a stream, where the name is another."""


@dataclass
class Files:
    """An iterable of batches from files; made by `DataFlags.stream`."""

    dataset: Dataset
    encoder: Encoder
    batch_size: int
    epochs: int = 1
    batches: int | None = None
    shuffle: int = 0
    by_session: bool = False
    """Whether chunks of rows of a session are shuffled, not single rows."""
    find_repeats: bool = False
    seed: int = 0
    workers: int = 0
    begin: RowPosition = START
    end: RowPosition | None = None
    """The rows to read: from `begin` to before `end`, or to the last."""
    held_out: "Files | None" = None
    rows_of_epoch: int | None = None
    """Samples of an epoch, if they were counted."""
    share: Share = WHOLE
    look_up: Callable[[Batch], Batch] | None = None
    """Gives fingerprints their rows; None if ids have theirs, or get them elsewhere."""

    yields_fresh: ClassVar[bool] = True

    bad_rows: int = field(default=0, init=False)
    """Counts the first epoch only: all have the same."""
    _warned: bool = field(default=False, init=False, repr=False)
    _steps: int | None = field(default=None, init=False)
    _state: dict[str, int] = field(default_factory=dict, init=False)
    _resume: dict[str, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._state = self._start()

    # What a model needs to know.

    @property
    def dense_features(self) -> int:
        return self.encoder.schema.dense_features

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.encoder.schema.labels)

    @property
    def lists(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.encoder.schema.ids if column.list)

    def held_out_at(self, state: Any) -> "Files | None":
        return self.held_out

    def tables(self, dim: int) -> list[Table]:
        return self.encoder.schema.tables(dim, self.encoder.rows)

    @property
    def samples(self) -> int | None:
        """None if they were not counted, if malformed rows may be left out, or if `batches` limits the stream."""
        if self.rows_of_epoch is None or self.batches is not None or self.encoder.skip:
            return None
        return (self.rows_of_epoch - self.share.left_out(self.rows_of_epoch, self.batch_size)) * self.epochs

    @property
    def steps(self) -> int | None:
        if self._steps is None and self.samples is not None and self.rows_of_epoch is not None:
            return len(self.share.cuts(self.rows_of_epoch, self.batch_size)) * self.epochs
        return self._steps

    # Parts for several trainers.

    def sharded(self, first: int, last: int, of: int) -> "Files":
        return replace(self, share=of_batch(first, last, of, self.batch_size))

    def dealt(self, rank: int, ranks: int) -> "Files":
        return replace(self, share=Turn(rank, ranks))

    # Iteration.

    def __iter__(self) -> Iterator[Batch]:
        state, self._resume = self._resume or self._start(), None
        self._steps = None
        steps = self._all(state)
        ahead = next(steps, None)
        while ahead is not None:
            (batches, after), ahead = ahead, next(steps, None)
            if ahead is None:  # one step is held back, so that `steps` is known when the last one is yielded
                self._steps = after["batches"]
            yield from batches[:-1]
            self._state = after  # counts the step once its last batch is handed out
            yield batches[-1]
        self._state = self._start()

    def pieces(self, size: int | None = None) -> Iterator[Encoded]:
        """Yield the rows of one epoch in order, in pieces of `size` rows; None for pieces as files yield them."""
        if size is None:
            return (piece for piece, _ in self._parts())
        return (piece.slice(first, first + rows) for piece, first, rows, _ in in_windows(self._parts(), size))

    def numbered(self) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yield the batches of one epoch that is not shuffled, with the number of each row among all rows of all files."""

        def numbers() -> Iterator[tuple[Encoded, FilePart]]:
            before = self.begin.row
            if self.begin[:2] > (0, 0):
                before += self.dataset.rows(self.begin._replace(row=0))
            for piece, part in self._parts():
                yield replace(piece, places=piece.places + (before - part.low)), part
                before += piece.read

        done = 0
        for piece, first, done, _ in in_windows(numbers(), self.batch_size):
            rows = np.arange(first, first + done)
            yield self.batch_of(piece, rows), piece.places[rows]
        if not done:
            self._refuse_empty()

    def _start(self) -> dict[str, int]:
        return {"epoch": 0, **self.begin._asdict(), "window": 0, "next": 0, "batches": 0}

    def _parts(self) -> Iterator[tuple[Encoded, FilePart]]:
        self.bad_rows = 0
        with closing(pieces(self.dataset, self.encoder, [(self.begin, self.end)], self.workers)) as source:
            yield from self._counted(source, count=True)

    def _all(self, state: dict[str, int]) -> Iterator[tuple[list[Batch], dict[str, int]]]:
        done, skip, first = state["batches"], state["next"], state["epoch"]
        if self.batches is not None and done >= self.batches:
            return
        together = self.share.batches * self.batch_size
        size = max(1, -(-self.shuffle // together)) * together
        start = RowPosition(state["file"], state["part"], state["row"])
        ranges = [(self.begin if epoch > first else start, self.end) for epoch in range(first, self.epochs)]
        with closing(pieces(self.dataset, self.encoder, ranges, self.workers)) as source:
            for epoch in range(first, self.epochs):
                empty, n = not skip, 0
                cut_out = in_windows(self._counted(source, epoch == 0), size)
                window = state["window"] if epoch == first else 0
                for number, (rows, begun, n, place) in enumerate(cut_out, start=window):
                    sessions = None
                    if self.by_session:
                        sessions, _ = sessions_of(rows.kept[0].slice(begun, n))
                    samples = begun + self._order(epoch, number, n, sessions)
                    here = {"epoch": epoch, **place._asdict(), "window": number}
                    steps = self.share.cuts(n, self.batch_size)
                    for index, cuts in enumerate(steps[skip:], start=skip):
                        done += 1
                        batches = [self.batch_of(rows, samples[low:high]) for low, high in cuts]
                        yield batches, {**here, "next": index + 1, "batches": done}
                        if done == self.batches:
                            return
                    empty, skip = empty and not steps, 0
                self._warn_of(self.share.left_out(n, self.batch_size))
                if empty:
                    self._refuse_empty(n)

    def _order(self, epoch: int, window: int, rows: int, sessions: np.ndarray | None) -> np.ndarray:
        """The rows of a window in the order of their samples (int64). sessions: a number for each, if these are shuffled."""
        if not self.shuffle:
            return np.arange(rows)
        stream = named(self.seed, epoch, window)
        if sessions is None:
            return permutation(rows, stream)
        begins = chunks_of(sessions)
        return Column(np.arange(rows), begins).take(permutation(len(begins) - 1, stream)).values

    def _counted(
        self, source: Iterator[tuple[Encoded, FilePart] | None], count: bool
    ) -> Iterator[tuple[Encoded, FilePart]]:
        for piece, part in iter(lambda: next(source), None):
            self.bad_rows += piece.bad if count else 0
            yield piece, part

    def _warn_of(self, left_out: int) -> None:
        """Warn once, on one trainer, if an epoch does not end with a whole batch."""
        if left_out and not self._warned and isinstance(self.share, Shards) and self.share.first == 0:
            self._warned = True
            logger.warning(
                "the last %d samples of an epoch are left out: they do not fill the %d shards of a batch of %d samples",
                left_out, self.share.of, self.batch_size,
            )  # fmt: skip

    def _refuse_empty(self, rows: int = 0) -> NoReturn:
        if rows:
            raise ValueError(
                f"{self.dataset.paths[0]}: there are {rows:,} rows, fewer than the {self.batch_size:,} of a batch, whose "
                f"shards all have to be there: set batch to {rows:,} or less"
            )
        bad = f" (left out: {self.bad_rows:,} malformed)" if self.bad_rows else ""
        what = f"{self.dataset.paths[0]}: there are no rows left to read{bad}"
        raise ValueError(f"{what}: give other files, fix malformed rows, or set valid to hold out others")

    def batch_of(self, piece: Encoded, rows: np.ndarray) -> Batch:
        batch = piece.batch(rows, [column.name for column in self.encoder.schema.ids])
        batch = replace(batch, sparse=find(batch.sparse)) if self.find_repeats else batch
        return batch if self.look_up is None else self.look_up(batch)

    # States.

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state) | {"stream": dict(self._identity)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        self._resume = {name: state[name] for name in self._start()}
        self._state = dict(self._resume)

    def check_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, Mapping) or "stream" not in state:
            grown = isinstance(state, Mapping) and "tables" in state
            then = "set vocab to open" if grown else "set data to what it was when the state was saved"
            raise ValueError(f"the state is of {'an open vocabulary' if grown else 'no files'}: {then}")
        for name, now in self._identity.items():
            if (was := state["stream"][name]) != now:
                was, now = _first_difference(was, now)
                flags = _FLAGS.get(name, "data" if name == "files" else name)
                raise ValueError(
                    f"the state is of a stream whose {name} has {was}, not {now}: set {flags} to what it was"
                )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """In types that JSON has. Cached, since a state is taken at each batch."""
        encoder, paths = self.encoder, map(Path, self.dataset.paths)
        begin, end = (
            "the end" if at is None else f"file {at.file} part {at.part} row {at.row}" for at in (self.begin, self.end)
        )
        reads = f"from {begin} to {end}"
        if encoder.keep is not None:
            reads += f" where {encoder.keep.low} <= {encoder.keep.column} < {encoder.keep.high}"
        # Use the actual numbers of rows (from a flag, the schema or a vocabulary). The session column and the time unit do
        # not change what training reads.
        ids = tuple(replace(column, rows=encoder.rows[column.table or column.name]) for column in encoder.schema.ids)
        return {
            "files": [f"{path.name} ({path.stat().st_size} bytes)" for path in paths],
            "reads": reads,
            "rows_of": encoder.rows_of.described,
            "schema": replace(encoder.schema, ids=ids, session=None, time_unit="").toml(),
            "sessions": encoder.schema.also[0] if self.by_session else "none",
            "repeats": "find" if self.find_repeats else "stored",  # sums by list first may differ in the last bit
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else 0,
            "bad_rows": "skip" if encoder.skip else "refuse",
        }


def _first_difference(was: Any, now: Any) -> tuple[Any, Any]:
    """The first entries or lines in which two lists or texts differ."""
    both = [each.splitlines() if isinstance(each, str) else each for each in (was, now)]
    if not all(isinstance(each, list) for each in both):
        return was, now
    return next((was, now) for was, now in zip_longest(*both, fillvalue="nothing") if was != now)
