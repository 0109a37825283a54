"""Files by session, compared with a plain sort of their rows in Python."""

import errno
import json
import os
import random
import resource
import shutil
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl import cli
from skirl.data.files.schema import BUILT_IN, FileSchema
from skirl.data.flags import DataFlags
from skirl.dedup import layout as layouts
from skirl.dedup import order
from skirl.dedup.by_session import convert_by_session
from skirl.dedup.commands import Convert
from skirl.dedup.finish import finish
from skirl.dedup.spill import HELD, Spill, Spilled, path_of
from skirl.dedup.stretch import Stretch
from skirl.dedup.wanted import BASE, Wanted, loads, shaped
from skirl.store.disk.os_files import DiskError, Lock
from skirl.tools import progress
from skirl.tools.flags import WrongFlags
from skirl.tools.os_errors import NotWritten
from tests.cases import cases
from tests.dedup.rows import SCHEMA, TYPES, Row, schema, write
from tests.warm import Python

WANTED = Wanted(None, None, None, None, BASE, "rows", "zstd", False)
"""Has so little memory that a few hundred rows take many files."""


def made(n: int, sessions: int, seed: int = 0, width: int = 60) -> list[Row]:
    """Return rows in a random order, numbered by `price`."""
    draw = random.Random(seed)
    lists = {v: [draw.randrange(1000) for _ in range(draw.randrange(width))] for v in range(sessions)}
    rows = []
    for i in range(n):
        visit = draw.randrange(sessions)
        if draw.random() < 0.2:
            lists[visit] = [draw.randrange(1000) for _ in range(draw.randrange(width))]
        one = {"click": i % 2, "price": float(i), "item": draw.randrange(50), "seen": lists[visit], "bought": [visit]}
        rows.append(one | {"visit": visit, "when": draw.randrange(400), "user": f"u{visit}"})
    return rows


def converted(
    folder: Path, rows: list[Row], wanted: Wanted, *, files: int = 2
) -> tuple[list[list[Row]], dict[str, Any]]:
    """Convert rows, and return the rows of each file and the command's result."""
    each = -(-len(rows) // files)
    for k in range(files):
        write(folder / f"in-{k}.parquet", rows[k * each : (k + 1) * each], 50)
    paths = ",".join(str(folder / f"in-{k}.parquet") for k in range(files))
    source = DataFlags(f"parquet:{paths}", schema=schema(folder)).files()
    told = convert_by_session(source, str(folder / "out"), wanted, force=True, json=True, quiet=True)
    assert not (folder / "out.unfinished").exists()
    return [pq.read_table(path).to_pylist() for path in sorted((folder / "out").iterdir())], told


def test_a_folder_that_files_are_read_from_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    source = DataFlags(write(tmp_path / "data" / "in.parquet", made(8, 2)), schema=schema(tmp_path)).files()
    for out in (tmp_path, tmp_path / "data"):
        with pytest.raises(ValueError, match=r"the folder that .*in\.parquet is read from: name another"):
            convert_by_session(source, str(out), WANTED, force=True, json=True, quiet=True)
    assert (tmp_path / "data" / "in.parquet").is_file()


def expected(rows: list[Row], wanted: Wanted) -> Counter[tuple[float, ...]]:
    """Return sessions as the numbers of their rows in order, by a plain sort."""
    gap = int(wanted.gap[:-1]) if wanted.gap else None
    part = int(wanted.partition[:-1]) if wanted.partition else 1 << 30
    users: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        users[row["visit"]].append(row)
    found = []
    for own in users.values():
        session: list[Row] = []
        for row in sorted(own, key=lambda row: (row["when"], row["price"])):
            last = session[-1]["when"] if session else None
            if last is not None and (
                row["when"] // part != last // part or (gap is not None and row["when"] - last > gap)
            ):
                found.append(tuple(r["price"] for r in session))
                session = []
            session.append(row)
        found.append(tuple(r["price"] for r in session))
    return Counter(found)


def sessions_in(files: list[list[Row]], wanted: Wanted) -> Counter[tuple[float, ...]]:
    """Return the same for the files written: a session ends where another begins, or at the end of a file."""
    part = int(wanted.partition[:-1]) if wanted.partition else 1 << 30
    found = []
    for rows in files:
        assert len({row["when"] // part for row in rows}) == 1
        name = "session" if wanted.user else "visit"
        last = None
        for row in rows:
            if row[name] != last:
                found.append([])
            last = row[name]
            found[-1].append(row["price"])
    assert sorted(each[0]["when"] // part for each in files) == [each[0]["when"] // part for each in files]
    return Counter(map(tuple, found))


ways = st.sampled_from(
    [
        WANTED,
        replace(WANTED, partition="100s"),
        replace(WANTED, user="user", gap="20s"),
        replace(WANTED, user="user", gap="20s", partition="100s"),
    ]
)


@given(n=st.integers(1, 300), sessions=st.integers(1, 30), seed=st.integers(0, 9), wanted=ways)
@cases(24)
def test_sessions_are_those_of_a_plain_sort(
    tmp_path_factory: Any, n: int, sessions: int, seed: int, wanted: Wanted
) -> None:
    rows = made(n, sessions, seed)
    files, told = converted(tmp_path_factory.mktemp("by"), rows, wanted)
    reference = expected(rows, wanted)
    assert sessions_in(files, wanted) == reference
    assert told["samples"] == n and told["sessions"] == reference.total()
    uncut = expected(rows, replace(wanted, partition=None)).total()
    assert (told["cut_at_borders"] > 0) == (reference.total() > uncut)
    by_number = {row["price"]: row for row in rows}
    for row in (row for rows in files for row in rows):
        own = by_number[row["price"]]
        assert (row["click"], len(row["seen"]), row["when"]) == (own["click"], len(own["seen"]), own["when"])


def test_many_buckets_make_many_files(tmp_path: Path) -> None:
    rows = made(3000, 200)
    files, told = converted(tmp_path, rows, WANTED, files=3)
    assert len(files) > 5 and told["spilled_bytes"] > told["bytes"]
    assert sessions_in(files, WANTED) == expected(rows, WANTED)


def test_a_session_that_is_too_long_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "LONGEST", 40)
    rows = made(300, 3)
    wanted = replace(WANTED, user="user", gap="1000s")
    files, told = converted(tmp_path, rows, wanted)
    whole = [len(session) for session in expected(rows, wanted)]
    assert told["cut_as_too_long"] == 3 and told["sessions"] == sum(-(-size // 40) for size in whole)
    assert max(map(len, sessions_in(files, wanted))) == 40


@pytest.mark.parametrize("unit", ["milliseconds", "microseconds"])
def test_times_count_what_the_schema_says(tmp_path: Path, unit: str) -> None:
    """The sessions and files are the same as with seconds, and the file names the unit of its times."""
    times = {"milliseconds": 1000, "microseconds": 1_000_000}[unit]
    wanted = replace(WANTED, user="user", gap="20s", partition="100s")
    rows = made(200, 12)
    long = [row | {"when": times * (1_700_000_000 + row["when"])} for row in rows]
    (tmp_path / "schema.toml").write_text(f'time_unit = "{unit}"\n{SCHEMA}')
    data = write(tmp_path / "in.parquet", long)
    source = DataFlags(data, schema=str(tmp_path / "schema.toml")).files()
    convert_by_session(source, str(tmp_path / "out"), wanted, force=False, json=True, quiet=True)
    files = [pq.read_table(path).to_pylist() for path in sorted((tmp_path / "out").iterdir())]
    back = [[row | {"when": row["when"] // times - 1_700_000_000} for row in each] for each in files]
    assert sessions_in(back, wanted) == expected(rows, wanted)
    assert DataFlags(f"parquet:{tmp_path / 'out'}").files().encoder.schema.time_unit == unit


def test_days_and_sessions_of_avazu(tmp_path: Path) -> None:
    """Its hours are YYMMDDHH: two users, each with two sessions a day, across the end of a month."""
    columns = BUILT_IN["avazu"].text.columns
    lines = [",".join(columns)]
    for day in ("141030", "141031", "141101"):
        for hour in ("03", "04", "20"):
            for user in ("a1", "b2"):
                given = {"click": "1", "hour": day + hour, "device_ip": user}
                lines.append(",".join(given.get(name, "1") for name in columns))
    (tmp_path / "train.csv").write_text("\n".join(lines) + "\n")
    flags = ["--by", "session", "--user", "device_ip", "--gap", "2h", "--partition", "1d", "--quiet"]
    data = f"avazu:{tmp_path / 'train.csv'}"
    assert cli.main(["convert", "--data", data, "--out", str(tmp_path / "plain.parquet"), "--quiet"]) == 0
    for number, each in enumerate([data, f"parquet:{tmp_path / 'plain.parquet'}"]):
        out = tmp_path / f"out-{number}"
        assert cli.main(["convert", "--data", each, "--out", str(out), *flags]) == 0
        tables = [pq.read_table(path) for path in sorted(out.iterdir())]
        days = [{int(when) // 100 for when in table.column("time").to_pylist()} for table in tables]
        assert days == [{141030}, {141031}, {141101}]
        assert [len(set(table.column("session").to_pylist())) for table in tables] == [4, 4, 4]


def counting(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the frames that are written and read."""
    seen = dict.fromkeys(("written", "keys", "read"), 0)

    def wrapped(name: str, real: Any) -> Any:
        def count(*args: Any) -> Any:
            seen[name] += 1 if name == "written" else len(args[1])
            return real(*args)

        return count

    for of, method, name in ((Spill, "_note", "written"), (Spilled, "keys", "keys"), (Spilled, "read", "read")):
        monkeypatch.setattr(of, method, wrapped(name, getattr(of, method)))
    return seen


@pytest.mark.parametrize("timed", [True, False])
def test_a_robot_is_read_piece_by_piece_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: bool) -> None:
    """One session has nearly all rows. They are narrow, and in any order of time or all at one time."""
    rows = [row | {"visit": 1, "when": row["when"] if timed else 7} for row in made(3000, 1, width=2)]
    rows += [row | {"visit": 2 + i % 9, "price": 5000.0 + i} for i, row in enumerate(made(50, 1))]
    wanted = replace(WANTED, layout="once")
    seen, held = counting(monkeypatch), []
    real = Stretch._between
    monkeypatch.setattr(Stretch, "_between", lambda *args: held.append(real(*args)) or held[-1])
    files, told = converted(tmp_path, rows, wanted)
    assert told["sessions"] == 10
    assert sessions_in(files, WANTED) == expected(rows, WANTED)
    taken = [HELD * len(piece) + int(piece.sizes.sum()) for piece in held]
    assert sum(taken) > 6 * wanted.unit and max(taken) < 1.5 * wanted.unit
    assert seen["read"] < 2.5 * seen["written"] and seen["keys"] < 4 * seen["written"]
    groups = groups_in(tmp_path / "out")
    monkeypatch.setattr(Stretch, "_borders", lambda *args: [])
    assert converted(tmp_path, rows, wanted) == (files, told) and groups_in(tmp_path / "out") == groups


def groups_in(folder: Path) -> list[list[int]]:
    """Return the rows of each row group of each file."""
    metas = [pq.read_metadata(path) for path in sorted(folder.iterdir())]
    return [[meta.row_group(k).num_rows for k in range(meta.num_row_groups)] for meta in metas]


def test_many_partitions_need_few_files_and_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come in any order of time, so each load has rows of all partitions and buckets."""
    seen, (soft, hard) = counting(monkeypatch), resource.getrlimit(resource.RLIMIT_NOFILE)
    rows, wanted = made(3000, 200), replace(WANTED, partition="20s")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, hard))
    try:
        files, _ = converted(tmp_path, rows, wanted)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sessions_in(files, wanted) == expected(rows, wanted) and len(files) == 20
    assert seen["written"] < 800 and seen["read"] < 1.5 * seen["written"]


def test_files_are_planned_by_what_rows_take_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Parquet input is a hundredth of the size in memory."""
    rows = [row | {"seen": [7] * 99, "user": ""} for row in made(3000, 200, width=2)]
    seen = counting(monkeypatch)
    files, told = converted(tmp_path, rows, WANTED)
    size = sum(path.stat().st_size for path in tmp_path.glob("in-*"))
    assert told["spilled_bytes"] > 10 * size
    assert told["spilled_bytes"] / WANTED.unit < len(files) < 3 * told["spilled_bytes"] / WANTED.unit
    assert seen["read"] < 4 * seen["written"]


def test_a_session_of_wide_rows_is_many_row_groups(tmp_path: Path) -> None:
    """A row group is a quarter of what is sorted at once. All have the same session, and lists stay whole."""
    seen = list(range(200))
    rows = [row | {"seen": seen, "bought": seen} for row in made(60, 1)]
    by, wanted = schema(tmp_path), replace(WANTED, layout="once", user="user", gap="1000s")
    files, told = converted(tmp_path, rows, wanted)
    assert told["sessions"] == 1 and len({row["session"] for own in files for row in own}) == 1
    assert [rows for own in groups_in(tmp_path / "out") for rows in own] == [5] * 12
    plain, out = (DataFlags(f"parquet:{tmp_path}/{name}", schema=of) for name, of in (("in-*", by), ("out", None)))
    lists = [[ids for piece in data.files().pieces() for ids in piece.ids] for data in (plain, out)]
    assert [sum(map(len, ids)) for ids in lists] == [60 * 401] * 2


def test_rows_are_decoded_a_few_at_a_time(tmp_path: Path) -> None:
    """From one row group, with or without lists left out, in files of both kinds."""
    rows = [row | {"seen": [7] * 500} for row in made(400, 2, width=2)]
    write(tmp_path / "in.parquet", rows)
    table = pq.read_table(tmp_path / "in.parquet")
    feather.write_feather(table, tmp_path / "in.arrow", chunksize=400)
    by = schema(tmp_path)
    once = DataFlags(f"parquet:{tmp_path}/in.parquet", schema=by)
    wanted = replace(WANTED, memory=BASE + (1 << 20), layout="once")
    convert_by_session(once.files(), str(tmp_path / "out"), wanted, force=True, json=True, quiet=True)
    assert groups_in(tmp_path / "out")[0][0] > 5
    for name in ("in.parquet", "in.arrow", "out"):
        of = None if name == "out" else by
        files, shape = shaped(DataFlags(f"parquet:{tmp_path}/{name}", schema=of).files(), WANTED)
        sizes = [len(piece) for piece in files.pieces(expanded=False)]
        if name != "out":
            assert 400 * 4000 / WANTED.piece < len(sizes) < 6 * 400 * 4000 / WANTED.piece
        tables = list(loads(files, shape, WANTED.load))
        assert sum(map(len, tables)) == 400 and max(table.nbytes for table in tables) <= WANTED.load
        assert files.dataset.anew().count() == 400


def test_a_row_group_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    rows = [row | {"seen": [i] * 500, "bought": []} for i, row in enumerate(made(200, 1))]
    rows[1]["seen"] = rows[0]["seen"]
    table = pa.Table.from_pylist(rows, TYPES)
    table = layouts.once(table.drop_columns(["user"]), {"run": ["seen"]}, np.arange(200) == 0)
    of = layouts.with_runs(FileSchema.parse(SCHEMA), {"run": ["seen"]})
    with layouts.writer_of(tmp_path / "in.parquet", table.schema, of, "none", []) as writer:
        writer.write_table(table)
    data = DataFlags(f"parquet:{tmp_path}/in.parquet")
    with pytest.raises(ValueError, match=r"row group 1 takes about 0 MiB, and is read as a whole.*: give more memory"):
        convert_by_session(data.files(), str(tmp_path / "out"), WANTED, force=False, json=True, quiet=True)


TWICE = """
import sys
from skirl import cli
from skirl.tools.machine import peak_bytes
folder, *flags = sys.argv[1:]
for name in ("few", "many"):
    code = cli.main(["convert", "--data", f"parquet:{folder}/{name}.parquet", "--out", f"{folder}/{name}", *flags])
    print(code, peak_bytes())
"""


def test_a_wide_row_group_takes_no_more_than_it_may(tmp_path: Path, python: Python) -> None:
    """192 MB of rows in one row group, as most writers write them; the file itself is small."""
    for name, rows, ids in (("few", 90, 40), ("many", 3000, 4000)):
        places = pa.array(np.arange(rows + 1, dtype=np.int32) * ids)
        lists = pa.ListArray.from_arrays(places, pa.array(np.zeros(rows * ids, np.int64)))
        columns = {"seen": lists, "bought": lists, "item": np.arange(rows), "visit": np.arange(rows) // 9}
        table = pa.table(columns | dict.fromkeys(("click", "price", "when"), np.zeros(rows, np.int8)))
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=rows)
    flags = ["--by", "session", "--memory", "640MiB", "--schema", schema(tmp_path), "--quiet"]
    done = python.run(TWICE, str(tmp_path), *flags)
    assert done.returncode == 0, done.stderr
    (failed, base), (wrong, peak) = (map(int, line.split()) for line in done.stdout.splitlines() if line[:1] == "0")
    assert not failed and not wrong and pq.read_metadata(tmp_path / "many.parquet").num_row_groups == 1
    assert peak - base <= (640 << 20) - BASE


def test_same_says_that_nothing_else_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, by = write(tmp_path / "in.parquet", made(300, 20)), schema(tmp_path)
    out = str(tmp_path / "out")
    flags = ["--by", "session", "--partition", "100s", "--schema", by]
    assert cli.main(["convert", "--data", data, "--out", out, *flags]) == 0
    assert "cut at borders of 100s" in capsys.readouterr().out
    assert cli.main(["same", "--data", data, "--as", f"parquet:{out}", "--schema", by, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True


@pytest.mark.parametrize("by", [["--user", "user", "--gap", "20s"], ["--session", "item"]], ids=["users", "another"])
@pytest.mark.parametrize("named", ["visit", "session"])
def test_same_compares_columns_and_not_what_they_stand_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], by: list[str], named: str
) -> None:
    """Sessions computed from users, or taken from another column, match no column of that name in the data."""
    data, file = write(tmp_path / "in.parquet", made(60, 9)), Path(schema(tmp_path))
    if named != "visit":
        table = pq.read_table(tmp_path / "in.parquet")
        names = [named if name == "visit" else name for name in table.column_names]
        pq.write_table(table.rename_columns(names), tmp_path / "in.parquet")
        file.write_text(SCHEMA.replace('"visit"', f'"{named}"'))
    out = f"parquet:{tmp_path / 'out'}"
    given = ["--data", data, "--schema", str(file), "--quiet"]
    assert cli.main(["convert", "--out", str(tmp_path / "out"), "--by", "session", *by, *given]) == 0
    asked = ["same", "--as", out, "--json", *given, *(by if by[0] == "--session" else [])]
    capsys.readouterr()
    assert cli.main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["same"] and "time" in told["compared"]
    if by[0] == "--session":
        assert "session" in told["compared"] and not told["not_compared"]
        return
    assert told["not_compared"] == [f"{named} of --data", f"{'session' if named == 'visit' else 'session_'} of --as"]
    rows = made(60, 9)
    rows[7]["when"] += 1
    write(tmp_path / "in.parquet", rows)
    if named == "visit":
        assert cli.main(asked) == 1


KILLED = """
import os, sys
from skirl import cli
moment, later, out, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
whole, seen, after = os.path.exists(out + ".unfinished/spilled.json"), 0, 0
def count(event, args):
    global whole, seen, after
    if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.unlink", "mmap.__new__", "os.listdir"):
        seen, after = seen + 1, after + whole
        whole = whole or event == "os.rename" and str(args[1]).endswith("spilled.json")
        if seen == moment or 0 < after == later:
            os.kill(os.getpid(), 9)
sys.addaudithook(count)
code = cli.main([*argv, "--out", out])
print(seen - after, after)
sys.exit(code)
"""
"""Killed at a moment of all, or at one of those after all rows have been spilled; 0 is never reached."""


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_killed_and_begun_again_it_writes_the_same_bytes(tmp_path: Path, python: Python, kills: int) -> None:
    """Killed while rows are spilled, and twice while files are written. Finished files stay as they are."""
    rows = made(600, 40)
    data, by = write(tmp_path / "in.parquet", rows, 50), schema(tmp_path)
    flags = ["--data", data, "--schema", by, "--by", "session", "--partition", "40s", "--quiet", "--json"]

    def run(out: str, moment: int = 0, later: int = 0) -> Any:
        return python.run(KILLED, str(moment), str(later), str(tmp_path / out), "convert", *flags)

    def bytes_of(out: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((tmp_path / out).iterdir())}

    whole = run("whole")
    assert whole.returncode == 0, whole.stderr
    spilled, after = map(int, whole.stdout.splitlines()[-1].split())
    draw, ended = random.Random(0), []
    while len(ended) < kills:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        during = draw.randrange(after // 4, after // 2)
        # A run that goes on does at least what was left, but for the spill, which may be there in part.
        for moment, later in ((draw.randrange(1, spilled // 2), 0), (0, during), (0, draw.randrange(1, after // 4))):
            assert not (tmp_path / "out").exists()
            ended.append(run("out", moment, later).returncode)
        parts = {
            path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.unfinished" / "parts").glob("*.parquet")
        }
        assert run("out").returncode == 0
        stayed = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
        assert len(parts) >= 2 and parts.items() <= stayed.items()
        assert bytes_of("out") == bytes_of("whole") and len(stayed) > len(parts)
    assert set(ended) == {-9}


def begun(folder: Path, rows: list[Row], wanted: Wanted = WANTED) -> DataFlags:
    """Leave a convert that was interrupted once its rows had gone to their buckets."""
    data = DataFlags(write(folder / "in.parquet", rows), schema=schema(folder))
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr("skirl.dedup.local.finish", _ended)
        convert_by_session(data.files(), str(folder / "out"), wanted, force=False, json=True, quiet=True)
    return data


def _ended(*args: Any) -> None:
    raise KeyboardInterrupt


def test_another_command_does_not_go_on(tmp_path: Path) -> None:
    data = begun(tmp_path, made(50, 5))
    go = {"force": False, "json": True, "quiet": True}
    with pytest.raises(
        ValueError, match=r"out.unfinished is of a convert with layout rows, not once: run the command as"
    ):
        convert_by_session(data.files(), str(tmp_path / "out"), replace(WANTED, layout="once"), **go)
    write(tmp_path / "in.parquet", made(51, 5))
    with pytest.raises(ValueError, match=r"is of a convert with other files \(.*in.parquet \(.* bytes"):
        convert_by_session(data.files(), str(tmp_path / "out"), WANTED, **go)


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    """Interrupted while the third is written."""
    data, ended = DataFlags(write(tmp_path / "in.parquet", made(60, 5)), schema=schema(tmp_path)), []
    parts = tmp_path / "out.unfinished" / "parts"

    def third(*args: Any) -> Any:
        if args[1] == 2:
            ended.extend((path.name, path.stat().st_mtime_ns) for path in parts.iterdir())
            raise KeyboardInterrupt
        return finish(*args)

    go = {"force": False, "json": True, "quiet": True}
    wanted = replace(WANTED, partition="100s")
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr("skirl.dedup.local.finish", third)
        convert_by_session(data.files(), str(tmp_path / "out"), wanted, **go)
    convert_by_session(data.files(), str(tmp_path / "out"), wanted, **go)
    there = {(path.name, path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir()}
    assert len(ended) == 2 and len(there) == 4 and set(ended) <= there


@pytest.mark.parametrize("damage", ["shorter", "other bytes", "gone", "index"])
def test_a_damaged_spill_is_refused(tmp_path: Path, damage: str) -> None:
    data = begun(tmp_path, made(50, 5))
    spill = path_of(tmp_path / "out.unfinished" / "spill", "rows.index" if damage == "index" else "rows")
    raw = bytearray(spill.read_bytes())
    raw[90] ^= 1
    spill.write_bytes(raw[:-8] if damage == "shorter" else raw)
    if damage == "gone":
        spill.unlink()
    found = {
        "shorter": "bytes, and had", "other bytes": "is damaged behind byte", "gone": "cannot be read",
        "index": "is not what was written",
    }[damage]  # fmt: skip
    with pytest.raises(ValueError, match=f"{spill}.*{found}.*: remove .*out.unfinished, and run the command again"):
        convert_by_session(data.files(), str(tmp_path / "out"), WANTED, force=False, json=True, quiet=True)


MISTAKES = {
    "no session": (
        ["--schema", "{bare}"],
        "nothing says which rows are a session: set --session to the column that does",
    ),
    "no such column": (["--session", "visits"], "it has no column 'visits', did you mean 'visit'?"),
    "a session that is null": (
        ["--session", "sometimes"],
        "row 2 of row group 1: session column sometimes is nothing",
    ),
    "a time that is NaN": (
        ["--schema", "{real}"],
        "row 3 of row group 1: time column real is nan, expected a finite number",
    ),
    "a time that counts milliseconds": (
        ["--schema", "{late}", "--partition", "1d"],
        "row 2 of row group 1: time column late is 1700000000000, expected seconds since 1970, 1e11 at most (if it",
    ),
    "a time that is no hour": (
        ["--schema", "{hours}"],
        "row 4 of row group 1: time column hours is 14102124, expected a day and an hour as YYMMDDHH",
    ),
    "gap alone": (
        ["--gap", "30m"],
        "--gap is '30m', and no user is named: set --user to a column",
    ),
    "wrong gap": (["--user", "user", "--gap", "30"], "--gap is '30': set it to a length of time such as 30m or 1d"),
    "too little memory": (["--memory", "1MiB"], "--memory is '1MiB': set it to 640.0 MiB or more"),
    "out inside of in": (
        ["--data", "parquet:{folder}", "--out", "{folder}/a/b"],
        "which is read: name a folder outside it",
    ),
    "out that a pattern finds": (
        ["--data", "parquet:{folder}/**/*.parquet", "--out", "{folder}/a/b"],
        "/in/**/*.parquet, which is read: name a folder outside it",
    ),
    "unfinished files that a pattern finds": (
        ["--data", "parquet:{folder}/*.parquet,{folder}/*.unfinished/*/*", "--out", "{folder}/b"],
        "/in/*.unfinished/*/*, which is read: name a folder outside it",
    ),
    "out is there": (
        ["--out", "{folder}/a"],
        "which already exists: name another folder, or add --force to replace it",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    folder = tmp_path / "in"
    (folder / "a").mkdir(parents=True)
    rows = made(4, 2)
    write(folder / "in.parquet", rows)
    table = pq.read_table(folder / "in.parquet")
    table = table.append_column("sometimes", pa.array([1, None, 3, 4])).append_column(
        "real", pa.array([1.0, 2.0, float("nan"), 4.0])
    )
    table = table.append_column("late", pa.array([5, 1_700_000_000_000, 7, 8]))
    table = table.append_column("hours", pa.array([14102100, 14102101, 14102123, 14102124]))
    pq.write_table(table, folder / "in.parquet")
    by = Path(schema(tmp_path)).read_text()
    (tmp_path / "bare.toml").write_text(by.replace('session = "visit"', ""))
    for name in ("real", "late"):
        (tmp_path / f"{name}.toml").write_text(by.replace('"when"', f'"{name}"'))
    (tmp_path / "hours.toml").write_text(by.replace('"when"', '"hours"\ntime_unit = "YYMMDDHH"'))
    more, sentence = MISTAKES[what]
    names = {name: tmp_path / f"{name}.toml" for name in ("bare", "real", "late", "hours")} | {"folder": folder}
    given = {
        "--data": f"parquet:{folder}/in.parquet",
        "--out": str(tmp_path / "out"),
        "--schema": str(tmp_path / "schema.toml"),
    }
    given |= {flag: value.format(**names) for flag, value in zip(more[::2], more[1::2])}
    assert cli.main(["convert", "--by", "session", *(w for pair in given.items() for w in pair), "--quiet"]) in (1, 2)
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_two_converts_into_one_folder_are_refused(tmp_path: Path) -> None:
    work = tmp_path / "out.unfinished"
    work.mkdir()
    lock = Lock(work)
    data = DataFlags(write(tmp_path / "in.parquet", made(5, 2)), schema=schema(tmp_path))
    with pytest.raises(DiskError, match=r"out.unfinished is in use by process \d+"):
        convert_by_session(data.files(), str(tmp_path / "out"), WANTED, force=False, json=True, quiet=True)
    (tmp_path / "out").mkdir()  # a convert with --force replaces it at its end
    for force in (True, False):
        with pytest.raises(DiskError, match=r"out.unfinished is in use by process \d+"):
            Convert(data.data, str(tmp_path / "out"), by="session", schema=data.schema, force=force, quiet=True).run()
        assert lock.is_there
    lock.release()


def test_a_folder_that_goes_before_it_is_locked_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another convert may finish in between."""
    data = DataFlags(write(tmp_path / "in.parquet", made(5, 2)), schema=schema(tmp_path))
    tries = []

    class Slow(Lock):
        def __init__(self, folder: Path) -> None:
            tries.append(folder)
            if len(tries) == 2:
                shutil.rmtree(folder)  # before the lock is opened
            super().__init__(folder)
            if len(tries) == 1:
                shutil.rmtree(folder)  # before it is looked at

    monkeypatch.setattr("skirl.dedup.by_session.Lock", Slow)
    convert_by_session(data.files(), str(tmp_path / "out"), WANTED, force=False, json=True, quiet=True)
    assert len(tries) == 3 and not (tmp_path / "out.unfinished").exists()


@pytest.mark.parametrize("force", [False, True])
def test_what_is_left_behind_the_last_step_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    data = DataFlags(write(tmp_path / "in.parquet", made(50, 5)), schema=schema(tmp_path))
    go = {"json": True, "quiet": True}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("skirl.dedup.by_session.shutil.rmtree", _ended_behind)
        convert_by_session(data.files(), str(tmp_path / "out"), WANTED, force=True, **go)
    assert (tmp_path / "out.unfinished" / "spilled.json").is_file()
    if force:
        convert_by_session(data.files(), str(tmp_path / "out"), WANTED, force=True, **go)
    else:
        with pytest.raises(WrongFlags, match="out, which already exists: name another folder, or add --force"):
            convert_by_session(data.files(), str(tmp_path / "out"), WANTED, force=False, **go)
    assert not (tmp_path / "out.unfinished").exists() and pq.read_table(tmp_path / "out").num_rows == 50


def _ended_behind(path: Path, ignore_errors: bool = False) -> None:
    if path.name == "out.unfinished":
        raise KeyboardInterrupt


def test_a_slash_behind_out_changes_nothing(tmp_path: Path) -> None:
    """As a shell completes a folder's name; the second time, the folder exists."""
    data, by = write(tmp_path / "in.parquet", made(50, 5)), schema(tmp_path)
    for force in (False, True):
        Convert(data, f"{tmp_path}/out/", by="session", schema=by, force=force, quiet=True).run()
        assert pq.read_table(tmp_path / "out").num_rows == 50
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out", "schema.toml"]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_bar_knows_how_much_there_is_to_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(progress, "ELSEWHERE", 0)
    monkeypatch.setattr("skirl.dedup.commands.PART", 1 << 10)
    monkeypatch.setattr(Wanted, "load", 1 << 11)
    rows = [{**row, "seen": [1], "bought": [2]} for row in made(300, 20)]
    data = write(tmp_path / "in.parquet", rows, 50)
    if kind == "csv":
        names = list(rows[0])
        lines = [
            ",".join(names),
            *(",".join(str(v[0] if isinstance(v, list) else v) for v in r.values()) for r in rows),
        ]
        (tmp_path / "in.csv").write_text("\n".join(lines) + "\n")
        Path(schema(tmp_path)).write_text(SCHEMA.replace("list = true", 'list = true\nseparator = "|"'))
        data = f"csv:{tmp_path / 'in.csv'}"
    by = str(tmp_path / "schema.toml") if kind == "csv" else schema(tmp_path)
    Convert(data, str(tmp_path / "out"), by="session", schema=by).run()
    lines = capsys.readouterr().out.splitlines()
    shown = [line[8:].partition(" · ")[0].split("/") for line in lines if line.startswith("convert ")]
    assert len(shown) > 2 and len({total for _, total in shown}) == 1
    assert shown[0][0] != shown[-1][0] == shown[-1][1]
    if kind == "parquet":
        assert shown[-1] == ["300", "300"]


def test_a_full_disk_is_a_sentence_and_then_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataFlags(write(tmp_path / "in.parquet", made(60, 5)), schema=schema(tmp_path))

    def full(file: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    go = {"force": False, "json": True, "quiet": True}
    for where in ("spill", "finish"):
        with monkeypatch.context() as patch, pytest.raises(NotWritten, match=r"the disk is full .* free some room"):
            patch.setattr(f"skirl.dedup.{where}.to_disk", full)
            convert_by_session(data.files(), str(tmp_path / "out"), WANTED, **go)
        assert not (tmp_path / "out").exists()
    convert_by_session(data.files(), str(tmp_path / "out"), WANTED, **go)
    assert pq.read_table(tmp_path / "out").num_rows == 60
