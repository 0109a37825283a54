"""Rows are exported to plain PyTorch and imported from it, and predictions stay the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import skirl
from skirl.cli import main
from skirl.cli.files import Import
from skirl.engine.access import peek
from tests.streams import jagged

TABLES = [skirl.Table("user", 300, 8), skirl.Table("item", 200, 8, features=("clicked",), pooling="mean")]
NAMES = ["user", "clicked"]


class Model(nn.Module):
    """One model, over skirl's rows or over plain ones."""

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
    return jagged(np.random.default_rng(seed), dict.fromkeys(NAMES, 200), 32, least=1, most=longest)


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


@pytest.mark.parametrize(("store", "suffix"), [("memory", ".pt"), ("disk", ".safetensors")])
def test_exported_rows_predict_the_same_in_plain_pytorch(tmp_path: Path, store: str, suffix: str) -> None:
    model = trained("memory" if store == "memory" else f"disk:{tmp_path / 'rows'}")
    skirl.save(tmp_path / "c", model=model)
    out = tmp_path / f"out{suffix}"
    assert main(["export", str(tmp_path / "c"), "--out", str(out), "--state-dict", "--dense"]) == 0
    plain = Model().eval()
    state = torch.load(out, weights_only=True) if suffix == ".pt" else load_file(out)
    plain.load_state_dict({f"bags.{n}" if n.split(".")[0] in ("user", "item") else n: of for n, of in state.items()})
    with torch.no_grad():
        assert torch.equal(plain(batch(99, 1)), model(batch(99, 1))), "one id a bag: to the last bit"
        torch.testing.assert_close(plain(batch(98, 5)), model(batch(98, 5)), rtol=1e-5, atol=1e-6)
    assert list((tmp_path / "c").glob("reading-*")) == []


def test_imported_by_command_and_taken_from_the_checkpoint(tmp_path: Path, as_json: Any) -> None:
    plain = Model().eval()
    torch.save(plain.state_dict(), tmp_path / "in.pt")
    flags = ["--table", "user,item", "--optimizer", "adagrad"]
    done = as_json("import", str(tmp_path / "in.pt"), "--out", str(tmp_path / "c"), *flags)
    assert done["tables"] == {"item": 200, "user": 300}
    model = Model(made())
    assert skirl.import_rows(model, tmp_path / "c") == {"user": 300, "item": 200}
    model.top.load_state_dict(plain.top.state_dict())
    with torch.no_grad():
        assert torch.equal(plain(batch(99, 1)), model.eval()(batch(99, 1)))
    other = skirl.EmbeddingBagCollection([skirl.Table("shop", 9, 4)], optimizer=skirl.SGD(), cache=9)
    with pytest.raises(skirl.CheckpointError, match="has no table of this model: it has item, user"):
        skirl.import_rows(other, tmp_path / "c")


RULES = [skirl.SGD(lr=0.1), skirl.RowwiseAdagrad(lr=0.1), skirl.Adagrad(lr=0.1, lr_decay=0.2), skirl.Adam(lr=0.1)]


def adaptive(rule: Any, name: str = "item") -> Any:
    return skirl.EmbeddingBagCollection(
        [skirl.Table(name, 50, 4), skirl.Table("o", 9, 4)], optimizer=rule, cache=12, seed=3
    )


def go_on(rows: Any, name: str = "item", steps: int = 6) -> torch.Tensor:
    """Train, and return every row afterwards."""
    for i in range(steps):
        ids = skirl.KeyedJagged.one_hot([name, "o"], torch.tensor([[i % 3, i], [i, i]]))
        out = rows.train()(ids)
        ((out[name] - 1) ** 2 + (out["o"] if i % 2 else 0)).sum().backward()  # the other table takes fewer steps
    return rows.eval()(skirl.KeyedJagged.one_hot([name, "o"], torch.arange(9)[:, None].expand(9, 2)))[name]


@pytest.mark.parametrize(
    ("rule", "by"), [*((rule, "file") for rule in RULES), (RULES[3], "one table"), (RULES[3], "command")]
)
def test_our_own_file_brings_the_optimizer_state_along(
    tmp_path: Path, rule: Any, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Moments, and the step counts of Adam and of a decaying Adagrad: training goes on with the same bits."""
    one, file = adaptive(rule), tmp_path / "rows.safetensors"
    go_on(one)
    skirl.save(tmp_path / "c", model=one)
    assert (
        main(["export", str(tmp_path / "c"), "--out", str(file), *(["--table", "item"] if by == "one table" else [])])
        == 0
    )
    other = adaptive(rule, "mine" if by == "one table" else "item")
    if by == "one table":
        skirl.import_rows(other, file, names={"mine": "weight"})
        skirl.import_rows(other, tmp_path / "c")  # the other table's
    elif by == "file":
        skirl.import_rows(other, file)
    else:
        capsys.readouterr()
        assert main(["import", str(file), "--out", str(tmp_path / "i")]) == 0
        assert "optimizer  adam" in capsys.readouterr().out
        skirl.import_rows(other, tmp_path / "i")
    assert (
        other.engine.packs[0].steps.tolist() == one.engine.packs[0].steps.tolist()
        and other.engine.packs[0].steps[0] > 5
    )
    assert torch.equal(go_on(other, "mine" if by == "one table" else "item"), go_on(one))


def test_moments_without_their_steps_are_refused_and_other_optimizers_begin_anew(tmp_path: Path) -> None:
    one, file = adaptive(RULES[3]), tmp_path / "rows.safetensors"
    go_on(one)
    skirl.export(one, file)
    with pytest.raises(ValueError, match=r"the state dict has Adam's state of table 'item', but not its number of"):
        skirl.import_rows(adaptive(RULES[3]), load_file(file))
    weights = {name: tensor for name, tensor in load_file(file).items() if "exp_avg" not in name}
    anew = adaptive(RULES[3])
    assert skirl.import_rows(anew, weights) == {"item": 6, "o": 6} and not anew.engine.packs[0].steps.any()
    skirl.export(adaptive(RULES[3]), file)  # at step 0, which is written too
    skirl.import_rows(adaptive(RULES[3]), file)
    # A row's sum is one number in row-wise Adagrad and four in Adagrad, under the same name.
    go_on(rowwise := adaptive(RULES[1]))
    skirl.export(rowwise, file)
    skirl.import_rows(other := adaptive(RULES[2]), file)
    records = peek(other.engine, np.arange(6), 0)
    assert not records[:, 4:].any() and records[:, :4].any()
    with pytest.raises(
        ValueError,
        match=r"item.sum is \[6, 1\] in the state dict, and not \[6, 4\]: leave",
    ):
        skirl.import_rows(adaptive(RULES[2]), load_file(file))
    with pytest.raises(ValueError, match="has ids of 'item', but not the number of its rows: export it again"):
        save_file(load_file(file), tmp_path / "bare.safetensors")
        Import(tmp_path / "bare.safetensors", tmp_path / "i").run()


def test_one_exported_table_comes_back(tmp_path):
    rows, again = (skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.SGD(), cache=500, seed=n) for n in (1, 2))
    rows(skirl.KeyedJagged.one_hot(["user", "clicked"], torch.tensor([[3, 7]])))["user"].sum().backward()
    skirl.export(rows, tmp_path / "item.safetensors", "item")
    assert skirl.import_rows(again, tmp_path / "item.safetensors") == {"item": 1}
    skirl.export(rows, tmp_path / "user.pt", "user")
    assert main(["import", str(tmp_path / "user.pt"), "--table", "user", "--out", str(tmp_path / "c")]) == 0
    assert skirl.import_rows(again, tmp_path / "c") == {"user": 300}
    torch.save({"table.weight": torch.ones(300, 8)}, tmp_path / "named.pt")
    assert main(["import", str(tmp_path / "named.pt"), "--table", "user", "--out", str(tmp_path / "d")]) == 1
    torch.save({"model": {"user.weight": torch.ones(300, 8)}}, tmp_path / "nested.pt")
    assert skirl.import_rows(again, tmp_path / "nested.pt") == {"user": 300}
    assert again.rows("user", torch.tensor([5])).tolist() == [[1.0] * 8]


@pytest.mark.parametrize(("encode", "hashed"), [("", True), ('encode = "row"\n', False)])
def test_rows_by_number_under_a_schema_that_hashes_ids_are_said(tmp_path, caplog, capsys, encode, hashed):
    torch.save({"item.weight": torch.ones(200, 8)}, tmp_path / "in.pt")
    assert main(["import", str(tmp_path / "in.pt"), "--out", str(tmp_path / "c")]) == 0
    (tmp_path / "a.csv").write_text("click,item\n" + "1,3\n0,5\n" * 9)
    (tmp_path / "a.toml").write_text(
        f'[[label]]\nname = "click"\n[[id]]\nname = "item"\ntype = "int"\n{encode}rows = 200\n'
    )
    words = ["train", f"csv:{tmp_path / 'a.csv'}", "--schema", str(tmp_path / "a.toml"), "--from", str(tmp_path / "c")]
    assert main([*words, "--model", "dlrm-tiny", "--dim", "8", "--batch", "9", "--cache", "100%", "--run", "none"]) == 0
    assert any("does not say which ids its rows are of" in line for line in caplog.messages) == hashed
    assert "with 200 rows out of" in (said := capsys.readouterr().out) and "optimizer's state starts from zero" in said
