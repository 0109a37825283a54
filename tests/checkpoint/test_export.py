"""Exported rows equal those of the plain reference, bit for bit; rows from elsewhere come under any name, from any file."""

import json
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import nn

import skirl
from skirl.core.optim import RowOptimizer
from skirl.core.reference import Reference
from skirl.train.verify import _bags
from tests.cases import cases
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
def test_rows_are_the_references(
    optimizer: RowOptimizer, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in pieces of three rows."""
    monkeypatch.setattr(import_module("skirl.checkpoint.export"), "_PIECE", 3)
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


def made() -> skirl.EmbeddingBagCollection:
    tables = [skirl.Table("a", 6, 2), skirl.Table("b", 6, 4)]
    return skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adagrad(), cache=4)


def rows_of(embeddings: skirl.EmbeddingBagCollection) -> dict[str, torch.Tensor]:
    ids = skirl.KeyedJagged.one_hot(["a", "b"], torch.arange(6)[:, None].expand(6, 2))
    out = embeddings.eval()(ids)
    return {name: out[name].detach().clone() for name in ("a", "b")}


@given(
    which=st.sets(st.sampled_from(["a", "b"]), min_size=1),
    form=st.sampled_from(["{}", "{}.weight", "model.bags.{}.weight", "other_{}"]),
    kind=st.sampled_from(["dict", ".pt", ".safetensors"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@cases(40)
def test_rows_are_those_of_the_source_and_others_stay(
    tmp_path_factory: pytest.TempPathFactory, which: set[str], form: str, kind: str, dtype: torch.dtype, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    dims = {"a": 2, "b": 4}
    source: Any = {form.format(n): torch.randn(6, dims[n], generator=draw).to(dtype) for n in sorted(which)}
    expected = rows_of(ours := made()) | {n: source[form.format(n)].to(torch.float32) for n in which}
    source["bias"] = torch.zeros(3)
    if kind != "dict":
        path = tmp_path_factory.getbasetemp() / f"rows{kind}"
        (torch.save if kind == ".pt" else save_file)(source, path)
        source = path
    names = {n: form.format(n) for n in which} if form.startswith("other") else None
    assert skirl.import_rows(ours, source, names=names) == dict.fromkeys(sorted(which), 6)
    found = rows_of(ours)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.weight": torch.zeros(6, 2, dtype=torch.int64)}, "a.weight is of torch.int64"),
        ({"a.weight": torch.tensor(1.0)}, r"a.weight is \[\]"),
        (
            {"a.weight": torch.zeros(2, 2), "a.ids": torch.zeros(2)},
            "a.ids is of torch.float32 .* not of torch.int64: convert it",
        ),
        ({"a.weight": torch.tensor(1.0), "a.ids": torch.zeros(2, dtype=torch.int64)}, "a.ids is"),
        ({"a.weight": torch.zeros(2, 2), "a.ids": torch.arange(2), "a.sum": torch.zeros(2, 0, 2)}, "a.sum is"),
        ({"x": torch.zeros(2)}, "has no table of this model"),
        ({"x.a.weight": torch.zeros(6, 2), "y.a.weight": torch.zeros(6, 2)}, "say which by names="),
    ],
)
def test_tensors_of_another_form_are_refused_with_their_file(
    tmp_path: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    save_file(tensors, tmp_path / "t.safetensors")
    torch.save(tensors, tmp_path / "t.pt")
    for name in ("t.safetensors", "t.pt"):
        rows = made()
        with pytest.raises(ValueError, match=words) as caught:
            skirl.import_rows(rows, tmp_path / name)
        assert name in str(caught.value) and not len(rows.engine.store)


def test_a_flipped_bit_in_a_file_of_torch_is_found(tmp_path: Path) -> None:
    """Torch checks no checksum when it maps the file."""
    state = {"a.weight": torch.ones(6, 2), "b.weight": torch.full((6, 4), 2.0)}
    path = tmp_path / "t.pt"
    torch.save(state, path)
    data = bytearray(path.read_bytes())
    data[bytes(data).index(np.float32(2.0).tobytes() * 4)] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"t\.pt is not a state dict .*CRC"):
        skirl.import_rows(made(), path)
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert skirl.import_rows(made(), path) == {"a": 6, "b": 6}


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": nn.Module}, tmp_path / "in.pt")
    with pytest.raises(ValueError, match=r"not a state dict that torch\.load") as refused:
        skirl.import_rows(made(), tmp_path / "in.pt")
    assert len(str(refused.value)) < 500 and "\n" not in str(refused.value)  # torch's own message takes a page
    (tmp_path / "in.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="not a safetensors file"):
        skirl.import_rows(made(), tmp_path / "in.safetensors")
