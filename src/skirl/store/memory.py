"""Rows in this machine's memory. A checkpoint of them is new segments, after those of earlier checkpoints."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.store.arena import Arena, Directory
from skirl.store.base import Facts, Frozen, Layout, Record, Rows, SavedRows, Store
from skirl.store.changes import Changes, Taken
from skirl.store.disk.frozen import named, rows_of, worth_keeping, write_frozen
from skirl.store.disk.manifest import Manifest, SegmentEntry
from skirl.tools.jit import kernel, read_only
from skirl.tools.threads import Gate

PIECE = 1 << 16
"""Number of keys handled at a time, which bounds the wait for the store's lock and the room reserved too early."""


@kernel
def _gather(held: Rows, positions: NDArray[np.int32], out: Rows, found: NDArray[np.bool_]) -> None:
    for i in range(positions.size):
        position = positions[i]
        if position >= 0:
            found[i] = True
            for j in range(out.shape[1]):
                out[i, j] = held[position, j]


@kernel
def _scatter(held: Rows, positions: NDArray[np.int32], rows: Rows) -> None:
    for i in range(positions.size):
        for j in range(rows.shape[1]):
            held[positions[i], j] = rows[i, j]


class _RowsOfKind:
    """The rows of one kind: the position of each key, which never changes, and the record at each position."""

    def __init__(self, record: Record) -> None:
        self.directory = Directory()
        self.rows = Arena(record.dtype, (record.width,))
        self.flags = Arena(np.uint8)
        self.changes = Changes()

    def has_room(self, n_more: int) -> bool:
        room = min(len(self.rows), len(self.flags))
        return self.directory.has_room(n_more) and self.directory.count + n_more <= room

    def reserve(self, n_more: int) -> None:
        self.directory.reserve(n_more)
        for arena in (self.rows, self.flags):
            arena.reserve(self.directory.count + n_more)

    def changing(self, positions: NDArray[np.int32]) -> None:
        self.changes.changing(self.flags.array, positions, self.directory.keys, self.rows.array)


class MemoryStore(Store):
    """A store in memory, for rows that fit there and for tests: at most 2**31 - 1 of one kind of record.

    >>> store = MemoryStore({0: Record(2), 1: Record(3)})
    >>> _ = store.write(np.array([5]), np.array([[1, 2]], np.float32))
    >>> out = np.zeros((2, 2), np.float32)
    >>> store.read(np.array([4, 5]), out)
    array([False,  True])
    >>> out
    array([[0., 0.],
           [1., 2.]], dtype=float32)
    """

    def __init__(self, layout: Layout | Mapping[int, Record]) -> None:
        super().__init__(layout)
        self._kinds = self._empty()
        self._gate = Gate()
        self._frozen: int | None = None
        """The generation since which changes are counted, if that one was written."""

    def __repr__(self) -> str:
        return "memory"

    def _empty(self) -> list[_RowsOfKind]:
        return [_RowsOfKind(record) for record in self.layout.kinds]

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        for piece in _pieces(keys.size):
            with self._gate:
                with self._gate.lookup():
                    held = self._kinds[kind]
                    positions = held.directory.locate(keys[piece])
                _gather(held.rows.array, positions, out[piece], found[piece])

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        for piece in _pieces(keys.size):
            self._kinds[kind].changes.wait_for_room()
            with self._gate:
                with self._gate.lookup():
                    held = self._kinds[kind]
                    if not held.has_room(keys[piece].size):
                        with self._gate.alone():
                            held.reserve(keys[piece].size)
                    positions = held.directory.place(keys[piece])
                held.changing(positions)
                _scatter(held.rows.array, positions, read_only(rows[piece]))

    def describe(self, about: Mapping[str, Any] | None = None) -> int:
        self.about = self.about if about is None else dict(about)
        return sum(kind.directory.count for kind in self._kinds)

    def held(self) -> Iterator[NDArray[np.int64]]:
        self._check_open()
        for kind in range(len(self._kinds)):
            start = 0
            while (piece := self._some_keys(kind, start)).size:
                yield piece
                start += piece.size

    def _some_keys(self, kind: int, start: int) -> NDArray[np.int64]:
        with self._gate, self._gate.lookup():
            return self._kinds[kind].directory.keys[start : start + PIECE].copy()

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        self._check_open()
        before: list[SegmentEntry] = []
        if since is not None and self._frozen == since["generation"]:
            before = Manifest.from_facts(since).segments
        with self._gate.alone():
            counts = [kind.directory.count for kind in self._kinds]
            before = worth_keeping(before, zip(self.layout.kinds, counts, strict=True))
            for kind in self._kinds:
                kind.changes.freeze(kind.flags.array, kind.directory.keys, everything=not before)
            self.generation += 1
            self._frozen = None
        manifest, written = Manifest(self.identity, self.generation, self.layout, before), list[int]()

        def write() -> Facts:
            kinds = [(record, iter(partial(self._take, n), None)) for n, record in enumerate(self.layout.kinds)]
            facts = write_frozen(folder, manifest, kinds)
            written.append(manifest.generation)
            return facts

        return Frozen(write, lambda: self._release(next(iter(written), None)))

    def _take(self, kind: int) -> Taken | None:
        with self._gate:
            with self._gate.lookup():
                held = self._kinds[kind]
                flags, keys, rows = held.flags.array, held.directory.keys, held.rows.array
            return held.changes.take(flags, keys, rows)

    def _release(self, generation: int | None) -> None:
        """Note that the frozen state is written, with its generation, or given up, with None."""
        with self._gate.alone():
            for kind in self._kinds:
                kind.changes.forget(kind.flags.array)
            self._frozen = generation

    def thaw(self, saved: SavedRows) -> None:
        """Old rows are freed last, so unless the store is empty, both are in memory for a while."""
        self._check_open()
        kinds = self._empty()
        with named(saved.folder, saved.folder):
            for number, part in enumerate(saved.parts):
                for keys, rows in rows_of(part, saved.folder, self.layout):
                    kind = kinds[self.layout.kind(keys, rows)]
                    kind.reserve(keys.size)
                    positions = kind.directory.place(keys)  # a later record of a key overwrites an earlier one
                    _scatter(kind.rows.array, positions, read_only(rows))
                    if number:  # the first part's files do not have it
                        kind.changing(positions)
        first, *others = saved.parts
        of_caches = all("resident" in part.facts for part in others)
        whole = first.shard is None and "columns" not in first.facts and of_caches
        with self._gate.alone():
            self._kinds = kinds
            self.identity, self.generation = saved.identity, saved.generation
            self._frozen = first.facts["generation"] if whole else None  # else no files have exactly these rows

    def close(self, *, flush: bool = True) -> None:
        if not self.closed:
            with self._gate.alone():
                super().close()
                self._kinds = self._empty()


def _pieces(size: int) -> Iterator[slice]:
    for start in range(0, size, PIECE):
        yield slice(start, start + PIECE)
