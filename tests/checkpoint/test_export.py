"""Exported rows equal those of the plain reference, bit for bit."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

import skirl
from skirl.core.optim import RowOptimizer
from skirl.core.reference import Reference
from skirl.train.verify import _bags
from tests.loops import hooked
from tests.resume import ROWS

TABLES = [
    skirl.Table("a", 40, 4),
    skirl.Table("b", 60, 8, features=("b1", "b2"), pooling="mean"),
    skirl.Table("c", 30, 4, init=skirl.Normal(0.1)),
    skirl.Table("never", 5, 4),
]
FEATURES = ["a", "b1", "b2", "c", "never"]


def batch(i: int) -> skirl.KeyedJagged:
    """Return skewed ids, so that some rows stay in the cache; the table `never` gets none."""
    rng = np.random.default_rng(i)
    lengths = rng.integers(0, 4, (5, 6))
    lengths[4] = 0
    ids = [int(x) for f, n in enumerate(lengths) for x in rng.integers(0, 30, n.sum()) ** 2 // 30]
    return skirl.KeyedJagged(FEATURES, torch.tensor(ids, dtype=torch.int64), lengths=torch.from_numpy(lengths.ravel()))


class Both:
    """The library and the reference, stepping together."""

    def __init__(self, optimizer: RowOptimizer, dtype: torch.dtype = torch.float32, cache: int = 40) -> None:
        self.rows = skirl.EmbeddingBagCollection(TABLES, optimizer=optimizer, cache=cache, seed=9, dtype=dtype)
        self.reference = Reference(TABLES, optimizer, seed=9, dtype=self.rows.engine.dtype)

    def step(self, sparse: skirl.KeyedJagged) -> None:
        out = self.rows(sparse)
        sum((out[name] * out[name]).sum() for name in FEATURES).backward()  # type: ignore[union-attr]
        expected = self.reference.forward(_bags(sparse))
        self.reference.backward({name: values + values for name, values in expected.items()})

    def check(self, path: Path, names: list[str] | None = None) -> None:
        found = load_file(path)
        expected = {}
        for t, table in enumerate(TABLES):
            if names is not None and table.name not in names:
                continue
            optimizer = self.reference.optimizers[t]
            prefix = "" if names is not None else f"{table.name}."
            keys = sorted(key for key in self.reference.rows if key >> 48 == t)
            records = np.array([self.reference.rows[key] for key in keys], self.rows.engine.dtype)
            records = records.reshape(len(keys), optimizer.width(table.dim))
            expected[f"{prefix}ids"] = np.array(keys, np.int64) & ((1 << 48) - 1)
            for part, place in optimizer.unpack(table.dim).items():
                expected[prefix + part] = records[:, place]
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name].dtype == values.dtype and found[name].shape == values.shape, name
            assert found[name].tobytes() == np.ascontiguousarray(values).tobytes(), name


@pytest.mark.parametrize(("optimizer", "dtype"), [*((rule, torch.float32) for rule in ROWS), (ROWS[3], torch.float64)])
def test_rows_are_the_references(optimizer: RowOptimizer, dtype: torch.dtype, tmp_path: Path) -> None:
    both = Both(optimizer, dtype)
    path = tmp_path / "rows.safetensors"

    def slow(stage: str, number: int) -> None:
        if stage == "write":
            time.sleep(0.03)  # so that write-backs are in flight when rows are exported

    loader = [batch(i) for i in range(12)]
    with hooked(slow, loader, both.rows, sparse=lambda ids: ids, timeout=120) as batches:
        for ids in batches:
            both.step(ids)
            if batches.step in (1, 7):  # resident rows, rows in the store, write-backs in flight, steps planned ahead
                skirl.export(both.rows, path)
                both.check(path)
    assert both.rows.engine.counters.fetched > 20
    skirl.export(both.rows, path)
    both.check(path)
    for table in TABLES:
        skirl.export(both.rows, path, table.name)
        both.check(path, [table.name])
    both.step(batch(99))  # without a lookahead
    skirl.export(both.rows, path)
    both.check(path)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.safetensors"]


def test_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(ROWS[1])
    for i in range(5):
        both.step(batch(i))
    monkeypatch.setattr(sys.modules["skirl.checkpoint.export"], "_PIECE", 3)
    skirl.export(both.rows, tmp_path / "rows.safetensors")
    both.check(tmp_path / "rows.safetensors")


def test_untouched_rows_too(tmp_path: Path) -> None:
    both = Both(ROWS[2])
    path = tmp_path / "rows.safetensors"
    with skirl.lookahead([batch(i) for i in range(9)], both.rows, sparse=lambda ids: ids, timeout=120) as batches:
        for ids in batches:
            both.step(ids)
            if batches.step == 3:  # the window knows rows that no step has used yet
                break
        skirl.export(both.rows, path, state_dict=True)
    found = load_file(path)
    whole = {t.name: (range(t.rows), range(t.rows + 1), None) for t in TABLES}
    fresh = Reference([replace(t, features=(), pooling="sum") for t in TABLES], ROWS[2], seed=9)
    fresh.rows = both.reference.rows
    expected = fresh.forward(whole, evaluate=True)
    assert sorted(found) == [f"{t.name}.weight" for t in TABLES]
    for table in TABLES:
        assert found[f"{table.name}.weight"].tobytes() == expected[table.name].tobytes()
    assert len(both.rows.engine.store) < sum(t.rows for t in TABLES)


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    both = Both(ROWS[3])
    skirl.export(both.rows, tmp_path / "empty.safetensors")
    both.check(tmp_path / "empty.safetensors")
    with safe_open(tmp_path / "empty.safetensors", "np") as file:
        assert file.metadata()["format"] == "skirl-rows"
        facts = json.loads(file.metadata()["tables"])
    assert facts == {t.name: {"rows": t.rows, "steps": 0, "optimizer": "Adam"} for t in TABLES}
