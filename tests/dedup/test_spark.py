"""Folders written with Spark have the same bytes as those written without. Without Spark, a stand-in does its part."""

import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl import cli
from skirl.data.flags import DataFlags
from skirl.dedup import spark
from skirl.dedup.by_session import convert_by_session
from skirl.dedup.spark import Spark, stretches
from skirl.dedup.wanted import Wanted
from tests.cases import cases
from tests.dedup.rows import Row, schema, write
from tests.dedup.spark_by_hand import Session
from tests.dedup.test_by_session import WANTED, made

WAYS = [
    replace(WANTED, layout="once"),
    replace(WANTED, partition="100s", layout="window"),
    replace(WANTED, user="user", gap="20s", partition="100s"),
]


def inputs(folder: Path, rows: list[Row], files: int = 2) -> DataFlags:
    each = -(-len(rows) // files)
    paths = [folder / f"in-{k}.parquet" for k in range(files)]
    for k, path in enumerate(paths):
        write(path, rows[k * each : (k + 1) * each], 20)
    return DataFlags(f"parquet:{','.join(map(str, paths))}", schema=schema(folder))


def files_of(folder: Path, data: DataFlags, of: Wanted, engine: Any = None) -> tuple[dict[str, bytes], dict[str, Any]]:
    out = folder / "out"
    told = convert_by_session(data.files(), str(out), of, engine, force=True, json=True, quiet=True)
    assert not (folder / "out.unfinished").exists()
    del told["spilled_bytes"]
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}, told


@given(
    n=st.integers(1, 150),
    seed=st.integers(0, 9),
    of=st.sampled_from(WAYS),
    load=st.integers(1, 1 << 15),
    least=st.integers(1, 12),
    unit=st.integers(1 << 12, 1 << 14),
)
@cases(15)
def test_bytes_do_not_depend_on_how_rows_are_cut(
    tmp_path_factory: Any, n: int, seed: int, of: Wanted, load: int, least: int, unit: int
) -> None:
    folder = tmp_path_factory.mktemp("spark")
    data = inputs(folder, made(n, 1 + n // 10, seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wanted, "unit", unit)
        whole = files_of(folder, data, of)
        patch.setattr(Wanted, "load", load)
        assert files_of(folder, data, of) == whole
        patch.setattr(spark, "TASKS", least)
        patch.setattr(spark, "LARGEST", 1 + load // 4)
        assert files_of(folder, data, of, Spark(session=Session(seed))) == whole
    assert len(whole[0]) > 1 or n < 100


def test_rows_that_take_more_than_the_first_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = inputs(tmp_path, made(400, 40))
    monkeypatch.setattr(Wanted, "unit", 1 << 13)
    here = files_of(tmp_path, data, WANTED)
    grids = []
    counted = Spark._counted
    monkeypatch.setattr(Spark, "_counted", lambda *args: grids.append(args[-1]) or counted(*args))
    monkeypatch.setattr(spark, "grown", lambda files: 1)
    assert files_of(tmp_path, data, WANTED, Spark(session=Session(0))) == here
    assert len(grids) == 2 and grids[0] < grids[1]


@pytest.mark.parametrize("parts", [1, 3, 7, 100])
def test_stretches_hold_each_row_once(tmp_path: Path, parts: int) -> None:
    files = inputs(tmp_path, made(200, 10), 3).files()
    cut = stretches(files, parts)
    assert len(cut) == min(parts, {1: 1, 3: 3, 7: 6, 100: 12}[parts])
    rows = [p.labels for begin, end in cut for p in replace(files, begin=begin, end=end).pieces()]
    assert sum(map(len, rows)) == 200


def test_it_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    data, of = inputs(tmp_path, made(400, 40)), replace(WANTED, partition="100s")
    (tmp_path / "whole").mkdir()
    whole = files_of(tmp_path / "whole", data, of)
    kept = []

    class Ended(Spark):
        def finish(self, work: Path, shape: Any, manifest: Any) -> Any:
            *_, last = super().finish(work, shape, manifest)
            kept.extend(sorted((work / "parts").iterdir()))
            for path in kept[1::2]:
                path.unlink()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files_of(tmp_path, data, of, Ended(session=Session(0)))
    assert len(kept) > 3
    with pytest.raises(ValueError, match="is of a convert with engine ended, not local: run the command as it was"):
        files_of(tmp_path, data, of)
    stamps = [path.stat().st_mtime_ns for path in kept[::2]]
    Ended.finish = Spark.finish  # type: ignore[method-assign]
    assert files_of(tmp_path, data, of, Ended(session=Session(1))) == whole
    assert [(tmp_path / "out" / path.name).stat().st_mtime_ns for path in kept[::2]] == stamps


def test_a_malformed_row_is_the_sentence_that_it_is_without_spark(tmp_path: Path) -> None:
    rows = made(100, 5)
    rows[70]["visit"] = None
    data = inputs(tmp_path, rows)
    said = []
    for engine in (None, Spark(session=Session(0))):
        with pytest.raises(ValueError, match="session column visit is nothing") as error:
            files_of(tmp_path, data, WANTED, engine)
        said.append(str(error.value))
        shutil.rmtree(tmp_path / "out.unfinished")
    assert said[0] == said[1]
    skipping = replace(data, bad_rows="skip")
    here = files_of(tmp_path, skipping, WANTED)
    assert here[1]["bad_rows_skipped"] == 1 and "row 1 of row group 2" in here[1]["first_bad_row"]
    assert files_of(tmp_path, skipping, WANTED, Spark(session=Session(0))) == here


def test_a_session_of_ones_own_gets_its_settings_back(tmp_path: Path) -> None:
    session = Session(0)
    session.conf.set(next(iter(spark.SETTINGS)), "7")
    with Spark(session=session):
        assert session.conf.get(next(iter(spark.SETTINGS))) == "8"
    assert session.conf.get(next(iter(spark.SETTINGS))) == "7"


MISSING = {
    "pyspark": "--engine is 'spark', and pyspark is not installed: pip install 'skirl[spark]'",
    "java": "--engine is 'spark', and there is no Java: install Java 17 or later, set JAVA_HOME to it, or set --master to",
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    monkeypatch.setattr(spark, "find_spec", lambda name: None if what == "pyspark" else name)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    data = inputs(tmp_path, made(3, 1), 1)
    flags = ["--data", data.data, "--schema", str(data.schema), "--by", "session", "--out", str(tmp_path / "out")]
    assert cli.main(["convert", *flags, "--engine", "spark"]) == 2
    error = capsys.readouterr().err
    assert MISSING[what] in error and error.count("\n") == 1 and not (tmp_path / "out.unfinished").exists()


@pytest.mark.skipif(
    find_spec("pyspark") is None or not spark._has_java(),
    reason="pyspark or Java is missing: pip install 'skirl[spark]'",
)
@pytest.mark.timeout(1200)  # its processes import torch one by one, which takes minutes while others use the cores
@pytest.mark.filterwarnings("ignore")  # Spark's
def test_spark_writes_the_same_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = inputs(tmp_path, made(2000, 100))
    flags = [
        "--data",
        data.data,
        "--schema",
        str(data.schema),
        "--by",
        "session",
        "--partition",
        "100s",
        "--quiet",
        "--json",
    ]
    assert cli.main(["convert", *flags, "--out", str(tmp_path / "here")]) == 0
    assert (
        cli.main(["convert", *flags, "--out", str(tmp_path / "spark"), "--engine", "spark", "--master", "local[2]"])
        == 0
    )
    here, there = ({p.name: p.read_bytes() for p in sorted((tmp_path / of).iterdir())} for of in ("here", "spark"))
    assert here == there and len(here) >= 4
