"""Write trained rows to one safetensors file that anybody can read: streamed, and sorted by id, so that the file does
not depend on cache, store or timing.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from torch import nn

from skirl.core.keys import ROW_BITS, row_of, table_of
from skirl.engine.access import bank_of, peek
from skirl.nn.collection import Place, collections_of, tables_of
from skirl.tools.sealed_json import skirl_version
from skirl.tools.sizes import parse_bytes
from skirl.tools.tensor_file import Writer, bytes_of

FORMAT = "skirl-rows"
_PIECE = 1 << 16  # rows read and written at a time


def export(
    model: nn.Module,
    path: str | Path,
    table: str | None = None,
    *,
    untouched: bool = False,
    limit: int | str = "16GiB",
) -> None:
    """Write the rows of one table, or of all, to a safetensors file; inside a lookahead, as the steps so far left them.

    For one table the file has `ids`, int64 `[n]`, ascending; `weight`, `[n, dim]`; and each part of the optimizer's
    state by the name that torch gives it (`sum`, `exp_avg`, ...). For all tables these names begin with the table's
    name and a dot. Its metadata has a JSON object under `tables`: the `rows` of each table, and the `steps` that
    trained it, without which Adam's moments mean nothing.

    **Arguments**

    - `model`: the model, or the collection itself.
    - `path`: the file to write; it is replaced only once the new one is complete.
    - `table`: the table to write; None, the default, writes all.
    - `untouched`: write every row of the tables instead, those never trained with their initial values, and `weight`
      alone. False because a table may have billions of rows that nobody has used.
    - `limit`: a file larger than this is refused, in bytes or as text; the default keeps a slip from filling the disk.

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
    chosen = _chosen(model, table)
    for collection in collections_of(model).values():
        collection.engine.check()
        collection.current.drain()
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
    with Writer(Path(path), columns, about) as writer:
        for name, place in chosen.items():
            prefix = "" if table is not None else f"{name}."
            for piece in _pieces(place, None if keys is None else keys[name]):
                rows = _records(place, piece)
                for part, at in _parts(place, untouched).items():
                    writer.write(prefix + part, rows[:, at])
                if not untouched:
                    writer.write(prefix + "ids", row_of(piece))


def rows_of(model: nn.Module, table: str | None = None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The touched rows of one table, or of all, in pieces: the table's name, row numbers ascending, and weights."""
    chosen = _chosen(model, table)
    keys = _touched(chosen)
    for name, place in chosen.items():
        for piece in _pieces(place, keys[name]):
            yield name, row_of(piece), _records(place, piece)[:, : place.table.dim]


def _chosen(model: nn.Module, table: str | None) -> dict[str, Place]:
    tables = tables_of(model)
    if table is None:
        return tables
    if table not in tables:
        raise ValueError(f"no table {table!r}: there are {', '.join(map(repr, tables))}")
    return {table: tables[table]}


def _touched(chosen: Mapping[str, Place]) -> dict[str, np.ndarray]:
    """The keys of every row ever used, by table, ascending: in the store or resident."""
    touched: dict[str, np.ndarray] = {}
    for engine in {id(place.engine): place.engine for place in chosen.values()}.values():
        of_engine = {name: place.number for name, place in chosen.items() if place.engine is engine}
        wanted = np.zeros(len(engine.schema.tables), np.bool_)
        wanted[list(of_engine.values())] = True
        found = [cache.key_of[cache.key_of >= 0] for cache in engine.caches]
        found += engine.store.keys()
        keys = np.concatenate([np.empty(0, np.int64), *(part[wanted[table_of(part)]] for part in found)])
        keys.sort()  # np.unique would hash them, and take 18 times as long
        keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
        borders = np.searchsorted(keys, np.arange(len(wanted) + 1) << ROW_BITS)
        touched |= {name: keys[borders[n] : borders[n + 1]] for name, n in of_engine.items()}
    return touched


def _pieces(place: Place, keys: np.ndarray | None) -> Iterator[np.ndarray]:
    """The keys to write, in pieces; all of the table's if `keys` is None."""
    n = place.table.rows if keys is None else len(keys)
    for start in range(0, n, _PIECE):
        stop = min(n, start + _PIECE)
        yield np.arange(start, stop) | (place.number << ROW_BITS) if keys is None else keys[start:stop]


def _parts(place: Place, untouched: bool) -> dict[str, slice]:
    parts = place.optimizer.unpack(place.table.dim)
    return {"weight": parts["weight"]} if untouched else parts


def _records(place: Place, keys: np.ndarray) -> np.ndarray:
    rows, _ = peek(place.engine, keys, bank_of(place.engine, place.number))  # keys ascend: rows are in their order
    return rows
