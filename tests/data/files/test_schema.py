"""Schema files: which are refused, what survives a round trip through a file, and what a schema says about its tables."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.data.files.find import BadSchema
from skirl.data.files.schema import BUILT_IN, DEFAULT_ROWS, FileSchema, Id, Label
from tests.cases import cases
from tests.data.corpus import SCHEMAS


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
