"""What every store is: it holds rows off the device and answers by key.

A row travels as one record, its weight and its optimizer state side by side, so a read is one request and one copy;
state kept in a store of its own would double both. A call is an array of keys and a [n, width] array, never a row at a
time: a Python call costs about a microsecond, a row of 65 floats 0.1. `Store` checks what it is given here, once for
all kinds of store; a kind of store implements `_read`, `_write` and the rest, and passes tests/store/conformance.py.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numba import njit
from numpy.typing import NDArray

from skirl.core.tables import MAX_TABLES, ROW_BITS

DTYPES = ("float32", "float64")

Rows = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True)
class Record:
    """The records of one table: how many numbers of which type.

    >>> Record(65)
    Record(width=65, dtype='float32')
    """

    width: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
        if self.width < 1:
            raise ValueError(f"width is {self.width}, set it to 1 or more")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, set it to one of {', '.join(DTYPES)}")

    def __str__(self) -> str:
        return f"[{self.width}] {self.dtype}"


@njit(nogil=True, cache=True)
def _first_stranger(keys: NDArray[np.int64], kind_of_table: NDArray[np.int32], kind: int) -> int:
    """The first key whose table has no records of this kind, -1 when there is none."""
    for i in range(keys.size):
        table = keys[i] >> ROW_BITS
        if table < 0 or table >= kind_of_table.size or kind_of_table[table] != kind:
            return i
    return -1


class Layout:
    """The records of every table of a store. Tables with equal records are one *kind*: one call serves them together.

    >>> layout = Layout({0: Record(65), 1: Record(17), 2: Record(65)})
    >>> layout.kinds
    (Record(width=17, dtype='float32'), Record(width=65, dtype='float32'))
    >>> layout.kind(np.array([0, 2 << 48]), np.zeros((2, 65), np.float32))
    1
    """

    def __init__(self, records: Mapping[int, Record]) -> None:
        if not records:
            raise ValueError("the layout names no table: give a Record for each")
        for table in records:
            if type(table) is not int or not 0 <= table < MAX_TABLES:
                raise ValueError(f"table {table} in the layout: number tables from 0 to {MAX_TABLES - 1}")
        self.records = dict(sorted(records.items()))
        self.kinds = tuple(sorted(set(self.records.values()), key=lambda r: (r.width, r.dtype)))
        self._kind = {(r.width, r.dtype): i for i, r in enumerate(self.kinds)}
        self._kind_of_table = np.full(max(self.records) + 1, -1, np.int32)
        for table, record in self.records.items():
            self._kind_of_table[table] = self._kind[record.width, record.dtype]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.records == other.records

    def __hash__(self) -> int:
        return hash(tuple(self.records.items()))

    def __repr__(self) -> str:
        return f"Layout({self.records})"

    def kind(self, keys: NDArray[np.int64], rows: Rows) -> int:
        """Check keys and rows of one call; the index of their kind in `kinds`."""
        if not isinstance(keys, np.ndarray) or keys.dtype != np.int64 or keys.ndim != 1:
            raise TypeError(f"keys are {_shown(keys)}: pass an int64 array of one dimension")
        if not isinstance(rows, np.ndarray) or rows.ndim != 2 or len(rows) != len(keys):
            raise ValueError(f"rows are {_shown(rows)} for {len(keys)} keys: pass an array [{len(keys)}, width]")
        if not rows.flags.c_contiguous:
            raise ValueError(
                "rows are not contiguous: pass np.ascontiguousarray(rows), or whole rows of a larger array"
            )
        kind = self._kind.get((rows.shape[1], rows.dtype.name), -1)
        if kind < 0:
            held = ", ".join(map(str, self.kinds))
            raise ValueError(f"rows are [{rows.shape[1]}] {rows.dtype}, this store holds {held}: pass one of these")
        stranger = _first_stranger(keys, self._kind_of_table, kind)
        if stranger >= 0:
            raise ValueError(self._refusal(int(keys[stranger]), self.kinds[kind]))
        return kind

    def stranger(self, keys: NDArray[np.int64], record: Record) -> int:
        """The first key whose table has no such records, -1 when there is none."""
        return _first_stranger(keys, self._kind_of_table, self._kind[record.width, record.dtype])

    def _refusal(self, key: int, given: Record) -> str:
        table = key >> ROW_BITS
        if key < 0:
            return f"key {key} is negative: a key is table << {ROW_BITS} | row"
        if table not in self.records:
            return f"key {key} is of table {table}, which is not in the layout: open the store with a Record for it"
        return f"key {key} is of table {table}, whose records are {self.records[table]}, not {given}: call once a kind"


def _shown(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


Facts = dict[str, Any]
"""What JSON can say: of frozen rows, which files hold them."""


class Frozen(ABC):
    """The rows of a store as they were at one moment, to be written while they change."""

    @abstractmethod
    def write(self) -> Facts:
        """Write them, made to last; meant for a thread of its own. For `Store.thaw`."""

    @abstractmethod
    def release(self) -> None:
        """They are written, or given up. Whether this fails or not, the store is of use as before."""


class Store(ABC):
    """Rows by key, off the device.

    `read` and `write` may be called from several threads at once, never for one key at once. All other methods wait for
    calls in progress where they need to, but are meant for one thread.
    """

    layout: Layout
    identity: str
    """Random, made when the store was; a restored store has the identity of the one that made the snapshot."""
    generation: int
    """How many snapshots were made; stands in each of them."""

    def __init__(self, layout: Layout | Mapping[int, Record]) -> None:
        self.layout = layout if isinstance(layout, Layout) else Layout(layout)
        self.identity = secrets.token_hex(16)
        self.generation = 0
        self.closed = False

    def read(self, keys: NDArray[np.int64], out: Rows) -> NDArray[np.bool_]:
        """Copy the rows of `keys`, all of one kind, to `out`; True where one is held, `out` is left alone elsewhere."""
        self._check_open()
        kind = self.layout.kind(keys, out)
        if not out.flags.writeable:
            raise ValueError("out is read-only: pass an array to write to")
        found = np.zeros(len(keys), np.bool_)
        if len(keys):
            self._read(kind, np.ascontiguousarray(keys), out, found)
        return found

    def write(self, keys: NDArray[np.int64], rows: Rows) -> int:
        """Hold a copy of `rows` under `keys`, distinct and all of one kind; what was held under them before is gone.

        Gives how many were taken, which is all of them, or it raises.
        """
        self._check_open()
        kind = self.layout.kind(keys, rows)
        if len(keys):
            self._write(kind, np.ascontiguousarray(keys), rows)
        return len(keys)

    @abstractmethod
    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        """`read`, checked and not empty; `found` comes all False."""

    @abstractmethod
    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        """`write`, checked and not empty."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows are held."""

    @abstractmethod
    def keys(self) -> Iterator[NDArray[np.int64]]:
        """The key of every row held, in arrays of bounded size, each of one kind, in no promised order.

        Rows first written while it runs may be missing.
        """

    @abstractmethod
    def snapshot(self, folder: str | Path) -> None:
        """Write all rows to a folder and add one to `generation`.

        At every moment the folder holds the snapshot that was there before or the new one, whole.
        """

    @abstractmethod
    def restore(self, folder: str | Path) -> None:
        """Take rows, identity and generation from a snapshot; what the store held before is gone.

        Anything wrong with the snapshot is a `SnapshotError` that names the file, and the store is as it was.
        """

    @abstractmethod
    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        """The rows as they are now, for a folder that several frozen states may share; add one to `generation`.

        Takes no time to speak of, and must not run beside a `write`. since: what the last `Frozen.write` to this folder
        gave, if nothing but this store has changed it: then only what has changed after it need be written. One at a time.
        """

    @abstractmethod
    def thaw(self, folder: Path, facts: Facts, over: Iterable[tuple[NDArray[np.int64], Rows]]) -> None:
        """Take the frozen rows, and over them those of `over`; what the store held before is gone.

        Anything wrong is a `CheckpointError` that names the file, and the store is as it was.
        """

    def flush(self) -> None:
        """Return when all that was written would survive a kill, as far as this kind of store can."""
        self._check_open()

    def close(self) -> None:
        """Let go of files and memory; a second close does nothing."""
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"this {type(self).__name__} is closed: open a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
