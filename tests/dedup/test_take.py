"""Rows in another order are those that Arrow takes."""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from skirl.dedup.take import taken
from tests.cases import cases

SOME = st.lists(st.integers(-9, 9), max_size=4)
COLUMNS = {
    pa.list_(pa.int64()): SOME,
    pa.list_(pa.field("id", pa.int32(), nullable=False)): SOME,
    pa.list_(pa.float32()): SOME,
    pa.list_(pa.int8()): st.one_of(st.none(), SOME),
    pa.list_(pa.int16()): st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=3),
    pa.list_(pa.bool_()): st.lists(st.booleans(), max_size=3),
    pa.large_list(pa.int64()): SOME,
    pa.string(): st.one_of(st.none(), st.text(max_size=3)),
}


@given(st.data())
@cases(60)
def test_rows_are_those_that_arrow_takes(data: Any) -> None:
    rows = data.draw(st.integers(0, 8))
    low, high = sorted(data.draw(st.lists(st.integers(0, rows), min_size=2, max_size=2)))
    arrays = [pa.array(data.draw(st.lists(v, min_size=rows, max_size=rows)), kind) for kind, v in COLUMNS.items()]
    batch = pa.RecordBatch.from_arrays(arrays, names=[str(n) for n in range(len(arrays))]).slice(low, high - low)
    places = data.draw(st.lists(st.integers(0, high - low - 1), max_size=12)) if high > low else []
    found = taken(batch, np.array(places, np.int64))
    found.validate(full=True)
    assert found.equals(batch.take(pa.array(places, pa.int64())), check_metadata=True)
