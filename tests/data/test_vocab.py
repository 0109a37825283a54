"""Vocabularies: exact counts, their file, and the rows they give."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from skirl.cli.files import Convert, Vocab
from skirl.data import DataFlags
from skirl.data.files.columnar import embedded_schema
from skirl.data.files.find import BadSchema
from skirl.data.files.schema import BUILT_IN
from skirl.data.vocabulary.vocabulary import BadVocabulary, Counts, load, save
from tests.cases import cases
from tests.data import logs

FACTS = {"version": 1, "types": {"C1": "hex"}, "min_count": 1, "samples": 1}


@pytest.fixture(scope="module")
def tsv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return logs.write_tsv(tmp_path_factory.mktemp("vocab") / "day_0", logs.criteo_rows(600, seed=2))


@given(st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=8), st.booleans())
@cases(40)
def test_counts_are_exact_whenever_they_merge(pieces: list[list[int]], merge: bool) -> None:
    counts, expected = Counts(), Counter[int]()
    for piece in pieces:
        counts.add(np.array(piece, np.uint64) * np.uint64(2**58))
        expected.update((value << 58) % 2**64 for value in piece)
        if merge:
            counts.counted()
    del expected[0]
    keys, times = counts.counted()
    assert list(zip(keys.tolist(), times.tolist())) == sorted(expected.items())


def test_rows_are_those_of_a_plain_count(tsv: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "v")
    result = Vocab(f"criteo:{tsv}", out, min_count=3, valid="50%", quiet=True).run()
    rows = logs.read_tsv(tsv)
    files = DataFlags(f"criteo:{tsv}", vocab=out, valid="50%", workers=0).files()
    found = logs.samples_of([*files, *(files.held_out or [])])
    tables = {table.name: table.rows for table in files.tables(4)}
    for k, name in enumerate(logs.CRITEO[14:]):
        counts = Counter(int(row[14 + k], 16) for row in rows[:300] if row[14 + k])
        kept = [value for value, count in counts.items() if count >= 3]
        kept.sort(key=lambda value: (-counts[value], logs.number_hash(value, name)))
        assert tables[name] == len(kept) + 2 == result["rows"][name]
        places = {value: number for number, value in enumerate(kept, start=2)}
        for row, (_, _, ids) in zip(rows, found):
            assert ids[k] == (places.get(int(row[14 + k], 16), 1) if row[14 + k] else 0)
    assert result["samples"] == 300 and sum(result["distinct"].values()) > sum(result["rows"].values())


def test_malformed_vocabularies_are_refused(tsv: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "v")
    good = {"C1": np.array([5], np.uint64)}
    cases_ = {
        "does not say what it is": lambda: save_file({"C1.keys": good["C1"]}, path),
        "of version 9": lambda: save_file({}, path, metadata={"skirl": json.dumps(FACTS | {"version": 9})}),
        "has no table 'C2'": lambda: save(path, {"C1": "hex"}, 1, 1, good),
        "its ids of 'C1' are texts, not hex": lambda: save(path, {"C1": "texts"}, 1, 1, good),
        "C1.keys is not a list of uint64": lambda: save_file(
            {"C1.keys": np.zeros((2, 2), np.uint64)}, path, metadata={"skirl": json.dumps(FACTS)}
        ),
    }
    save_file({"C1.keys": good["C1"]}, path, metadata={"skirl": json.dumps(FACTS | {"means": {"C1": 0.5}})})
    assert load(path).rows == {"C1": 3}  # an earlier skirl added a field, which says nothing about rows
    for said, make in cases_.items():
        make()
        with pytest.raises(BadVocabulary, match=said):
            DataFlags(f"criteo:{tsv}", vocab=path)


@pytest.mark.parametrize("form", ["fingerprints", "rows", "vocab"])
def test_converted_files_give_the_same_batches(tsv: Path, tmp_path: Path, form: str) -> None:
    out, vocab = str(tmp_path / "out.parquet"), str(tmp_path / "v")
    ids: dict[str, Any] = {"rows": "3000"}
    if form == "vocab":
        Vocab(f"criteo:{tsv}", vocab, min_count=2, quiet=True).run()
        ids = {"vocab": vocab}
    result = Convert(f"criteo:{tsv}", out, quiet=True, **({} if form == "fingerprints" else ids)).run()
    assert result["samples"] == 600
    original = list(DataFlags(f"criteo:{tsv}", batch=100, **ids).stream())
    same = DataFlags(f"parquet:{out}", batch=100, **(ids if form == "fingerprints" else {})).stream()
    assert logs.samples_of(list(same)) == logs.samples_of(original)
    assert [t.rows for t in same.tables(4)] == [t.rows for t in DataFlags(f"criteo:{tsv}", **ids).stream().tables(4)]
    if form != "fingerprints":
        with pytest.raises(ValueError, match="set rows in the schema"):
            DataFlags(f"parquet:{out}", rows="C1=50")


def test_lists_and_shared_tables_survive_a_conversion(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        '[[label]]\nname = "y"\n[[id]]\nname = "item"\n[[id]]\nname = "seen"\ntable = "item"\nlist = true\nseparator = "|"\n'
        '[file]\ncolumns = ["y", "item", "seen"]\ndelimiter = "tab"'
    )
    (tmp_path / "data").write_text("0\ta\tb|c|a\n1\tb\t\n0\tc\ta\n")
    flags: dict[str, Any] = {"data": f"csv:{tmp_path / 'data'}", "schema": str(tmp_path / "s.toml"), "rows": "500"}
    (batch,) = DataFlags(**flags).stream()
    ids = batch.sparse.values().tolist()
    assert batch.sparse.lengths().tolist() == [1, 1, 1, 3, 0, 1]
    assert ids[3:6] == [ids[1], ids[2], ids[0]] and ids[6] == ids[0], "one table, one row a value"
    assert ids[0] == logs.row_of(logs.text_hash(b"a", "item"), 500)
    assert [(t.name, t.features) for t in DataFlags(**flags).stream().tables(2)] == [("item", ("item", "seen"))]
    out = str(tmp_path / "out.parquet")
    Convert(flags["data"], out, schema=flags["schema"], rows="500", quiet=True).run()
    (again,) = DataFlags(f"parquet:{out}").stream()
    assert again.sparse.values().tolist() == ids and again.sparse.lengths().tolist() == batch.sparse.lengths().tolist()


def test_a_vocabulary_of_other_values_does_not_fit_converted_fingerprints(tsv: Path, tmp_path: Path) -> None:
    """As text, as hexadecimal digits and as a number, "10" has three fingerprints; a file of fingerprints names its kind."""
    schema = BUILT_IN["criteo"].toml()
    (tmp_path / "texts.toml").write_text(schema.replace('type = "hex"', 'type = "string"'))
    texts, hexes, out, rows, old = (str(tmp_path / name) for name in ("t", "h", "o.parquet", "r.parquet", "old"))
    Vocab(f"criteo:{tsv}", hexes, min_count=1, quiet=True).run()
    Vocab(f"criteo:{tsv}", texts, min_count=1, schema=str(tmp_path / "texts.toml"), quiet=True).run()
    Convert(f"criteo:{tsv}", out, quiet=True).run()
    list(DataFlags(f"parquet:{out}", vocab=hexes).stream())
    with pytest.raises(BadVocabulary, match="its ids of 'C1' are texts, not hex: make it again with this data"):
        DataFlags(f"parquet:{out}", vocab=texts)
    assert Path(hexes).stat().st_mode == tsv.stat().st_mode, "others may read it"
    again = str(tmp_path / "again")  # and a vocabulary of the converted file fits the original
    Vocab(f"parquet:{out}", again, min_count=1, quiet=True).run()
    assert load(again).types == load(hexes).types and load(again).checksum == load(hexes).checksum
    list(DataFlags(f"criteo:{tsv}", vocab=again).stream())
    # A file that does not say so, as earlier ones do not, could hold any of them.
    (tmp_path / "old.toml").write_text((embedded_schema(out) or "").replace('of = "hex"\n', ""))
    list(DataFlags(f"parquet:{out}", vocab=texts, schema=str(tmp_path / "old.toml")).stream())
    Vocab(f"parquet:{out}", old, schema=str(tmp_path / "old.toml"), min_count=1, quiet=True).run()
    list(DataFlags(f"criteo:{tsv}", vocab=old).stream())
    # Rows come from one vocabulary or have one size, and no other can be given.
    Convert(f"criteo:{tsv}", rows, vocab=hexes, quiet=True).run()
    with pytest.raises(ValueError, match=r"every id column holds rows already.*, train without one"):
        DataFlags(f"parquet:{rows}", vocab=hexes)
    mixed = embedded_schema(rows) or ""
    some = '[[id]]\nname = "C1"\ncolumn = ""\ntype = "int"\nof = ""\nencode = '
    (tmp_path / "mixed.toml").write_text(mixed.replace(f'{some}"row"', f'{some}"hash"'))
    save(texts, {"C1": "numbers", "C2": "hex"}, 1, 1, {t: np.array([5], np.uint64) for t in ("C1", "C2")})
    with pytest.raises(BadVocabulary, match="it has ids of 'C2', which is a row in this data already: make it again"):
        DataFlags(f"parquet:{rows}", vocab=texts, schema=str(tmp_path / "mixed.toml"))


@pytest.mark.parametrize("kind", ["string", "hex"])
@pytest.mark.parametrize(("values", "said"), [([7, 10], "int64"), ([7.0, 10.0], "double"), ([[7], [10, 2]], "int64")])
def test_numbers_in_a_column_of_texts_are_refused(tmp_path: Path, kind: str, values: list[Any], said: str) -> None:
    lists = "\nlist = true" if isinstance(values[0], list) else ""
    (tmp_path / "s.toml").write_text(f'[[label]]\nname = "y"\n[[id]]\nname = "item"\ntype = "{kind}"{lists}\n')
    pq.write_table(pa.table({"y": [0, 1], "item": values}), tmp_path / "data")
    then = f"holds {said}, not texts.*: set its type to {'float' if said == 'double' else 'int'}"
    with pytest.raises(BadSchema, match=rf"^{tmp_path / 'data'}: column 'item' {then}"):
        list(DataFlags(f"parquet:{tmp_path / 'data'}", schema=str(tmp_path / "s.toml"), rows="50").stream())
