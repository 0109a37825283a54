"""Samples of synthetic:sessions as rows of files, with their session and time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.files.hashing import hash_numbers, seed_of
from skirl.data.files.schema import Dense, FileSchema, Id, Label
from skirl.data.sessions import Sessions
from skirl.dedup.finish import Shape, with_keys
from skirl.dedup.row_hash import session_hashes

UNIT = 96 << 20
"""Bytes of rows that `skirl convert --by session` sorts at once in 1 GiB."""


def schema_of(data: Sessions, *, as_rows: bool) -> FileSchema:
    """Of such files.

    **Arguments**

    - `data`: the stream.
    - `as_rows`: ids are rows of tables; otherwise fingerprints, as `skirl convert` writes them.
    """
    ids = []
    for table in data.tables(1):
        form: dict[str, Any] = {"type": "fingerprint", "of": "numbers"}
        if as_rows:
            form = {"type": "int", "encode": "row", "rows": table.rows}
        ids += [Id(name, table=table.name, list=name in data.lists, **form) for name in table.features or (table.name,)]
    dense = tuple(Dense(f"dense_{k}") for k in range(data.dense_features))
    order = {name: place for place, name in enumerate(("user", "item", *data.lists))}
    ids.sort(key=lambda column: order[column.name])
    return FileSchema((Label("click"),), dense, tuple(ids), session="session", time="time")


def rows_of(data: Sessions, samples: int, *, as_rows: bool) -> Iterator[Any]:
    """Arrow tables of the first samples of a stream, in order.

    **Arguments**

    - `data`: the stream; its samples as they are, lists not shared.
    - `samples`: how many.
    - `as_rows`: ids are rows of tables, not fingerprints.
    """
    schema, before = schema_of(data, as_rows=as_rows), 0
    size = data.batch_size
    for first in range(0, samples, size):
        batch, count = data.batch(first // size), min(size, samples - first)
        sparse, columns = batch.sparse.expanded(), {}
        columns["click"] = pa.array(batch.labels.numpy())
        for k, column in enumerate(schema.dense):
            columns[column.name] = pa.array(batch.dense[:, k].contiguous().numpy())
        values, offsets = sparse.values().numpy(), sparse.offsets().numpy()
        for f, column in enumerate(schema.ids):
            own = offsets[f * size : (f + 1) * size + 1]
            ids = np.ascontiguousarray(values[own[0] : own[-1]])
            if not as_rows:
                prints = np.empty(len(ids), np.uint64)
                hash_numbers(ids, seed_of(column.table), prints)
                ids = prints.view(np.int64)
            array = pa.array(ids)
            if column.list:
                array = pa.ListArray.from_arrays(pa.array((own - own[0]).astype(np.int32)), array)
            columns[column.name] = array
        number = before + np.cumsum(data.begins(first, size))
        before = int(number[-1])
        columns["session"], columns["time"] = pa.array(number), pa.array(np.arange(first, first + size))
        yield pa.table(columns).slice(0, count)


def given(data: Sessions, samples: int, compression: str) -> tuple[Iterator[Any], Shape, int]:
    """What `analyze` looks at: rows with what they are ordered by, what is written of them, and bytes sorted at once.

    **Arguments**

    - `data`: the stream.
    - `samples`: how many.
    - `compression`: of pages.
    """
    schema = schema_of(data, as_rows=False)
    shape = Shape(schema, {}, ("session", "time"), "time", "", None, "once", compression)

    def tables() -> Iterator[Any]:
        for table in rows_of(data, samples, as_rows=False):
            hashes = session_hashes(table.column("session").combine_chunks())
            yield with_keys(table, hashes, table.column("time").to_numpy().astype(np.float64))

    return tables(), shape, UNIT
