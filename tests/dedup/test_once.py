"""Files that omit lists equal to those of the row above, compared with the same rows in full."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.once import find
from skirl.data.files.columnar import KEY
from skirl.data.files.find import BadFile, BadSchema
from skirl.data.files.schema import FileSchema
from skirl.data.flags import DataFlags
from skirl.dedup.by_session import convert_by_session
from skirl.dedup.layout import once, runs_of, with_runs
from tests.cases import cases
from tests.data.logs import plain
from tests.dedup.rows import Row, schema, write
from tests.dedup.test_by_session import WANTED, made


def both(folder: Path, rows: list[Row]) -> tuple[str, str]:
    """Write the same rows to two folders, one with each list once and one with all of them."""
    source = DataFlags(write(folder / "in.parquet", rows), schema=schema(folder)).files()
    for layout in ("once", "rows"):
        wanted = replace(WANTED, layout=layout)
        convert_by_session(source, str(folder / layout), wanted, force=True)
    return f"parquet:{folder / 'once'}", f"parquet:{folder / 'rows'}"


def test_what_is_left_out_is_what_equals_the_row_above(tmp_path: Path) -> None:
    some, whole = both(tmp_path, made(400, 15))
    one, other = (pq.read_table(data.partition(":")[2]) for data in (some, whole))
    assert one.num_rows == 400
    for name in ("seen", "bought"):
        run, above = f"run of {name}", None
        assert one.column(run).type == pa.int32()
        for lists, full, back, visit, last in zip(
            one.column(name).to_pylist(), other.column(name).to_pylist(), one.column(run).to_pylist(),
            one.column("visit").to_pylist(), [None, *one.column("visit").to_pylist()],
        ):  # fmt: skip
            repeats = visit == last and full == above
            assert (lists is None) == repeats and (back > 0) == repeats
            assert repeats or lists == full
            above = full


@given(n=st.integers(2, 120), sessions=st.integers(1, 12), seed=st.integers(0, 9), batch=st.sampled_from([1, 7, 64]))
@cases(12)
def test_batches_are_those_of_the_plain_rows(
    tmp_path_factory: Any, n: int, sessions: int, seed: int, batch: int
) -> None:
    some, whole = both(tmp_path_factory.mktemp("once"), made(n, sessions, seed))
    ways: list[dict[str, Any]] = [{}, {"shuffle": 30}, {"valid": "30%"}]
    for more in ways:
        streams = [DataFlags(data, batch=batch, **more).stream() for data in (some, whole)]
        for mine, theirs in zip(*streams, strict=True):
            assert plain(mine) == plain(theirs) == plain(find(theirs))
            assert mine.sparse.values().numel() <= theirs.sparse.values().numel()


def test_repeats_are_found_in_clustered_files_of_others(tmp_path: Path) -> None:
    """The same batches as of the plain rows, with the bags that the search finds, from any state."""
    _, whole = both(tmp_path, made(200, 10))
    stored, found = (DataFlags(whole, batch=50, repeats=repeats).stream() for repeats in ("stored", "find"))
    batches, left = list(found), 0
    for mine, theirs in zip(batches, stored, strict=True):
        assert plain(mine) == plain(theirs) and mine.sparse.groups and not theirs.sparse.groups
        expected = find(theirs.sparse)
        assert mine.sparse.values().equal(expected.values()) and mine.sparse.lengths().equal(expected.lengths())
        left += theirs.sparse.values().numel() - mine.sparse.values().numel()
    assert left > 0
    going = DataFlags(whole, batch=50, repeats="find").stream()
    step = iter(going)
    next(step)
    state = going.state_dict()
    going.load_state_dict(state)
    assert all(one.sparse.values().equal(other.sparse.values()) for one, other in zip(going, batches[1:], strict=True))
    with pytest.raises(ValueError, match="whose repeats has find, not stored"):
        stored.load_state_dict(state)
    with pytest.raises(ValueError, match="an open vocabulary gives ids rows when batches are made"):
        DataFlags(whole, batch=50, repeats="find", vocab="open")


def test_a_pass_goes_on_in_the_middle_and_by_shards(tmp_path: Path) -> None:
    some, whole = both(tmp_path, made(130, 6))
    source, reference = (DataFlags(data, batch=8, shuffle=16).stream() for data in (some, whole))
    batches = iter(source)
    for _ in range(5):
        next(batches)
    again = DataFlags(some, batch=8, shuffle=16).stream()
    again.load_state_dict(source.state_dict())
    rest = list(reference)[5:]
    assert [plain(batch) for batch in again] == [plain(batch) for batch in rest]
    for rank in range(2):
        shards = [stream.sharded(rank, rank + 1, 2) for stream in (source, reference)]
        for mine, theirs in zip(*shards, strict=True):
            assert plain(mine) == plain(theirs)


def test_workers_and_a_growing_vocabulary_change_nothing(tmp_path: Path) -> None:
    some, whole = both(tmp_path, made(130, 6))
    kinds: list[dict[str, Any]] = [{"workers": 2}, {"vocab": "open", "admit": 2}]
    for more in kinds:
        mine, theirs = (DataFlags(data, batch=32, **more).stream() for data in (some, whole))
        assert [plain(batch) for batch in mine] == [plain(batch) for batch in theirs]


def table_of(path: Path) -> Any:
    return pq.read_table(path / "part-00000.parquet")


def run_with(row: int, value: int) -> Callable[[Any], Any]:
    def change(table: Any) -> Any:
        runs = table.column("run of seen").to_numpy().copy()
        runs[row] = value
        return table.set_column(table.column_names.index("run of seen"), "run of seen", pa.array(runs, pa.int32()))

    return change


DAMAGES = {
    "begins with null": (lambda table: table.slice(1), "row 1 of row group 1 leaves out the list of column 'seen'"),
    "run is wrong": (run_with(2, 1), "row 3 of .* has 1 in column 'run of seen', .* is stored 2 rows above"),
    "run without a null": (run_with(4, 3), "row 5 of .* has 3 in column 'run of seen', .* is stored in this row"),
    "a null without a run": (run_with(1, 0), "row 2 of row group 1 has 0 in column 'run of seen'"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_files_are_refused(tmp_path: Path, what: str) -> None:
    lists = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [4], [4]]
    made_of = FileSchema.parse('[[label]]\nname = "y"\n[[id]]\nname = "seen"\ntype = "int"\nlist = true\n')
    table = pa.table({"y": pa.array([0.0] * 6), "seen": pa.array(lists, pa.list_(pa.int64()))})
    of = with_runs(made_of)
    table = once(table, of, np.arange(6) == 0)
    assert table.column("seen").null_count == 4
    damage, sentence = DAMAGES[what]
    path = tmp_path / "x.parquet"
    pq.write_table(damage(table).replace_schema_metadata({KEY: of.toml().encode()}), path)
    with pytest.raises(BadFile, match=sentence):
        list(DataFlags(f"parquet:{path}", batch=2).stream())


def test_files_of_an_unknown_layout_are_refused(tmp_path: Path) -> None:
    """Also with a schema that does not say so: what they leave out would be read as empty lists."""
    path, by = tmp_path / "x.parquet", tmp_path / "x.toml"
    plain = '[[label]]\nname = "y"\n[[id]]\nname = "seen"\ntype = "int"\nlist = true\n'
    table = pa.table({"seen": [[1, 2, 3], None], "y": [0.0, 1.0]})
    pq.write_table(table.replace_schema_metadata({KEY: f'{plain}begin = "run_start"'.encode()}), path)
    by.write_text(plain)
    for of in (None, str(by)):
        with pytest.raises(BadSchema, match=r"the schema in it \[\[id\]\] 'seen': there is no 'begin'"):
            list(DataFlags(f"parquet:{path}", batch=2, schema=of).stream())


def test_an_empty_list_stays_one(tmp_path: Path) -> None:
    lists = pa.array([[], [], [5], [5], []], pa.list_(pa.int64()))
    new = np.array([True, False, False, False, True])
    named = FileSchema.parse('[[label]]\nname = "run of a"\n[[id]]\nnames = ["a", "b"]\ntype = "int"\nlist = true\n')
    table = pa.table({"a": lists, "b": pa.array([[1, 1], [9], [2], [2], [2]], lists.type)})
    of = with_runs(named)
    assert [column.run for column in of.ids] == ["run of a_", "run of b"], "a name that is taken is not taken again"
    out = once(table, of, new)
    assert out.column("a").to_pylist() == [[], None, [5], None, []]
    assert out.column("b").to_pylist() == [[1, 1], [9], [2], None, [2]] and runs_of(new).tolist() == [0, 1, 2, 3, 0]


def test_other_programs_expand_it_in_a_line(tmp_path: Path) -> None:
    """With the code in docs/howto/sessions.md."""
    import duckdb

    rows = [row | {"seen": []} if k % 7 == 0 else row for k, row in enumerate(made(200, 10))]
    some, whole = both(tmp_path, rows)
    lists = table_of(Path(whole.partition(":")[2])).column("seen").to_pylist()
    path = Path(some.partition(":")[2]) / "part-00000.parquet"
    found = duckdb.sql(
        f"SELECT last_value(seen IGNORE NULLS) OVER (ORDER BY file_row_number) AS seen FROM read_parquet('{path}', "
        "file_row_number = true) ORDER BY file_row_number"
    )
    assert [row[0] for row in found.fetchall()] == lists and [] in lists
