"""Decides whether to write data by session, from a sample of its sessions and a projection of the files."""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.files.columns import one
from skirl.data.files.schema import FileSchema
from skirl.dedup.changes import Column, column_of, together
from skirl.dedup.finish import WrittenColumns
from skirl.dedup.order import begins, by_session, sessions_named
from skirl.dedup.projected import Projected
from skirl.dedup.sample import Sample
from skirl.tools.progress import Progress

STRETCH = 1 << 16
"""Rows from the start of the data to look at in their original order."""
LEAST = 1.5
"""Rewriting the data is worth it if a list occurs at least this many times in a session, on average."""
BETTER = 1.2
"""Windows are worth it if ids repeat at least this many times as often in them as in equal lists."""


@dataclass(frozen=True)
class AnalyzedRows:
    """The rows to look at.

    **Arguments**

    - `tables`: all rows, with their sort keys.
    - `shape`: what `skirl convert` would write.
    - `unit`: bytes of rows that `skirl convert` would sort at once.
    """

    tables: Iterator[Any]
    shape: WrittenColumns
    unit: int


def analyze(given: AnalyzedRows, *, keep: int, batch: int, json: bool, quiet: bool) -> dict[str, Any]:
    """Read all rows once, and return the result of the command.

    **Arguments**

    - `given`: the rows.
    - `keep`: bytes of rows to keep in the sample.
    - `batch`: samples per batch.
    - `json`: show progress on stderr, since the result goes to stdout.
    - `quiet`: show no progress.
    """
    sample, shape = Sample(keep, STRETCH), given.shape
    with Progress("analyze", steps=None, to=sys.stderr if json else sys.stdout, quiet=quiet) as progress:
        for table in given.tables:
            sample.add(table)
            facts = {"rows": f"{sample.rows:,}", "sampled": f"1 in {1 << sample.level} sessions"}
            progress(sample.rows, lambda facts=facts: facts)
    if not sample.rows:
        raise ValueError("there are no rows to look at: set data to files that have some")
    table, hashes, times = sample.kept()
    order = by_session(hashes, times)
    hashes, times, table = hashes[order], times[order], table.take(pa.array(order)).combine_chunks()
    new = begins(hashes, times, shape.gap)
    stretch = sample.stretch()
    if shape.named:
        named = pa.array(sessions_named(hashes, times, new))
        table = table.append_column(shape.named, named)
        stretch = stretch.append_column(shape.named, pa.array(np.zeros(len(stretch), np.int64)))
    schema = shape.schema
    columns = [column_of(c.name, one(table.column(c.name)), new) for c in (*schema.dense, *schema.ids)]
    of_ids = columns[len(schema.dense) :]
    per_session = len(new) / max(1, int(new.sum()))
    found: dict[str, Any] = {
        "samples": sample.rows,
        "sessions": round(sample.rows / per_session),
        "per_session": round(per_session, 3),
        "sampled": {"samples": len(new), "sessions": int(new.sum()), "one_in": 1 << sample.level, "cut": sample.cut},
        "columns": {column.name: _told(column, len(new)) for column in columns},
        "groups": together(columns),
    }
    with tempfile.TemporaryDirectory(prefix="skirl-") as folder:
        projected = Projected(
            table, new, stretch, schema, sample.rows, given.unit, shape.compression, Path(folder)
        )  # fmt: skip
        found["left_out"] = projected.groups
        found["projected"] = {
            "bytes": projected.bytes(columns),
            "lookup": projected.lookup(of_ids, batch),
            "least_cache": projected.least_cache(_tables(schema), batch),
            "reader": projected.reader(batch),
        }
    return found | verdict(found, of_ids)


def _tables(schema: FileSchema) -> dict[str, str]:
    return {column.name: column.table or column.name for column in schema.ids}


def _told(column: Column, rows: int) -> dict[str, Any]:
    windows = column.window_factor
    return {
        "list": column.lists,
        "ids": round(column.ids / max(1, rows), 3),
        "change": round(column.change, 4),
        "factor": round(column.factor, 3),
        "shifts": column.windows is not None,
        "window_factor": None if windows is None else round(windows, 3),
    }


def verdict(found: Mapping[str, Any], ids: Sequence[Column]) -> dict[str, Any]:
    """Return the advice, as a word and as a sentence, with the factors it is based on.

    **Arguments**

    - `found`: the figures of the sample.
    - `ids`: the id columns.
    """
    lists = [column for column in ids if column.lists]
    total, once = sum(c.ids for c in lists), sum(c.once for c in lists)
    windows = sum(c.once if c.windows is None else min(c.once, len(c.windows.values)) for c in lists)
    exact, best = total / max(1, once), total / max(1, windows)
    facts = {"factor": round(exact, 3), "window_factor": round(best, 3)}
    size = found["projected"]["bytes"]
    if not lists:
        return facts | _advice("don't bother", "no column holds lists, and only lists are left out where they repeat")
    if max(exact, best) < LEAST:
        rows = found["per_session"]
        why = f"with {rows:.1f} samples a session, a list comes {exact:.1f} times in one"
        return facts | _advice("don't bother", f"{why}; {LEAST:g} times would be worth it")
    if best >= BETTER * exact and best >= LEAST:
        shifting = ", ".join(c.name for c in lists if c.windows is not None)
        smaller, fewer = size["as_it_is"] / max(1, size["window"]), once / max(1, windows)
        return facts | _advice(
            "windows",
            f"cluster by session, with windows: {shifting} shift, so ids come {best:.1f} times in buffers and "
            f"{exact:.1f} times in equal lists; files get {smaller:.1f} times as small, and reading decodes and "
            f"hashes fewer ids; din and dcat look up {fewer:.1f} times fewer than with equal lists once, and models that "
            "pool as many",
            bare=True,
        )
    smaller = size["as_it_is"] / max(1, size["once"])
    return facts | _advice(
        "cluster",
        f"cluster by session: a list comes {exact:.1f} times in one, files get {smaller:.1f} times as small, and a batch "
        f"looks up {found['projected']['lookup']['x']:.1f} times fewer ids",
        bare=True,
    )


def _advice(word: str, why: str, *, bare: bool = False) -> dict[str, Any]:
    return {"advice": word, "verdict": why if bare else f"{word}: {why}"}


NO_SESSION = _advice("don't bother", "no session column")
"""The result if nothing says which rows belong together."""
AS_IT_IS = _advice("don't bother", "lists that repeat are left out of these files already")
