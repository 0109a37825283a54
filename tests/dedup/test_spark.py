"""Folders written with Spark have the same rows as those written without. Without Spark, a stand-in does its part."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl import cli
from skirl.data.flags import DataFlags
from skirl.dedup import layout, spark
from skirl.dedup.by_session import convert_by_session
from skirl.dedup.sessions import Sessions
from tests.cases import cases
from tests.dedup.rows import Row, schema, write
from tests.dedup.test_by_session import BY_USER, WANTED, made

ONCE = replace(WANTED, layout="once")
WAYS = [ONCE, replace(ONCE, partition="100s"), replace(BY_USER, partition="100s")]


class Frame:
    """A data frame of a SparkSession in this process: tables in partitions, which functions get in batches of any size."""

    def __init__(self, parts: list[list[Row]], draw: random.Random) -> None:
        self.parts, self._draw = parts, draw

    def mapInArrow(self, function: Callable[[Any], Any], columns: str) -> "Frame":
        return Frame([self._mapped(function, part) for part in self.parts], self._draw)

    def _mapped(self, function: Callable[[Any], Any], part: list[Row]) -> list[Row]:
        cuts = sorted({0, len(part), *(self._draw.randrange(len(part) + 1) for _ in range(3))})
        batches = (pa.RecordBatch.from_pylist(part[a:b]) for a, b in pairwise(cuts))
        return [row for batch in function(batches) for row in batch.to_pylist()]

    def repartition(self, count: int, by: str) -> "Frame":
        parts: list[list[Row]] = [[] for _ in range(count)]
        for row in self._draw.sample(rows := [row for part in self.parts for row in part], len(rows)):
            parts[hash(row[by.strip("`")]) % count].append(row)
        return Frame(parts, self._draw)

    def sortWithinPartitions(self, *by: str) -> "Frame":
        return Frame([sorted(part, key=lambda row: [row[k.strip("`")] for k in by]) for part in self.parts], self._draw)

    def collect(self) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for part in self.parts for row in part]


class Session:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def range(self, start: int, end: int, step: int, count: int) -> Frame:
        return Frame([[{"id": number}] for number in range(start, end, step)], self._draw)


def inputs(folder: Path, rows: list[Row], files: int = 3) -> DataFlags:
    each = -(-len(rows) // files)
    paths = [folder / f"in-{k}.parquet" for k in range(files)]
    for k, path in enumerate(paths):
        write(path, rows[k * each : (k + 1) * each], 20)
    return DataFlags(f"parquet:{','.join(map(str, paths))}", schema=schema(folder))


def sessions_of(folder: Path, data: DataFlags, of: Sessions, session: Any = None) -> tuple[list[Any], dict[str, Any]]:
    """Convert. Return the rows of each time partition by session, and the counts of the result."""
    found = convert_by_session(data.files(), str(folder / "out"), of, session=session, force=True)
    assert not (folder / "out.unfinished").exists()
    counts = {name: found[name] for name in ("samples", "sessions", "bad_rows_skipped")}
    return in_order(folder / "out", of), counts


def in_order(folder: Path, of: Sessions) -> list[Any]:
    name, found = "session" if of.user else "visit", []
    for path in sorted(folder.iterdir()):
        table = pq.read_table(path)
        stored, lists = None, []
        for each in table.column("seen").to_pylist():
            stored = stored if each is None else each
            lists.append(stored)
        rows = zip(table.column(name).to_pylist(), table.column("price").to_pylist(), lists, strict=True)
        part = table.column("when")[0].as_py() // (100 if of.partition else 1 << 30)
        by: dict[Any, list[Any]] = {}
        for session, *row in rows:
            by.setdefault(session, []).append(row)
        found += [(part, *pair) for pair in by.items()]
    assert [part for part, *_ in found] == sorted(part for part, *_ in found), "files are in order of time"
    return sorted(found)


@given(n=st.integers(1, 150), seed=st.integers(0, 9), of=st.sampled_from(WAYS), share=st.integers(1 << 12, 1 << 15))
@cases(12)
def test_rows_are_those_without_spark(tmp_path_factory: Any, n: int, seed: int, of: Sessions, share: int) -> None:
    folder = tmp_path_factory.mktemp("spark")
    data = inputs(folder, made(n, 1 + n // 10, seed))
    here = sessions_of(folder, data, of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spark, "SHARE", share)
        patch.setattr(layout, "FILE_BYTES", 1 << 14)
        assert sessions_of(folder, data, of, Session(seed)) == here


def test_malformed_rows_are_counted(tmp_path: Path) -> None:
    rows = made(100, 5)
    rows[70]["visit"] = None
    data = inputs(tmp_path, rows)
    with pytest.raises(ValueError, match="session column visit is nothing"):
        sessions_of(tmp_path, data, WANTED, Session(0))
    skipping = replace(data, bad_rows="skip")
    here = sessions_of(tmp_path, skipping, WANTED)
    assert here[1]["bad_rows_skipped"] == 1
    assert sessions_of(tmp_path, skipping, WANTED, Session(0)) == here


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyspark") is None, reason="pyspark is missing: pip install 'skirl[spark]'")
@pytest.mark.timeout(1200)  # its processes import torch one by one, which takes minutes while others use the cores
@pytest.mark.filterwarnings("ignore")  # Spark's
def test_spark_writes_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = made(2000, 100)
    data, of = inputs(tmp_path, rows), replace(ONCE, partition="100s")
    flags = ["--data", data.data, "--schema", str(data.schema), "--by", "session", "--partition", "100s", "--check"]
    flags += ["--quiet", "--json"]
    assert cli.main(["convert", *flags, "--out", str(tmp_path / "here")]) == 0
    at = ["--engine", "spark", "--master", "local[2]"]
    assert cli.main(["convert", *flags, "--out", str(tmp_path / "spark"), *at]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["check"]["same"]
    assert in_order(tmp_path / "spark", of) == in_order(tmp_path / "here", of)
    rows[70]["visit"] = None
    data = inputs(tmp_path, rows)
    assert cli.main(["convert", *flags, "--out", str(tmp_path / "spark"), *at, "--force"]) == 1
    assert "session column visit is nothing" in capsys.readouterr().err
