"""Measures `skirl convert --by session` and `skirl same`: rows per CPU second, memory, and the rate beside Arrow's."""

import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skirl.data.files.columnar import KEY
from skirl.data.sessions import Sessions
from skirl.dedup.commands import Same
from skirl.dedup.generated import in_time, rows_of, schema_of
from skirl.measure.bench.helpers import Stopwatch, child
from skirl.tools.units import parse_bytes

FILES = 8
QUARTER = FILES // 4
"""Files that are converted first: the peak of memory should not grow from these to all."""
GROUP = 1 << 16
"""Most rows of a row group of the files to convert."""
TURNS = 3


def converted(samples: int, change: float, rows_scale: float, at_once: int, memory: str) -> dict[str, Any]:
    """Write samples in order of time, convert them, and compare the result with what it is made of.

    **Arguments**

    - `samples`: number of samples, of some 1.2 KB each.
    - `change`: probability that a list differs from the previous sample's.
    - `rows_scale`: multiplies the number of ids that samples are drawn from.
    - `at_once`: number of concurrent sessions.
    - `memory`: as for `skirl convert`.
    """
    with tempfile.TemporaryDirectory(prefix="skirl-bench-") as name:
        folder = Path(name)
        files = _written(folder / "all", samples, change, rows_scale, at_once)
        linked(folder / "quarter", files[:QUARTER])
        quarter = _convert(folder / "quarter", folder / "quarter.out", memory)
        whole = _convert(folder / "all", folder / "all.out", memory)
        sizes = {of: sum(path.stat().st_size for path in (folder / of).glob("*.parquet")) for of in ("all", "all.out")}
        compared = child(["-m", "skirl.dedup.converting", json.dumps([str(folder), TURNS])], {})
        differ = {what: not _same_when(folder, files[:QUARTER], what) for what in CHANGES}
    return {
        "samples": samples,
        "bytes": sizes["all"],
        "bytes_out": sizes["all.out"],
        "memory": parse_bytes(memory),
        "peak_bytes": whole["peak_bytes"],
        "peak_bytes_of_quarter": quarter["peak_bytes"],
        "spilled_bytes": whole["spilled_bytes"],
        "seconds": round(whole["seconds"], 1),
        "cpu_seconds": round(whole["cpu"], 1),
        "rows_a_cpu_second": round(samples / whole["cpu"]),
        **compared,
        "told_apart": differ,
    }


def _written(folder: Path, samples: int, change: float, rows_scale: float, at_once: int) -> list[Path]:
    """Write samples to plain files without compression. Sessions of a row group are in order of time, as a log has them."""
    size = min(GROUP, -(-samples // FILES))
    groups = -(-samples // size)
    data = Sessions(batch_size=size, batches=groups, change=change, rows_scale=rows_scale, histories=2, once=False)
    tables, draw = rows_of(data, samples, as_rows=False), np.random.default_rng(0)
    schema = {KEY: schema_of(data, as_rows=False).toml().encode()}
    folder.mkdir()
    paths = []
    while first := next(tables, None):
        paths.append(folder / f"{len(paths):02}.parquet")
        arrow = first.schema.with_metadata(schema)
        with pq.ParquetWriter(paths[-1], arrow, compression="none", use_dictionary=False) as writer:
            for table in (first, *islice(tables, -(-groups // FILES) - 1)):
                sessions = table.column("session").to_numpy()
                order = in_time(np.diff(sessions, prepend=-1) != 0, at_once, draw)
                writer.write_table(table.take(order).replace_schema_metadata(schema), row_group_size=GROUP)
    return paths


def linked(folder: Path, files: list[Path]) -> None:
    """Make a folder that holds these files, too."""
    folder.mkdir()
    for path in files:
        os.link(path, folder / path.name)


def _convert(data: Path, out: Path, memory: str) -> dict[str, Any]:
    """Run the command, and return its result with the CPU seconds of its process, the system's included."""
    before = _of_children()
    flags = ["--data", f"parquet:{data}", "--out", str(out), "--by", "session", "--memory", memory, "--json", "--quiet"]
    found = child(["-m", "skirl", "convert", *flags], {})
    return found | {"cpu": _of_children() - before}


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compared(folder: Path, turns: int) -> dict[str, Any]:
    """Compare what was converted with the result by `skirl same`, and have Arrow decode both, in turns.

    **Arguments**

    - `folder`: holds the folders "quarter" and "all", and the results of both, with ".out" at the end of their names.
    - `turns`: how often each is timed.
    """
    _is_same(folder, "quarter")  # compiles
    took: dict[str, list[float]] = {"same": [], "arrow": []}
    found = []
    for _ in range(turns):
        with Stopwatch() as watch:
            found.append(_is_same(folder, "all"))
        took["same"].append(watch.cpu)
        with Stopwatch() as watch:
            for path in sorted([*(folder / "all").iterdir(), *(folder / "all.out").glob("*.parquet")]):
                for _ in _groups(path):
                    pass
        took["arrow"].append(watch.cpu)
    return {
        "same": all(found),
        "same_cpu_seconds": round(median(took["same"]), 2),
        "arrow_cpu_seconds": round(median(took["arrow"]), 2),
        "same_vs_arrow": round(median(a / b for a, b in zip(took["arrow"], took["same"], strict=True)), 3),
    }


def _is_same(folder: Path, name: str) -> bool:
    return Same(f"parquet:{folder / name}", f"parquet:{folder / name}.out", quiet=True).run()["same"]


def _groups(path: Path) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, use_threads=False)


def _dropped(table: pa.Table) -> pa.Table:
    return table.slice(1)


def _doubled(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table, table.slice(0, 1)])


def _changed(table: pa.Table) -> pa.Table:
    return _with(table, "dense_0", lambda values: [values[0] + 1, *values[1:]])


def _swapped(table: pa.Table) -> pa.Table:
    """Two rows have each other's item."""
    items = table.column("item").to_pylist()
    other = next(row for row, item in enumerate(items) if item != items[0])
    return _with(table, "item", lambda values: [values[other], *values[1:other], values[0], *values[other + 1 :]])


def _with(table: pa.Table, name: str, change: Callable[[list[Any]], list[Any]]) -> pa.Table:
    own = table.column(name)
    place = table.column_names.index(name)
    return table.set_column(place, table.field(name), pa.array(change(own.to_pylist()), own.type))


CHANGES: dict[str, Callable[[pa.Table], pa.Table]] = {
    "dropped": _dropped,
    "doubled": _doubled,
    "changed": _changed,
    "swapped": _swapped,
}
"""What befalls a row, or two, of the files that `skirl same` then has to tell from what they were converted to."""


def _same_when(folder: Path, files: list[Path], what: str) -> bool:
    """Return what `skirl same` says of a quarter of the files after one change, and of their conversion."""
    changed = folder / what
    linked(changed, files[:-1])
    groups = _groups(files[-1])
    first = next(groups)
    with pq.ParquetWriter(changed / files[-1].name, first.schema, compression="none", use_dictionary=False) as writer:
        writer.write_table(CHANGES[what](first))
        for table in groups:
            writer.write_table(table)
    return Same(f"parquet:{changed}", f"parquet:{folder / 'quarter.out'}", quiet=True).run()["same"]


def told_of(found: dict[str, Any]) -> dict[str, str]:
    """Return the result as labelled lines for people to read.

    **Arguments**

    - `found`: what `converted` returned.
    """
    apart = [what for what, told in found["told_apart"].items() if told]
    missed = [what for what, told in found["told_apart"].items() if not told]
    return {
        "convert": f"{found['samples']:,} rows, {found['bytes'] / 1e9:.2f} GB: {found['rows_a_cpu_second']:,} rows a CPU "
        f"second, {found['seconds']:.0f} s in all",
        "memory": f"{found['peak_bytes'] / 1e6:,.0f} MB at its peak, {found['peak_bytes_of_quarter'] / 1e6:,.0f} MB with a "
        f"quarter of the files; {found['memory'] / 1e6:,.0f} MB allowed",
        "same": f"{'yes' if found['same'] else 'no: please report it'}, at {found['same_vs_arrow']:.2f} of the rate at "
        "which Arrow decodes both",
        "told apart": f"rows {', '.join(apart) or 'none'}" + (f"; missed: {', '.join(missed)}" if missed else ""),
    }


if __name__ == "__main__":
    where, count = json.loads(sys.argv[1])
    print(json.dumps(compared(Path(where), count)))
