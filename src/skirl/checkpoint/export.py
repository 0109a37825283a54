"""Write trained rows to a file that other software reads, in the format that its suffix names: streamed, and sorted by id,
so that a file does not depend on cache, store or timing."""

import json
import math
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from skirl.core.keys import ROW_BITS, row_of, table_of
from skirl.data.vocabulary.vocabulary import Origins
from skirl.engine.access import bank_of, peek
from skirl.nn.collection import TablePlace, collections_of, tables_of
from skirl.tools import __version__
from skirl.tools.os_errors import replacing
from skirl.tools.sealed_json import sync_folder, to_disk

SUFFIXES = (".safetensors", ".pt", ".parquet")
FORMAT = "skirl-rows"
_PIECE = 1 << 16  # rows read and written at a time
_NAMES = {"float32": "F32", "float64": "F64", "int64": "I64"}


def export(
    model: nn.Module,
    path: str | Path,
    table: str | None = None,
    *,
    state_dict: bool = False,
) -> None:
    """Write the rows of one table, or of all, to a file. Inside a lookahead, rows are as the steps so far left them.

    The suffix of the file's name decides its format, as for `skirl export`. A .safetensors file has the rows that were used.
    A .pt file is a state dict of every row: `TABLE.weight`, or `weight` for one table. A .parquet file has the rows that
    were used, in the columns table, row and weight.

    For one table, a safetensors file has `ids`, int64 `[n]`, ascending; `weight`, `[n, dim]`; and each part of the
    optimizer's state by its name in torch (`sum`, `exp_avg`, ...). For all tables, these names begin with the table's
    name and a dot. Its metadata has a JSON object under `tables`, with the `rows` of each table, its `optimizer`, and
    the `steps` that trained it, without which Adam's moments are meaningless.

    **Arguments**

    - `model`: the model, or the collection itself.
    - `path`: the file to write. An existing file is replaced only once the new one is complete.
    - `table`: the table to write; None, the default, writes all.
    - `state_dict`: for .safetensors: write `weight` of every row of the tables instead; rows that were never trained have
      their initial values. False by default, because a table may have billions of rows that were never used.

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
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"path is {path}: name a file that ends with .safetensors, .pt or .parquet")
    if state_dict and path.suffix == ".parquet":
        raise ValueError(
            "Parquet holds the rows that were used: leave state_dict out, or name a .safetensors or .pt file"
        )
    write_rows(model, path, table, state_dict=state_dict)


def write_rows(
    model: nn.Module,
    path: Path,
    table: str | None,
    *,
    state_dict: bool = False,
    dense: Mapping[str, torch.Tensor] | None = None,
    origins: Origins | None = None,
) -> None:
    if path.suffix == ".parquet":
        to_parquet(model, path, table, origins)
    elif path.suffix == ".pt" or dense:
        to_state_dict(model, path, table, dense or {})
    else:
        to_safetensors(model, path, table, untouched=state_dict)


def to_state_dict(rows: nn.Module, out: Path, table: str | None, dense: Mapping[str, torch.Tensor]) -> None:
    with replacing(out) as whole, tempfile.TemporaryDirectory(dir=out.parent) as folder:
        draft = Path(folder) / "rows.safetensors"
        to_safetensors(rows, draft, table, untouched=True)
        state = load_file(draft) | dict(dense)  # rows are mapped into memory, not read
        torch.save(state, whole) if out.suffix == ".pt" else save_file(state, whole, metadata={"format": "pt"})


def to_parquet(rows: nn.Module, path: Path, table: str | None, origins: Origins | None) -> None:
    """Write the columns table, row and weight, ordered by table and row, and the origin of each row if it is known."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = pa.float32() if next(iter(collections_of(rows).values())).engine.dtype == np.float32 else pa.float64()
    fields = [("table", pa.string()), ("row", pa.int64())]
    if origins is not None:
        fields += [("what", pa.string()), ("id", pa.string()), ("fingerprint", pa.uint64())]
    schema = pa.schema([*fields, ("weight", pa.list_(number))])
    chosen = _chosen(rows, table)
    keys = _touched(chosen)
    pieces = ((name, piece) for name, place in chosen.items() for piece in _pieces(place, keys[name]))
    with replacing(path) as draft, pq.ParquetWriter(draft, schema) as writer:
        for name, piece in pieces:
            ids, weights = row_of(piece), _records(chosen[name], piece)[:, : chosen[name].table.dim]
            flat = pa.array(np.ascontiguousarray(weights).reshape(-1), number)
            offsets = pa.array(np.arange(len(ids) + 1, dtype=np.int32) * weights.shape[1])
            columns = [pa.array([name] * len(ids)), pa.array(ids)]
            if origins is not None:
                what, texts, prints = origins.of_rows(name, ids)
                columns += [pa.array(what), pa.array(texts, pa.string()), pa.array(prints, mask=prints == 0)]
            columns.append(pa.ListArray.from_arrays(offsets, flat))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def to_safetensors(model: nn.Module, path: Path, table: str | None, *, untouched: bool = False) -> None:
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
    tables = {
        name: {"rows": of.table.rows, "steps": int(of.pack.steps[of.number]), "optimizer": of.optimizer.name}
        for name, of in chosen.items()
    }
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "skirl": __version__, "tables": json.dumps(tables)}}
    begins: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in sorted(columns.items(), key=lambda item: -item[1][0].itemsize):  # keeps all aligned
        begins[name], end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as draft, draft.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, place in chosen.items():
            prefix = "" if table is not None else f"{name}."
            for piece in _pieces(place, None if keys is None else keys[name]):
                rows = _records(place, piece)
                parts = {part: rows[:, numbers] for part, numbers in _parts(place, untouched).items()}
                for part, values in (parts if untouched else parts | {"ids": row_of(piece)}).items():
                    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
                    file.seek(8 + len(text) + begins[prefix + part])
                    file.write(data)
                    begins[prefix + part] += len(data)
        to_disk(file)
    sync_folder(path.parent)


def _chosen(model: nn.Module, table: str | None) -> dict[str, TablePlace]:
    """Return the tables to write, once their rows are as the steps so far left them."""
    tables = tables_of(model)
    if table is not None and table not in tables:
        raise ValueError(f"there is no table {table!r}: name one of {', '.join(map(repr, tables))}")
    for collection in collections_of(model).values():
        collection.engine.check()
        if not collection.engine.rows.local:
            raise ValueError(
                f"an export works with one trainer only, and {collection.engine.rows.peers.size} trainers share these rows: "
                "call skirl.save on all of them, then load the checkpoint in a single process"
            )
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
    n = place.table.rows if keys is None else len(keys)
    for start in range(0, n, _PIECE):
        stop = min(n, start + _PIECE)
        yield np.arange(start, stop) | (place.number << ROW_BITS) if keys is None else keys[start:stop]


def _parts(place: TablePlace, untouched: bool) -> dict[str, slice]:
    parts = place.optimizer.unpack(place.table.dim)
    return {"weight": parts["weight"]} if untouched else parts


def _records(place: TablePlace, keys: np.ndarray) -> np.ndarray:
    return peek(place.engine, keys, bank_of(place.engine, place.number), place.pack.number)
