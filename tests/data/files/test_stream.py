"""Batches from files: the same rows as a plain reading, in the same order with any workers, resumed at any batch."""

import csv
import multiprocessing
import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.cli.files import Vocab
from skirl.core.batch import Batch
from skirl.data import DataFlags, Source, Synthetic
from skirl.data.files.dataset import WorkerDied, permutation
from skirl.data.files.schema import BUILT_IN
from skirl.data.files.stream import Files
from tests.cases import cases
from tests.data import logs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    logs.write_in_three_forms(folder, logs.criteo_rows(1000), (0, 300, 310, 900, 1000))
    return folder


def opened(path: Path | str, part_bytes: int = 20_000, **flags: Any) -> Files:
    return DataFlags(f"criteo:{path}", **{"batch": 64, "rows": "5000", **flags}).files(part_bytes)


def all_same(a: Iterable[Batch], b: Iterable[Batch]) -> bool:
    return [*map(logs.plain, a)] == [*map(logs.plain, b)]


@pytest.mark.parametrize("name", ["text", "packed", "parquet"])
def test_every_sample_is_that_of_a_plain_reading(folder: Path, name: str) -> None:
    batches = list(opened(folder / name))
    found = logs.samples_of(batches)
    expected = [logs.criteo_sample(row, 5000) for row in logs.criteo_rows(1000)]
    assert [(label, ids) for label, _, ids in found] == [(label, ids) for label, _, ids in expected]
    for (_, dense, _), (_, wanted, _) in zip(found, expected):
        assert dense == pytest.approx(wanted, rel=1e-6)
    assert [len(batch.labels) for batch in batches] == [64] * 15 + [40]


@pytest.mark.parametrize("shuffle", [0, 200])
@pytest.mark.parametrize("name", ["text", "packed", "parquet"])
def test_a_state_goes_on_at_its_batch(folder: Path, name: str, shuffle: int) -> None:
    flags: dict[str, Any] = {"epochs": 2, "shuffle": shuffle, "seed": 5, "valid": "20%"}
    files = opened(folder / name, **flags)
    batches, states = [], [files.state_dict()]
    for batch in files:
        batches.append(batch)
        states.append(files.state_dict())
    assert len(batches) == 26 and files.steps == 26
    for taken in [*random.Random(1).sample(range(26), 2), 0, 12, 13, 25]:
        other = opened(folder / name, **flags)
        other.load_state_dict(states[taken])
        assert other.state_dict() == states[taken]
        assert all_same(list(other), batches[taken:]), taken
        assert other.steps == 26
    assert all_same(list(other), batches), "the next pass is a whole one"


def test_a_pass_that_is_left_leaves_no_process(folder: Path) -> None:
    before = multiprocessing.active_children()
    files = opened(folder / "text", workers=2)
    with pytest.raises(RuntimeError, match="my own"):
        for _ in files:
            assert len(multiprocessing.active_children()) == len(before) + 2
            raise RuntimeError("my own")
    del files
    assert multiprocessing.active_children() == before


def test_workers_hold_a_share_out(folder: Path) -> None:
    flags = {"epochs": 2, "valid": "30%"}
    assert all_same(list(opened(folder / "parquet", workers=3, **flags)), list(opened(folder / "parquet", **flags)))


def test_a_share_is_held_out_in_order(folder: Path) -> None:
    rows = [logs.criteo_sample(row, 5000)[2] for row in logs.criteo_rows(1000)]
    for name in ("text", "packed", "parquet"):
        files = opened(folder / name, valid="25%", epochs=2, shuffle=300)
        assert files.held_out is not None
        assert [ids for _, _, ids in logs.samples_of(list(files.held_out))] == rows[750:]
        trained = [ids for _, _, ids in logs.samples_of(list(files))]
        assert sorted(trained) == sorted(rows[:750] * 2) and trained[:750] != rows[:750]
        assert (files.samples, files.held_out.samples) == (1500, 250)


def test_steps_are_known_when_the_last_batch_is_there(folder: Path) -> None:
    files = opened(folder / "packed")
    known = [files.steps for _ in files]
    assert known == [None] * 15 + [16]


@given(n=st.integers(0, 300), stream=st.integers(0, 2**64 - 1))
@cases(50)
def test_a_permutation_has_every_number_once(n: int, stream: int) -> None:
    assert sorted(permutation(n, np.uint64(stream)).tolist()) == list(range(n))


def test_real_avazu(data_folder: Path) -> None:
    rows = []
    for name in ("dev", "test", "train"):  # the files in natural order; only the last has a header
        with (data_folder / "avazu" / f"{name}.csv").open() as file:
            rows += [row for row in csv.reader(file) if row[0] != "id"]
    files = DataFlags(f"avazu:{data_folder / 'avazu'}", rows="1000").files()
    names = [table.name for table in files.tables(4)]
    assert names[:3] == ["C1", "banner_pos", "site_id"] and len(names) == 21
    found = logs.samples_of(list(files))
    assert len(found) == len(rows) == 8999
    for (label, dense, ids), row in zip(found, rows):
        bases = [10 if i < 2 or i > 10 else 16 for i in range(21)]
        values = [logs.number_hash(int(text, base), name) for text, base, name in zip(row[3:], bases, names)]
        assert (label, dense) == (float(row[1]), [int(row[2]) % 100 / 24])
        assert ids == [logs.row_of(value, 1000) for value in values]


def test_a_worker_that_is_killed_is_a_sentence(folder: Path) -> None:
    files = opened(folder / "text", 3000, workers=2)
    batches = iter(files)
    next(batches)
    for process in multiprocessing.active_children():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"ended by itself \(exit code -9\): is there enough memory\? Set workers to"):
        list(batches)
    assert not multiprocessing.active_children()


def test_a_state_of_other_files_or_rows_is_refused(folder: Path, tmp_path: Path) -> None:
    rows = logs.criteo_rows(200)
    for name, some in (("a", rows), ("b", rows), ("other/a", rows[:-1])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        logs.write_tsv(tmp_path / name, some)
    state = opened(tmp_path / "a", valid="20%").state_dict()
    opened(tmp_path / "a", valid="20%", epochs=3).load_state_dict(state)
    with pytest.raises(ValueError, match=r"files has a \(\d+ bytes\), not b \(\d+ bytes\): set data to what it was"):
        opened(tmp_path / "b", valid="20%").load_state_dict(state)
    with pytest.raises(ValueError, match="whose files has a"):
        opened(tmp_path / "other" / "a", valid="20%").load_state_dict(state)
    with pytest.raises(ValueError, match="whose files has a"):
        opened(folder / "text", valid="20%").load_state_dict(state)
    with pytest.raises(ValueError, match="set valid to what it was"):
        opened(tmp_path / "a", valid="30%").load_state_dict(state)


def test_a_state_of_another_schema_rows_or_vocabulary_is_refused(tmp_path: Path) -> None:
    """Each of these changes the batches of the same files. The error names the difference, and the flag that fixes it."""
    logs.write_tsv(tmp_path / "day_0", logs.criteo_rows(200))
    whole = BUILT_IN["criteo"].toml()

    def made(schema: str = whole, **flags: Any) -> Source:
        (tmp_path / "s.toml").write_text(schema)
        given: dict[str, Any] = {"batch": 64, "rows": "500", "schema": str(tmp_path / "s.toml"), **flags}
        return DataFlags(f"criteo:{tmp_path / 'day_0'}", **given).stream()

    state = made().state_dict()
    made(f'session = "C1"\n{whole}').load_state_dict(state)  # not read yet
    c7, i3 = '[[id]]\nname = "C7"\ncolumn = ""\ntype = "hex"', 'name = "I3"\ncolumn = ""\ntransform = "log"'
    for *change, said in (
        (c7, c7.replace("hex", "string"), 'schema has type = "hex", not type = "string": set schema'),
        (i3, i3.replace("log", "none"), 'has transform = "log", not transform = "none"'),
    ):
        other = whole.replace(*change)
        assert other != whole
        with pytest.raises(ValueError, match=said):
            made(other).load_state_dict(state)
    with pytest.raises(ValueError, match="has rows = 500, not rows = 700"):
        made(rows="500,C3=700").load_state_dict(state)
    vocabularies = [f"{tmp_path}/v{count}" for count in (1, 2)]
    for count, path in enumerate(vocabularies, start=1):
        Vocab(f"criteo:{tmp_path / 'day_0'}", path, min_count=count, quiet=True).run()
    first, second = (made(rows=None, vocab=path) for path in vocabularies)
    with pytest.raises(ValueError, match=r"rows_of has by hash, not by a vocabulary of [\d,]+ rows .*: set vocab to"):
        first.load_state_dict(state)
    with pytest.raises(ValueError, match=r"by a vocabulary of .* with checksum .*, not by a vocabulary of .*: set voc"):
        second.load_state_dict(first.state_dict())
    grown = made(vocab="open")
    with pytest.raises(ValueError, match="the state is of an open vocabulary: set vocab to open"):
        made().load_state_dict(grown.state_dict())
    with pytest.raises(ValueError, match="by hash, not by an open vocabulary: set vocab to what it was"):
        grown.load_state_dict(state)
    for one, other in ((made(), Synthetic("tiny")), (Synthetic("tiny"), made()), (grown, Synthetic("tiny"))):
        with pytest.raises(ValueError, match="set data to what it was"):
            one.load_state_dict(other.state_dict())
