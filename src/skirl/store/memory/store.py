"""Rows in this machine's memory: a row costs its record and 16 to 19 bytes, from its first write on.

Rows of one kind stand in one array in order of first write, and a directory knows where; tables of any size cost
nothing until rows are touched, and growing copies none (see `_arena.py`). One core reads some 7 million records of 65
floats a second and writes 4 million, with a million held. A dict of arrays takes some 200 bytes a row more, and the
interpreter for every row; an array of all rows of a table would be plain, and take 230 GB for the 882.8 million rows of
Criteo Terabyte. A reader and a writer do not wait for each other's copies (see `_gate.py`).
"""

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from skirl.store.base import Facts, Frozen, Layout, Record, Rows, Store
from skirl.store.changes import Marks, Taken
from skirl.store.gate import Gate
from skirl.store.memory.arena import Arena
from skirl.store.memory.directory import Directory
from skirl.store.snapshot import DISK_ROWS, HEADER, MEMORY_ROWS, Snapshot, SnapshotError, save
from skirl.tools.tensor_file import Reader, Writer

_WORTH = 2
"""Frozen files may take this many times the bytes of the rows held; then all are written anew."""
_PIECE = 1 << 16  # keys looked up at a time: bounds both the wait for the lock and the room made too early


@njit(nogil=True, cache=True)
def _gather(held: Rows, positions: NDArray[np.int32], out: Rows, found: NDArray[np.bool_]) -> None:
    for i in range(positions.size):
        position = positions[i]
        if position >= 0:
            found[i] = True
            for j in range(out.shape[1]):
                out[i, j] = held[position, j]


@njit(nogil=True, cache=True)
def _scatter(held: Rows, positions: NDArray[np.int32], rows: Rows) -> None:
    for i in range(positions.size):
        for j in range(rows.shape[1]):
            held[positions[i], j] = rows[i, j]


class _Kind:
    """The rows of one kind: where each key stands, and the records."""

    def __init__(self, record: Record) -> None:
        self.directory = Directory()
        self.rows = Arena(record.dtype, (record.width,))
        self.flags = Arena(np.uint8)
        self.marks = Marks()

    def has_room(self, n_more: int) -> bool:
        need = self.directory.count + n_more
        return self.directory.has_room(n_more) and need <= min(len(self.rows), len(self.flags))

    def reserve(self, n_more: int) -> None:
        self.directory.reserve(n_more)
        self.rows.reserve(self.directory.count + n_more)
        self.flags.reserve(self.directory.count + n_more)

    def before(self, positions: NDArray[np.int32]) -> None:
        self.marks.before(self.flags.array, positions, self.directory.keys, self.rows.array)


class MemoryStore(Store):
    """The rows of a run that fit in memory, or of a test.

    At most 2**31 - 1 rows of one kind: positions are int32.

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
        """The generation that changes are counted from, if it was written."""

    def _empty(self) -> list[_Kind]:
        return [_Kind(record) for record in self.layout.kinds]

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        for piece in _pieces(keys.size):
            try:
                with self._gate.lookup():
                    held = self._kinds[kind]
                    positions = held.directory.locate(keys[piece])
                _gather(held.rows.array, positions, out[piece], found[piece])
            finally:
                self._gate.copied()

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        try:
            self._write_pieces(kind, keys, rows)
        except KeyboardInterrupt:
            self._write_pieces(kind, keys, rows)  # what was begun is finished: a key without its row would be found
            raise

    def _write_pieces(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        for piece in _pieces(keys.size):
            self._kinds[kind].marks.room()
            try:
                with self._gate.lookup():
                    held = self._kinds[kind]
                    if not held.has_room(keys[piece].size):
                        with self._gate.alone():
                            held.reserve(keys[piece].size)
                    positions = held.directory.place(keys[piece])
                held.before(positions)
                _scatter(held.rows.array, positions, rows[piece])
            finally:
                self._gate.copied()

    def __len__(self) -> int:
        return sum(kind.directory.count for kind in self._kinds)

    def keys(self) -> Iterator[NDArray[np.int64]]:
        self._check_open()
        for kind in range(len(self._kinds)):
            start = 0
            while (piece := self._some_keys(kind, start)).size:
                yield piece
                start += piece.size

    def _some_keys(self, kind: int, start: int) -> NDArray[np.int64]:
        try:
            with self._gate.lookup():
                return self._kinds[kind].directory.keys[start : start + _PIECE].copy()
        finally:
            self._gate.copied()

    def snapshot(self, folder: str | Path) -> None:
        self._check_open()
        with self._gate.alone():
            facts = {
                "kind": MEMORY_ROWS,
                "identity": self.identity,
                "generation": self.generation + 1,
                "layout": [[table, r.width, r.dtype] for table, r in self.layout.records.items()],
            }
            arrays: dict[str, NDArray[Any]] = {}
            for record, kind in zip(self.layout.kinds, self._kinds, strict=True):
                arrays[f"keys-{_name(record)}"] = kind.directory.keys
                arrays[f"rows-{_name(record)}"] = kind.rows.array[: kind.directory.count]
            save(folder, facts, arrays)
            self.generation += 1

    def restore(self, folder: str | Path) -> None:
        """As promised by `Store`. Old rows are let go last: restore into an empty store to hold rows only once."""
        self._check_open()
        snapshot = Snapshot(folder)
        header = Path(folder) / HEADER
        identity, generation, layout = _facts(snapshot.facts, header)
        if layout != self.layout:
            raise SnapshotError(
                f"{header} has records {layout}, this store {self.layout}: open it with the same tables"
            )
        kinds = self._empty()
        for record, kind in zip(self.layout.kinds, kinds, strict=True):
            self._load(snapshot, header, record, kind)
        with self._gate.alone():
            self._kinds = kinds
            self.identity, self.generation = identity, generation

    def _load(self, snapshot: Snapshot, header: Path, record: Record, kind: _Kind) -> None:
        keys_name, rows_name = f"keys-{_name(record)}", f"rows-{_name(record)}"
        if keys_name not in snapshot or rows_name not in snapshot:
            raise SnapshotError(f"{header} names no {keys_name}: use another snapshot")
        count = math.prod(snapshot.shape(keys_name))
        keys = np.empty(count, np.int64)
        snapshot.load(keys_name, keys)
        kind.reserve(count)
        snapshot.load(rows_name, kind.rows.array[:count])
        try:
            self.layout.kind(keys, kind.rows.array[:count])
        except (TypeError, ValueError) as error:
            raise SnapshotError(f"{header}: {keys_name} does not fit its rows ({error})") from None
        kind.directory.place(keys)
        if kind.directory.count != count:
            raise SnapshotError(f"{header}: {keys_name} holds a key twice: use another snapshot")

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        self._check_open()
        files = list(since["files"]) if since is not None and self._frozen == since["generation"] else []
        with self._gate.alone():
            each = [
                (np.dtype(r.dtype).itemsize * r.width + 8, k)
                for r, k in zip(self.layout.kinds, self._kinds, strict=True)
            ]
            held = sum(bytes * kind.directory.count for bytes, kind in each)
            everything = not files or sum(entry["bytes"] for entry in files) > _WORTH * held
            counts = [k.marks.freeze(k.flags.array, k.directory.keys, everything=everything) for k in self._kinds]
            self.generation += 1
            self._frozen = None
        return _FrozenRows(self, folder, [] if everything else files, counts, self.generation)

    def _take(self, kind: int) -> Taken | None:
        """Some of what is owed to the frozen state."""
        try:
            with self._gate.lookup():
                held = self._kinds[kind]
                flags, keys, rows = held.flags.array, held.directory.keys, held.rows.array
            return held.marks.take(flags, keys, rows)
        finally:
            self._gate.copied()

    def _release(self, generation: int | None) -> None:
        """The frozen state of a generation is written, None: it is given up."""
        with self._gate.alone():
            for kind in self._kinds:
                kind.marks.forget(kind.flags.array)
            self._frozen = generation

    def thaw(self, folder: Path, facts: Facts, over: Iterable[tuple[NDArray[np.int64], Rows]]) -> None:
        """As promised by `Store`. Old rows are let go last: thaw into an empty store to hold rows only once."""
        self._check_open()
        kinds = self._empty()
        for pairs, changed in ((frozen_rows(folder, facts, self.layout), False), (over, True)):
            for keys, rows in pairs:
                kind = kinds[self.layout.kind(keys, rows)]
                kind.reserve(keys.size)
                positions = kind.directory.place(keys)
                _scatter(kind.rows.array, positions, rows)
                if changed:  # against the files of the frozen state
                    kind.before(positions)
        with self._gate.alone():
            self._kinds = kinds
            self.identity = facts["identity"]
            self.generation = facts["generation"]
            self._frozen = facts["generation"]

    def close(self) -> None:
        """Let go of the rows."""
        if not self.closed:
            with self._gate.alone():
                super().close()
                self._kinds = self._empty()


class _FrozenRows(Frozen):
    """Files of an earlier frozen state, and one more of what has changed since."""

    def __init__(
        self, store: MemoryStore, folder: Path, files: list[Facts], counts: list[int], generation: int
    ) -> None:
        self._store, self._folder, self._files, self._counts = store, folder, files, counts
        self._generation, self._written = generation, False

    def write(self) -> Facts:
        kinds = self._store.layout.kinds
        columns: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        for record, n in zip(kinds, self._counts, strict=True):
            columns[f"keys-{_name(record)}"] = np.dtype(np.int64), (n,)
            columns[f"rows-{_name(record)}"] = np.dtype(record.dtype), (n, record.width)
        files = self._files
        if any(self._counts):
            with Writer(
                self._folder / f"store-{secrets.token_hex(8)}.safetensors", columns, {"format": "skirl-rows"}
            ) as writer:
                for kind, record in enumerate(kinds):
                    while (taken := self._store._take(kind)) is not None:
                        writer.write(f"keys-{_name(record)}", taken[0])
                        writer.write(f"rows-{_name(record)}", taken[1])
            files = [*files, writer.entry]
        self._written = True
        layout = [[table, r.width, r.dtype] for table, r in self._store.layout.records.items()]
        facts = {"kind": MEMORY_ROWS, "identity": self._store.identity, "generation": self._generation}
        return facts | {"layout": layout, "files": files}

    def release(self) -> None:
        self._store._release(self._generation if self._written else None)


def frozen_rows(folder: Path, facts: Facts, layout: Layout) -> Iterator[tuple[NDArray[np.int64], Rows]]:
    """What `_FrozenRows` wrote, in the order in which it is to be written: later rows replace earlier ones."""
    header = folder / "store"
    _, _, found = _facts(facts, header)
    if found != layout:
        raise SnapshotError(f"{folder} has records {found}, this store {layout}: open it with the same tables")
    for entry in facts["files"]:
        reader = Reader(folder, entry)
        for record in layout.kinds:
            yield from reader.pairs(f"keys-{_name(record)}", f"rows-{_name(record)}", layout, _PIECE)


def _pieces(size: int) -> Iterator[slice]:
    for start in range(0, size, _PIECE):
        yield slice(start, start + _PIECE)


def _name(record: Record) -> str:
    return f"{record.width}-{record.dtype}"


def _facts(facts: Mapping[str, Any], header: Path) -> tuple[str, int, Layout]:
    if facts.get("kind") == DISK_ROWS:
        raise SnapshotError(
            f"{header} holds the rows of a disk store, which need not fit in memory: set store='disk:FOLDER', with a new or "
            "an empty folder"
        )
    if facts.get("kind") != MEMORY_ROWS:
        raise SnapshotError(
            f"{header} is a snapshot of {facts.get('kind')!r}, not of rows: give the store's own folder"
        )
    try:
        layout = Layout({table: Record(width, dtype) for table, width, dtype in facts["layout"]})
        return facts["identity"], facts["generation"], layout
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"{header} does not describe rows ({error}): use another snapshot") from None
