"""Schema files: which are refused, what survives a round trip through a file, and what a schema says about its tables."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.data.files.find import BadSchema
from skirl.data.files.schema import BUILT_IN, DEFAULT_ROWS, Dense, FileSchema, Id, Label, Text
from tests.cases import cases
from tests.data.corpus import SCHEMAS

NAMES = st.lists(st.text(min_size=1, max_size=6), min_size=2, max_size=7, unique=True)


@st.composite
def schemas(draw: Any) -> FileSchema:
    """Draw any valid schema: names of any characters, and tables that several columns share."""
    names = draw(NAMES)
    n_ids = draw(st.integers(1, len(names) - 1))
    tables = draw(st.lists(st.sampled_from(["", "", "shared"]), min_size=n_ids, max_size=n_ids))
    ids = []
    for name, table in zip(names[:n_ids], tables):
        kind = draw(st.sampled_from(["string", "hex", "int", "float", "fingerprint"]))
        lists = draw(st.booleans())
        ids.append(
            Id(
                name, type=kind, table=table, list=lists, rows=None if table else draw(st.none() | st.integers(2, 1 << 48)),
                separator=draw(st.sampled_from(["", " ", "|"])) if lists else "",
                of=draw(st.sampled_from(["", "hex"])) if kind == "fingerprint" else "",
            )
        )  # fmt: skip
    dense = tuple(
        Dense(name, transform=draw(st.sampled_from(["none", "log", "hour"])),
              fill=draw(st.floats(-1e30, 1e30)), indicator=draw(st.booleans()))
        for name in names[n_ids:]
    )  # fmt: skip
    time = draw(st.none() | st.just("hour"))
    unit = draw(st.sampled_from(["", "milliseconds", "YYMMDDHH"])) if time else ""
    label = Label(draw(st.text(min_size=1, max_size=4)), draw(st.sampled_from(["binary", "number"])))
    return FileSchema(
        (label,), dense, tuple(ids), session=draw(st.none() | st.just("visit")), time=time, time_unit=unit,
        missing=tuple(draw(st.lists(st.text(max_size=3), max_size=3))), nan_is_missing=draw(st.booleans()),
        text=Text(draw(st.sampled_from([",", "tab", ";"])), header=draw(st.sampled_from(["auto", "yes", "no"]))),
    )  # fmt: skip


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_schema_survives_as_toml(name: str) -> None:
    assert FileSchema.parse(BUILT_IN[name].toml()) == BUILT_IN[name]


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
