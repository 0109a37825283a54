"""How large files of sessions are: rows shuffled, in order of time and by session, and with repeated lists left out."""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from skirl.measure.bench.dedup import Dedup as Step
from skirl.measure.bench.helpers import result

WRITERS = ("pyarrow", "polars", "duckdb")
SETTINGS = {
    "default": {},
    "zstd 3": {"compression": "zstd", "compression_level": 3},
    "zstd 3, no dictionary": {"compression": "zstd", "compression_level": 3, "use_dictionary": False},
    "zstd 9, no dictionary": {"compression": "zstd", "compression_level": 9, "use_dictionary": False},
}
"""Of pyarrow's writer."""


@dataclass(frozen=True)
class Dedup(Step):
    """What it gains to have lists that repeat once: in the embedding step (lookup), and in files (storage)."""

    part: tuple[Literal["lookup", "storage", "order", "cache"], ...] = ("lookup",)  # type: ignore[assignment]
    """lookup: the step of an embedding collection, all rows resident; storage: bytes of files of synthetic:sessions;
    order: a model trained over orders of samples; cache: what a cache sees of them."""
    _: KW_ONLY
    samples: int = 200_000
    """Samples of the files."""
    rows_scale: float = 100.0
    """Multiplies the ids that the files' samples are drawn from: 2 million items."""
    change: float = 0.05
    """Of the files: the probability that a list differs from that of the sample before."""
    at_once: tuple[int, ...] = (1_000, 10_000)
    """Sessions that run at the same time, in the files in order of time."""
    mind: str | None = None
    """A behaviors.tsv, whose files are measured too; that of $SKIRL_DATA if not set and there is one."""
    seeds: int = 3
    """Of order: runs of each order."""

    def run(self) -> dict[str, Any]:
        """Measure each part."""
        found: dict[str, Any] = {}
        if "lookup" in self.part:
            names = [field.name for field in fields(Step) if field.name != "part"]
            found |= Step(("lookup",), **{name: getattr(self, name) for name in names}).run()
        if "storage" in self.part:
            found |= result("dedup", self, "part samples rows_scale change at_once", **self.stored())
        if "order" in self.part:
            from skirl.dedup.ordering import ordered

            orders = ordered(self.samples, self.seeds, self.mind or _of_environment())
            found |= result("dedup", self, "part samples seeds", order=orders)
        if "cache" in self.part:
            from skirl.dedup.caching import cached

            if (mind := self.mind or _of_environment()) is None:
                raise ValueError("part cache is measured on MIND: set mind to a behaviors.tsv")
            found |= result("dedup", self, "part", cache=cached(mind))
        return found | {"part": list(self.part)}

    def stored(self) -> dict[str, Any]:
        """Bytes of the same rows in each order and layout, with each setting."""
        import numpy as np

        from skirl.dedup.layout import groups_found, once

        table, schema, new = _rows(self.samples, self.change, self.rows_scale)
        draw = np.random.default_rng(0)
        groups = groups_found(table, schema, new)
        orders: dict[str, Callable[[], Any]] = {
            "shuffled": lambda: table.take(draw.permutation(len(table))),
            **{f"time_{n}": lambda n=n: table.take(_in_time(new, n, draw)) for n in self.at_once},
            "clustered": lambda: table,
            "once": lambda: once(table, groups, new),
        }
        bytes_: dict[str, dict[str, int]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for name, rows in orders.items():
                bytes_[name] = _sizes(rows(), Path(folder) / "x.parquet")
                print(f"{name}: {bytes_[name]}", file=sys.stderr, flush=True)
        best = {name: min(sizes.values()) for name, sizes in bytes_.items()}
        default = bytes_["shuffled"]["default"] / bytes_["once"]["default"]
        ratios = {
            "vs_shuffled_default": default,
            "vs_shuffled_best": best["shuffled"] / best["once"],
            "vs_time_best": {str(n): best[f"time_{n}"] / best["once"] for n in self.at_once},
        }
        lost = [name for name in WRITERS[1:] if not _there(name)]
        return {"once": ratios, "bytes": bytes_, "writers_missing": lost, "groups": groups}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        told = super().summary(result) if "lookup" in self.part else {}
        if "order" in self.part:
            from skirl.dedup.ordering import told_of

            told |= told_of(result["order"])
        if "cache" in self.part:
            from skirl.dedup.caching import told_of as told_of_cache

            told |= told_of_cache(result["cache"])
        if "storage" not in self.part:
            return told
        for name, sizes in result["bytes"].items():
            told[name] = ", ".join(f"{of}: {size / 1e6:,.1f} MB" for of, size in sizes.items())
        of = result["once"]
        told["once"] = (
            f"{of['vs_shuffled_default']:.1f} times as small as shuffled, {of['vs_shuffled_best']:.1f} best against best"
        )
        for n, x in of["vs_time_best"].items():
            told[f"{int(n):,} at once"] = f"{x:.1f} times as small as in order of time, best against best"
        if result["writers_missing"]:
            told["not there"] = f"{', '.join(result['writers_missing'])}: not installed, so not measured"
        return told


def _rows(samples: int, change: float, rows_scale: float) -> tuple[Any, Any, Any]:
    """Rows of synthetic:sessions in order with fingerprints of 64 bits as ids, their schema, and where sessions begin."""
    import numpy as np
    import pyarrow as pa

    from skirl.data.files.hashing import hash_numbers, seed_of
    from skirl.data.files.schema import FileSchema, Id, Label
    from skirl.data.sessions import Sessions

    data = Sessions(batch_size=samples, batches=1, change=change, rows_scale=rows_scale, once=False)
    batch = next(iter(data))
    sparse, columns = batch.sparse, {"label": pa.array(batch.labels.numpy())}
    for k in range(batch.dense.shape[1]):
        columns[f"dense_{k}"] = pa.array(batch.dense[:, k].contiguous().numpy())
    values, offsets = sparse.values().numpy(), sparse.offsets().numpy()
    ids = []
    for f, name in enumerate(sparse.keys()):
        own = offsets[f * samples : (f + 1) * samples + 1]
        prints = np.empty(own[-1] - own[0], np.uint64)
        hash_numbers(np.ascontiguousarray(values[own[0] : own[-1]]), seed_of(name), prints)
        column = pa.array(prints.view(np.int64))
        of_list = name in data.lists
        ids.append(Id(name, type="fingerprint", list=of_list))
        if of_list:
            column = pa.ListArray.from_arrays(pa.array((own - own[0]).astype(np.int32)), column)
        columns[name] = column
    users = columns["user"].to_numpy()
    new = np.ones(samples, bool)
    new[1:] = users[1:] != users[:-1]
    return pa.table(columns), FileSchema((Label("label"),), (), tuple(ids)), new


def _in_time(new: Any, at_once: int, draw: Any) -> Any:
    """The rows in order of time, where so many sessions run at once, each sample of one after a random while."""
    import numpy as np

    session = np.cumsum(new) - 1
    begins = draw.random(session[-1] + 1) * max(1, (session[-1] + 1) / at_once)
    times = begins[session] + draw.random(len(new))
    first = np.flatnonzero(new)
    times = times[np.lexsort((times, session))]  # samples of a session stay in order
    assert len(first) == session[-1] + 1
    return np.argsort(times, kind="stable")


def _sizes(table: Any, path: Path) -> dict[str, int]:
    import pyarrow.parquet as pq

    found = {}
    for name, settings in SETTINGS.items():
        pq.write_table(table, path, **settings)
        found[name] = os.stat(path).st_size
    for name in WRITERS[1:]:
        if not _there(name):
            continue
        if name == "polars":
            import_module(name).from_arrow(table).write_parquet(path)
        else:
            import_module(name).from_arrow(table).write_parquet(str(path))
        found[f"{name} default"] = os.stat(path).st_size
    return found


def _of_environment() -> str | None:
    folder = os.environ.get("SKIRL_DATA")
    found = sorted(Path(folder, "mind").glob("*.tsv")) if folder else []
    return str(found[0]) if found else None


def _there(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True
