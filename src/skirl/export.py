"""Write trained rows to one safetensors file, for anybody to read.

Rows are streamed: a safetensors file says in its header where each tensor lies, and the sizes are known once the ids are,
so every piece of rows is written straight to its places. Memory is 24 bytes a touched row while ids are sorted, and a
piece of 65,536 records; collecting the tensors first, as safetensors' own writer needs them, would take all rows at once,
which are the very thing that does not fit. 2 million rows of 65 floats took 3.1 s on one busy core, and 25 MB of memory.

Rows are sorted by id, so the file does not depend on cache, store or timing.
"""

import json
import math
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from torch import nn

from skirl.cache import parse_bytes
from skirl.engine import Engine
from skirl.nn.modules import collection_of
from skirl.sealed import skirl_version, sync_folder, to_disk
from skirl.tables import ROW_BITS

_PIECE = 1 << 16  # rows read and written at a time
_NAMES = {"float32": "F32", "float64": "F64", "int64": "I64"}


def export(
    model: nn.Module,
    path: str | Path,
    table: str | None = None,
    *,
    untouched: bool = False,
    limit: int | str = "16GiB",
) -> None:
    """Write the rows of one table, or of all, to a safetensors file; inside a lookahead, as the steps so far left them.

    For a table: `ids` int64 [n], ascending; `weight` [n, dim]; and each part of the optimizer's state by the name that
    torch gives it (`sum`, `exp_avg`, ...), [n, numbers a row]. For all tables the names begin with the table's and a dot.
    untouched: every row of the tables instead, those never trained at their initial values; `weight` [rows, dim] only.
    A file larger than `limit` is refused.

    >>> import tempfile, skirl, torch
    >>> from safetensors.numpy import load_file
    >>> tables = [skirl.Table("item", rows=1000, dim=2, init=skirl.Constant(1.0))]
    >>> rows = skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adagrad(lr=0.5), cache=10)
    >>> rows(skirl.KeyedJagged.one_hot(["item"], torch.tensor([[7], [3]])))["item"].sum().backward()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(rows, f"{folder}/rows.safetensors", "item")
    ...     out = load_file(f"{folder}/rows.safetensors")
    >>> {name: array.tolist() for name, array in sorted(out.items())}
    {'ids': [3, 7], 'sum': [[1.0, 1.0], [1.0, 1.0]], 'weight': [[0.5, 0.5], [0.5, 0.5]]}
    """
    collection = collection_of(model)
    engine = collection.engine
    engine.check()
    numbers = {t.name: i for i, t in enumerate(engine.schema.tables)}
    if table is not None and table not in numbers:
        raise ValueError(f"no table {table!r}: there are {', '.join(map(repr, numbers))}")
    if collection.lookahead is not None:
        collection.lookahead.drain()
    chosen = [numbers[table]] if table is not None else list(numbers.values())
    keys = None if untouched else _touched(engine, chosen)
    columns: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for number in chosen:
        n = engine.schema.tables[number].rows if keys is None else len(keys[number])
        prefix = "" if table is not None else f"{engine.schema.tables[number].name}."
        for part, place in _parts(engine, number, untouched).items():
            columns[prefix + part] = (engine.dtype, (n, place.stop - place.start))
        if not untouched:
            columns[prefix + "ids"] = (np.dtype(np.int64), (n,))
    size, most = _bytes_of(columns), parse_bytes(limit) if isinstance(limit, str) else limit
    if size > most:
        raise ValueError(
            f"the file would take {size:,} bytes, the limit is {most:,}: name one table, leave untouched rows out, or set "
            f"limit={size}"
        )
    about = {"format": "skirl-rows", "skirl": skirl_version(), "optimizer": type(engine.optimizer).__name__}
    with _Writer(Path(path), columns, about) as writer:
        for number in chosen:
            prefix = "" if table is not None else f"{engine.schema.tables[number].name}."
            for piece in _pieces(engine, number, keys):
                rows = _records(engine, number, piece)
                for part, place in _parts(engine, number, untouched).items():
                    writer.write(prefix + part, rows[:, place])
                if not untouched:
                    writer.write(prefix + "ids", piece & ((1 << ROW_BITS) - 1))


def _touched(engine: Engine, tables: Iterable[int]) -> dict[int, np.ndarray]:
    """The keys of every row ever used, by table, ascending: in the store or resident."""
    tables = list(tables)
    wanted = np.zeros(len(engine.schema.tables), np.bool_)
    wanted[tables] = True
    found = [cache.key_of[cache.key_of >= 0] for cache in engine.caches]
    found += engine.store.keys()
    keys = np.concatenate([np.empty(0, np.int64), *(part[wanted[part >> ROW_BITS]] for part in found)])
    keys.sort()  # np.unique would hash them, and take 18 times as long
    keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
    borders = np.searchsorted(keys, np.arange(len(wanted) + 1) << ROW_BITS)
    return {number: keys[borders[number] : borders[number + 1]] for number in tables}


def _pieces(engine: Engine, number: int, keys: dict[int, np.ndarray] | None) -> Iterator[np.ndarray]:
    """The keys to write, some at a time."""
    n = engine.schema.tables[number].rows if keys is None else len(keys[number])
    for start in range(0, n, _PIECE):
        stop = min(n, start + _PIECE)
        yield np.arange(start, stop) | (number << ROW_BITS) if keys is None else keys[number][start:stop]


def _parts(engine: Engine, number: int, untouched: bool) -> dict[str, slice]:
    parts = engine.optimizer.unpack(engine.schema.tables[number].dim)
    return {"weight": parts["weight"]} if untouched else parts


def _records(engine: Engine, number: int, keys: np.ndarray) -> np.ndarray:
    bank = next(i for i, bank in enumerate(engine.schema.banks) if number in bank.tables)
    rows, _ = engine.peek(keys, bank)  # keys ascend, so the rows are in their order
    return rows


Columns = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


def _bytes_of(columns: Columns) -> int:
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in columns.values())


class _Writer:
    """A safetensors file whose tensors are written from their first row on, in pieces; it appears when all are whole.

    The format: the header's length (8 bytes), the header in JSON with each tensor's place, then the tensors.
    """

    def __init__(self, path: Path, columns: Columns, about: Mapping[str, str]) -> None:
        self._path = path
        self._draft = path.with_name(f"{path.name}-{secrets.token_hex(8)}.tmp")
        self._at: dict[str, int] = {}
        self._end: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": dict(about)}
        place = 0
        for name, (dtype, shape) in sorted(columns.items(), key=lambda item: -item[1][0].itemsize):  # keeps all aligned
            end = place + dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [place, end]}
            self._at[name], self._end[name] = place, end
            place = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._head = struct.pack("<Q", len(text)) + text

    def __enter__(self) -> Self:
        self._file = self._draft.open("xb")
        self._file.write(self._head)
        return self

    def write(self, name: str, rows: np.ndarray) -> None:
        """The next rows of a tensor."""
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        self._file.seek(len(self._head) + self._at[name])
        self._file.write(data)
        self._at[name] += len(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if error is None:
                    assert self._at == self._end, "not every row was written"
                    to_disk(self._file)
            if error is None:
                os.replace(self._draft, self._path)
                sync_folder(self._path.parent)
        finally:
            self._draft.unlink(missing_ok=True)
