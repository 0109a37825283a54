"""Files whose lists are windows of a session's buffer, compared with the same rows in full."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skirl.data.files.columnar import KEY, embedded_schema
from skirl.data.files.errors import BadFile, BadSchema
from skirl.data.files.schema import FileSchema
from skirl.data.flags import DataFlags
from skirl.dedup.by_session import convert_by_session
from skirl.dedup.same import same
from skirl.dedup.window_layout import MOST_NEW, Buffers, windows, windows_found, with_windows
from tests.cases import cases
from tests.dedup.rows import Row, schema, write
from tests.dedup.test_by_session import made
from tests.dedup.test_once import ONCE, plain

SHIFTS = st.lists(
    st.tuples(st.sampled_from(["new", "append", "prepend", "drop", "cut", "redraw"]), st.integers(0, MOST_NEW + 2)),
    min_size=1,
    max_size=40,
)


def lists_of(steps: list[tuple[str, int]], seed: int) -> tuple[list[list[int]], np.ndarray]:
    """Return lists that each differ from the one before as a step says, and where sessions begin."""
    draw, now = random.Random(seed), [1, 2, 3]
    lists, new = [], []
    for what, count in steps:
        some = [draw.randrange(5) for _ in range(count)]
        of = {"append": now[count:] + some, "prepend": some + now[: max(0, len(now) - count)], "drop": now[count:]}
        now = of.get(what, now[:-1] if what == "cut" else some)
        lists.append(now)
        new.append(what == "new" or not new)
    return lists, np.array(new)


def expanded(buffers: list[Any], starts: list[int], lengths: list[int]) -> list[list[int]]:
    """Expand windows as other programs do: from the buffer above, and the window in it."""
    found, last = [], []
    for buffer, start, length in zip(buffers, starts, lengths, strict=True):
        last = last if buffer is None else buffer
        assert start >= 0 and start + length <= len(last)
        found.append(last[start : start + length])
    return found


@given(steps=SHIFTS, seed=st.integers(0, 99))
@cases(150)
def test_windows_are_the_lists(steps: list[tuple[str, int]], seed: int) -> None:
    check_windows(steps, seed)


def check_windows(steps: list[tuple[str, int]], seed: int) -> None:
    """Check that buffers hold the lists of all rows, and no more ids than the lists do."""
    lists, new = lists_of(steps, seed)
    laid = Buffers(pa.array(lists, pa.list_(pa.int64())), new)
    buffers = laid.column().to_pylist()
    assert expanded(buffers, laid.starts.tolist(), laid.lengths.tolist()) == lists
    assert all(buffer is not None for buffer, begins in zip(buffers, new) if begins)
    assert sum(len(buffer or ()) for buffer in buffers) == len(laid.values) <= sum(map(len, lists))


@pytest.mark.parametrize("behind", [True, False])
def test_a_row_adds_few_ids_at_one_end(behind: bool) -> None:
    lists = [list(range(20)), list(range(8, 28)), list(range(17, 37))]
    lists = lists if behind else [[-n for n in reversed(one)] for one in lists]
    laid = Buffers(pa.array(lists), np.array([True, False, False]))
    assert laid.fresh.tolist() == [True, False, True]  # 8 new ids, then 9
    assert laid.starts.tolist() == ([0, 8, 0] if behind else [8, 0, 0])


def shifting(n: int, sessions: int, seed: int = 0) -> list[Row]:
    """Return rows whose lists shift, in random order."""
    rows, draw = made(n, sessions, seed), random.Random(seed)
    now: dict[Any, list[int]] = {}
    for row in sorted(rows, key=lambda row: (row["when"], row["item"])):
        seen = now.setdefault(row["visit"], [draw.randrange(1000) for _ in range(12)])
        if draw.random() < 0.5:
            seen = [*seen[1:], draw.randrange(1000)] if row["visit"] % 2 else [draw.randrange(1000), *seen[:-1]]
        now[row["visit"]] = row["seen"] = seen
    return rows


def both(folder: Path, rows: list[Row], layouts: tuple[str, ...] = ("window", "rows")) -> list[str]:
    source = DataFlags(write(folder / "in.parquet", rows), schema=schema(folder)).files()
    for layout in layouts:
        wanted = replace(ONCE, layout=layout)
        convert_by_session(source, str(folder / layout), wanted, force=True, json=True, quiet=True)
    return [f"parquet:{folder / layout}" for layout in layouts]


@given(n=st.integers(2, 90), sessions=st.integers(1, 8), seed=st.integers(0, 9), batch=st.sampled_from([1, 7, 64]))
@example(n=2, sessions=2, seed=0, batch=1)
@example(n=2, sessions=2, seed=1, batch=1)
@cases(8)
def test_batches_are_those_of_the_plain_rows(
    tmp_path_factory: Any, n: int, sessions: int, seed: int, batch: int
) -> None:
    check_batches(tmp_path_factory.mktemp("window"), n, sessions, seed, batch)


def check_batches(folder: Path, n: int, sessions: int, seed: int, batch: int, layout: str = "window") -> None:
    """Check that the batches of a layout equal those of the rows in full."""
    folders = [folder / name for name in ("a", "b")]
    for number, one in enumerate(folders):
        one.mkdir()
        both(one, shifting(n, sessions, seed + number), (layout, "rows"))
    some, whole = (f"parquet:{folders[0] / name},{folders[1] / name}" for name in (layout, "rows"))
    first, other = (embedded_schema(str(one / layout / "part-00000.parquet")) for one in folders)
    if first != other:  # windows, or even runs, were worth it in only one of them
        with pytest.raises(BadSchema, match=r"part-00000\.parquet: .* with one command$"):
            list(DataFlags(some, batch=batch).stream())
        return
    ways: list[dict[str, Any]] = [{}, {"shuffle": 30}, {"valid": "30%"}]
    for more in ways:
        for mine, theirs in zip(
            *(DataFlags(data, batch=batch, **more).stream() for data in (some, whole)), strict=True
        ):
            assert plain(mine) == plain(theirs)


def test_workers_shards_and_a_growing_vocabulary_change_nothing(tmp_path: Path) -> None:
    some, whole = both(tmp_path, shifting(130, 6))
    assert "run_start" in pq.read_schema(f"{some.partition(':')[2]}/part-00000.parquet").names
    kinds: list[dict[str, Any]] = [{"workers": 2}, {"vocab": "open", "admit": 2}]
    for more in kinds:
        mine, theirs = (DataFlags(data, batch=32, **more).stream() for data in (some, whole))
        assert [plain(batch) for batch in mine] == [plain(batch) for batch in theirs]
    shards = [DataFlags(data, batch=8, shuffle=16).stream().sharded(1, 2, 2) for data in (some, whole)]
    for mine, theirs in zip(*shards, strict=True):
        assert plain(mine) == plain(theirs)
    batch = next(iter(DataFlags(some, batch=130).stream()))
    assert batch.sparse.stride_per_key()[1] < 100  # equal windows share one bag


def test_batches_hold_each_id_of_a_buffer_once(tmp_path: Path) -> None:
    """Compared with the lists of the samples: an id is there if a sample has it, and lists that overlap share it."""
    check_buffers(tmp_path, 0)


def check_buffers(folder: Path, seed: int) -> None:
    """Check how many ids batches hold, in order and shuffled."""
    some, whole = both(folder, shifting(160, 4, seed))
    for shuffle in (0, 160):
        for mine, theirs in zip(
            *(DataFlags(data, batch=64, shuffle=shuffle).stream() for data in (some, whole)), strict=True
        ):
            ids = mine.sparse
            begins, lengths = (of.tolist() for of in ids.windows["seen"])
            held = ids.select(["seen"]).values().tolist()
            lists = [held[begin : begin + size] for begin, size in zip(begins, lengths, strict=True)]
            own = theirs.sparse.select(["seen"])
            assert [lists[w] for w in ids.groups["seen",]] == [
                of.tolist() for of in own.values().split(own.lengths().tolist())
            ]
            assert {i for begin, size in zip(begins, lengths) for i in range(begin, begin + size)} == set(
                range(len(held))
            )
            starts = ids.select(["seen"]).offsets().tolist()
            assert len(starts) - 1 < len(lists) < len(own.lengths())
            of_window = [sum(begin >= start for start in starts[:-1]) for begin in begins]
            assert all(begin + size <= starts[of] for begin, size, of in zip(begins, lengths, of_window, strict=True))
            assert len(held) < sum(lengths) / 2
    batch = next(iter(DataFlags(some, batch=1).stream()))
    assert not batch.sparse.windows, "a single list saves nothing"


def test_same_says_so_for_every_layout(tmp_path: Path) -> None:
    layouts = ("once", "rows", "window")
    data = both(tmp_path, shifting(200, 9), layouts)
    hashes = set()
    for other in data:
        found = same(DataFlags(data[0]).files(), DataFlags(other).files(), json=True, quiet=True)
        assert found["same"]
        hashes.add(found["hash_as"])
    assert len(hashes) == 1
    other = both(tmp_path, shifting(200, 9, seed=1), ("window",))[0]
    assert not same(DataFlags(data[0]).files(), DataFlags(other).files(), json=True, quiet=True)["same"]


def number(column: str, row: int, value: int | None, kind: Any = None) -> Callable[[Any], Any]:
    def change(table: Any) -> Any:
        values = table.column(column).to_pylist()
        values[row] = value
        return table.set_column(table.column_names.index(column), column, pa.array(values, kind or pa.int32()))

    return change


DAMAGES = {
    "behind the end": (
        number("run_start", 1, 2),
        "row 2 of row group 1 has a window outside its buffer: 2 . 3 of 4 ids",
    ),
    "before the begin": (
        number("run_start", 1, -1),
        "row 2 of row group 1 has a window outside its buffer: -1 . 3 of 4",
    ),
    "no length": (number("run_length", 2, None), "row 3 of row group 1 has a window outside its buffer"),
    "longer": (number("run_length", 0, 5), "row 1 of row group 1 has a window outside its buffer: 0 . 5 of 4 ids"),
    "of 2 ** 31": (number("run_length", 3, 2**31 - 1), "row 4 of row group 1 has a window outside its buffer"),
    "at 2 ** 63 - 1": (
        number("run_start", 1, 2**63 - 1, pa.int64()),
        "row 2 of row group 1 has a window outside its buffer: 9223372036854775807 . 3 of 4 ids",
    ),
    "run": (number("run", 1, 0), "row 2 of row group 1 has 0 in column 'run', .* is stored 1 rows above"),
    "begins with null": (lambda table: table.slice(1), "row 1 of row group 1 leaves out the list of column 'seen'"),
    "texts": (
        lambda table: table.set_column(3, "run_start", pa.array(["0"] * 4)),
        "row 1 of row group 1 has no whole numbers in columns 'run_start' and 'run_length'",
    ),
}
SCHEMA = FileSchema.parse('[[label]]\nname = "y"\n[[id]]\nname = "seen"\ntype = "int"\nlist = true\n')


def written(path: Path, damage: Callable[[Any], Any]) -> str:
    lists = [[1, 2, 3], [2, 3, 4], [2, 3, 4], [2, 3]]
    table = pa.table({"y": pa.array([0.0] * 4), "seen": pa.array(lists, pa.list_(pa.int64()))})
    new = np.array([True, False, False, False])
    groups = windows_found(table, SCHEMA, new)
    of = with_windows(SCHEMA, groups)
    assert groups == {"run": ["seen"]} and FileSchema.parse(of.toml()) == of
    pq.write_table(damage(windows(table, groups, new)).replace_schema_metadata({KEY: of.toml().encode()}), path)
    return f"parquet:{path}"


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_files_are_refused(tmp_path: Path, what: str) -> None:
    damage, sentence = DAMAGES[what]
    with pytest.raises(BadFile, match=sentence):
        list(DataFlags(written(tmp_path / "x.parquet", damage), batch=2).stream())


def test_a_schema_that_does_not_say_so_is_refused(tmp_path: Path) -> None:
    data, path = written(tmp_path / "x.parquet", lambda table: table), tmp_path / "x.toml"
    assert [plain(batch)[2] for batch in DataFlags(data, batch=4, rows="9").stream()]
    path.write_text(SCHEMA.toml())
    with pytest.raises(BadSchema, match="lists of column 'seen' are windows, as 'run_start' and 'run_length' say"):
        list(DataFlags(data, batch=2, schema=str(path)).stream())
    with pytest.raises(BadSchema, match="start, length and run say together where a window is"):
        replace(SCHEMA, ids=(replace(SCHEMA.ids[0], start="a", length="b"),))


@pytest.fixture
def windows_and_lists(tmp_path: Path) -> tuple[Path, list[Any]]:
    """Write a file of windows, and return it with the lists that they stand for."""
    some, whole = both(tmp_path, shifting(200, 10))
    path, plain_rows = (Path(data.partition(":")[2]) / "part-00000.parquet" for data in (some, whole))
    return path, pq.read_table(plain_rows).column("seen").to_pylist()


def test_duckdb_expands_it_in_a_line(windows_and_lists: tuple[Path, list[Any]]) -> None:
    import duckdb

    path, lists = windows_and_lists
    found = duckdb.sql(
        "SELECT list_slice(last_value(seen IGNORE NULLS) OVER (ORDER BY file_row_number), run_start + 1, run_start + "
        f"run_length) AS seen FROM read_parquet('{path}', file_row_number = true) ORDER BY file_row_number"
    )
    assert [row[0] for row in found.fetchall()] == lists


def test_polars_expands_it_in_a_line(windows_and_lists: tuple[Path, list[Any]]) -> None:
    path, lists = windows_and_lists
    polars = pytest.importorskip("polars", reason="not installed: pip install polars")
    column = polars.col("seen").forward_fill().list.slice(polars.col("run_start"), polars.col("run_length"))
    assert polars.read_parquet(path).select(column).to_series().to_list() == lists
