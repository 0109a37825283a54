"""Files by session, compared with a plain sort of their rows in Python."""

import json
import random
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skirl import cli
from skirl.cli import files as commands
from skirl.cli.files import Convert
from skirl.data.files.column import Column, Encoded, offsets_of
from skirl.data.files.schema import BUILT_IN, FileSchema
from skirl.data.flags import DataFlags
from skirl.dedup import layout
from skirl.dedup.by_session import convert_by_session, in_order
from skirl.dedup.row_hash import row_hashes
from skirl.dedup.sessions import KEYS, Sessions, with_keys
from skirl.store.disk.os_files import DiskError, Lock
from tests.cases import cases
from tests.data.logs import plain
from tests.dedup.rows import SCHEMA, Row, counted, schema, write
from tests.warm import Python

WANTED = Sessions(layout="rows", compression="zstd")


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
    folder: Path, rows: list[Row], wanted: Sessions, *, files: int = 2
) -> tuple[list[list[Row]], dict[str, Any]]:
    """Convert rows, and return the rows of each file and the command's result."""
    each = -(-len(rows) // files)
    for k in range(files):
        write(folder / f"in-{k}.parquet", rows[k * each : (k + 1) * each], 50)
    paths = ",".join(str(folder / f"in-{k}.parquet") for k in range(files))
    source = DataFlags(f"parquet:{paths}", schema=schema(folder)).files()
    found = convert_by_session(source, str(folder / "out"), wanted, force=True)
    assert not (folder / "out.unfinished").exists()
    return [pq.read_table(path).to_pylist() for path in sorted((folder / "out").iterdir())], found


def expected(rows: list[Row], wanted: Sessions) -> Counter[tuple[float, ...]]:
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
            if last is not None and (row["when"] // part != last // part or (gap and row["when"] - last > gap)):
                found.append(tuple(r["price"] for r in session))
                session = []
            session.append(row)
        found.append(tuple(r["price"] for r in session))
    return Counter(found)


def sessions_in(files: list[list[Row]], wanted: Sessions) -> Counter[tuple[float, ...]]:
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


BY_USER = replace(WANTED, user="user", gap="20s")
ways = st.sampled_from([WANTED, replace(WANTED, partition="100s"), BY_USER, replace(BY_USER, partition="100s")])


@given(n=st.integers(1, 300), sessions=st.integers(1, 30), seed=st.integers(0, 9), wanted=ways)
@cases(24)
def test_sessions_are_those_of_a_plain_sort(
    tmp_path_factory: Any, n: int, sessions: int, seed: int, wanted: Sessions
) -> None:
    rows = made(n, sessions, seed)
    files, found = converted(tmp_path_factory.mktemp("by"), rows, wanted)
    reference = expected(rows, wanted)
    assert sessions_in(files, wanted) == reference
    assert found["samples"] == n and found["sessions"] == reference.total()
    assert counted(kept_of(row) for own in files for row in own) == counted(map(kept_of, rows))


def kept_of(row: Row) -> Row:
    """Return what is written as it was, but for fingerprints, of which only the number is compared."""
    return {name: float(row[name]) for name in ("click", "price", "when")} | {"seen": len(row["seen"])}


def test_small_groups_and_files_hold_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups begin at sessions, but for one that is too large, and are whole: readers get lists as they were."""
    rows = made(3000, 60, width=9)
    rows += [row | {"visit": 99, "price": 5000.0 + i} for i, row in enumerate(made(400, 1, 1, 9))]
    whole, _ = converted(tmp_path, rows, replace(WANTED, layout="once"))
    plain = batches_of(tmp_path)
    monkeypatch.setattr(layout, "SLICE", 200)
    monkeypatch.setattr(layout, "FILE_BYTES", 1 << 15)
    files, found = converted(tmp_path, rows, replace(WANTED, layout="once"))
    assert len(files) > 4 and sum(map(len, files)) == found["samples"] == 3400
    assert [row["price"] for own in files for row in own] == [row["price"] for row in whole[0]]
    sizes = groups_in(tmp_path / "out")
    assert max(n for own in sizes for n in own) <= 200 and sum(n == 200 for own in sizes for n in own) < 5
    assert batches_of(tmp_path) == plain


def batches_of(folder: Path) -> list[Any]:
    return [plain(batch) for batch in DataFlags(f"parquet:{folder / 'out'}", batch=64).stream()]


def groups_in(folder: Path) -> list[list[int]]:
    metas = [pq.read_metadata(path) for path in sorted(folder.iterdir())]
    return [[meta.row_group(k).num_rows for k in range(meta.num_row_groups)] for meta in metas]


NUMBERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
TIMES = [*NUMBERS, pa.float32(), pa.float64(), pa.date32(), pa.date64(), pa.timestamp("s"), pa.timestamp("ns"),
         pa.timestamp("us", "UTC"), pa.timestamp("ms", "+02:00")]  # fmt: skip


@given(
    session=st.sampled_from([*NUMBERS, pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]),
    time=st.sampled_from(TIMES), seed=st.integers(0, 9),
)  # fmt: skip
@cases(20)
def test_kept_columns_of_any_type_stay_as_they_are(tmp_path_factory: Any, session: Any, time: Any, seed: int) -> None:
    """In the order of a stable sort of Arrow by session and time."""
    folder, draw = tmp_path_factory.mktemp("types"), np.random.default_rng(seed)
    visits, days = (pa.array(draw.integers(0, most, 120)) for most in (9, 90))
    visits = visits.cast(pa.string()).dictionary_encode() if pa.types.is_dictionary(session) else visits.cast(session)
    if pa.types.is_integer(time) or pa.types.is_floating(time) or time == pa.date32():
        when = days.cast(pa.int32()).cast(time)
    else:
        when = pa.array(days.to_numpy() * 86_600_000).cast(pa.timestamp("ms")).cast(time)
    rows = made(120, 9, seed)
    write(folder / "in.parquet", [{name: of for name, of in row.items() if name in SCHEMA} for row in rows])
    table = pq.read_table(folder / "in.parquet").drop_columns(["visit", "when"])
    table = table.append_column("visit", visits).append_column("when", when)
    pq.write_table(table, folder / "in.parquet")
    source = DataFlags(f"parquet:{folder / 'in.parquet'}", schema=schema(folder)).files()
    convert_by_session(source, str(folder / "out"), WANTED)
    plain = visits if pa.types.is_integer(session) else visits.cast(pa.string())
    out = pq.read_table(folder / "out")
    assert out.column("visit").type == plain.type
    assert out.column("when").type == pq.read_table(folder / "in.parquet").column("when").type
    reference = table.set_column(table.column_names.index("visit"), "visit", plain)
    reference = reference.append_column("row", pa.array(range(120)))
    reference = reference.sort_by([("visit", "ascending"), ("when", "ascending"), ("row", "ascending")])
    names = ["visit", "when", "price", "click"]
    by_visit = [defaultdict(list), defaultdict(list)]
    for own, rows_of in zip(by_visit, (out, reference), strict=True):
        for row in rows_of.select(names).to_pylist():
            own[row["visit"]].append((row["when"], row["price"], row["click"]))
    assert by_visit[0] == by_visit[1]
    visits_seen = out.column("visit").to_pylist()
    assert 1 + sum(a != b for a, b in pairwise(visits_seen)) == len(by_visit[0])


def test_more_rows_than_fit_are_spilled_and_come_back_in_order(tmp_path: Path) -> None:
    draw, seen = np.random.default_rng(0), []

    def tables() -> Any:
        for first in range(0, 400_000, 4000):
            ids = pa.ListArray.from_arrays(np.arange(4001, dtype=np.int32) * 20, draw.integers(0, 1 << 60, 80_000))
            days = pa.array(range(4000), pa.date64())
            table = pa.table({"ids": ids, "n": np.arange(first, first + 4000), "day": days})
            hashes = draw.integers(0, 5000, 4000).astype(np.uint64)
            yield with_keys(table, hashes, draw.random(4000).round(1), 1.0, first)

    given, spilled = list(tables()), 0
    for table in in_order(iter(given), tmp_path, 64 << 20):
        assert table.schema == given[0].schema
        seen.append(table)
        spilled = max(spilled, sum(path.stat().st_size for path in (tmp_path / "spill").iterdir()))
    assert spilled > 1 << 20
    assert pa.concat_tables(seen).equals(pa.concat_tables(given).sort_by([(key, "ascending") for key in KEYS]))


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


few = st.integers(0, 2)
row = st.tuples(st.lists(few, max_size=3), st.lists(few, max_size=2), few, few)


@given(st.lists(row, max_size=5), st.lists(row, max_size=5))
@cases(100)
@example([([1], [2], 0, 0), ([3], [4], 1, 1)], [([3], [4], 1, 1), ([1], [2], 0, 0)])
@example([([1], [2], 0, 0), ([3], [4], 1, 1)], [([1], [2], 1, 0), ([3], [4], 0, 1)])
@example([([1, 2], [], 0, 0)], [([2, 1], [], 0, 0)])
@example([([1], [2], 0, 0)], [([2], [1], 0, 0)])
def test_sums_of_hashes_are_equal_where_the_rows_are(one: list[Any], other: list[Any]) -> None:
    """In any order."""
    of = FileSchema.parse('session = "v"\n[[label]]\nname = "y"\n[[id]]\nnames = ["a", "b"]\nlist = true\n')
    sums = []
    for rows in (one, other):
        lists = [[r[k] for r in rows] for k in range(2)]
        ids = [Column(np.array([*chain(*bags)], np.int64), offsets_of([len(bag) for bag in bags])) for bags in lists]
        labels = np.array([[r[2]] for r in rows], np.float32).reshape(len(rows), 1)
        encoded = Encoded(labels, np.empty((len(rows), 0), np.float32), ids, np.arange(len(rows)))
        sums.append(row_hashes(encoded, of, {"v": pa.array([r[3] for r in rows], pa.int64())}).sum())
    assert (sums[0] == sums[1]) == (counted(map(numbered, one)) == counted(map(numbered, other)))


def numbered(values: Any) -> Row:
    return {str(k): value for k, value in enumerate(values)}


CHECKED = {
    "a file": [], "by session": ["--by", "session"],
    "another": ["--by", "session", "--session", "item", "--partition", "100s"],
}  # fmt: skip


@pytest.mark.parametrize("way", CHECKED)
def test_check_compares_what_was_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    data, by, out = write(tmp_path / "in.parquet", made(300, 20)), schema(tmp_path), str(tmp_path / "out.parquet")
    command = ["convert", "--data", data, "--out", out, "--schema", by, "--check", "--quiet", *CHECKED[way]]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "same rows" in said
    written = out if way == "a file" else f"{out}/*.parquet"
    train = ["train", "--data", f"parquet:{written}", "--steps", "1", "--batch", "8", "--run", "none"]
    assert cli.main([*train, "--model", "dlrm-tiny", "--dim", "4", "--valid", "20%", "--quiet"]) == 0
    capsys.readouterr()
    real = Convert._checked

    def changed(self: Any) -> Any:
        path = next(Path(out).iterdir()) if way != "a file" else Path(out)
        table = pq.read_table(path)
        prices = table.column("price").to_numpy().copy()
        prices[:2] = prices[1::-1]
        pq.write_table(table.set_column(table.column_names.index("price"), "price", pa.array(prices)), path)
        return real(self)

    monkeypatch.setattr(Convert, "_checked", changed)
    assert cli.main([*command, "--force", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["check"]["same"] is False and "which are not the 300 of " in shown.err


KILLED = """
import os, sys
from skirl import cli
moment, argv, seen = int(sys.argv[1]), sys.argv[2:], 0
def count(event, args):
    global seen
    if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.listdir"):
        seen += 1
        if seen == moment:
            os.kill(os.getpid(), 9)
sys.addaudithook(count)
code = cli.main(argv)
print(seen)
sys.exit(code)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_killed_and_begun_again_the_folder_is_whole_or_not_there(tmp_path: Path, python: Python, kills: int) -> None:
    data, by = write(tmp_path / "in.parquet", made(600, 40), 50), schema(tmp_path)
    flags = ["convert", "--data", data, "--schema", by, "--by", "session", "--partition", "40s", "--quiet", "--out"]
    done = python.run(KILLED, "0", *flags, str(tmp_path / "whole"))
    assert done.returncode == 0, done.stderr
    moments, draw = int(done.stdout.splitlines()[-1]), random.Random(0)
    whole = pq.read_table(tmp_path / "whole")
    for _ in range(kills):
        moment = draw.randrange(moments // 2, moments)
        assert python.run(KILLED, str(moment), *flags, str(tmp_path / "out")).returncode == -9
        if (tmp_path / "out").exists():
            assert pq.read_table(tmp_path / "out").equals(whole)
        assert python.run(KILLED, "0", *flags, str(tmp_path / "out"), "--force").returncode == 0
        assert pq.read_table(tmp_path / "out").equals(whole)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out", "schema.toml", "whole"]
        for path in (tmp_path / "out").iterdir():
            path.unlink()
        (tmp_path / "out").rmdir()


MISTAKES = {
    "no session": (["--schema", "{bare}"], "nothing says which rows are a session: set --session to the column that"),
    "no such column": (["--session", "visits"], "it has no column 'visits', did you mean 'visit'?"),
    "a session that is null": (["--session", "sometimes"], "row 2 of row group 1: session column sometimes is nothing"),
    "a time that is NaN": (["--schema", "{real}"], "row 3 of row group 1: time column real is nan, expected a finite"),
    "a time that counts milliseconds": (
        ["--schema", "{late}", "--partition", "1d"],
        "row 2 of row group 1: time column late is 1700000000000, expected seconds since 1970, as time_unit says",
    ),
    "too little memory": (["--memory", "1MiB"], "--memory is '1MiB': set it to 256.0 MiB or more"),
    "out is there": (["--out", "{folder}/a"], "which already exists: name another folder, or add --force to replace"),
    "out is read": (["--out", "{folder}", "--force", ""], "the folder that {folder}/in.parquet is read from: name"),
    "out holds what is read": (["--out", "{folder}/..", "--force", ""], "the folder that {folder}/in.parquet is read"),
    "no duckdb": ([], "duckdb is not installed: pip install 'skirl[sessions]'"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder = tmp_path / "in"
    (folder / "a").mkdir(parents=True)
    write(folder / "in.parquet", made(4, 2))
    table = pq.read_table(folder / "in.parquet").append_column("sometimes", pa.array([1, None, 3, 4]))
    table = table.append_column("real", pa.array([1.0, 2.0, float("nan"), 4.0]))
    pq.write_table(table.append_column("late", pa.array([5, 1_700_000_000_000, 7, 8])), folder / "in.parquet")
    by = Path(schema(tmp_path)).read_text()
    (tmp_path / "bare.toml").write_text(by.replace('session = "visit"', ""))
    for name in ("real", "late"):
        (tmp_path / f"{name}.toml").write_text(by.replace('"when"', f'"{name}"'))
    if what == "no duckdb":
        monkeypatch.setattr(commands, "find_spec", lambda name: None)
    more, sentence = MISTAKES[what]
    names = {name: tmp_path / f"{name}.toml" for name in ("bare", "real", "late")} | {"folder": folder}
    flags = {
        "--data": f"parquet:{folder}/in.parquet",
        "--out": f"{tmp_path}/out",
        "--schema": f"{tmp_path}/schema.toml",
    }
    flags |= {flag: value.format(**names) for flag, value in zip(more[::2], more[1::2])}
    words = [word for pair in flags.items() for word in pair if word]
    assert cli.main(["convert", "--by", "session", *words, "--quiet"]) in (1, 2)
    error = capsys.readouterr().err
    assert sentence.format(folder=folder) in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.unfinished").exists()


def test_two_converts_into_one_folder_are_refused(tmp_path: Path) -> None:
    work = tmp_path / "out.unfinished"
    work.mkdir()
    lock = Lock(work)
    data = DataFlags(write(tmp_path / "in.parquet", made(5, 2)), schema=schema(tmp_path))
    with pytest.raises(DiskError, match=r"out.unfinished is in use by process \d+"):
        convert_by_session(data.files(), str(tmp_path / "out"), WANTED)
    assert (work / "lock").exists()
    lock.release()
