"""Every malformed file gives its own error: where, found, expected, what to do. Or its rows are left out and counted."""

import gzip
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.data import DataFlags
from skirl.data.files.errors import BadFile, BadRow, BadSchema
from skirl.data.files.schema import BUILT_IN, FileSchema
from skirl.data.files.stream import Files
from tests.cases import cases
from tests.data import logs
from tests.data.corpus import CASES, CRITEO, ROWS, SCHEMA, SCHEMAS, Case, parquet, text

CLEAN = (BadFile, BadRow, BadSchema)


def opened(case: Case, folder: Path, **flags: Any) -> Files:
    """The case's file, made if it is not there yet."""
    path = folder / "file"
    if not path.exists():
        case.make(path)
    if case.schema is not None:
        (folder / "schema.toml").write_text(case.schema)
        flags["schema"] = str(folder / "schema.toml")
    return DataFlags(f"{case.kind}:{path}", batch=64, **case.flags, **flags).files()


def samples_in(files: Files) -> int:
    return sum(len(batch.labels) for batch in files)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_malformed_file_is_refused_in_its_words(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        samples_in(opened(case, tmp_path))
    said = str(caught.value)
    assert all(word in said for word in case.words), said
    assert str(tmp_path / "file") in said or case.kind == "parquet" or case.flags, said
    if case.skipped is None:
        with pytest.raises(ValueError):
            samples_in(opened(case, tmp_path, bad_rows="skip"))
        return
    files = opened(case, tmp_path, bad_rows="skip")
    if case.left:
        assert samples_in(files) == case.left
    else:
        said = f", {case.skipped} malformed ones were skipped" if case.skipped else ""
        with pytest.raises(ValueError, match=f"no row is left to read{said}: give more files"):
            samples_in(files)
    assert files.bad_rows == case.skipped


def test_there_are_enough_of_them() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_wrong_schema_is_refused_in_its_words(name: str) -> None:
    toml, said = SCHEMAS[name]
    with pytest.raises(BadSchema) as caught:
        FileSchema.parse(toml)
    assert said in str(caught.value)


def test_what_looks_odd_and_is_right(tmp_path: Path) -> None:
    """A byte order mark, CRLF, no line end at the end, a header, odd numbers: all of them are read."""
    expected = [logs.criteo_sample(row, 1000) for row in ROWS]
    header = "\t".join(CRITEO).encode() + b"\n"
    forms = {
        "bom": b"\xef\xbb\xbf" + text(),
        "crlf": text(end="\r\n"),
        "no end": text()[:-1],
        "crlf, no end": text(end="\r\n")[:-1],
        "header": header + text(),
        "bom and header": b"\xef\xbb\xbf" + header + text(),
        "members": gzip.compress(text(ROWS[:2])) + gzip.compress(text(ROWS[2:])),
    }
    for name, data in forms.items():
        path = tmp_path / "file"
        path.write_bytes(data)
        found = logs.samples_of(list(DataFlags(f"criteo:{path}", rows="1000").files()))
        assert [ids for _, _, ids in found] == [ids for _, _, ids in expected], name


def test_skipped_rows_leave_the_others_as_they_are(tmp_path: Path) -> None:
    rows = logs.criteo_rows(500, seed=1)
    bad = {7: "x", 8: "nan", 130: "1e999", 499: "--"}
    for row, value in bad.items():
        rows[row][3] = value
    lines = text(rows).splitlines(keepends=True)
    lines[250] = b"too\tfew\n"
    (tmp_path / "file").write_bytes(b"".join(lines))
    good = [row for number, row in enumerate(rows) if number not in bad and number != 250]
    expected = [logs.criteo_sample(row, 1000)[2] for row in good]
    for workers in (0, 2):
        flags = DataFlags(f"criteo:{tmp_path / 'file'}", rows="1000", bad_rows="skip", epochs=2, workers=workers)
        files = flags.files(10_000)
        found = [ids for _, _, ids in logs.samples_of(list(files))]
        assert found == expected * 2 and files.bad_rows == 5
    held = DataFlags(f"criteo:{tmp_path / 'file'}", rows="1000", bad_rows="skip", valid="50%").files(10_000).held_out
    assert held is not None and len(next(iter(held)).labels) == 250 - 2, "rows are counted as they stand in the file"


def test_the_first_malformed_row_is_the_one_that_is_named(tmp_path: Path) -> None:
    rows = logs.criteo_rows(900, seed=1)
    rows[800][20], rows[805][2] = "zz", "x"
    (tmp_path / "file").write_bytes(text(rows))
    for workers in (0, 3):
        with pytest.raises(BadRow, match=r"line 801: column C7 is 'zz'") as caught:
            list(DataFlags(f"criteo:{tmp_path / 'file'}", workers=workers).files(10_000))
        assert caught.value.where == "line 801"


def test_nan_may_stand_for_nothing(tmp_path: Path) -> None:
    parquet(x=[0.5, float("nan"), 1, 2], item=[1.0, float("nan"), 3.0, 4.0])(tmp_path / "file")
    (tmp_path / "schema.toml").write_text("nan_is_missing = true\n" + SCHEMA)
    files = DataFlags(f"parquet:{tmp_path / 'file'}", schema=str(tmp_path / "schema.toml")).files()
    (batch,) = files
    assert batch.dense[:, 0].tolist() == [0.5, 0.0, 1.0, 2.0]
    assert batch.sparse.values()[:4].tolist()[1] == 0 and batch.sparse.lengths()[4:].tolist() == [1, 0, 2, 0]


# Fuzzing: whatever the bytes are, an error of ours or a right result.

BYTES = st.binary(max_size=40)
GOOD_TEXT = text()


def outcome(path: Path, kind: str, schema: str | None = None) -> int | None:
    """Samples that are read, None where the file is refused; checks that every batch is sound."""
    count = 0
    try:
        files = DataFlags(f"{kind}:{path}", rows="100", schema=schema, bad_rows="skip").files(700)
        for batch in files:
            n = len(batch.labels)
            assert batch.dense.isfinite().all() and ((batch.labels == 0) | (batch.labels == 1)).all()
            values = batch.sparse.values()
            assert int(batch.sparse.lengths().sum()) == len(values)
            assert not len(values) or (int(values.min()) >= 0 and int(values.max()) < 100)
            count += n
    except CLEAN:
        return None
    except ValueError as error:
        assert "no row is left to read" in str(error)
        return None
    return count


@given(at=st.integers(0, len(GOOD_TEXT)), cut=st.integers(0, 200), put=BYTES, packed=st.booleans())
@cases(60)
def test_mutated_text(tmp_path_factory: pytest.TempPathFactory, at: int, cut: int, put: bytes, packed: bool) -> None:
    data = GOOD_TEXT[:at] + put + GOOD_TEXT[at + cut :]
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    count = outcome(path, "criteo")
    if count is not None:
        assert count == plain_count(data)


def plain_count(data: bytes) -> int:
    """How many lines of Criteo text are right, by Python alone."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    lines = data.split(b"\n")
    if lines[-1] in (b"", b"\r"):
        lines.pop()
    if set(lines[0].rstrip(b"\r").split(b"\t")) >= {name.encode() for name in CRITEO}:
        lines = lines[1:]
    return sum(map(is_right, lines))


def is_right(line: bytes) -> bool:
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != 40 or b"\r" in line.removesuffix(b"\r") or fields[0] == b"":
        return False
    try:
        numbers = [float(field.decode("ascii")) for field in fields[:14] if field]
    except ValueError:
        return False
    if not is_utf8(line):
        return False
    plain = not any(set(field) & set(b" _\x0b\x0c\x1c\x1d\x1e\x1f") for field in fields[:14])
    hexes = all(len(f) <= 16 and set(f) <= set(b"0123456789abcdefABCDEF") for f in fields[14:])
    return plain and hexes and all(map(math.isfinite, numbers)) and float(fields[0]) in (0, 1)


def is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(at=st.integers(0, 5000), cut=st.integers(0, 30), put=BYTES, kind=st.sampled_from(["rows", "texts", "arrow"]))
@cases(100)
def test_mutated_columns(tmp_path_factory: pytest.TempPathFactory, at: int, cut: int, put: bytes, kind: str) -> None:
    from tests.data.corpus import arrow

    base = tmp_path_factory.getbasetemp()
    path, schema = base / "fuzzed-columns", base / "fuzzed.toml"
    schema.write_text(SCHEMA)
    if kind == "texts":
        logs.write_parquet(path, ROWS)
    elif kind == "arrow":
        arrow(path)
    else:
        parquet()(path)
    data = path.read_bytes()
    at %= len(data)
    path.write_bytes(data[:at] + put + data[at + cut :])
    outcome(path, "criteo" if kind == "texts" else "parquet", None if kind == "texts" else str(schema))


@given(at=st.integers(0, 3000), cut=st.integers(0, 20), put=st.text(max_size=12))
@cases(150)
def test_mutated_schema(at: int, cut: int, put: str) -> None:
    toml = BUILT_IN["avazu"].toml()
    at %= len(toml)
    try:
        schema = FileSchema.parse(toml[:at] + put + toml[at + cut :])
    except BadSchema:
        return
    assert FileSchema.parse(schema.toml()) == schema


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_schema_survives_as_toml(name: str) -> None:
    assert FileSchema.parse(BUILT_IN[name].toml()) == BUILT_IN[name]


def test_a_parquet_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    """Not by its footer, but in the middle of its pages."""
    logs.write_parquet(tmp_path / "file", logs.criteo_rows(400))
    data = (tmp_path / "file").read_bytes()
    start = pq.read_metadata(tmp_path / "file").row_group(2).column(5).data_page_offset
    (tmp_path / "file").write_bytes(data[:start] + b"\xff" * 64 + data[start + 64 :])
    with pytest.raises(BadFile, match="row group 2 cannot be read"):
        list(DataFlags(f"criteo:{tmp_path / 'file'}").files())


# What fuzzing found.

INTS = '[[label]]\nname = "y"\nkind = "number"\n[[id]]\nname = "item"\ntype = "int"\n[file]\ncolumns = ["y", "item"]\n'


def ids_of(folder: Path, text: bytes, schema: str, **flags: Any) -> list[int]:
    (folder / "file").write_bytes(text)
    (folder / "s.toml").write_text(schema)
    files = DataFlags(f"csv:{folder / 'file'}", schema=str(folder / "s.toml"), rows="1000", **flags).files()
    return [row for batch in files for row in batch.sparse.values().tolist()]


def test_hexadecimal_digits_are_no_whole_number(tmp_path: Path) -> None:
    """Arrow's cast takes 0x1f for 31."""
    for value in (b"0x1f", b"0X1"):
        with pytest.raises(BadRow, match=rf"line 2: column item is '{value.decode()}', expected a whole number"):
            ids_of(tmp_path, b"1,7\n0," + value + b"\n", INTS)
        assert ids_of(tmp_path, b"1,7\n0," + value + b"\n", INTS, bad_rows="skip") == ids_of(tmp_path, b"1,7\n", INTS)


def test_a_float_in_text_is_a_whole_number_where_the_schema_says_so(tmp_path: Path) -> None:
    floats = INTS.replace('"int"', '"float"')
    plain = ids_of(tmp_path, b"1,7\n1,-2\n1,1000\n1,9007199254740993\n", INTS)
    assert ids_of(tmp_path, b"1,7.0\n1,-2.\n1,1e3\n1,9007199254740993\n", floats) == plain
    for value in (b"7.5", b"1e30", b"9223372036854775808", b"nan", b"x"):
        with pytest.raises(BadRow, match="line 2: column item is"):
            ids_of(tmp_path, b"1,7\n1," + value + b"\n", floats)


def test_a_label_beyond_float32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRow, match="label y is '1e39', expected a number that fits a float32"):
        ids_of(tmp_path, b"1e39,7\n", INTS)
    with pytest.raises(BadSchema, match="fill is 1e\\+39"):
        FileSchema.parse(INTS + '[[dense]]\nname = "y"\nfill = 1e39\n')
    with pytest.raises(BadSchema, match="set it to a finite number"):
        FileSchema.parse(INTS + f'[[dense]]\nname = "y"\nfill = {"9" * 400}\n')


def test_a_byte_order_mark_is_refused_in_any_line(tmp_path: Path) -> None:
    """Not only where a part happens to begin."""
    schema = INTS.replace('["y", "item"]', '["other", "y", "item"]')
    with pytest.raises(BadRow, match="line 2: the line begins with a byte order mark"):
        ids_of(tmp_path, b"a,1,7\n\xef\xbb\xbfa,1,7\na,1,7\n", schema)
    assert len(ids_of(tmp_path, b"\xef\xbb\xbfa,1,7\na,1,7\n", schema)) == 2


def test_a_header_alone_has_no_rows_whatever_ends_it(tmp_path: Path) -> None:
    for end in (b"", b"\n", b"\r\n", b"\r\r\r"):
        with pytest.raises(ValueError, match="no row is left to read"):
            ids_of(tmp_path, b"y,item" + end, INTS)


def test_names_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    from tests.data.corpus import arrow

    arrow(tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(data.replace(b"item", b"it\xa8m"))
    (tmp_path / "s.toml").write_text(SCHEMA)
    with pytest.raises(BadFile, match="is damaged or cut off"):
        list(DataFlags(f"parquet:{tmp_path / 'file'}", schema=str(tmp_path / "s.toml")).files())
