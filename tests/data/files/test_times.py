"""Dates as times: the same rows are held out whether a file has text, timestamps or numbers."""

import csv
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.data.convert import convert
from skirl.data.files.columns import PER_SECOND, seconds_of, since_1970
from skirl.data.files.find import BadRow, BadSchema
from skirl.data.files.hashing import BAD, GOOD, NONE
from skirl.data.flags import DataFlags

SCHEMA = """
time = "when"
[[label]]
name = "clicked"
[[dense]]
name = "hour"
column = "when"
transform = "hour"
[[id]]
name = "item"
type = "int"
encode = "row"
rows = 1000
"""
BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
TIMES = [BEGIN + timedelta(minutes=37 * i) for i in range(200)]
LIMIT = datetime(2026, 3, 4, tzinfo=UTC)
FORMS = {
    "naive": lambda at: at.strftime("%Y-%m-%d %H:%M:%S"),
    "zulu": lambda at: at.strftime("%Y-%m-%dT%H:%M:%SZ"),
    "zoned": lambda at: at.astimezone(timezone(timedelta(hours=2))).isoformat(),
}


DATE = st.tuples(
    st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)),
    st.sampled_from([None, *(timezone(timedelta(hours=h)) for h in (-5, 0, 9))]),
    st.sampled_from(["T", " "]), st.sampled_from(["seconds", "microseconds"]), st.sampled_from(["", "x", None, "wrong"]),
)  # fmt: skip


@given(st.lists(DATE))
def test_texts_are_the_dates_that_python_reads(drawn):
    texts, expected = [], []
    for at, zone, between, precision, spoilt in drawn:
        at = at.replace(tzinfo=zone)
        text = at.isoformat(between, precision)
        if spoilt is None:
            texts.append(None)
            expected.append((NONE, None))
        elif spoilt:
            texts.append(text[:5] + spoilt + text[5:])
            expected.append((BAD, None))
        else:
            texts.append(text)
            at = datetime.fromisoformat(text)
            at = at if at.tzinfo else at.replace(tzinfo=UTC)
            expected.append((GOOD, (at - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(seconds=1)))
    seconds, kinds = seconds_of(pa.array(texts, pa.string()))
    assert kinds.tolist() == [kind for kind, _ in expected]
    for found, (kind, value) in zip(seconds.tolist(), expected, strict=True):
        assert kind != GOOD or found == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    "kind", [pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("ms", "Europe/Berlin"), pa.date32()]
)
def test_columns_of_dates_are_those_dates(kind):
    column = pa.array([BEGIN.replace(tzinfo=None), None, LIMIT.replace(tzinfo=None)], pa.timestamp("s")).cast(kind)
    seconds, kinds = seconds_of(column)
    assert kinds.tolist() == [GOOD, NONE, GOOD]
    assert (seconds[0], seconds[2]) == (BEGIN.timestamp(), LIMIT.timestamp())


@given(st.lists(st.integers(-5, 100_000_005) | st.datetimes(datetime(2000, 1, 1), datetime(2099, 12, 31))))
def test_digits_are_the_hours_that_python_reads(drawn):
    digits, expected = [], []
    for at in drawn:
        digits.append(at if isinstance(at, int) else int(at.strftime("%y%m%d%H")))
        try:
            text = f"20{digits[-1]:08}" if digits[-1] >= 0 else ""
            expected.append(datetime.strptime(text, "%Y%m%d%H").replace(tzinfo=UTC).timestamp())
        except ValueError:
            expected.append(np.nan)
    found = since_1970(np.array(digits, np.float64), "YYMMDDHH")
    np.testing.assert_array_equal(found, np.array(expected, np.float64))
    assert np.isnan(since_1970(np.array([14102100.5]), "YYMMDDHH")).all()


def written(folder, form: str) -> DataFlags:
    """Write 200 rows; the item of each is its number."""
    (folder / "schema.toml").write_text(SCHEMA)
    if form in FORMS:
        with open(folder / "clicks.csv", "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["when", "item", "clicked"])
            out.writerows([FORMS[form](at), i, i % 2] for i, at in enumerate(TIMES))
        data = f"csv:{folder / 'clicks.csv'}"
    else:
        when = pa.array(TIMES, pa.timestamp("ms", "UTC"))
        table = {"when": when, "item": np.arange(200), "clicked": np.arange(200) % 2}
        pq.write_table(pa.table(table), folder / "clicks.parquet")
        data = f"parquet:{folder / 'clicks.parquet'}"
    return DataFlags(data, schema=str(folder / "schema.toml"), batch=16, valid="when>=2026-03-04")


def items(stream) -> list[int]:
    return [i for batch in stream for i in batch.sparse.values().tolist()]


@pytest.mark.parametrize("form", [*FORMS, "timestamps"])
def test_rows_are_held_out_from_a_date_on(tmp_path, form):
    flags = written(tmp_path, form)
    late = [i for i, at in enumerate(TIMES) if at >= LIMIT]
    files = flags.files()
    assert items(files.held_out) == late and items(files) == [i for i in range(200) if i not in late]
    hours = np.concatenate([batch.dense[:, 0].numpy() for batch in files.held_out])
    assert hours.tolist() == [np.float32(TIMES[i].hour / 24) for i in late]
    everything = DataFlags(flags.data, schema=flags.schema, batch=16).files()
    convert(everything, str(tmp_path / "out.parquet"), "snappy", as_rows=False)
    converted = DataFlags(f"parquet:{tmp_path / 'out.parquet'}", batch=16, valid="time>=2026-03-04T00:00:00Z").files()
    assert items(converted.held_out) == late
    with pytest.raises(ValueError, match="there are no rows left to read"):
        items(DataFlags(flags.data, schema=flags.schema, valid="time>=2030-01-01").files().held_out)
    with pytest.raises(ValueError, match="there are no rows left to read"):
        items(DataFlags(flags.data, schema=flags.schema, valid="time>=1990-01-01").stream())


@pytest.mark.parametrize("unit", ["seconds", "milliseconds", "microseconds"])
def test_a_date_holds_out_from_numbers_since_1970(tmp_path, unit):
    flags = written(tmp_path, "naive")
    times = [int(at.timestamp() * PER_SECOND[unit]) for at in TIMES]
    pq.write_table(pa.table({"when": times, "item": range(200), "clicked": [0, 1] * 100}), tmp_path / "clicks.parquet")
    schema = SCHEMA.replace('time = "when"', f'time = "when"\ntime_unit = "{unit}"').replace('"hour"', '"none"')
    (tmp_path / "numbers.toml").write_text(schema)
    data, numbers = f"parquet:{tmp_path / 'clicks.parquet'}", str(tmp_path / "numbers.toml")
    files = DataFlags(data, schema=numbers, batch=16, valid=flags.valid).files()
    assert items(files.held_out) == [i for i, at in enumerate(TIMES) if at >= LIMIT]
    (tmp_path / "numbers.toml").write_text(schema.replace(unit, "YYMMDDHH"))
    with pytest.raises(ValueError, match="a date, and when holds YYMMDDHH: set valid to a number of these"):
        DataFlags(data, schema=numbers, valid=flags.valid)


def test_dates_and_numbers_are_not_compared(tmp_path):
    flags = written(tmp_path, "naive")
    with pytest.raises(BadRow, match="expected a finite number"):
        list(DataFlags(flags.data, schema=flags.schema, valid="time>=20260304").stream())
    (tmp_path / "clicks.csv").write_text("when,item,clicked\n2026-03-01,1,0\nyesterday,1,0\n")
    with pytest.raises(BadRow, match=r"line 3: column hour is 'yesterday', expected a date such as .* YYMMDDHH"):
        list(DataFlags(flags.data, schema=flags.schema).stream())
    (tmp_path / "clicks.csv").write_text("when,item,clicked\n20260301,1,0\n")
    with pytest.raises(BadRow, match="time column when is '20260301', expected a date such as"):
        list(DataFlags(flags.data, schema=flags.schema, valid="time>=2026-03-04").stream())
    flags = written(tmp_path, "timestamps")
    with pytest.raises(BadSchema, match="time column 'when' holds dates: set valid to one"):
        list(DataFlags(flags.data, schema=flags.schema, valid="time>=20260304").stream())
    table = {"when": [1.0], "item": [1], "clicked": [0]}
    pq.write_table(pa.table(table), tmp_path / "clicks.parquet")
    with pytest.raises(BadSchema, match="holds numbers \\(double\\), and valid names a date"):
        list(DataFlags(flags.data, schema=flags.schema, valid="time>=2026-03-04").stream())
