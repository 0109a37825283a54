"""Samples of synthetic:sessions as rows of files, for measurements: in order of sessions, and in order of time."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.core.jagged import KeyedJagged
from skirl.data.files.hashing import hash_numbers, seed_of
from skirl.data.files.schema import Dense, FileSchema, Id, Label
from skirl.data.sessions import Sessions
from skirl.dedup.finish import WrittenColumns, with_keys
from skirl.dedup.row_hash import session_hashes
from skirl.tools.jit import read_only

UNIT = 96 << 20
"""Bytes of rows that `skirl convert --by session` sorts at once with 1 GiB of memory."""
SHIFTS = 0.5
"""Probability that a list shifts from one sample to the next, in measurements of windows."""


def columns_of(sparse: KeyedJagged, lists: Collection[str], tables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the features of a plain batch as Arrow columns.

    **Arguments**

    - `sparse`: the ids.
    - `lists`: features with lists; the others have one id per sample.
    - `tables`: the table of each feature, to turn ids into its fingerprints; None keeps ids unchanged.
    """
    samples, columns = sparse.stride(), {}
    values, offsets = sparse.values().numpy(), sparse.offsets().numpy()
    for f, name in enumerate(sparse.keys()):
        own = offsets[f * samples : (f + 1) * samples + 1]
        ids = np.ascontiguousarray(values[own[0] : own[-1]])
        if tables is not None:
            prints = np.empty(len(ids), np.uint64)
            hash_numbers(read_only(ids), seed_of(tables[name]), prints)
            ids = prints.view(np.int64)
        array = pa.array(ids)
        if name in lists:
            array = pa.ListArray.from_arrays(pa.array((own - own[0]).astype(np.int32)), array)
        columns[name] = array
    return columns


def schema_of(data: Sessions, *, as_rows: bool) -> FileSchema:
    """Return the schema of files with a stream's samples.

    **Arguments**

    - `data`: the stream.
    - `as_rows`: write ids as rows of tables; otherwise as fingerprints, like `skirl convert`.
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
    """Yield the first samples of a stream in order, as Arrow tables.

    **Arguments**

    - `data`: the stream; its lists are written in full.
    - `samples`: number of samples.
    - `as_rows`: write ids as rows of tables, not as fingerprints.
    """
    schema, before = schema_of(data, as_rows=as_rows), 0
    size = data.batch_size
    for first in range(0, samples, size):
        batch, count = data.batch(first // size), min(size, samples - first)
        sparse, columns = batch.sparse.expanded(), {}
        columns["click"] = pa.array(batch.labels.numpy())
        for k, column in enumerate(schema.dense):
            columns[column.name] = pa.array(batch.dense[:, k].contiguous().numpy())
        tables = None if as_rows else {column.name: column.table for column in schema.ids}
        columns |= columns_of(sparse, data.lists, tables)
        number = before + np.cumsum(data.begins(first, size))
        before = int(number[-1])
        columns["session"], columns["time"] = pa.array(number), pa.array(np.arange(first, first + size))
        yield pa.table(columns).slice(0, count)


def given(data: Sessions, samples: int, compression: str) -> tuple[Iterator[Any], WrittenColumns, int]:
    """Return the arguments of `AnalyzedRows`: rows with their sort keys, what to write, and the bytes to sort at once.

    **Arguments**

    - `data`: the stream.
    - `samples`: number of samples.
    - `compression`: compression of pages.
    """
    schema = schema_of(data, as_rows=False)
    shape = WrittenColumns(schema, {}, ("session", "time"), "time", "", None, "once", compression)

    def tables() -> Iterator[Any]:
        for table in rows_of(data, samples, as_rows=False):
            hashes = session_hashes(table.column("session").combine_chunks())
            yield with_keys(table, hashes, table.column("time").to_numpy().astype(np.float64))

    return tables(), shape, UNIT


def rows_of_sessions(samples: int, change: float, rows_scale: float, drift: Any = "redraw") -> tuple[Any, Any, Any]:
    """Return rows of synthetic:sessions in order with 64-bit fingerprints as ids, their schema, and where sessions begin.

    **Arguments**

    - `samples`: number of samples.
    - `change`: probability that a list differs from the previous sample's.
    - `rows_scale`: multiplies the number of ids that samples are drawn from.
    - `drift`: how a list changes, as in `Sessions`.
    """
    data = Sessions(batch_size=samples, batches=1, change=change, rows_scale=rows_scale, drift=drift, once=False)
    batch = next(iter(data))
    sparse, columns = batch.sparse, {"label": pa.array(batch.labels.numpy())}
    for k in range(batch.dense.shape[1]):
        columns[f"dense_{k}"] = pa.array(batch.dense[:, k].contiguous().numpy())
    names = sparse.keys()
    columns |= columns_of(sparse, data.lists, {name: name for name in names})
    ids = [Id(name, type="fingerprint", list=name in data.lists) for name in names]
    users = columns["user"].to_numpy()
    new = np.ones(samples, bool)
    new[1:] = users[1:] != users[:-1]
    return pa.table(columns), FileSchema((Label("label"),), (), tuple(ids)), new


def in_time(new: np.ndarray, at_once: int, draw: np.random.Generator) -> np.ndarray:
    """Return the order of rows by time: sessions begin at random times, and their samples follow after random delays.

    **Arguments**

    - `new`: where sessions begin.
    - `at_once`: number of concurrent sessions.
    - `draw`: random number generator.
    """
    session = np.cumsum(new) - 1
    begins = draw.random(session[-1] + 1) * max(1, (session[-1] + 1) / at_once)
    times = begins[session] + draw.random(len(new))
    times = times[np.lexsort((times, session))]  # samples of a session stay in order
    return np.argsort(times, kind="stable")
