"""Modules with parts of one collection share its tables: bags and sequences, compared with nn.Embedding in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import skirl
from skirl.models import DLRM
from tests.streams import jagged

ROWS, DIM = 30, 4
FEATURES = {"user": 9, "bought": ROWS, "seen": ROWS}


def collection(optimizer: Any = None, **options: Any) -> skirl.EmbeddingCollection:
    tables = [skirl.Table("user", 9, DIM), skirl.Table("item", ROWS, DIM, features=("bought", "seen"))]
    options = {"cache": 24, "dtype": torch.float64, "seed": 1} | options
    return skirl.EmbeddingCollection(tables, optimizer=optimizer or skirl.Adagrad(lr=0.3), **options)


def loader(batches: int = 8) -> list[skirl.KeyedJagged]:
    rng = np.random.default_rng(0)
    return [jagged(rng, FEATURES, 3, one=["user"]) for _ in range(batches)]


class Profile(nn.Module):
    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, sparse: Any) -> Tensor:
        return self.bags(sparse).stacked().square().sum()


class History(nn.Module):
    """Another one: sequences that share a feature with it, and bags of that feature."""

    def __init__(self, rows: skirl.EmbeddingCollection) -> None:
        super().__init__()
        self.steps, self.sums = rows.part("seen"), rows.part("seen", pooled="sum")

    def forward(self, sparse: Any) -> Tensor:
        rows, _ = self.steps(sparse).padded("seen")
        return (rows.cumsum(1) * 0.1).exp().sum() + self.sums(sparse)["seen"].pow(3).sum()


class Both(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        rows = collection(**options)
        self.profile, self.history = Profile(rows.part("bought", "user", pooled="mean")), History(rows)

    @property
    def rows(self) -> Any:
        return self.history.steps.of

    def loss(self, sparse: Any) -> Tensor:
        return self.profile(sparse) + self.history(sparse)


def train(model: Both) -> None:
    with skirl.lookahead(loader(3), model, sparse=lambda batch: batch) as batches:
        for sparse in batches:
            model.loss(sparse).backward()


class Plain(nn.Module):
    """One nn.Embedding for each table, applied by feature and sample."""

    def __init__(self, rows: skirl.EmbeddingCollection) -> None:
        super().__init__()
        self.user, self.item = (
            nn.Embedding.from_pretrained(rows.rows(name, range(count)).clone(), freeze=False)
            for name, count in (("user", 9), ("item", ROWS))
        )

    def loss(self, sparse: skirl.KeyedJagged) -> Tensor:
        samples = sparse.stride()
        parts = sparse.values().split(sparse.lengths().tolist())
        total = torch.zeros((), dtype=torch.float64)
        longest = max(len(part) for part in parts[2 * samples :])
        for sample in range(samples):
            tables = enumerate((self.user, self.item, self.item))
            user, bought, seen = (table(parts[feature * samples + sample]) for feature, table in tables)
            bag = bought.sum(0) / max(1, len(bought))
            total = total + user.square().sum() + bag.square().sum()
            padded = torch.cat([seen, seen.new_zeros(longest - len(seen), DIM)])
            total = total + (padded.cumsum(0) * 0.1).exp().sum() + seen.sum(0).pow(3).sum()
        return total


@pytest.mark.parametrize("optimizer", [skirl.SGD(lr=0.05), skirl.Adagrad(lr=0.3)])
def test_parts_in_two_modules_train_one_table_as_plain_torch_does(optimizer: Any) -> None:
    model = Both(optimizer=optimizer)
    plain = Plain(model.rows)
    kind = torch.optim.SGD if isinstance(optimizer, skirl.SGD) else torch.optim.Adagrad
    plain_optimizer = kind(plain.parameters(), lr=optimizer.lr)
    with skirl.lookahead(loader(), model, sparse=lambda batch: batch) as batches:
        for sparse in batches:
            loss, expected = model.loss(sparse), plain.loss(sparse)
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
            plain_optimizer.zero_grad()
            loss.backward()
            expected.backward()
            plain_optimizer.step()
    assert model.rows.engine.counters.steps == 8  # one update per step
    for name, table in (("user", plain.user), ("item", plain.item)):
        found = model.rows.rows(name, range(len(table.weight)))
        torch.testing.assert_close(found, table.weight.detach(), rtol=1e-11, atol=1e-14)


def test_a_model_of_parts_is_saved_loaded_and_exported_with_one_table(tmp_path: Path) -> None:
    model, again = Both(), Both()
    train(model)
    skirl.save(tmp_path / "saved", model=model)
    skirl.load(tmp_path / "saved", model=again)
    assert torch.equal(model.eval().loss(loader(1)[0]), again.eval().loss(loader(1)[0]))
    skirl.export(model, tmp_path / "rows.safetensors")
    fresh = Both()
    assert set(skirl.import_rows(fresh, tmp_path / "rows.safetensors")) == {"user", "item"}
    assert torch.equal(fresh.rows.rows("item", range(ROWS)), model.rows.rows("item", range(ROWS)))


def test_a_model_of_the_library_takes_a_part_for_its_embeddings() -> None:
    items, ids = collection(dtype=torch.float32), loader(1)[0]
    bags = skirl.EmbeddingBagCollection(items.tables, optimizer=skirl.SGD(lr=0.1), cache=30, seed=1)
    torch.manual_seed(0)
    model = DLRM.tiny(items.part("user", "seen", "bought", pooled="sum"), dense_features=2)
    torch.manual_seed(0)
    expected = DLRM.tiny(bags, dense_features=2)
    batch = skirl.Batch(torch.ones(3, 2), ids, torch.zeros(3))
    torch.testing.assert_close(model.eval()(batch), expected.eval()(batch))


@pytest.mark.parametrize(("name", "dim"), [("item", DIM), ("item", 2), ("other", DIM)])
def test_a_table_that_two_collections_have_is_refused_and_one_of_another_shape_or_name_is_not(
    name: str, dim: int
) -> None:
    table = skirl.Table(name, ROWS, dim, features=("seen",), pooling="mean")
    bags = skirl.EmbeddingBagCollection([table], optimizer=skirl.SGD(lr=0.1), cache=9)
    model = nn.ModuleDict({"steps": collection(), "bags": bags})
    if (name, dim) != ("item", DIM):
        with skirl.lookahead(loader(2), model, sparse=lambda batch: batch):
            return
    with pytest.raises(ValueError, match=r"'steps' and 'bags', have a table 'item' of 30 rows and dim 4, .*part\("):
        skirl.lookahead(loader(2), model, sparse=lambda batch: batch)


def test_two_drop_in_bags_of_one_shape_are_two_tables() -> None:
    bags = [skirl.EmbeddingBag(9, 2, optimizer=skirl.SGD(lr=0.1), cache=9) for _ in range(2)]
    ids = skirl.KeyedJagged(["weight"], torch.tensor([1]), lengths=torch.tensor([1]))
    with skirl.lookahead([ids], nn.ModuleList(bags), sparse=lambda batch: batch):
        pass
