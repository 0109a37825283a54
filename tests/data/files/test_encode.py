"""Columns become labels, numbers and rows: compared with a plain reading of each value."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.data import DataFlags
from skirl.data.files.column import Encoded
from skirl.data.files.encode import ByHash, Encoder, Raw
from skirl.data.files.find import BadRow
from skirl.data.files.schema import FileSchema
from tests.cases import cases
from tests.data import logs
from tests.data.corpus import SCHEMA, parquet
from tests.data.files.test_column import lists_of
from tests.data.logs import INTS, ids_of

MIXED = FileSchema.parse(
    """
    [[label]]
    name = "y"
    [[dense]]
    name = "x"
    transform = "log"
    fill = -1.0
    indicator = true
    [[id]]
    name = "item"
    type = "int"
    rows = 40
    encode = "row"
    [[id]]
    name = "tags"
    list = true
    separator = " "
    rows = 100
    """
)
ROW = st.tuples(
    st.sampled_from(["0", "1", "1.0", "2", "x"]),
    st.sampled_from(["", "0", "-3", "7", "0.5", "1e3", "nan", "y"]),
    st.sampled_from(["0", "39", "40", "-1", "", "7"]),
    st.sampled_from(["", "a", "a b", "b a b"]),
)


def piece(rows: list[tuple[str, ...]]) -> Raw:
    names = ("y", "x", "item", "tags")
    columns = {name: pa.array([row[i] for row in rows], pa.string()) for i, name in enumerate(names)}
    return Raw(columns, len(rows), "file", lambda row: f"row {row}", [])


def encoder(**other: Any) -> Encoder:
    rows = MIXED.rows_of(None)
    return Encoder(MIXED, ByHash(rows), rows, **other)


def plainly(row: tuple[str, ...]) -> tuple[float, float, float, int, list[int]] | None:
    """Return label, number, whether it is missing, row, and rows of tags; None if the row is malformed."""
    y, x, item, tags = row
    if y not in ("0", "1", "1.0") or x in ("nan", "y") or item not in ("0", "39", "7"):
        return None
    number = -1.0 if x == "" else float(np.float32(math.log1p(max(float(x), 0))))
    of_tags = [logs.row_of(logs.text_hash(tag.encode(), "tags"), 100) for tag in tags.split()]
    return float(y), number, float(x == ""), int(item), of_tags


@given(rows=st.lists(ROW, max_size=30))
@cases(200)
def test_every_value_is_that_of_a_plain_reading(rows: list[tuple[str, ...]]) -> None:
    done = encoder(skip=True)(piece(rows))
    plain = [plainly(row) for row in rows]
    good = [i for i, values in enumerate(plain) if values is not None]
    expected = [plain[i] for i in good]
    assert done.places.tolist() == good and done.bad == len(rows) - len(good) and len(done) == len(good)
    assert done.labels[:, 0].tolist() == [values[0] for values in expected if values]
    assert done.dense.tolist() == [pytest.approx([values[1], values[2]], rel=1e-6) for values in expected if values]
    assert lists_of(done.ids[0]) == [[values[3]] for values in expected if values]
    assert lists_of(done.ids[1]) == [values[4] for values in expected if values]


@given(rows=st.lists(ROW, min_size=1, max_size=30))
@cases(100)
def test_the_first_malformed_row_is_the_error(rows: list[tuple[str, ...]]) -> None:
    bad = [i for i, row in enumerate(rows) if plainly(row) is None]
    if not bad:
        assert len(encoder()(piece(rows))) == len(rows)
        return
    with pytest.raises(BadRow) as caught:
        encoder()(piece(rows))
    assert caught.value.where == f"row {bad[0]}"


@given(rows=st.lists(ROW, max_size=20), low=st.integers(0, 20), size=st.integers(0, 20))
@cases(100)
def test_a_stretch_of_a_piece_is_encoded_like_the_whole(rows: list[tuple[str, ...]], low: int, size: int) -> None:
    whole = encoder(skip=True)(piece(rows))
    part = encoder(skip=True)(piece(rows).only(low, low + size))
    within = np.flatnonzero((whole.places >= low) & (whole.places < low + size))
    same(part, whole.take(within))


def same(a: Encoded, b: Encoded) -> None:
    for x, y in zip((a.labels, a.dense, a.places), (b.labels, b.dense, b.places), strict=True):
        assert np.array_equal(x, y)
    assert list(map(lists_of, a.ids)) == list(map(lists_of, b.ids))


def test_nan_may_stand_for_nothing(tmp_path: Path) -> None:
    parquet(x=[0.5, float("nan"), 1, 2], item=[1.0, float("nan"), 3.0, 4.0])(tmp_path / "file")
    (tmp_path / "schema.toml").write_text("nan_is_missing = true\n" + SCHEMA)
    files = DataFlags(f"parquet:{tmp_path / 'file'}", schema=str(tmp_path / "schema.toml")).files()
    (batch,) = files
    assert batch.dense[:, 0].tolist() == [0.5, 0.0, 1.0, 2.0]
    assert batch.sparse.values()[:4].tolist()[1] == 0 and batch.sparse.lengths()[4:].tolist() == [1, 0, 2, 0]


def test_a_float_in_text_is_a_whole_number_where_the_schema_says_so(tmp_path: Path) -> None:
    floats = INTS.replace('"int"', '"float"')
    plain = ids_of(tmp_path, b"1,7\n1,-2\n1,1000\n1,9007199254740993\n", INTS)
    assert ids_of(tmp_path, b"1,7.0\n1,-2.\n1,1e3\n1,9007199254740993\n", floats) == plain
    for value in (b"7.5", b"1e30", b"9223372036854775808", b"nan", b"x"):
        with pytest.raises(BadRow, match="line 2: column item is"):
            ids_of(tmp_path, b"1,7\n1," + value + b"\n", floats)
