"""`skirl analyze`: its figures for each column against a plain count, and for plain files against converted ones."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dedup.test_window_layout import shifting

from skirl.cli import main
from skirl.data.files.columnar import KEY
from skirl.data.files.errors import BadSchema
from skirl.data.flags import DataFlags
from skirl.data.sessions import Sessions
from skirl.dedup.analyze_command import Analyze
from skirl.dedup.changes import column_of, together
from skirl.dedup.commands import Convert
from skirl.dedup.finish import with_keys
from skirl.dedup.generated import rows_of, schema_of
from skirl.dedup.sample import Sample
from tests.cases import cases
from tests.dedup.rows import SCHEMA, schema, write
from tests.dedup.test_by_session import made


def asked(data: str, **flags: Any) -> dict[str, Any]:
    return Analyze(data, quiet=True, **flags).run()


@given(
    rows=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), max_size=4), st.integers(0, 1)), min_size=1)
)  # fmt: skip
@cases(60)
def test_a_column_is_counted_as_plainly(rows: list[tuple[bool, list[int], int]]) -> None:
    rows = [(n == 0 or new, ids, one) for n, (new, ids, one) in enumerate(rows)]
    new = np.array([first for first, _, _ in rows])
    columns = [column_of(name, pa.array([row[at] for row in rows], kind), new)
               for name, at, kind in (("a", 1, pa.list_(pa.int64())), ("b", 2, pa.int64()))]  # fmt: skip
    for at, column in ((1, columns[0]), (2, columns[1])):
        own = [n for n in range(len(rows)) if rows[n][0] or rows[n][at] != rows[n - 1][at]]
        inside = [n for n in range(len(rows)) if not rows[n][0]]
        weight = [len(row[1]) if at == 1 else 1 for row in rows]
        assert (column.ids, column.once) == (sum(weight), sum(weight[n] for n in own))
        assert column.change == pytest.approx(len([n for n in own if n in inside]) / max(1, len(inside)))
    alike = np.array_equal(columns[0].own, columns[1].own)
    assert together(columns) == ([["a", "b"]] if alike else [])


def written(path: Path, data: Sessions, samples: int) -> str:
    """Write samples of synthetic sessions to a file, in a random order."""
    of = schema_of(data, as_rows=False)
    table = pa.concat_tables(rows_of(data, samples, as_rows=False))
    table = table.take(pa.array(np.random.default_rng(0).permutation(samples)))
    pq.write_table(table.replace_schema_metadata({KEY: of.toml().encode()}), path)
    return f"parquet:{path}"


@pytest.mark.parametrize("way", ["all", "some", "users"])
def test_what_is_projected_is_what_convert_gives(tmp_path: Path, way: str) -> None:
    flags: dict[str, Any] = {"compression": "zstd"} if way == "all" else {}
    if way == "users":
        data, flags = (
            write(tmp_path / "in.parquet", made(900, 20)),
            {"schema": schema(tmp_path), "user": "user", "gap": "3s"},
        )
    else:
        few: dict[str, Any] = {"pooling_factor": 8, "per_session": 5} if way == "some" else {"pooling_factor": 20}
        stream = Sessions(batch_size=1024, change=0.1, once=False, rows_scale=0.1, **few)
        data = written(tmp_path / "in.parquet", stream, 16_000 if way == "some" else 6000)
    found = asked(data, **flags, **({"sample": "2MiB"} if way == "some" else {}))
    assert (found["sampled"]["one_in"] > 1) == (way == "some")
    given = Convert(data, str(tmp_path / "out"), by="session", quiet=True, **flags).run()
    table = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "out").iterdir())])
    assert found["samples"] == given["samples"] == len(table)
    assert found["sessions"] == pytest.approx(given["sessions"], rel=0 if way != "some" else 0.05)
    assert found["left_out"].keys() == given["groups"].keys()
    for name in (name for names in given["groups"].values() for name in names):
        lists, ids, held = table.column(name).to_pylist(), 0, 0
        above: list[int] = []
        for row in lists:
            above, held = (above, held) if row is None else (row, held + len(row))
            ids += len(above)
        assert found["columns"][name]["factor"] == pytest.approx(ids / held, rel=0.05)
    assert found["projected"]["bytes"]["once"] == pytest.approx(given["bytes"], rel=0.15)
    told = Analyze(data, quiet=True, **flags).summary(found)
    compression = flags.get("compression", "none")
    assert told["files"].endswith(f"\nif written with --compression {compression}")
    assert ("--compression zstd" in " ".join(told.get("next", "").split())) == (compression == "zstd")


def test_windows_are_projected_as_convert_writes_them(tmp_path: Path) -> None:
    stream = Sessions(batch_size=1024, change=0.5, drift="shift", once=False, rows_scale=0.1, pooling_factor=12)
    data = written(tmp_path / "in.parquet", stream, 4000)
    found = asked(data, batch=500)
    given = Convert(data, str(tmp_path / "out"), by="session", layout="window", quiet=True).run()
    assert found["advice"] == "windows"
    assert found["projected"]["bytes"]["window"] == pytest.approx(given["bytes"], rel=0.15)
    held = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "out").iterdir())]).column("seen_1")
    ids = sum(map(len, pa.concat_tables(rows_of(stream, 4000, as_rows=False)).column("seen_1").to_pylist()))
    factor = ids / sum(len(row) for row in held.to_pylist() if row)
    assert found["columns"]["seen_1"]["window_factor"] == pytest.approx(factor, rel=0.05)
    batches = list(DataFlags(f"parquet:{tmp_path / 'out'}", batch=500).stream())
    lookup, held = found["projected"]["lookup"], np.mean([len(batch.sparse.values()) for batch in batches])
    assert lookup["ids_windows"] == pytest.approx(held, rel=0.02) and held < lookup["ids_once"]
    assert lookup["windows_x"] == pytest.approx(lookup["ids"] / lookup["ids_windows"], rel=0.01)


def test_a_sample_has_whole_sessions_and_keeps_to_its_memory() -> None:
    draw = np.random.default_rng(1)
    sample, came = Sample(100_000, 50), list[Any]()
    for _ in range(40):
        sessions = draw.integers(0, 300, 500)
        hashes = np.stack([sessions, sessions], axis=1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        came.append(with_keys(pa.table({"session": sessions}), hashes, np.zeros(500)))
        sample.add(came[-1])
        assert sample._bytes <= 100_000
    table, hashes, _ = sample.kept()
    every = np.concatenate([t.column("session").to_numpy() for t in came])
    kept = table.column("session").to_numpy()
    assert sample.rows == len(every) and sample.level > 1 and not sample.cut and len(hashes) == len(kept) > 0
    assert sorted(kept) == sorted(every[np.isin(every, np.unique(kept))]), "of a session that is there, all rows are"
    assert len(np.unique(kept)) == pytest.approx(300 / 2**sample.level, rel=0.6)
    assert sample.stretch().column("session").to_numpy().tolist() == every[:50].tolist()


def test_a_session_larger_than_the_sample_is_cut() -> None:
    sample = Sample(50_000, 10)
    for _ in range(20):
        sample.add(with_keys(pa.table({"x": np.zeros(500)}), np.full((500, 2), 2**63 + 5, np.uint64), np.zeros(500)))
    assert sample.cut and sample.rows == 10_000 and 0 < len(sample.kept()[0]) < 10_000


@pytest.mark.parametrize(
    ("flags", "advice"),
    [({}, "cluster"), ({"drift": "shift"}, "windows"), ({"drift": "shift", "change": 0.5}, "windows"),
     ({"per_session": 1.2}, "don't bother"), ({"change": 1.0}, "don't bother")],
)  # fmt: skip
def test_verdicts(flags: dict[str, Any], advice: str) -> None:
    found = asked("synthetic:sessions", samples=3000, pooling_factor=12, **flags)
    assert found["advice"] == advice and found["verdict"].startswith(advice if advice != "windows" else "cluster")
    assert ("seen_1, seen_2, seen_3 shift" in found["verdict"]) == (advice == "windows")
    fewer = re.findall(r"din and dcat look up ([\d.]+) times fewer than with equal lists once", found["verdict"])
    ratio = round(found["window_factor"] / found["factor"], 1)
    assert [float(of) for of in fewer] == pytest.approx([ratio] if advice == "windows" else [], abs=0.11)
    assert (found["projected"]["bytes"]["window"] is not None) == (flags.get("drift") == "shift")
    wanted = flags.get("per_session", 16.5)
    assert found["per_session"] == pytest.approx(wanted, rel=0.15)
    expected = wanted / (1 + (wanted - 1) * flags.get("change", 0.05))
    assert found["columns"]["seen_1"]["factor"] == pytest.approx(expected, rel=0.15)


def test_without_a_session_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, path = write(tmp_path / "in.parquet", made(20, 3)), tmp_path / "none.toml"
    path.write_text(SCHEMA.replace('session = "visit"', ""))
    for command in (["--data", "synthetic:tiny"], ["--data", data, "--schema", str(path)]):
        assert main(["analyze", *command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["verdict"] == "don't bother: no session column"
    assert main(["analyze", "--data", data, "--schema", str(path), "--session", "sitting"]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "no column 'sitting'" in err and "Traceback" not in err


def test_files_by_session_are_left_as_they_are(tmp_path: Path) -> None:
    data = write(tmp_path / "in.parquet", made(200, 5))
    Convert(data, str(tmp_path / "out"), by="session", schema=schema(tmp_path), quiet=True).run()
    assert asked(f"parquet:{tmp_path / 'out'}")["verdict"].startswith("don't bother: lists that repeat are left out")


def test_it_is_read_in_a_terminal_of_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a path of 80 letters could not be broken
    data = write(Path("in.parquet"), shifting(300, 9))
    assert main(["analyze", "--data", data, "--schema", schema(Path()), "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].startswith("  verdict")
    assert sum("as windows, by din and dcat: " in line for line in lines) == 1
    assert any(line.split()[:3] == ["columns", "name", "ids"] for line in lines)
    assert {"seen", "bought", "item", "price"} <= {word for line in lines for word in line.split()}


@pytest.mark.parametrize(
    ("flags", "said"),
    [({"session": "a", "user": "b"}, "both set"), ({"gap": "3s"}, "no user is named"), ({"user": "u"}, "and no gap"),
     ({"user": "u", "gap": "soon"}, "gap is 'soon'"), ({"sample": "much"}, "sample is 'much'"),
     ({"lists": 4}, "lists is a flag of"), ({"sample": "1KiB"}, "1MiB or more"), ({"batch": 0}, "batch is 0")],
)  # fmt: skip
def test_wrong_flags(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Analyze("csv:nowhere", **flags)
    with pytest.raises(ValueError, match="schema is a flag of files"):
        Analyze("synthetic:sessions", schema="x")
    with pytest.raises(ValueError, match="data is 'paper:x'"):
        Analyze("paper:x")


def test_users_need_times(tmp_path: Path) -> None:
    data, path = write(tmp_path / "in.parquet", made(20, 3)), tmp_path / "none.toml"
    path.write_text(SCHEMA.replace('time = "when"', ""))
    with pytest.raises(BadSchema, match="a gap needs times"):
        asked(data, schema=str(path), user="user", gap="3s")


def test_real_data(data_folder: Path) -> None:
    assert asked(f"mind:{data_folder / 'mind'}", sample="2MiB")["verdict"].startswith("cluster by session")
    for data in (f"criteo:{data_folder / 'criteo_first10k.tsv'}", f"avazu:{data_folder / 'avazu'}"):
        assert asked(data)["verdict"] == "don't bother: no session column"
