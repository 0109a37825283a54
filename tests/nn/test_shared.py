"""Batches whose samples share bags, compared with expanded ones: equal outputs, and equal rows if sums are exact."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import skirl
from skirl import SGD, Adam, EmbeddingBagCollection, EmbeddingCollection, KeyedJagged, Table
from skirl.core import once
from skirl.core.once import find
from skirl.nn import output

TABLES = (
    Table("user", 50, 4, features=("user", "friends")),
    Table("item", 40, 8, features=("item", "seen", "liked")),
    Table("word", 30, 4),
)
NAMES = [name for table in TABLES for name in table.features]


def plain(seed: int, samples: int = 12, weights: bool = False) -> KeyedJagged:
    """Return samples of sessions: `seen` and `liked` change together, `word` by itself, the rest in every sample."""
    rng = np.random.default_rng(seed)
    bags: dict[str, list[Any]] = {name: [] for name in NAMES}
    for sample in range(samples):
        for name, rows in (("user", 50), ("item", 40)):
            bags[name].append([int(rng.integers(0, rows))])
        if sample % 4 == 0:
            seen, liked = rng.integers(0, 40, rng.integers(0, 5)).tolist(), rng.integers(0, 40, 3).tolist()
        if sample % 3 == 0:
            words = rng.integers(0, 30, 4).tolist()
        bags["seen"].append(seen)
        bags["liked"].append(liked)
        bags["word"].append(words)
        bags["friends"].append(rng.integers(0, 50, 3).tolist())
    ids = KeyedJagged.of_bags(bags)
    given = torch.from_numpy(np.repeat(rng.choice([0.5, 1.0, 2.0], 64), 64)[: len(ids.values())].astype(np.float32))
    return KeyedJagged(NAMES, ids.values(), lengths=ids.lengths(), weights=given) if weights else ids


def shared(seed: int, **options: Any) -> KeyedJagged:
    return find(plain(seed, **options), features=["seen", "liked", "word", "friends"])


def collection(optimizer: Any, kind: Any = EmbeddingBagCollection, cache: int = 120, **options: Any) -> Any:
    return kind(TABLES, optimizer=optimizer, cache=cache, **options)


def rows_of(embeddings: Any) -> list[torch.Tensor]:
    return [embeddings.rows(table.name, range(table.rows)) for table in TABLES]


def train(embeddings: Any, batches: list[KeyedJagged], loss: Any, **options: Any) -> list[torch.Tensor]:
    outs = []
    with skirl.lookahead(batches, embeddings, sparse=lambda ids: ids, **options) as loop:
        for ids in loop:
            out = embeddings(ids)
            outs += [out[name].detach().clone() for name in NAMES]
            loss(out).backward()
    return outs


def whole_numbers(out: Any) -> torch.Tensor:
    """Return a loss with whole numbers as each sample's gradient, so that the order of sums does not matter."""
    return sum(
        (out[name].round().detach() + torch.arange(len(out[name]))[:, None] % 7 - 3).mul(out[name]).sum()
        for name in NAMES
    )  # type: ignore[return-value]


def bent(out: Any) -> torch.Tensor:
    return sum(((i + 1) * out[name]).tanh().square().sum() for i, name in enumerate(NAMES))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_whole_runs_are_equal_where_sums_are_exact(kind):
    """Rows and gradients are whole numbers, which floats add exactly in any order."""
    batches = [shared(i) for i in range(6)]
    assert list(batches[0].groups) == [("friends",), ("seen", "liked"), ("word",)]
    tables = [replace(t, init=torch.arange(t.rows * t.dim).view(t.rows, t.dim) % 5.0) for t in TABLES]
    runs = []
    for of in (batches, [ids.expanded() for ids in batches]):
        embeddings = kind(tables, optimizer=SGD(lr=1.0), cache=110)
        outs = train(embeddings, of, lambda out: whole_numbers(out) / 4, accumulate=2)
        runs.append([*outs, *rows_of(embeddings)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_bags_are_given_out_once(kind):
    ids, embeddings = shared(1), collection(SGD(lr=1.0), kind)
    for out in (embeddings(ids), embeddings.eval()(ids)):
        for name in NAMES:
            rows, offsets, inverse = out.distinct(name)
            assert len(offsets) - 1 == ids.stride_per_key()[NAMES.index(name)] and len(inverse) == 12
            at = [i for bag in inverse for i in range(offsets[bag], offsets[bag + 1])]
            assert torch.equal(rows[at], out[name]), name
        with pytest.raises(KeyError, match="no feature 'nothing'"):
            out.distinct("nothing")
    embeddings.train()
    out = embeddings(ids)
    (out.distinct("seen").rows.sum() + out["seen"].sum() + 2 * out.distinct("user").rows.sum()).backward()
    again, plainly = collection(SGD(lr=1.0), kind), ids.expanded()
    times = torch.zeros(40)
    for bag, length in zip(ids.select(["seen"]).values().split(ids.select(["seen"]).lengths().tolist()), range(99)):
        times[bag] += 0  # the rows exist
        for i in bag:
            times[i] += 1 + int((ids.groups["seen", "liked"] == length).sum())
    before = collection(SGD(lr=1.0), kind)
    assert torch.equal((before.rows("item", range(40)) - embeddings.rows("item", range(40))).round()[:, 0], times)
    (2 * again(plainly)["user"].sum()).backward()
    assert torch.equal(again.rows("user", range(50)), embeddings.rows("user", range(50)))


def test_lists_are_copied_to_samples_only_if_asked_for(monkeypatch):
    ids, embeddings, copied = shared(1), collection(SGD(lr=1.0), EmbeddingCollection), []
    whole = embeddings.eval()(ids)["seen"]
    monkeypatch.setattr(output, "expand", lambda rows, at: copied.append(len(at)) or once.expand(rows, at))
    for out in (embeddings(ids), embeddings.train()(ids)):
        assert len(out["item"]) == len(out["user"]) == 12 and not copied
        assert out["seen"] is out["seen"] and copied == [len(whole)]
        copied.clear()


def test_a_frozen_feature_and_one_without_a_gradient_train_no_row():
    ids, embeddings = shared(2), collection(Adam(lr=0.1))
    embeddings.freeze("word")
    before = rows_of(embeddings)
    out = embeddings(ids)
    (out["word"].sum() + out["liked"].sum() + out.distinct("word").rows.sum()).backward()
    after = rows_of(embeddings)
    assert torch.equal(before[0], after[0]) and torch.equal(before[2], after[2])
    changed = (before[1] != after[1]).any(1).nonzero().flatten()
    assert set(changed.tolist()) == set(ids.select(["liked"]).values().tolist())
