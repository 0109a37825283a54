"""The interface of every store, which holds rows off the device and answers by key; and what it checks for all of them.

A kind of store implements the abstract methods and has to pass tests/store/conformance.py.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from skirl.core.keys import MAX_TABLES, ROW_BITS, table_of
from skirl.store.frozen import Facts, Frozen, Part
from skirl.tools.jit import kernel

DTYPES = ("float32", "float64")

MEMORY_ROWS, DISK_ROWS = "rows", "disk rows"
"""What the facts of frozen rows say under `kind`: which kind of store they came from."""

Rows = NDArray[np.float32] | NDArray[np.float64]


def at_once() -> None:
    """What a store that takes frozen rows waits for where it is the only one: nothing."""


@dataclass(frozen=True)
class Record:
    """The records of one table: how many numbers of which type.

    **Arguments**

    - `width`: numbers in a record: the row and its optimizer state.
    - `dtype`: "float32" or "float64"; "float32" because that is what nearly all tables have.

    >>> Record(65)
    Record(width=65, dtype='float32')
    """

    width: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if type(self.dtype) is not str or self.dtype not in DTYPES:
            object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
        if self.width < 1:
            raise ValueError(f"width is {self.width}, set it to 1 or more")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, set it to one of {', '.join(DTYPES)}")

    def __str__(self) -> str:
        return f"[{self.width}] {self.dtype}"


@kernel
def _first_stranger(keys: NDArray[np.int64], kind_of_table: NDArray[np.int32], kind: int) -> int:
    """The first key whose table has no records of this kind, -1 when there is none."""
    for i in range(keys.size):
        table = keys[i] >> ROW_BITS
        if table < 0 or table >= kind_of_table.size or kind_of_table[table] != kind:
            return i
    return -1


class Layout:
    """The records of every table of a store. Tables with equal records are one *kind*: one call serves them together.

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
        """What `facts` said; a TypeError or ValueError where it is none."""
        return cls({table: Record(width, dtype) for table, width, dtype in facts})

    def facts(self) -> list[list[Any]]:
        """The records of each table, in anything that JSON can say."""
        return [[table, r.width, r.dtype] for table, r in self.records.items()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.records == other.records

    def __hash__(self) -> int:
        return hash(tuple(self.records.items()))

    def __repr__(self) -> str:
        return f"Layout({self.records})"

    def against(self, other: "Layout") -> tuple[str, str]:
        """The first difference to another layout: what this one has, and what the other.

        >>> Layout({0: Record(5), 1: Record(5)}).against(Layout({0: Record(5), 1: Record(9)}))
        ('of 5 float32 for table 1', 'of 9 float32')
        """
        for table in sorted(self.records.keys() | other.records.keys()):
            mine, theirs = (found.records.get(table) for found in (self, other))
            if mine != theirs:
                texts = ["none" if r is None else f"of {r.width} {r.dtype}" for r in (mine, theirs)]
                return f"{texts[0]} for table {table}", texts[1]
        return "of the same tables", "of the same"

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
        table = table_of(key)
        if key < 0:
            return f"key {key} is negative: a key is table << {ROW_BITS} | row"
        if table not in self.records:
            return f"key {key} is of table {table}, which is not in the layout: open the store with a Record for it"
        return f"key {key} is of table {table}, whose records are {self.records[table]}, not {given}: call once a kind"


def _shown(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


class Store(ABC):
    """Rows by key, off the device.

    `read` and `write` may be called from several threads at once, but never for the same key at once. All other methods wait
    for calls in progress where they need to, and are meant for one thread.

    **Arguments**

    - `layout`: the records of each table; a mapping will do.
    """

    layout: Layout
    identity: str
    """Random, made when the store is made. A store that thaws rows takes the identity of the store that froze them."""
    generation: int
    """Grows with each frozen state, and with each durable point of a store on disk; frozen rows say theirs."""

    read_only = False
    """Whether its rows can be looked up and not trained."""
    ready = True
    """Whether it has what it is to hold."""
    frozen_kind = MEMORY_ROWS
    """What its frozen rows say under `kind`."""
    in_any_process = False
    """Whether a copy of this process can read its rows: no thread and no lock is in the way."""

    def __init__(self, layout: Layout | Mapping[int, Record]) -> None:
        self.layout = layout if isinstance(layout, Layout) else Layout(layout)
        self.identity = secrets.token_hex(16)
        self.generation = 0
        self.closed = False
        self.about: dict[str, Any] = {}
        """By table: what rows that were never written begin from: initialiser and seed, or an array's digest, or something
        that has a `digest`."""

    def remember(self, about: Mapping[str, Any]) -> None:
        """Keep in `about` what rows begin from, at the latest when the first of them is written.

        A store that outlives its process keeps the digests with its rows; to make one reads all of an array. One that does
        not is refused when rows that began from an array are to be trained further.
        """
        self.about = dict(about)

    def read(self, keys: NDArray[np.int64], out: Rows) -> NDArray[np.bool_]:
        """Copy rows to `out`; True where a row is held, elsewhere `out` is left alone.

        **Arguments**

        - `keys`: int64 `[n]`, all of one kind.
        - `out`: `[n, width]`, contiguous, in the dtype of that kind.
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
        """Hold a copy of rows; what was held under their keys before is gone. Gives how many were taken: all, or it raises.

        **Arguments**

        - `keys`: int64 `[n]`, distinct and all of one kind.
        - `rows`: `[n, width]`, contiguous, in the dtype of that kind.
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

    def held(self) -> "Iterator[NDArray[np.int64] | tuple[int, NDArray[np.uint64]]]":
        """Which rows are held, for whoever needs one bit for each: by default what `keys` gives.

        A store on another machine overrides it and yields (table, bits) instead of keys, where those are fewer bytes. Row r
        of the table is bit r % 64 of word r // 64; rows behind the last word are not held. Keys and bits may be mixed.
        """
        return self.keys()

    @abstractmethod
    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        """The rows as they are now; `generation` grows.

        It returns at once, and must not run beside a `write`. At most one frozen state is not released.

        **Arguments**

        - `folder`: where the rows go; several frozen states may share its files.
        - `since`: what the last `Frozen.write` of this store for this folder gave. Rows that have not changed since are
          not written again. None: write all.
        """

    @abstractmethod
    def thaw(self, folder: Path, facts: Facts, over: Iterable[tuple[NDArray[np.int64], Rows]]) -> None:
        """Take frozen rows, with their identity and generation; what the store held before is gone.

        Anything wrong is a `CheckpointError` that names the file, and the store is as it was.

        **Arguments**

        - `folder`: where they are.
        - `facts`: what `Frozen.write` gave.
        - `over`: keys and rows that replace the frozen ones: those that were in the cache.
        """

    def thaw_parts(
        self,
        folder: Path,
        parts: Sequence[Part],
        identity: str,
        generation: int,
        ready: Callable[[], Any] = at_once,
    ) -> None:
        """As `thaw`, from frozen states of several stores that have no key in common: all of it, or nothing changes.

        **Arguments**

        - `folder`: where they are.
        - `parts`: the frozen states, and which of their rows are this store's. By default one, all of it.
        - `identity`, `generation`: what the store takes as its own, for the parts have several.
        - `ready`: called when all is read, and on disk as far as it is to be there, and nothing has changed yet; where it
          raises, nothing changes.
        """
        if len(parts) != 1 or parts[0].mine is not None:
            raise ValueError(
                f"{self!r} takes the rows of one trainer, all of them: set store='memory' or 'disk:FOLDER'"
            )
        ready()
        self.thaw(folder, parts[0].facts, parts[0].over)
        self.identity, self.generation = identity, generation

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
