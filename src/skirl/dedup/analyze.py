"""Decides whether to write data by session, from whole sessions that fit in a fixed amount of memory."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skirl.data.files.columnar import SLICE
from skirl.data.files.columns import one
from skirl.data.files.schema import FileSchema
from skirl.dedup.layout import Writer, changed, dictionaries_for, once, row_groups, with_runs
from skirl.dedup.sessions import KEYS, Columns
from skirl.tools.progress import progress_of
from skirl.tools.units import size

LEAST = 1.5
"""Rewriting the data is worth it if a list occurs at least this many times in a session, on average."""


class Sample:
    """Keeps the rows of sessions with small hashes, and halves their number whenever there are more than `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows = 0
        self.level = 0
        """One in 2 ** level sessions is kept."""
        self.cut = False
        """True if one session alone was too large, so that rows are missing."""
        self._kept: list[Any] = []

    def add(self, table: Any) -> None:
        self.rows += len(table)
        if self.cut:
            return
        self._kept.append(self._chosen(table))
        while sum(each.nbytes for each in self._kept) > self._most:
            self.level += 1
            fewer = [each for each in map(self._chosen, self._kept) if len(each)]
            if not fewer:  # this would drop the last session
                self.level, self.cut = self.level - 1, True
                break
            self._kept = fewer

    def _chosen(self, table: Any) -> Any:
        if not self.level:
            return table
        hashes = table.column("~session").to_numpy().view(np.uint64)
        return table.take(pa.array(np.flatnonzero(hashes << np.uint64(64 - self.level) == 0)))

    def kept(self) -> Any:
        return pa.concat_tables(self._kept).sort_by([(key, "ascending") for key in KEYS])


def analyze(tables: Iterator[Any], columns: Columns, *, keep: int, now: int) -> dict[str, Any]:
    """Read all rows once, `keyed`, and return the result of the command. keep: bytes of rows to keep in the sample; now:
    bytes of the files."""
    sample = Sample(keep)
    with progress_of("analyze") as progress:
        for table in tables:
            sample.add(table)
            facts = {"rows": f"{sample.rows:,}", "sampled": f"1 in {1 << sample.level} sessions"}
            progress(sample.rows, lambda facts=facts: facts)
    if not sample.rows:
        raise ValueError("there are no rows to look at: set data to files that have some")
    groups = list(row_groups([sample.kept()], columns, columns.starts()))
    table = pa.concat_tables([group.table for group in groups]).combine_chunks()
    new, schema = np.concatenate([group.new for group in groups]), columns.schema
    figures = {c.name: figures_of(one(table.column(c.name)), new) for c in schema.ids if c.list}
    sessions = int(new.sum())
    found: dict[str, Any] = {
        "samples": sample.rows,
        "sessions": round(sample.rows * sessions / len(new)),
        "per_session": round(len(new) / sessions, 3),
        "sampled": {"samples": len(new), "sessions": sessions, "one_in": 1 << sample.level, "cut": sample.cut},
        "columns": figures,
    }
    of = with_runs(schema)
    rewritten = _written(of, [once(group.table, of, group.new) for group in groups])
    found["bytes"] = {"now": now, "by session": round(sample.rows * rewritten)}
    return found | verdict(found)


def figures_of(lists: Any, new: np.ndarray) -> dict[str, float]:
    """Return ids a row of a column in order, and by what factor leaving lists out lowers them. new: where sessions begin."""
    sizes = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    ids, left = int(sizes.sum()), int(sizes[changed(lists, new)].sum())
    return {"ids": round(ids / len(new), 3), "factor": round(ids / max(1, left), 3)}


def _written(of: FileSchema, tables: list[Any]) -> float:
    out = pa.BufferOutputStream()
    with Writer(out, tables[0].schema, of, "none", dictionaries_for(tables[0], "none")) as file:
        for table in tables:
            file.write_table(table, row_group_size=SLICE)
    meta = pq.ParquetFile(pa.BufferReader(out.getvalue())).metadata
    pages = [meta.row_group(g).column(c) for g in range(meta.num_row_groups) for c in range(meta.num_columns)]
    return sum(page.total_compressed_size for page in pages) / sum(map(len, tables))


def verdict(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the advice as a word and as a sentence, with the factor that it is based on."""
    lists = found["columns"].values()
    total, left = sum(of["ids"] for of in lists), sum(of["ids"] / of["factor"] for of in lists if of["factor"])
    factor = total / left if left else 1.0
    if not lists:
        return advice("no column holds lists, and only lists are left out where they repeat", factor)
    if factor < LEAST:
        why = f"with {found['per_session']:.1f} samples a session, a list comes {factor:.1f} times in one"
        return advice(f"{why}; {LEAST:g} times would be worth it", factor)
    now, then = (size(count) for count in found["bytes"].values())
    gains = f"a list comes {factor:.1f} times in one; files of {now} become {then}, less with --compression zstd"
    return advice("", factor) | {"advice": "cluster", "verdict": f"cluster by session: {gains}"}


def advice(why: str, factor: float | None = None) -> dict[str, Any]:
    found = {"advice": "don't bother", "verdict": f"don't bother: {why}"}
    return found if factor is None else found | {"factor": round(factor, 3)}
