"""Frozen rows of a memory store, read in place: the index is in memory, and the rows are mapped from their files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import Layout, Record, Rows
from skirl.store.frozen import FrozenPart, Mine
from skirl.store.memory.arena import Arena
from skirl.store.memory.directory import Directory
from skirl.store.memory.frozen import PIECE, identity_of, name_of
from skirl.tools.jit import kernel
from skirl.tools.sealed_json import CheckpointError
from skirl.tools.tensor_file import TensorReader


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
            readers += [(TensorReader(folder, entry), part.mine) for entry in part.facts["files"]]
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

    def __init__(self, record: Record, readers: list[tuple[TensorReader, Mine | None]], layout: Layout) -> None:
        self.directory = Directory()
        self._at = Arena(np.int64)
        self._files: list[tuple[int, Rows]] = []
        """The number of each file's first row, and the file's rows."""
        self._rows = 0
        self._replaced, self._replacing = Arena(record.dtype, (record.width,)), 0
        name = name_of(record)
        for reader, mine in readers:
            begin = self._rows
            if not reader.columns.keys() >= {f"keys-{name}", f"rows-{name}"}:
                raise CheckpointError(f"{reader.path} has no keys-{name}: use another checkpoint")
            rows = reader.mapped(f"rows-{name}")
            if rows.shape != (*reader.columns[f"keys-{name}"][1], record.width) or rows.dtype != record.dtype:
                raise CheckpointError(f"{reader.path}: rows-{name} does not fit its keys: use another checkpoint")
            for [keys] in reader.pieces([f"keys-{name}"], PIECE):
                if layout.stranger(keys, record) >= 0:
                    raise CheckpointError(f"{reader.path}: keys-{name} does not fit its rows: use another checkpoint")
                self._place(keys, mine)
            self._files.append((begin, np.asarray(rows)))

    def _place(self, keys: NDArray[np.int64], mine: Mine | None = None) -> None:
        """Add the keys of the next rows. A key that came before now has its row here. `mine` tells which keys to take."""
        at = np.arange(self._rows, self._rows + len(keys))
        self._rows += len(keys)
        if mine is not None:
            here = mine(keys)
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
