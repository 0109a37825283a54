"""Measures what the order of samples costs and gains: trains a model on the same files of sessions in each order."""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pyarrow.parquet as pq

from skirl.data.files.columnar import KEY
from skirl.data.flags import DataFlags
from skirl.data.sessions import Sessions
from skirl.dedup.commands import Convert
from skirl.dedup.generated import rows_of, schema_of
from skirl.measure.bench.helpers import Stopwatch
from skirl.train.commands import Train

BATCH, DIM = 512, 16
MIX = 65_536
RATES = (0.02, 0.005, 0.00125)
"""Learning rates of rows to try: a list whose samples are all in one batch is updated once, so the best rate depends on the
order."""
GLOBAL = "global"
HELD_OUT = "20%"


def orders(samples: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the data flags of each order.

    **Arguments**

    - `samples`: number of samples in the files.
    """
    yield GLOBAL, {"shuffle": samples}
    yield "keep", {}
    for most in (1, 2, 4, 8, "all"):
        yield f"shuffle {most}", {"session_order": "shuffle", "most_rows": most, "mix": MIX}


def ordered(samples: int, seeds: int, mind: str | None) -> dict[str, Any]:
    """Train on each data set in each order, at the learning rate that is best for it with the first seed.

    Return, by data set and order, AUC and log loss on held-out sessions, samples per second of CPU time including
    evaluation, and how often a list repeats in a batch.

    **Arguments**

    - `samples`: samples of synthetic sessions.
    - `seeds`: runs of each order at its rate, each with its own initial values and order; figures are means, speeds are
      medians.
    - `mind`: path of a behaviors.tsv; None leaves it out.
    """
    found = {}
    with tempfile.TemporaryDirectory(prefix="skirl-") as folder:
        data = {"synthetic": f"parquet:{_written(Path(folder), samples)}"}
        data |= {"mind": f"mind:{mind}"} if mind else {}
        for name, source in data.items():
            out = Path(folder) / name
            rows = Convert(source, str(out), by="session", quiet=True).run()["samples"]
            runs = {}
            for of, flags in orders(rows):
                runs[of] = _runs(out, flags, seeds)
                found[name] = _compared(runs)
                print(f"{name}, {of}: {found[name][of]}", file=sys.stderr, flush=True)
    return found


def _written(folder: Path, samples: int) -> Path:
    """Write samples of synthetic sessions to a file, with rows as ids."""
    data = Sessions(batch_size=8192, once=False)
    path, schema = folder / "samples.parquet", schema_of(data, as_rows=True).toml().encode()
    writer: Any = None
    for table in rows_of(data, samples, as_rows=True):
        table = table.replace_schema_metadata({KEY: schema})
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()
    return path


def _trained(folder: Path, flags: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train once, and return the figures. All rows are resident, so that only order and factor differ."""
    command = Train.of(
        data=f"parquet:{folder}", model="dlrm-tiny", dim=DIM, batch=BATCH, valid=HELD_OUT, seed=seed, cache="100%",
        threads=1, run="none", quiet=True, **flags,
    )  # fmt: skip
    with Stopwatch() as watch:
        result = command.run()
    return {
        "lr": flags["lr"],
        "auc": result["test_auc"],
        "logloss": result["test_logloss"],
        "samples_per_second": result["samples"] / watch.cpu,
        "factor": result["factor"] or 1.0,
    }


def _runs(folder: Path, flags: Mapping[str, Any], seeds: int) -> list[dict[str, Any]]:
    """Run once with each seed, all at the rate with the highest AUC for the first seed."""
    best = max((_trained(folder, {**flags, "lr": lr}, 0) for lr in RATES), key=lambda run: run["auc"])
    return [best, *(_trained(folder, {**flags, "lr": best["lr"]}, seed) for seed in range(1, seeds))]


def _compared(runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return means over seeds, and the loss against a shuffle of all rows with the same seed."""
    found = {}
    for name, each in runs.items():
        lost = [base["auc"] - run["auc"] for base, run in zip(runs[GLOBAL], each, strict=True)]
        found[name] = {
            "lr": each[0]["lr"],
            "auc": round(mean(run["auc"] for run in each), 5),
            "auc_lost": round(mean(lost), 5),
            "auc_lost_error": round(stdev(lost) / len(lost) ** 0.5, 5) if len(lost) > 1 else None,
            "logloss": round(mean(run["logloss"] for run in each), 5),
            "samples_per_second": round(median(run["samples_per_second"] for run in each)),
            "factor": round(mean(run["factor"] for run in each), 3),
        }
    return found


def told_of(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the result as labelled lines for people to read.

    **Arguments**

    - `found`: what `ordered` returned.
    """
    told = {}
    for data, by_order in found.items():
        lines = [f"{'order':<12} {'AUC':>8} {'lost':>9} {'log loss':>9} {'samples/s':>10} {'factor':>7} {'lr':>8}"]
        for name, of in by_order.items():
            lines.append(
                f"{name:<12} {of['auc']:8.4f} {of['auc_lost']:9.4f} {of['logloss']:9.4f} "
                f"{of['samples_per_second']:10,} {of['factor']:7.1f} {of['lr']:8g}"
            )
        told[data] = "\n".join(lines)
    return told


def shuffled_chunks(data: str, *, rows: str | None = None, batch: int = 2048, rounds: int = 3) -> dict[str, float]:
    """Return rows per second of CPU time in order, and with sessions shuffled in chunks of at most 8 rows; and the ratio.

    **Arguments**

    - `data`: files of sessions, such as parquet:FOLDER.
    - `rows`: rows of the tables, if ids are fingerprints.
    - `batch`: samples per batch.
    - `rounds`: passes of each side, in turns; the best of each counts.
    """
    best: dict[str, float] = {}
    for _ in range(rounds + 1):  # the first round compiles
        for side in ("keep", "shuffle"):
            stream = DataFlags(data, batch=batch, rows=rows, session_order=side).stream()
            with Stopwatch() as watch:
                read = sum(len(each.labels) for each in stream)
            best[side] = max(best.get(side, 0.0), read / watch.cpu)
    return {"keep": best["keep"], "shuffle": best["shuffle"], "x": round(best["shuffle"] / best["keep"], 3)}
