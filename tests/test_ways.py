"""Rows move out to plain PyTorch and in from it, and predictions stay what they were."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import skirl
from skirl.checkpoint.rows import open_rows
from skirl.cli import main

TABLES = [skirl.Table("user", 300, 8), skirl.Table("item", 200, 8, features=("clicked",), pooling="mean")]
NAMES = ["user", "clicked"]


class Model(nn.Module):
    """The same model over skirl's rows or over plain ones."""

    def __init__(self, rows: nn.Module | None = None) -> None:
        super().__init__()
        if rows is None:
            self.bags = nn.ModuleDict({t.name: nn.EmbeddingBag(t.rows, t.dim, mode=t.pooling) for t in TABLES})
        else:
            self.rows = rows
        self.top = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, sparse: skirl.KeyedJagged) -> torch.Tensor:
        if hasattr(self, "rows"):
            out = self.rows(sparse)
            return self.top(torch.cat([out[name] for name in NAMES], dim=1))
        offsets, n = sparse.offsets(), sparse.stride()
        parts = []
        for f, bag in enumerate(self.bags.values()):
            part = offsets[f * n : (f + 1) * n + 1]
            parts.append(bag(sparse.values()[part[0] : part[-1]], part[:-1] - part[0]))
        return self.top(torch.cat(parts, dim=1))


def batch(seed: int, longest: int) -> skirl.KeyedJagged:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (2 * 32,), generator=draw)
    return skirl.KeyedJagged(NAMES, torch.randint(0, 200, (int(lengths.sum()),), generator=draw), lengths=lengths)


def made(store: str = "memory") -> skirl.EmbeddingBagCollection:
    return skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.Adagrad(lr=0.1), cache=250, store=store, seed=3)


def trained(store: str = "memory") -> Model:
    torch.manual_seed(0)
    model = Model(made(store))
    dense = torch.optim.Adam(model.parameters())
    for i in range(20):
        model(batch(i, 3)).square().mean().backward()
        dense.step(), dense.zero_grad()
    return model.eval()


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_exported_rows_predict_the_same_in_plain_pytorch(tmp_path: Path, store: str, suffix: str) -> None:
    model = trained("memory" if store == "memory" else f"disk:{tmp_path / 'rows'}")
    skirl.save(tmp_path / "c", model=model)
    out = tmp_path / f"out{suffix}"
    assert main(["export", str(tmp_path / "c"), str(out), "--state-dict", "--dense", "--prefix", "bags."]) == 0
    plain = Model().eval()
    plain.load_state_dict(torch.load(out, weights_only=True) if suffix == ".pt" else load_file(out))
    with torch.no_grad():
        assert torch.equal(plain(batch(99, 1)), model(batch(99, 1))), "one id a bag: to the last bit"
        torch.testing.assert_close(plain(batch(98, 5)), model(batch(98, 5)), rtol=1e-5, atol=1e-6)
    assert list((tmp_path / "c").glob("export-*")) == []


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", None])
def test_an_imported_model_predicts_the_same_and_trains_on(tmp_path: Path, suffix: str | None) -> None:
    torch.manual_seed(5)
    plain, source = Model().eval(), tmp_path / f"in{suffix}"
    if suffix == ".pt":
        torch.save(plain.state_dict(), source)
    elif suffix:
        save_file(plain.state_dict(), source)
    model = Model(made())
    model(batch(0, 3)).sum().backward()  # some rows are resident already
    assert skirl.import_rows(model, source if suffix else plain.state_dict()) == {"user": 300, "item": 200}
    model.top.load_state_dict(plain.top.state_dict())
    with torch.no_grad():
        assert torch.equal(plain(batch(99, 1)), model.eval()(batch(99, 1)))
        torch.testing.assert_close(plain(batch(98, 5)), model(batch(98, 5)), rtol=1e-5, atol=1e-6)
    model.train()(batch(1, 3)).sum().backward()
    skirl.save(tmp_path / "c", model=model)
    again = Model(made())
    skirl.load(tmp_path / "c", model=again)
    assert torch.equal(again.eval()(batch(7, 3)), model.eval()(batch(7, 3)))


def test_imported_by_command_and_taken_from_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = Model().eval()
    torch.save(plain.state_dict(), tmp_path / "in.pt")
    flags = ["--prefix", "bags.", "--optimizer", "adagrad", "--json"]
    assert main(["import", str(tmp_path / "in.pt"), str(tmp_path / "c"), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["tables"] == {"item": 200, "user": 300}
    model = Model(made())
    assert skirl.import_rows(model, tmp_path / "c") == {"user": 300, "item": 200}
    model.top.load_state_dict(plain.top.state_dict())
    with torch.no_grad():
        assert torch.equal(plain(batch(99, 1)), model.eval()(batch(99, 1)))


def test_our_own_file_brings_the_optimizer_state_along(tmp_path: Path) -> None:
    model = trained()
    skirl.save(tmp_path / "c", model=model)
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "rows.safetensors")]) == 0
    other = Model(made())
    skirl.import_rows(other, tmp_path / "rows.safetensors")
    other.top.load_state_dict(model.top.state_dict())
    for one in (model, other):
        one.rows.engine.table_steps[:] = 0  # type: ignore[union-attr,index]
        one.zero_grad()
        one.train()(batch(50, 3)).sum().backward()
    assert torch.equal(other.eval()(batch(51, 3)), model.eval()(batch(51, 3)))


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_checkpoint_brings_adam_along_with_its_steps(tmp_path: Path, store: str) -> None:
    tables = [skirl.Table("item", 50, 4)]

    def rows(where: str) -> Any:
        kind = f"disk:{tmp_path / where}" if store == "disk" else "memory"
        return skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adam(lr=0.1), cache=8, store=kind)

    def train(embeddings: Any) -> None:
        for i in range(6):
            ids = skirl.KeyedJagged.one_hot(["item"], torch.tensor([[i % 3], [i]]))
            (embeddings.train()(ids)["item"] ** 2).sum().backward()

    one, other = rows("one"), rows("other")
    train(one)
    skirl.save(tmp_path / "c", model=one)
    assert skirl.import_rows(other, tmp_path / "c") == {"item": 6}
    assert not list((tmp_path / "c").glob("export-*"))
    train(one)
    train(other)
    every = skirl.KeyedJagged.one_hot(["item"], torch.arange(6)[:, None])
    assert torch.equal(one.eval()(every)["item"], other.eval()(every)["item"])


def test_parquet_has_the_touched_rows(tmp_path: Path) -> None:
    model = trained()
    skirl.save(tmp_path / "c", model=model)
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "rows.parquet")]) == 0
    table = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert {row["table"] for row in table} == {"user", "item"}
    assert len(table) == len(model.rows.engine.seen)  # type: ignore[union-attr,arg-type]
    rows, _ = open_rows(tmp_path / "c")
    for row in table[:: len(table) // 9]:
        number = [t.name for t in TABLES].index(row["table"])
        record = rows.engine.peek(torch.tensor([row["row"] | number << 48]).numpy(), 0)[0][0]
        assert row["weight"] == record[:8].tolist()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"user.weight": torch.zeros(299, 8)},
            r"user.weight is \[299, 8\] in the state dict, table 'user' is \[300, 8\]",
        ),
        ({"other": torch.zeros(3)}, "no table of this model: it has other"),
        ({"a.user.weight": torch.zeros(300, 8), "b.user.weight": torch.zeros(300, 8)}, "pass names="),
    ],
)
def test_what_does_not_fit_is_refused(state: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        skirl.import_rows(made(), state)


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"user.weight": Model}, tmp_path / "in.pt")
    with pytest.raises(ValueError, match=r"no state dict that torch\.load"):
        skirl.import_rows(made(), tmp_path / "in.pt")
    (tmp_path / "in.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="no safetensors file"):
        skirl.import_rows(made(), tmp_path / "in.safetensors")
