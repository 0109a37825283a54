"""A drafted schema reads the files that it was drafted from, as `skirl train` does."""

import gzip
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.cli import main
from skirl.data import DataFlags
from skirl.data.files.draft import draft
from skirl.data.files.find import BadSchema
from skirl.data.files.schema import BUILT_IN, DEFAULT_ROWS, Dense, FileSchema, Id, Label
from tests.cases import cases
from tests.data.corpus import SCHEMAS

N = 300
DAY = datetime(2026, 3, 1)


def columns() -> dict[str, list]:
    draw = np.random.default_rng(0)
    seen = draw.integers(10, 40, (N, 3)).tolist()
    return {
        "click": draw.integers(0, 2, N).tolist(),
        "visit": (np.arange(N) // 5).tolist(),
        "when": [DAY + timedelta(minutes=n) for n in range(N)],
        "item": draw.integers(10, 40, N).tolist(),
        "seen": [row[: n % 4] for n, row in enumerate(seen)],
        "price": [None if n % 7 == 0 else round(float(p), 2) for n, p in enumerate(draw.random(N) * 500)],
        "shows": np.exp(2 * draw.standard_normal(N) + 3).astype(int).tolist(),
        "change": draw.integers(-3, 3, N).tolist(),
        'a "city"': draw.choice(["Köln", "Paris"], N).tolist(),
        "request": [f"r{n}" for n in range(N)],
        "one": [7] * N,
    }


def as_text(delimiter: str, header: bool) -> bytes:
    def cell(value) -> str:
        return "|".join(map(str, value)) if isinstance(value, list) else "NULL" if value is None else str(value)

    of = columns()
    names = ['"' + name.replace('"', "") + '"' for name in of]
    lines = [names] * header + [[*map(cell, row)] for row in zip(*of.values())]
    return "".join(delimiter.join(line) + "\n" for line in lines).encode()


def written(folder: Path, form: str) -> str:
    path = folder / form
    if form == "parquet":
        pq.write_table(pa.table(columns() | {"struct": [{"x": 1}] * N, "nan": [float("nan"), 0.5] * (N // 2)}), path)
    elif form == "tsv.gz":
        path.write_bytes(gzip.compress(as_text("\t", True)))
    else:
        path.write_bytes(as_text(";", form == "csv"))
    return str(path)


@pytest.mark.parametrize("form", ["csv", "tsv.gz", "headless", "parquet"])
def test_a_draft_says_what_columns_mean_and_reads_every_row(tmp_path: Path, form: str) -> None:
    path, toml = written(tmp_path, form), tmp_path / "drafted.toml"
    toml.write_text(draft(path, "column_1" if form == "headless" else None))
    schema = FileSchema.load(str(toml))
    named = [*columns()] if form == "parquet" else [name.replace('"', "") for name in columns()]
    name = {real: f"column_{n}" if form == "headless" else real for n, real in enumerate(named, 1)}
    city = next(real for real in named if "city" in real)

    assert [label.name for label in schema.labels] == [name["click"]]
    shared = name["item"]
    more = {"separator": "" if form == "parquet" else "|", "table": shared, "rows": 300}
    lists = Id(name["seen"], type="int", list=True, **more)
    assert {Id(shared, type="int", rows=300), lists, Id(name[city], rows=100)} <= {*schema.ids}
    amounts = {Dense(name["price"], transform="log"), Dense(name["shows"], transform="log"), Dense(name["change"])}
    assert amounts <= {*schema.dense}
    assert not {name["request"], name["one"], "struct"} & {*schema.needed}
    assert schema.nan_is_missing == (form == "parquet")
    assert schema.missing == ("",) if form == "parquet" else ("", "NULL")
    if form != "headless":  # whose names say nothing
        assert (schema.session, schema.time) == ("visit", "when")

    kind = "parquet" if form == "parquet" else "csv"
    stream = DataFlags(f"{kind}:{path}", schema=str(toml), batch=64, rows="1000").stream()
    batches = list(stream)
    assert np.concatenate([batch.labels for batch in batches]).tolist() == columns()["click"]
    lengths = np.concatenate([batch.sparse.lengths().reshape(-1, len(batch.labels))[1] for batch in batches])
    assert lengths.tolist() == [n % 4 for n in range(N)] or form == "headless"


def test_a_list_has_the_rows_of_the_ids_that_it_holds(tmp_path: Path) -> None:
    """Not of the first column whose few ids are all among them."""
    rows = range(400)
    table = {
        "click": [n % 2 for n in rows], "user": [n % 40 for n in rows], "item": [n % 150 for n in rows],
        "seen": [[n % 150, (n + 7) % 150] for n in rows],
    }  # fmt: skip
    pq.write_table(pa.table(table), tmp_path / "c.parquet")
    assert 'name = "seen"' in (text := draft(str(tmp_path / "c.parquet"), "click"))
    assert 'table = "item"' in text and 'table = "user"' not in text


def test_train_names_the_command_and_takes_its_draft(tmp_path: Path, capsys, monkeypatch) -> None:
    path, toml = written(tmp_path, "csv"), tmp_path / "schema.toml"
    train = f"train csv:{path} --model dlrm-tiny --batch 64 --dim 4 --run none --cache 90%".split()
    assert main(train) == 2
    asked = capsys.readouterr().err
    assert f"`skirl schema csv:{path} --out schema.toml` drafts" in asked and "--schema" in asked
    assert main(["schema", f"csv:{path}"]) == 0
    toml.write_text(capsys.readouterr().out)
    assert main([*train, "--schema", str(toml), "--rows", "100", "--quiet"]) == 0
    monkeypatch.setattr("skirl.data.files.draft.HEAD", 2000)
    assert "more to come" in (sample := draft(path)) and "rows = " not in sample


def test_a_schema_that_is_there_is_shown_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "day_0"
    path.write_text("\t".join(["1"] * 40) + "\n")
    assert FileSchema.parse(draft(f"criteo:{path}")) == BUILT_IN["criteo"]


@pytest.mark.parametrize(
    ("text", "label", "says"),
    [
        ("a,b\n0,1\n1,0\n", None, "2 columns do (a, b): name the column to predict with --label"),
        ("a,b\n0,x\n2,y\n", None, "no column does: name the column to predict with --label"),
        ("a,b\n0,x\n1,y\n", "c", "clicks.csv has no column 'c' (there are a, b): set label to another"),
        ("a,b\n0,x\n1,y\n", "b", "column 'b' does not hold different numbers: set label to one that does (a)"),
        ("a,b\n0,1.5\n1,2.5\n", "a", "no column looks like ids"),
        ("a,b\n", None, "has no rows"),
        ("a,b\n1\n1,2,3\n", None, "do not have equally many columns"),
    ],
)
def test_what_cannot_be_drafted_is_one_sentence(tmp_path: Path, text: str, label: str | None, says: str) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        draft(str(path), label)
    assert says in str(raised.value) and "\n" not in str(raised.value)


@st.composite
def schemas(draw: Any) -> FileSchema:
    """Draw id columns with names of any characters, and tables that several of them share."""
    ids = []
    for name in draw(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=6, unique=True)):
        kind = draw(st.sampled_from(["string", "hex", "int", "float", "fingerprint"]))
        table, lists = draw(st.sampled_from(["", "", "shared"])), draw(st.booleans())
        rows = None if table else draw(st.none() | st.integers(2, 1 << 48))
        ids.append(Id(name, type=kind, table=table, list=lists, rows=rows))
    return FileSchema((Label("y"),), (), tuple(ids))


@given(schema=schemas(), general=st.none() | st.integers(2, 1 << 40))
@cases(100)
def test_each_table_has_the_rows_that_were_asked_for(schema: FileSchema, general: int | None) -> None:
    rows = schema.rows_of(None if general is None else str(general))
    for column in schema.ids:
        own = column.rows if general is None or column.encode == "row" else general
        assert rows[column.table or column.name] == (own or DEFAULT_ROWS)
    tables = schema.tables(3, rows)
    assert [table.name for table in tables] == list(rows) and {table.dim for table in tables} == {3}
    assert sorted(f for table in tables for f in table.features) == sorted(column.name for column in schema.ids)


def test_the_flag_wins_over_the_schema_except_for_ids_that_are_rows() -> None:
    schema = FileSchema(
        (Label("y"),), (), (Id("a", rows=7), Id("b", type="int", encode="row", rows=50), Id("c", rows=8))
    )
    assert schema.rows_of("c=90") == {"a": 7, "b": 50, "c": 90}
    assert schema.rows_of("c=90,100") == schema.rows_of("100,c=90") == {"a": 100, "b": 50, "c": 90}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_wrong_schema_is_refused_in_its_words(name: str) -> None:
    toml, said = SCHEMAS[name]
    with pytest.raises(BadSchema) as caught:
        FileSchema.parse(toml)
    assert said in str(caught.value)
