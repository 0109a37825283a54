"""Projects files by session from a sample: their bytes, their reading speed, and what their batches look up and need."""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skirl.core.shared import pays
from skirl.core.stretches import Stretches
from skirl.data.files.columnar import SLICE
from skirl.data.files.columns import one
from skirl.data.files.schema import FileSchema
from skirl.data.flags import DataFlags
from skirl.dedup import layout as layouts
from skirl.dedup.changes import Column
from skirl.dedup.finish import LAYOUTS, TRIED
from skirl.dedup.order import groups_of_rows
from skirl.dedup.window_layout import Buffers

BATCHES = 8
"""Most batches of each order to look at for the smallest cache."""
FEWEST = 4096
"""Least rows of a file whose reading is timed."""


class Projected:
    """Writes a sample in every layout, as `skirl convert` would.

    **Arguments**

    - `table`: rows in order by session.
    - `new`: bool [n]: where sessions begin.
    - `stretch`: rows in their original order.
    - `schema`: schema of the files, with nothing left out.
    - `rows`: number of rows in the whole data set.
    - `unit`: bytes of rows to sort at once.
    - `compression`: compression of pages.
    - `folder`: folder to write to.
    """

    def __init__(
        self, table: Any, new: np.ndarray, stretch: Any, schema: FileSchema, rows: int, unit: int, compression: str,
        folder: Path,
    ) -> None:  # fmt: skip
        self._table, self._new, self._stretch, self._schema = table, new, stretch, schema
        self._rows, self._unit, self._compression, self._folder = rows, unit, compression, folder
        most = max(1, unit * len(table) // (4 * max(1, table.nbytes)))
        self._cuts = groups_of_rows(new, min(SLICE, most))
        tried = groups_of_rows(new, min(TRIED, most))[1]
        self._first, self._first_new = table.slice(0, tried), new[:tried]
        self.groups = layouts.groups_found(self._first, schema, self._first_new)
        """List columns to leave out where they repeat, by the name of their column of runs."""

    def bytes(self, columns: Sequence[Column]) -> dict[str, int | None]:
        """Return the projected bytes of all rows: in their original order, by session, by session with lists once, and by
        session with windows (None if no list shifts).

        **Arguments**

        - `columns`: the columns' figures.
        """
        found: dict[str, int | None] = {"as_it_is": self._written("as_it_is", [self._stretch], self._schema, [])}
        pieces = [(self._table.slice(low, high - low), slice(low, high)) for low, high in pairwise(self._cuts)]
        plain = [table for table, _ in pieces]
        found["rows"] = self._written("rows", plain, self._schema, self._dictionaries(self._first))
        once = layouts.once(self._first, self.groups, self._first_new)
        left_out = [layouts.once(table, self.groups, self._new[rows]) for table, rows in pieces]
        of = layouts.with_runs(self._schema, self.groups)
        found["once"] = self._written("once", left_out, of, self._dictionaries(once))
        found["window"] = None
        if any(column.windows is not None for column in columns):
            window, first, new = LAYOUTS["window"], self._first, self._first_new
            groups = window.found(first, self._schema, new)
            laid = (window.lay(table, groups, self._new[rows]) for table, rows in pieces)
            of, tried = window.schema(self._schema, groups), window.lay(first, groups, new)
            found["window"] = self._written("window", laid, of, self._dictionaries(tried))
        return found

    def _dictionaries(self, table: Any) -> list[str]:
        return layouts.measured(table.slice(0, TRIED), self._compression, self._folder)

    def _written(self, name: str, tables: Iterable[Any], of: FileSchema, dictionaries: list[str]) -> int:
        """Write tables, and return the bytes that all rows would take if written like this."""
        path, writer, rows, held = self._folder / f"{name}.parquet", None, 0, 0
        for table in tables:
            if writer is None:
                writer = layouts.writer_of(path, table.schema, of, self._compression, dictionaries)
            writer.write_table(table, row_group_size=SLICE)
            rows, held = rows + len(table), held + table.nbytes
        assert writer is not None
        writer.close()
        meta = pq.ParquetFile(path).metadata
        pages = sum(
            meta.row_group(g).column(c).total_compressed_size
            for g in range(meta.num_row_groups)
            for c in range(meta.num_columns)
        )
        files = max(1.0, held * self._rows / max(1, rows) / self._unit)
        return round(pages * self._rows / max(1, rows) + (path.stat().st_size - pages) * files)

    def reader(self, batch: int) -> dict[str, Any] | None:
        """Return rows per second of reading these files on one core; None if they are too small to tell.

        **Arguments**

        - `batch`: samples per batch.
        """
        if len(self._stretch) < FEWEST or len(self._table) < FEWEST:
            return None
        rates = {}
        for name in ("as_it_is", "rows", "once"):
            took = []
            for _ in range(3):  # the first pass compiles
                stream = DataFlags(f"parquet:{self._folder / name}.parquet", batch=batch).stream()
                began = time.process_time()
                read = sum(len(each.labels) for each in stream)
                took.append((time.process_time() - began) / read)
            rates[name] = round(1 / max(1e-9, min(took)))
        return {"rows_per_second": rates, "x": round(rates["once"] / rates["as_it_is"], 2)}

    def lookup(self, columns: Sequence[Column], batch: int) -> dict[str, Any]:
        """Return the average number of ids in a batch by session, and of those that are looked up: each list once, or, by
        models that attend to windows, each id of a buffer.

        **Arguments**

        - `columns`: the figures of the id columns.
        - `batch`: samples per batch.
        """
        batch = min(batch, len(self._new))
        begins = np.arange(0, len(self._new) - batch + 1, batch)
        ids = left = held = 0
        for column in columns:
            sizes = _sizes(self._table.column(column.name))[: len(begins) * batch]
            total = np.add.reduceat(sizes, begins)
            ids += int(total.sum())
            if column.lists:
                own = column.own[: len(sizes)].copy()
                own[begins] = True
                few = np.add.reduceat(sizes * own, begins)
                total = np.array([b if pays(int(a), int(b), batch) else a for a, b in zip(total, few, strict=True)])
            left += int(total.sum())
            held += int(total.sum()) if column.windows is None else _in_buffers(column.windows, begins, batch, total)
        count = max(1, len(begins))
        found = {"batch": batch, "ids": ids // count, "ids_once": left // count, "x": round(ids / max(1, left), 2)}
        windows = any(column.windows is not None for column in columns)
        more = (held // count, round(ids / max(1, held), 2)) if windows else (None, None)
        return found | dict(zip(("ids_windows", "windows_x"), more, strict=True))

    def least_cache(self, ids: Mapping[str, str], batch: int) -> dict[str, int]:
        """Return the number of distinct rows in the largest batch, in the original order and by session.

        **Arguments**

        - `ids`: the table of each id column.
        - `batch`: samples per batch.
        """
        batch = min(batch, len(self._stretch), len(self._table))
        sides = {"as_it_is": self._stretch, "by_session": self._table}
        return {name: _largest(table, ids, batch) for name, table in sides.items()}


def _in_buffers(buffers: Buffers, begins: np.ndarray, batch: int, otherwise: np.ndarray) -> int:
    """Return how many ids batches look up if lists are windows where that pays. otherwise: by batch, how many if not."""
    first = (np.cumsum(buffers.sizes) - buffers.sizes)[buffers.fresh]
    starts, total = first[np.cumsum(buffers.fresh) - 1] + buffers.starts, 0
    for begin, ids in zip(begins.tolist(), otherwise.tolist(), strict=True):
        held = Stretches.of(starts[begin : begin + batch], buffers.lengths[begin : begin + batch]).ids
        total += held if pays(ids, held, batch) else ids
    return int(total)


def _largest(table: Any, ids: Mapping[str, str], batch: int) -> int:
    most = 0
    for first in range(0, min(len(table), BATCHES * batch) - batch + 1, batch):
        of: dict[str, list[np.ndarray]] = {}
        for name, its in ids.items():
            column = one(table.column(name).slice(first, batch))
            flat = column.flatten() if pa.types.is_list(column.type) else column
            of.setdefault(its, []).append(flat.to_numpy(zero_copy_only=False))
        most = max(most, sum(len(np.unique(np.concatenate(each))) for each in of.values()))
    return most


def _sizes(column: Any) -> np.ndarray:
    column = one(column)
    return (
        np.diff(column.offsets.to_numpy()).astype(np.int64) if pa.types.is_list(column.type) else np.ones(len(column))
    )
