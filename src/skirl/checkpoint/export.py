"""Write trained rows to one safetensors file that anybody can read: streamed, and sorted by id, so that the file does
not depend on cache, store or timing.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from torch import nn

from skirl.core.tables import ROW_BITS
from skirl.engine.engine import Engine
from skirl.nn.collection import collection_of
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
    size, most = bytes_of(columns), parse_bytes(limit) if isinstance(limit, str) else limit
    if size > most:
        raise ValueError(
            f"the file would take {size:,} bytes, the limit is {most:,}: name one table, leave untouched rows out, or set "
            f"limit={size}"
        )
    steps = {n: {"rows": engine.schema.tables[n].rows, "steps": int(engine.table_steps[n])} for n in chosen}
    about = {"format": FORMAT, "skirl": skirl_version(), "optimizer": type(engine.optimizer).__name__}
    about["tables"] = json.dumps({engine.schema.tables[n].name: facts for n, facts in steps.items()})
    with Writer(Path(path), columns, about) as writer:
        for number in chosen:
            prefix = "" if table is not None else f"{engine.schema.tables[number].name}."
            for piece in _pieces(engine, number, keys):
                rows = _records(engine, number, piece)
                for part, place in _parts(engine, number, untouched).items():
                    writer.write(prefix + part, rows[:, place])
                if not untouched:
                    writer.write(prefix + "ids", piece & ((1 << ROW_BITS) - 1))


def rows_of(model: nn.Module, table: str | None = None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The touched rows of one table, or of all, in pieces: the table's name, row numbers, ascending, and their weights."""
    engine = collection_of(model).engine
    numbers = {t.name: i for i, t in enumerate(engine.schema.tables)}
    if table is not None and table not in numbers:
        raise ValueError(f"no table {table!r}: there are {', '.join(map(repr, numbers))}")
    keys = _touched(engine, numbers.values())
    for name, number in numbers.items():
        if table in (None, name):
            for piece in _pieces(engine, number, keys):
                weights = _records(engine, number, piece)[:, : engine.schema.tables[number].dim]
                yield name, piece & ((1 << ROW_BITS) - 1), weights


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
    """The keys to write, in pieces."""
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
