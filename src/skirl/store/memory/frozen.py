"""Frozen rows of a store in memory, and rows mapped from a checkpoint."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skirl.core.placement import Shard
from skirl.store.base import DISK_ROWS, MEMORY_ROWS, Facts, Frozen, FrozenPart, Layout, Record, Rows
from skirl.store.changes import Taken
from skirl.store.memory.directory import Arena, Directory
from skirl.tools.jit import kernel
from skirl.tools.sealed_json import CheckpointError
from skirl.tools.tensor_file import TensorReader, TensorWriter


@kernel
def _gather(
    rows: Rows,
    at: NDArray[np.int64],
    low: int,
    positions: NDArray[np.int32],
    out: Rows,
    found: NDArray[np.bool_],
) -> None:
    """Copy the rows that are in one file, whose first row has number `low`."""
    for i in range(positions.size):
        if positions[i] < 0:
            continue
        place = at[positions[i]] - low
        if 0 <= place < rows.shape[0]:
            found[i] = True
            for j in range(out.shape[1]):
                out[i, j] = rows[place, j]


class MappedRows:
    """The rows of all kinds, read-only. Each takes 24 to 27 bytes of memory, whatever its width."""

    def __init__(self, folder: Path, parts: Sequence[FrozenPart], layout: Layout) -> None:
        readers = []
        for part in parts:
            identity_of(folder, part.facts, layout)
            readers += [(TensorReader(folder, entry), part.shard) for entry in part.facts["files"]]
        self._kinds = [_MappedKind(record, readers, layout) for record in layout.kinds]
        for part in parts:
            for keys, rows in part.own(part.over):
                self._kinds[layout.kind(keys, rows)].replace(keys, rows)

    def __len__(self) -> int:
        return sum(kind.directory.count for kind in self._kinds)

    def keys(self) -> Iterator[NDArray[np.int64]]:
        """Yield the key of every row once."""
        for kind in self._kinds:
            for start in range(0, kind.directory.count, PIECE):
                yield kind.directory.keys[start : start + PIECE].copy()

    def read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        """See `Store._read`."""
        self._kinds[kind].read(keys, out, found)


class _MappedKind:
    """The rows of one kind: the number of each key's row, counted through all files in order."""

    def __init__(self, record: Record, readers: list[tuple[TensorReader, Shard | None]], layout: Layout) -> None:
        self.directory = Directory()
        self._at = Arena(np.int64)
        self._files: list[tuple[int, Rows]] = []
        """The number of each file's first row, and the file's rows."""
        self._rows = 0
        self._replaced, self._replacing = Arena(record.dtype, (record.width,)), 0
        name = name_of(record)
        for reader, shard in readers:
            begin = self._rows
            if not reader.columns.keys() >= {f"keys-{name}", f"rows-{name}"}:
                raise CheckpointError(f"{reader.path} has no keys-{name}: use another checkpoint")
            rows = reader.mapped(f"rows-{name}")
            if rows.shape != (*reader.columns[f"keys-{name}"][1], record.width) or rows.dtype != record.dtype:
                raise CheckpointError(f"{reader.path}: rows-{name} does not fit its keys: use another checkpoint")
            for [keys] in reader.pieces([f"keys-{name}"], PIECE):
                if layout.stranger(keys, record) >= 0:
                    raise CheckpointError(f"{reader.path}: keys-{name} does not fit its rows: use another checkpoint")
                self._place(keys, shard)
            self._files.append((begin, np.asarray(rows)))

    def _place(self, keys: NDArray[np.int64], shard: Shard | None = None) -> None:
        """Add the keys of the next rows. A key that came before now has its row here. `shard` tells which keys to take."""
        at = np.arange(self._rows, self._rows + len(keys))
        self._rows += len(keys)
        if shard is not None:
            here = shard(keys)
            keys, at = keys[here], at[here]
        self.directory.reserve(len(keys))
        positions = self.directory.place(keys)
        self._at.reserve(self.directory.count)
        self._at.array[positions] = at

    def replace(self, keys: NDArray[np.int64], rows: Rows) -> None:
        """Replace rows of the files with rows in memory."""
        self._place(keys)
        self._replaced.reserve(self._replacing + len(keys))
        self._replaced.array[self._replacing : self._replacing + len(keys)] = rows
        self._replacing += len(keys)

    def read(self, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        positions, at = self.directory.locate(keys), self._at.array
        replaced = self._replaced.array[: self._replacing]
        replaced.flags.writeable = False  # as the mapped files are, so that one compiled kernel serves both
        for begin, rows in [*self._files, (self._rows - self._replacing, replaced)]:
            if len(rows):
                _gather(rows, at, begin, positions, out, found)


PIECE = 1 << 16
"""Number of keys handled at a time, which bounds the wait for the store's lock and the room reserved too early."""


class FrozenRows(Frozen):
    """Rows to be written. `write` adds one file to those of earlier frozen states."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        facts: Facts,
        counts: list[int],
        take: Callable[[int], Taken | None],
        release: Callable[[int | None], None],
    ) -> None:
        self._folder, self._layout, self._facts, self._counts = folder, layout, facts, counts
        self._take, self._release = take, release
        self._written = False

    def write(self) -> Facts:
        columns: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        for record, n in zip(self._layout.kinds, self._counts, strict=True):
            columns[f"keys-{name_of(record)}"] = np.dtype(np.int64), (n,)
            columns[f"rows-{name_of(record)}"] = np.dtype(record.dtype), (n, record.width)
        files = self._facts["files"]
        if any(self._counts):
            path = self._folder / f"store-{secrets.token_hex(8)}.safetensors"
            with TensorWriter(path, columns, {"format": "skirl-rows"}) as writer:
                for kind, record in enumerate(self._layout.kinds):
                    while (taken := self._take(kind)) is not None:
                        writer.write(f"keys-{name_of(record)}", taken[0])
                        writer.write(f"rows-{name_of(record)}", taken[1])
            files = [*files, writer.entry]
        self._written = True
        return {"kind": MEMORY_ROWS, **self._facts, "layout": self._layout.facts(), "files": files}

    def release(self) -> None:
        self._release(self._facts["generation"] if self._written else None)


def frozen_rows(folder: Path, facts: Facts, layout: Layout) -> Iterator[tuple[NDArray[np.int64], Rows]]:
    """Yield what `FrozenRows` wrote, in the order in which to write it to a store: later rows replace earlier ones."""
    identity_of(folder, facts, layout)
    for entry in facts["files"]:
        reader = TensorReader(folder, entry)
        for record in layout.kinds:
            yield from reader.pairs(f"keys-{name_of(record)}", f"rows-{name_of(record)}", layout, PIECE)


def identity_of(folder: Path, facts: Facts, layout: Layout) -> tuple[str, int]:
    """Return the identity and generation of frozen rows. Raise a CheckpointError if they do not fit the layout."""
    if facts.get("kind") == DISK_ROWS:
        raise CheckpointError(
            f"{folder} holds the rows of a disk store, which need not fit in memory: set store='disk:FOLDER', with a new or "
            "an empty folder"
        )
    try:
        found, identity, generation = Layout.from_facts(facts["layout"]), facts["identity"], facts["generation"]
        if facts["kind"] != MEMORY_ROWS or not isinstance(identity, str) or not isinstance(generation, int):
            raise ValueError(f"{facts['kind']!r} of {identity!r}, {generation!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} does not describe rows ({error}): use another checkpoint") from None
    if found != layout:
        has, need = found.against(layout)
        raise CheckpointError(f"{folder} has records {has}, this store {need}: open it with the same tables")
    return identity, generation


def name_of(record: Record) -> str:
    """Return what follows `keys-` and `rows-` in the names of a record's columns in a file."""
    return f"{record.width}-{record.dtype}"
