"""Write trained rows to one safetensors file that any program can read. It is streamed, and sorted by id, so that it does
not depend on cache, store or timing.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from torch import nn

from skirl.core.keys import ROW_BITS, row_of, table_of
from skirl.engine.access import bank_of, peek
from skirl.nn.collection import TablePlace, collections_of, tables_of
from skirl.tools.sealed_json import skirl_version
from skirl.tools.tensor_file import TensorWriter, bytes_of
from skirl.tools.units import parse_bytes

FORMAT = "skirl-rows"
_PIECE = 1 << 16  # rows read and written at a time


def to_safetensors(
    model: nn.Module, path: str | Path, table: str | None, *, untouched: bool = False, limit: int | str
) -> None:
    """Write the rows of one table, or of all. `skirl.export` describes the file."""
    chosen = _chosen(model, table)
    keys = None if untouched else _touched(chosen)
    columns: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, place in chosen.items():
        n = place.table.rows if keys is None else len(keys[name])
        prefix = "" if table is not None else f"{name}."
        for part, at in _parts(place, untouched).items():
            columns[prefix + part] = (place.engine.dtype, (n, at.stop - at.start))
        if not untouched:
            columns[prefix + "ids"] = (np.dtype(np.int64), (n,))
    size, most = bytes_of(columns), parse_bytes(limit) if isinstance(limit, str) else limit
    if size > most:
        raise ValueError(
            f"the file would take {size:,} bytes, the limit is {most:,}: name one table, leave untouched rows out, or set "
            f"limit={size}"
        )
    optimizers = {name: place.optimizer.name for name, place in chosen.items()}
    about = {"format": FORMAT, "skirl": skirl_version()}
    if len(set(optimizers.values())) == 1:
        about["optimizer"] = next(iter(optimizers.values()))
    else:
        about["optimizers"] = json.dumps(optimizers)
    about["tables"] = json.dumps(
        {
            name: {"rows": place.table.rows, "steps": int(place.engine.table_steps[place.number])}
            for name, place in chosen.items()
        }
    )
    with TensorWriter(Path(path), columns, about) as writer:
        for name, place in chosen.items():
            prefix = "" if table is not None else f"{name}."
            for piece in _pieces(place, None if keys is None else keys[name]):
                rows = _records(place, piece)
                for part, at in _parts(place, untouched).items():
                    writer.write(prefix + part, rows[:, at])
                if not untouched:
                    writer.write(prefix + "ids", row_of(piece))


def rows_of(model: nn.Module, table: str | None = None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the touched rows of one table, or of all, in pieces: the table's name, ascending row numbers, and weights."""
    chosen = _chosen(model, table)
    keys = _touched(chosen)
    for name, place in chosen.items():
        for piece in _pieces(place, keys[name]):
            yield name, row_of(piece), _records(place, piece)[:, : place.table.dim]


def _chosen(model: nn.Module, table: str | None) -> dict[str, TablePlace]:
    """Return the tables to write, once their rows are as the steps so far left them."""
    tables = tables_of(model)
    if table is not None and table not in tables:
        raise ValueError(f"there is no table {table!r}: name one of {', '.join(map(repr, tables))}")
    for collection in collections_of(model).values():
        collection.engine.check()
        collection.engine.rows.check_alone("an export")
        collection.current.drain()
    return tables if table is None else {table: tables[table]}


def _touched(chosen: Mapping[str, TablePlace]) -> dict[str, np.ndarray]:
    """Return the keys of every row ever used, in the store or resident, by table, ascending."""
    touched: dict[str, np.ndarray] = {}
    for engine in {id(place.engine): place.engine for place in chosen.values()}.values():
        of_engine = {name: place.number for name, place in chosen.items() if place.engine is engine}
        wanted = np.zeros(len(engine.schema.tables), np.bool_)
        wanted[list(of_engine.values())] = True
        found = [cache.key_of[cache.key_of >= 0] for cache in engine.caches]
        found += engine.store.held()
        keys = np.concatenate([np.empty(0, np.int64), *(part[wanted[table_of(part)]] for part in found)])
        keys.sort()  # np.unique would hash them, which takes 18 times as long
        keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
        borders = np.searchsorted(keys, np.arange(len(wanted) + 1) << ROW_BITS)
        touched |= {name: keys[borders[n] : borders[n + 1]] for name, n in of_engine.items()}
    return touched


def _pieces(place: TablePlace, keys: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yield the keys to write in pieces. If `keys` is None, yield all of the table's."""
    n = place.table.rows if keys is None else len(keys)
    for start in range(0, n, _PIECE):
        stop = min(n, start + _PIECE)
        yield np.arange(start, stop) | (place.number << ROW_BITS) if keys is None else keys[start:stop]


def _parts(place: TablePlace, untouched: bool) -> dict[str, slice]:
    parts = place.optimizer.unpack(place.table.dim)
    return {"weight": parts["weight"]} if untouched else parts


def _records(place: TablePlace, keys: np.ndarray) -> np.ndarray:
    rows, _ = peek(place.engine, keys, bank_of(place.engine, place.number))  # keys ascend, so rows come in their order
    return rows
