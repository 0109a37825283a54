"""Measures the size of files of sessions in each order and layout, by each writer with its defaults and other settings."""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skirl.data.files.columnar import SLICE
from skirl.data.flags import DataFlags
from skirl.dedup.by_session import convert_by_session
from skirl.dedup.generated import SHIFTS, in_time, rows_of_sessions
from skirl.dedup.layout import groups_found, once
from skirl.dedup.wanted import Wanted
from skirl.dedup.window_layout import windows, windows_found

_LARGE = {"dictionary_pagesize_limit": 32 << 20, "data_page_size": 16 << 20}
GROUPS = "row groups of 65,536"
"""The row groups of `skirl convert`: a dictionary of 1 MiB mostly holds the ids of one, but not those of a whole file."""
SETTINGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "pyarrow": {
        "default": {},
        GROUPS: {"row_group_size": SLICE},
        "zstd 3": {"compression": "zstd", "compression_level": 3},
        "zstd 3, no dictionary": {"compression": "zstd", "compression_level": 3, "use_dictionary": False},
        "zstd 9, no dictionary": {"compression": "zstd", "compression_level": 9, "use_dictionary": False},
        "zstd 3, pages of 16 MiB, dictionaries of 32": {"compression": "zstd", "compression_level": 3, **_LARGE},
    },
    "polars": {"default": {}},
    "duckdb": {"default": {}, "zstd": {"compression": "zstd"}, "zstd 9": {"compression": "zstd 9"}},
}
"""The settings to try with each writer, by name."""


def sizes(table: Any, path: Path) -> dict[str, int]:
    """Return the bytes of a table as written by each installed writer with each of its settings.

    **Arguments**

    - `table`: the rows.
    - `path`: path to write it to.
    """
    found = {}
    for writer, settings in SETTINGS.items():
        if not there(writer):
            continue
        for name, given in settings.items():
            _WRITE[writer](table, path, given)
            found[f"{writer} {name}"] = path.stat().st_size
    return found


def there(writer: str) -> bool:
    """Return whether a writer is installed."""
    try:
        import_module(writer)
    except ImportError:
        return False
    return True


def _by_pyarrow(table: Any, path: Path, given: Mapping[str, Any]) -> None:
    pq.write_table(table, path, **given)


def _by_polars(table: Any, path: Path, given: Mapping[str, Any]) -> None:
    import_module("polars").from_arrow(table).write_parquet(path, **given)


def _by_duckdb(table: Any, path: Path, given: Mapping[str, Any]) -> None:
    codec, _, level = given.get("compression", "").partition(" ")
    more = f", COMPRESSION {codec}" if codec else ""
    more += f", COMPRESSION_LEVEL {level}" if level else ""
    connection = import_module("duckdb").connect()
    connection.register("rows_given", table)
    connection.execute(f"COPY (SELECT * FROM rows_given) TO '{path}' (FORMAT parquet{more})")
    connection.close()


_WRITE = {"pyarrow": _by_pyarrow, "polars": _by_polars, "duckdb": _by_duckdb}


def stored(samples: int, change: float, rows_scale: float, at_once: Sequence[int], mind: str | None) -> dict[str, Any]:
    """Return the bytes of the same rows in each order and layout, and by which factor `once` is smaller.

    **Arguments**

    - `samples`: number of samples.
    - `change`: probability that a list differs from the previous sample's.
    - `rows_scale`: multiplies the number of ids that samples are drawn from.
    - `at_once`: numbers of concurrent sessions, for files in order of time.
    - `mind`: path of a behaviors.tsv; None if there is none.
    """
    table, schema, new = rows_of_sessions(samples, change, rows_scale)
    draw = np.random.default_rng(0)
    groups = groups_found(table, schema, new)
    bytes_ = _of_each(
        {
            "shuffled": lambda: table.take(draw.permutation(len(table))),
            **{f"time_{n}": lambda n=n: table.take(in_time(new, n, draw)) for n in at_once},
            "clustered": lambda: table,
            "once": lambda: once(table, groups, new),
        }
    )
    best = {name: min(of.values()) for name, of in bytes_.items()}
    ratios = _ratios(bytes_["shuffled"], bytes_["once"])
    ratios["vs_time_best"] = {str(n): best[f"time_{n}"] / best["once"] for n in at_once}
    return {
        "once": ratios,
        "window": (shifting := _shifting(samples, rows_scale)),
        "mind": "missing" if mind is None else _mind(mind),
        "bytes": bytes_ | shifting.pop("bytes"),
        "writers_missing": [name for name in SETTINGS if not there(name)],
        "groups": groups,
    }


def _shifting(samples: int, rows_scale: float) -> dict[str, Any]:
    """Return the same for lists that shift by an id at every second sample on average: windows against `once`."""
    table, schema, new = rows_of_sessions(samples, SHIFTS, rows_scale, "shift")
    of_each = [groups_found(table, schema, new), windows_found(table, schema, new)]
    some = _of_each(
        {
            "once, shifting": lambda: once(table, of_each[0], new),
            "window, shifting": lambda: windows(table, of_each[1], new),
        }
    )
    one, other = some.values()
    best = min(one.values()) / min(other.values())
    return {
        "vs_once": one["pyarrow default"] / other["pyarrow default"],
        "vs_once_groups": one[f"pyarrow {GROUPS}"] / other[f"pyarrow {GROUPS}"],
        "vs_once_best": best,
        "change": SHIFTS,
        "bytes": some,
    }


def _of_each(tables: Mapping[str, Callable[[], Any]]) -> dict[str, dict[str, int]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, made in tables.items():
            found[name] = sizes(made(), Path(folder) / "x.parquet")
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def _ratios(shuffled: dict[str, int], some: dict[str, int]) -> dict[str, Any]:
    """Return how many times smaller files are: with each setting, the least of all defaults, and best against best."""
    each = {name: size / some[name] for name, size in shuffled.items()}
    return {
        "vs_shuffled_default": min(x for name, x in each.items() if name.endswith(" default")),
        "vs_shuffled_best": min(shuffled.values()) / min(some.values()),
        "vs_shuffled": each,
    }


def _mind(path: str) -> dict[str, Any]:
    """Return the same for MIND's impressions, as written by `skirl convert --by session` with and without --rows 100000."""
    found: dict[str, Any] = {"bytes": {}}
    for ids, rows in (("fingerprints", None), ("rows", "100000")):
        with tempfile.TemporaryDirectory() as folder:
            tables = []
            for layout in ("once", "rows"):
                wanted = Wanted(None, None, None, None, 1 << 30, layout, "none", as_rows=rows is not None)
                files = DataFlags(f"mind:{path}", rows=rows).files()
                convert_by_session(files, f"{folder}/{layout}", wanted, force=False, json=True, quiet=True)
                parts = sorted(Path(folder, layout).iterdir())
                tables.append(pa.concat_tables([pq.read_table(part) for part in parts]).replace_schema_metadata())
            shuffled = tables[1].take(np.random.default_rng(0).permutation(len(tables[1])))
            some = _of_each(
                {f"mind, {ids}, shuffled": lambda of=shuffled: of, f"mind, {ids}, once": lambda of=tables[0]: of}
            )
        found["bytes"] |= some
        found[ids] = _ratios(*some.values())
    return found | {"vs_shuffled_default": found["rows"]["vs_shuffled"]["pyarrow default"], "samples": len(shuffled)}


def told_of(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the result as labelled lines for people to read.

    **Arguments**

    - `result`: what `stored` returned.
    """
    told = {}
    of_mind = {} if result["mind"] == "missing" else result["mind"]["bytes"]
    for name, of in {**result["bytes"], **of_mind}.items():
        told[name] = ", ".join(f"{writer}: {size / 1e6:,.1f} MB" for writer, size in of.items())
    ratios = {"once": result["once"]}
    if result["mind"] != "missing":
        ratios |= {f"mind, {ids}": result["mind"][ids] for ids in ("fingerprints", "rows")}
    for name, of in ratios.items():
        told[f"{name}, times as small"] = (
            f"{of['vs_shuffled_default']:.1f} than shuffled by default; {of['vs_shuffled_best']:.1f} best against best"
        )
    for n, x in result["once"]["vs_time_best"].items():
        told[f"{int(n):,} at once"] = f"{x:.1f} times as small as in order of time, best against best"
    of = result["window"]
    told["window"] = (
        f"{of['vs_once']:.2f} times as small as once by default, {of['vs_once_groups']:.2f} in {GROUPS}; "
        f"{of['vs_once_best']:.2f} best against best"
    )
    if result["writers_missing"]:
        told["not there"] = f"{', '.join(result['writers_missing'])}: not installed, so not measured"
    return told
