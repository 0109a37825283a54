"""Files by session, compared with a plain sort of rows in Python."""

import errno
import json
import random
import shutil
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl import cli
from skirl.data.files.schema import BUILT_IN
from skirl.data.flags import DataFlags
from skirl.dedup import order
from skirl.dedup.by_session import convert_by_session
from skirl.dedup.commands import Convert
from skirl.dedup.spill import path_of
from skirl.dedup.wanted import BASE, Wanted
from skirl.store.disk.errors import DiskError
from skirl.store.disk.lock import Lock
from skirl.tools import progress
from skirl.tools.flags import WrongFlags
from skirl.tools.os_errors import NotWritten
from tests.cases import cases
from tests.dedup.rows import SCHEMA, Row, schema, write
from tests.zygote import Python

WANTED = Wanted(None, None, None, None, BASE, "rows", "zstd", False)
"""So little memory that a few hundred rows are many files."""


def made(n: int, sessions: int, seed: int = 0, width: int = 60) -> list[Row]:
    """Rows in a random order; `price` numbers them."""
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
    """The rows of each file, and what the command says."""
    each = -(-len(rows) // files)
    for k in range(files):
        write(folder / f"in-{k}.parquet", rows[k * each : (k + 1) * each], 50)
    paths = ",".join(str(folder / f"in-{k}.parquet") for k in range(files))
    source = DataFlags(f"parquet:{paths}", schema=schema(folder)).files()
    told = convert_by_session(source, str(folder / "out"), wanted, force=True, json=True, quiet=True)
    assert not (folder / "out.unfinished").exists()
    return [pq.read_table(path).to_pylist() for path in sorted((folder / "out").iterdir())], told


def expected(rows: list[Row], wanted: Wanted) -> Counter[tuple[float, ...]]:
    """Sessions as the numbers of their rows in order: a plain sort."""
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
    """The same of what was written: a session ends where another comes, or a file does."""
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
    monkeypatch.setattr(order.begins, "__defaults__", (40,))
    rows = made(300, 3)
    wanted = replace(WANTED, user="user", gap="1000s")
    files, told = converted(tmp_path, rows, wanted)
    whole = [len(session) for session in expected(rows, wanted)]
    assert told["cut_as_too_long"] == 3 and told["sessions"] == sum(-(-size // 40) for size in whole)
    assert max(map(len, sessions_in(files, wanted))) == 40


@pytest.mark.parametrize("unit", ["milliseconds", "microseconds"])
def test_times_count_what_the_schema_says(tmp_path: Path, unit: str) -> None:
    """The same sessions and files as of seconds; and the file says what its times count."""
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
    """Its hours are YYMMDDHH: two users, each with two sessions a day, over a border of months."""
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
    """Sessions made of users, and those of another column, are no column that the data has under this name."""
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
moment, seen, argv = int(sys.argv[1]), 0, sys.argv[2:]
def count(event, args):
    global seen
    if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.unlink", "mmap.__new__", "os.listdir"):
        seen += 1
        if seen == moment:
            os.kill(os.getpid(), 9)
sys.addaudithook(count)
code = cli.main(argv)
print(seen)
sys.exit(code)
"""


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_killed_and_begun_again_it_writes_the_same_bytes(tmp_path: Path, warm_python: Python, kills: int) -> None:
    rows = made(600, 40)
    data, by = write(tmp_path / "in.parquet", rows, 50), schema(tmp_path)
    flags = ["--data", data, "--schema", by, "--by", "session", "--partition", "100s", "--quiet", "--json"]

    def run(out: str, moment: int) -> Any:
        return warm_python.run(KILLED, str(moment), "convert", "--out", str(tmp_path / out), *flags)

    def bytes_of(out: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((tmp_path / out).iterdir())}

    whole = run("whole", 0)
    assert whole.returncode == 0, whole.stderr
    moments = int(whole.stdout.splitlines()[-1])
    draw = random.Random(0)
    ended = [run("out", draw.randrange(moments * k // 4, moments * (k + 1) // 4)).returncode for k in (1, 2, 3)]
    while kills > 3 and ended.count(-9) < kills:
        if (tmp_path / "out").exists():
            assert bytes_of("out") == bytes_of("whole")
            shutil.rmtree(tmp_path / "out")
        ended.append(run("out", draw.randrange(moments)).returncode)
    assert -9 in ended
    last = run("out", 0)
    assert last.returncode == 0 or (tmp_path / "out").exists(), last.stderr
    assert bytes_of("out") == bytes_of("whole") and len(bytes_of("out")) >= 4


def begun(folder: Path, rows: list[Row], wanted: Wanted = WANTED) -> DataFlags:
    """What a convert leaves that was ended when rows had gone to their buckets."""
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


@pytest.mark.parametrize("damage", ["shorter", "other bytes", "gone"])
def test_a_damaged_spill_is_refused(tmp_path: Path, damage: str) -> None:
    data = begun(tmp_path, made(50, 5))
    spill = next(path for k in range(16) if (path := path_of(tmp_path / "out.unfinished" / "spill", k)).is_file())
    raw = bytearray(spill.read_bytes())
    raw[200] ^= 1
    spill.write_bytes(raw[:-8] if damage == "shorter" else raw)
    if damage == "gone":
        spill.unlink()
    found = {"shorter": "bytes, and had", "other bytes": "is damaged behind byte", "gone": "cannot be read"}[damage]
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
        "which is read: name a folder beside it",
    ),
    "out that a pattern finds": (
        ["--data", "parquet:{folder}/**/*.parquet", "--out", "{folder}/a/b"],
        "/in/**/*.parquet, which is read: name a folder beside it",
    ),
    "unfinished files that a pattern finds": (
        ["--data", "parquet:{folder}/*.parquet,{folder}/*.unfinished/*/*", "--out", "{folder}/b"],
        "/in/*.unfinished/*/*, which is read: name a folder beside it",
    ),
    "out is there": (["--out", "{folder}/a"], "which is there: name another folder, or add --force to replace it"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    import pyarrow as pa

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
    (tmp_path / "out").mkdir()  # what a convert with --force replaces at its end
    for force in (True, False):
        with pytest.raises(DiskError, match=r"out.unfinished is in use by process \d+"):
            Convert(data.data, str(tmp_path / "out"), by="session", schema=data.schema, force=force, quiet=True).run()
        assert lock.is_there
    lock.release()


def test_a_folder_that_goes_before_it_is_locked_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another convert may end between the two."""
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
        with pytest.raises(WrongFlags, match="out, which is there: name another folder, or add --force"):
            convert_by_session(data.files(), str(tmp_path / "out"), WANTED, force=False, **go)
    assert not (tmp_path / "out.unfinished").exists() and pq.read_table(tmp_path / "out").num_rows == 50


def _ended_behind(path: Path, ignore_errors: bool = False) -> None:
    if path.name == "out.unfinished":
        raise KeyboardInterrupt


def test_a_slash_behind_out_changes_nothing(tmp_path: Path) -> None:
    """As a shell completes a folder; the second time it is there."""
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
