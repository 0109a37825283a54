"""Sequences as models use them, padded with a mask, nested or flat: compared with nn.Embedding in float64."""

import pytest
import torch
from torch import Tensor, nn

import skirl

ROWS, DIM = 30, 4
TABLES = [skirl.Table("item", ROWS, DIM, features=("seen", "bought")), skirl.Table("shop", ROWS, 2 * DIM)]
SAMPLES = {
    "ordinary": [[3, 1, 4, 1], [5], [9, 2, 6]],
    "empty bags": [[], [3, 1], [], [7, 7, 7], []],
    "all bags empty": [[], []],
    "one sample": [[8, 2]],
    "no sample": [],
}
LAYER = nn.Linear(DIM, 1, dtype=torch.float64)


def ids_of(seen: list[list[int]]) -> skirl.KeyedJagged:
    """Return `seen` between two other features."""
    bought, shop = [[1, 2] for _ in seen], [[3] for _ in seen]
    bags = [*bought, *seen, *shop]
    values = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    return skirl.KeyedJagged(
        ["bought", "seen", "shop"], values, lengths=torch.tensor([len(bag) for bag in bags]).long()
    )


def collection() -> skirl.EmbeddingCollection:
    return skirl.EmbeddingCollection(TABLES, optimizer=skirl.SGD(lr=0.5), cache=ROWS, dtype=torch.float64)


class Plain:
    """Uses nn.Embedding over padded ids: row 0 is padding, row i + 1 is id i."""

    def __init__(self, rows: skirl.EmbeddingCollection) -> None:
        first = rows.rows("item", range(ROWS))
        self.embedding = nn.Embedding(ROWS + 1, DIM, padding_idx=0, dtype=torch.float64)
        self.embedding.weight.data[1:] = first
        self.optimizer = torch.optim.SGD(self.embedding.parameters(), lr=0.5)

    def __call__(self, seen: list[list[int]]) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(len(seen), max(map(len, seen), default=0), dtype=torch.int64)
        for sample, bag in enumerate(seen):
            ids[sample, : len(bag)] = torch.tensor(bag) + 1
        return self.embedding(ids), ids != 0

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weight(self) -> Tensor:
        return self.embedding.weight.detach()[1:]


def loss_of(rows: Tensor, mask: Tensor) -> Tensor:
    """Return attention over real entries plus a sum over everything, including padding, from which no gradient may flow."""
    scores = LAYER(rows).squeeze(2).masked_fill(~mask, -1e9)
    return (scores.softmax(1).unsqueeze(2) * rows).square().sum() + rows.sum() + (rows + 1).prod(2).sum()


@pytest.mark.parametrize("seen", SAMPLES.values(), ids=SAMPLES.keys())
def test_padded_rows_and_their_mask_are_those_of_an_embedding_with_padding_idx(seen: list[list[int]]) -> None:
    embeddings = collection()
    plain = Plain(embeddings)
    for _ in range(2):
        rows, mask = embeddings(ids_of(seen)).padded("seen")
        expected, expected_mask = plain(seen)
        assert torch.equal(rows, expected) and torch.equal(mask, expected_mask)
        assert rows.shape == (len(seen), max(map(len, seen), default=0), DIM) and mask.dtype == torch.bool
        loss_of(rows, mask).backward()
        loss_of(expected, expected_mask).backward()
        plain.step()
        torch.testing.assert_close(embeddings.rows("item", range(ROWS)), plain.weight, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seen", SAMPLES.values(), ids=SAMPLES.keys())
def test_nested_rows_are_those_of_each_sample(seen: list[list[int]]) -> None:
    embeddings = collection()
    plain = Plain(embeddings)
    nested = embeddings(ids_of(seen)).nested("seen")
    expected, mask = plain(seen)
    assert nested.is_nested and nested.layout == torch.jagged and nested.shape[0] == len(seen)
    for part, rows, there in zip(nested.unbind(), expected, mask, strict=True):
        assert torch.equal(part, rows[there])
    second = embeddings.eval()(ids_of(seen)).nested("bought")  # it starts after the other one
    assert all(torch.equal(part, embeddings.rows("item", [1, 2])) for part in second.unbind())
    assert second.offsets().tolist() == [2 * sample for sample in range(len(seen) + 1)]
    embeddings.train()
    (nested.values() * nested.values()).sum().backward()
    (expected * expected).sum().backward()
    plain.step()
    torch.testing.assert_close(embeddings.rows("item", range(ROWS)), plain.weight, rtol=1e-12, atol=1e-15)


def test_flat_padded_and_nested_of_one_lookup_add_their_gradients() -> None:
    embeddings, seen = collection(), SAMPLES["empty bags"]
    plain = Plain(embeddings)
    out = embeddings(ids_of(seen))
    rows, _ = out.padded("seen")
    (out["seen"].sum() + rows.square().sum() + out.nested("seen").values().exp().sum()).backward()
    expected, mask = plain(seen)
    flat = expected[mask]
    (flat.sum() + flat.square().sum() + flat.exp().sum()).backward()
    plain.step()
    torch.testing.assert_close(embeddings.rows("item", range(ROWS)), plain.weight, rtol=1e-12, atol=1e-15)
    untouched = embeddings.rows("shop", range(ROWS))
    assert torch.equal(untouched, collection().rows("shop", range(ROWS)))  # nobody used its feature
