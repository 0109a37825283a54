"""The interface of a store: layouts of records, rows written and read by key, and rows frozen for a checkpoint."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from skirl.core.keys import MAX_ROWS, MAX_TABLES, ROW_BITS, table_of
from skirl.core.placement import Shard
from skirl.tools.jit import kernel

Facts = dict[str, Any]
"""JSON-compatible facts about frozen rows, such as the files that hold them."""


@dataclass
class Frozen:
    """The rows of a store as they were at one moment, which can be written while the store goes on changing."""

    write: Callable[[], Facts]
    """Writes the rows, waits until they are durable, and returns the facts of a `FrozenPart`. Meant for its own thread."""
    release: Callable[[], None]
    """Frees the frozen state, once it is written or given up. The store works as before even if this fails."""


Pairs = Iterator[tuple[NDArray[np.int64], Any]]


@dataclass(frozen=True)
class FrozenPart:
    facts: Facts
    shard: Shard | None = None
    """The rows to take. None: all."""


@dataclass(frozen=True)
class SavedRows:
    folder: Path
    parts: Sequence[FrozenPart]
    """Rows of caches replace those of parts before them. Parts of stores have no key in common."""
    identity: str
    """What the store takes as its own, since each part has its own."""
    generation: int


DTYPES = ("float32", "float64")

Rows = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True)
class Record:
    """Width and dtype of one table's records.

    **Arguments**

    - `width`: number of values in a record: the row and its optimizer state.
    - `dtype`: "float32" (the default: nearly all tables have it) or "float64".

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

    @property
    def nbytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize


@kernel
def _first_stranger(keys: NDArray[np.int64], kind_of_table: NDArray[np.int32], kind: int) -> int:
    for i in range(keys.size):
        table = keys[i] >> ROW_BITS
        if table < 0 or table >= kind_of_table.size or kind_of_table[table] != kind:
            return i
    return -1


class Layout:
    """The records of every table of a store. Tables with equal records form one *kind*: one call can serve them all.

    **Arguments**

    - `records`: the `Record` of each table, by the table's number.

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

    @classmethod
    def from_facts(cls, facts: Any) -> "Layout":
        """Raise a TypeError or ValueError if `facts` is not what the method `facts` returned."""
        return cls({table: Record(width, dtype) for table, width, dtype in facts})

    def facts(self) -> list[list[Any]]:
        return [[table, r.width, r.dtype] for table, r in self.records.items()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.records == other.records

    def against(self, other: "Layout") -> tuple[str, str]:
        """Describe the first difference from another layout: what this one has, and what the other has."""
        every = sorted(self.records.keys() | other.records.keys())
        table = next(table for table in every if self.records.get(table) != other.records.get(table))
        here, there = (of.records.get(table, "none") for of in (self, other))
        return f"{here} for table {table}", str(there)

    def kind(self, keys: NDArray[np.int64], rows: Rows) -> int:
        """Check keys, int64 `[n]`, and contiguous rows, `[n, width]`, of one call; return the index of their kind."""
        if not isinstance(keys, np.ndarray) or keys.dtype != np.int64 or keys.ndim != 1:
            raise TypeError(f"keys are {_shown(keys)}: pass an int64 array of one dimension")
        fits = isinstance(rows, np.ndarray) and rows.ndim == 2 and len(rows) == len(keys)
        if not fits or not rows.flags.c_contiguous:
            raise ValueError(
                f"rows are {_shown(rows)}: pass a contiguous array [{len(keys)}, width], np.ascontiguousarray"
            )
        kind = self._kind.get((rows.shape[1], rows.dtype.name), -1)
        if kind < 0:
            held = ", ".join(map(str, self.kinds))
            raise ValueError(f"rows are [{rows.shape[1]}] {rows.dtype}, this store holds {held}: pass one of these")
        stranger = _first_stranger(keys, self._kind_of_table, kind)
        if stranger >= 0:
            table, given = int(table_of(keys[stranger])), self.kinds[kind]
            has = f"has records {self.records[table]}" if table in self.records else "is not in the layout"
            raise ValueError(
                f"key {keys[stranger]} is of table {table}, which {has}, not {given}: a key is table << {ROW_BITS} | row, "
                "and one call is for one kind of record"
            )
        return kind

    def rows_of(self, record: Record, rows: Mapping[int, int] | None) -> dict[int, int]:
        """Return how many rows each table with these records has: as `rows` says, else as many as any may have."""
        if rows is not None and (missing := self.records.keys() - rows.keys()):
            raise ValueError(f"rows names no table {min(missing)}: give the rows of each table, or of none")
        return {t: MAX_ROWS if rows is None else rows[t] for t, of in self.records.items() if of == record}


def _shown(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


class Store(ABC):
    """Rows by key, off the device.

    Several threads may call `read` and `write` at once, but never for the same key. All other methods are meant for one
    thread, and wait for calls in progress where they need to.

    **Arguments**

    - `layout`: the records of each table; a mapping will do.
    """

    layout: Layout
    identity: str
    """Random, drawn when the store is made. A store that thaws rows takes the identity of the one that froze them."""
    generation: int
    """Grows with each frozen state, and with each durable point of a store on disk. Frozen rows record theirs."""

    read_only = False
    ready = True
    """False while the rows that it is to serve are not loaded yet."""
    durable = False
    """True if its rows outlive this process."""

    def __init__(self, layout: Layout | Mapping[int, Record]) -> None:
        self.layout = layout if isinstance(layout, Layout) else Layout(layout)
        self.identity = secrets.token_hex(16)
        self.generation = 0
        self.closed = False
        self.about: dict[str, Any] = {}
        """The start values of rows before they are first written, by table: initialiser and seed, an array's digest, or an
        object with a `digest`."""

    def read(self, keys: NDArray[np.int64], out: Rows) -> NDArray[np.bool_]:
        """Copy the rows that are held to `out`, and leave its other rows alone. Return a mask of those that are held.

        `keys` are int64 `[n]`, all of one kind. `out` is `[n, width]`, contiguous, in the dtype of that kind.
        """
        self._check_open()
        kind = self.layout.kind(keys, out)
        if not out.flags.writeable:
            raise ValueError("out is read-only: pass an array to write to")
        found = np.zeros(len(keys), np.bool_)
        if len(keys):
            self._read(kind, np.ascontiguousarray(keys), out, found)
        return found

    def write(self, keys: NDArray[np.int64], rows: Rows) -> int:
        """Store a copy of rows, replacing those held under the same keys. Return how many: all of them, or it raises.

        `keys` are int64 `[n]`, distinct and all of one kind. `rows` are `[n, width]`, contiguous, in the dtype of that kind.
        """
        self._check_open()
        kind = self.layout.kind(keys, rows)
        if len(keys):
            keys = np.ascontiguousarray(keys)
            try:
                self._write(kind, keys, rows)
            except KeyboardInterrupt:
                self._write(kind, keys, rows)  # finish it: a key without its row would be found
                raise
        return len(keys)

    @abstractmethod
    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        """Implement `read`. Arguments are checked and not empty, and `found` is all False."""

    @abstractmethod
    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        """Implement `write`. Arguments are checked and not empty. A Ctrl-C repeats the call."""

    @abstractmethod
    def held(self) -> Iterator[NDArray[np.int64]]:
        """Yield the key of every row held, in arrays of bounded size, each of one kind, in no particular order.

        Rows first written during the iteration may be missing.
        """

    @abstractmethod
    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        """Freeze the rows as they are now, and return them. `generation` grows.

        It returns at once, and must not run at the same time as a `write`. Release a frozen state before the next call.
        The rows go to `folder`, whose files several frozen states may share. `since` is what the last `Frozen.write` of
        this store for this folder returned: rows that have not changed since are not written again. None: write all.
        """

    @abstractmethod
    def thaw(self, saved: SavedRows) -> None:
        """Replace the store's rows, identity and generation.

        If anything is wrong, it raises a `CheckpointError` that names the file, and the store is unchanged, or refuses all
        calls until it has thawed rows.
        """

    @abstractmethod
    def describe(self, about: Mapping[str, Any] | None = None) -> int:
        """Return how many rows are held.

        If `about` is given, it is kept in the attribute `about`, and all that was written is made to survive a kill, as far
        as this kind of store can. A store that outlives its process keeps the digests with its rows, although computing
        one reads the whole array: without them it is refused when it is opened again to train rows that started from an
        array.
        """

    def close(self, *, flush: bool = True) -> None:
        """Release files and memory. Closing again does nothing. `flush`: first make all that was written durable."""
        self.closed = True

    # Over those

    def __len__(self) -> int:
        return self.describe()

    def flush(self) -> None:
        """Wait until all that was written would survive a kill, as far as this kind of store can ensure that."""
        self._check_open()
        self.describe(self.about)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"this {type(self).__name__} is closed: open a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=kind is None)
