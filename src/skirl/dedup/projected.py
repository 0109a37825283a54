"""What files by session would be: their bytes, how fast they are read, what a batch of them looks up and needs at once."""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skirl.core.shared import pays
from skirl.data.files.columnar import SLICE
from skirl.data.files.columns import one
from skirl.data.files.schema import FileSchema
from skirl.data.flags import DataFlags
from skirl.dedup import layout as layouts
from skirl.dedup.changes import Column
from skirl.dedup.finish import LAYOUTS, TRIED
from skirl.dedup.order import groups_of_rows

BATCHES = 8
"""Batches of each order that are looked at."""
FEWEST = 4096
"""Rows of a file whose reading is timed, at least."""


class Projected:
    """Writes a sample in every layout, as `skirl convert` would.

    **Arguments**

    - `table`: rows in order by session.
    - `new`: bool [n]: where sessions begin.
    - `stretch`: rows as they come.
    - `schema`: of the files, nothing left out.
    - `rows`: of the whole data set.
    - `unit`: bytes of rows that are sorted at once.
    - `compression`: of pages.
    - `folder`: where to write.
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
        """Lists that are left out where they repeat, by the name of the column that says so."""

    def bytes(self, columns: Sequence[Column]) -> dict[str, int | None]:
        """Of all rows: converted in the order they have; by session; that with lists once; that with windows, where lists
        shift.

        **Arguments**

        - `columns`: what was found of each.
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
        """Bytes that all rows would have, written like these."""
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
        """Rows a second out of these files, of one core; None of files that are too small to say so.

        **Arguments**

        - `batch`: samples of one.
        """
        if len(self._stretch) < FEWEST or len(self._table) < FEWEST:
            return None
        rates = {}
        for name in ("as_it_is", "rows", "once"):
            took = []
            for _ in range(3):  # the first compiles
                stream = DataFlags(f"parquet:{self._folder / name}.parquet", batch=batch).stream()
                began = time.process_time()
                read = sum(len(each.labels) for each in stream)
                took.append((time.process_time() - began) / read)
            rates[name] = round(1 / max(1e-9, min(took)))
        return {"rows_per_second": rates, "x": round(rates["once"] / rates["as_it_is"], 2)}

    def lookup(self, columns: Sequence[Column], batch: int) -> dict[str, Any]:
        """Ids of a batch by session, on average, and those that are looked up.

        **Arguments**

        - `columns`: what was found of each column of ids.
        - `batch`: samples of one.
        """
        batch = min(batch, len(self._new))
        begins = np.arange(0, len(self._new) - batch + 1, batch)
        ids = left = 0
        for column in columns:
            sizes = _sizes(self._table.column(column.name))[: len(begins) * batch]
            total = np.add.reduceat(sizes, begins)
            ids += int(total.sum())
            if column.lists:
                own = column.own[: len(sizes)].copy()
                own[begins] = True
                few = np.add.reduceat(sizes * own, begins)
                left += sum(int(b if pays(int(a), int(b), batch) else a) for a, b in zip(total, few, strict=True))
            else:
                left += int(total.sum())
        count = max(1, len(begins))
        return {"batch": batch, "ids": ids // count, "ids_once": left // count, "x": round(ids / max(1, left), 2)}

    def least_cache(self, ids: Mapping[str, str], batch: int) -> dict[str, int]:
        """Rows of the largest batch: of the data as it is, and by session.

        **Arguments**

        - `ids`: the table of each column of ids.
        - `batch`: samples of one.
        """
        batch = min(batch, len(self._stretch), len(self._table))
        sides = {"as_it_is": self._stretch, "by_session": self._table}
        return {name: _largest(table, ids, batch) for name, table in sides.items()}


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
