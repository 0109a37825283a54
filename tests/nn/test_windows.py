"""Batches with windows, compared with expanded ones: equal outputs, equal rows if sums are exact, fewer lookups."""

from typing import Any

import numpy as np
import pytest
import torch

import skirl
from skirl import SGD, Adagrad, EmbeddingBagCollection, EmbeddingCollection, KeyedJagged, Table
from skirl.core.ids import capture
from skirl.pipeline.epoch import OrderChanged

TABLES = (Table("item", 40, 8, features=("item", "seen")), Table("word", 30, 4))
NAMES = ["item", "seen", "word"]
KINDS = [EmbeddingBagCollection, EmbeddingCollection]


def shifting(seed: int, samples: int = 12) -> KeyedJagged:
    """Return samples of sessions whose histories shift: windows of two buffers, not in the order of the samples."""
    rng = np.random.default_rng(seed)
    item, word = rng.integers(0, 40, samples), rng.integers(0, 30, samples)
    buffers = rng.integers(0, 40, (2, 16))
    begins, sizes = rng.integers(0, 9, 8) + 16 * (np.arange(8) % 2), rng.integers(0, 8, 8)
    inverse = rng.integers(0, 8, samples)
    return KeyedJagged(
        NAMES, torch.from_numpy(np.concatenate([item, buffers.reshape(-1), word])),
        lengths=torch.tensor([1] * samples + [16, 16] + [1] * samples), strides=[samples, 2, samples],
        inverse={"seen": torch.from_numpy(inverse)},
        windows={"seen": (torch.from_numpy(begins), torch.from_numpy(sizes))},
    )  # fmt: skip


def rows_of(embeddings: Any) -> list[torch.Tensor]:
    return [embeddings.rows(table.name, range(table.rows)) for table in TABLES]


def train(embeddings: Any, batches: Any, loss: Any, **options: Any) -> list[torch.Tensor]:
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


@pytest.mark.parametrize("device", ["cpu", "interpret"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_runs_are_equal_where_sums_are_exact(kind: Any, device: str) -> None:
    if device == "interpret":
        pytest.importorskip("triton")
    batches = [shifting(i) for i in range(4)]
    tables = [
        Table(t.name, t.rows, t.dim, t.features, init=torch.arange(t.rows * t.dim).view(t.rows, t.dim) % 5.0)
        for t in TABLES
    ]
    runs = []
    for of, at in ((batches, device), ([ids.expanded() for ids in batches], "cpu")):
        embeddings = kind(tables, optimizer=SGD(lr=1.0), cache=60, device=at)
        outs = train(embeddings, of, lambda out: whole_numbers(out) / 4, accumulate=2)
        runs.append([*outs, *rows_of(embeddings)])
        embeddings.close()
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_an_id_of_a_buffer_is_looked_up_once() -> None:
    ids = shifting(0)
    begins, lengths = ids.windows["seen"]
    used = ids.groups[("seen",)].unique().tolist()
    there = {i for w in used for i in range(int(begins[w]), int(begins[w] + lengths[w]))}
    counts = []
    for kind in KINDS:
        embeddings = kind(TABLES, optimizer=SGD(lr=1.0), cache=60)
        resolver = embeddings.engine.resolver
        captured = resolver.capture(ids)
        counts.append(sum(map(len, resolver.positions(captured))))
    bags = sum(int(lengths[w]) for w in used)
    assert counts == [2 * ids.stride() + bags, 2 * ids.stride() + len(there)] and len(there) < bags


def test_windows_are_given_out_with_the_rows_of_their_buffers() -> None:
    """Every form of the output has the rows of the samples' lists, and its gradient reaches the rows."""
    ids, plain = shifting(1), shifting(1).expanded()
    took = []
    for sparse in (ids, plain):
        embeddings = EmbeddingCollection(TABLES, optimizer=SGD(lr=1.0), cache=60)
        before, out = rows_of(embeddings), embeddings(sparse)
        found, lists = out.windows("seen"), out.distinct("seen")
        if sparse is ids:
            assert len(found.rows) < len(lists.rows) < len(out["seen"]) and not found.apart
            captured = capture(ids, NAMES)
            assert torch.equal(found.ends - found.begins, torch.from_numpy(captured.window(1)[1]))  # type: ignore[index]
        by_sample = [found.rows[found.begins[w] : found.ends[w]] for w in found.inverse]
        assert torch.equal(torch.cat(by_sample), out["seen"])
        assert torch.equal(
            torch.cat([lists.rows[lists.offsets[w] : lists.offsets[w + 1]] for w in lists.inverse]), out["seen"]
        )
        padded, mask = out.padded("seen")
        assert torch.equal(padded[mask], out["seen"])
        assert [len(each) for each in out.nested("seen").unbind()] == [len(each) for each in by_sample]
        weighed = torch.arange(len(out["seen"]))[:, None] % 3 * out["seen"]
        (weighed.sum() + 2 * out.pooled("seen").sum() + 4 * sum(each.sum() for each in by_sample)).backward()
        took.append([a - b for a, b in zip(before, rows_of(embeddings), strict=True)])
        same = embeddings.eval()(sparse)
        assert torch.equal(same.windows("seen").distinct().rows, same.distinct("seen").rows)
    for a, b in zip(*took, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_of_features_without_windows_are_windows_that_lie_apart() -> None:
    out = EmbeddingCollection(TABLES, optimizer=SGD(lr=1.0), cache=60)(shifting(2))
    words = out.windows("word")
    assert words.plain and torch.equal(words.rows, out["word"]) and torch.equal(words.distinct().rows, out["word"])
    with pytest.raises(KeyError, match="no feature 'nothing'"):
        out.windows("nothing")


def moved(ids: KeyedJagged) -> KeyedJagged:
    """Return the same buffers with one window a place further."""
    begins, lengths = (of.clone() for of in ids.windows["seen"])
    which = next(w for w in ids.groups[("seen",)].tolist() if lengths[w])
    begins[which] += 1
    return KeyedJagged(NAMES, ids.values(), lengths=ids.lengths(), strides=ids.stride_per_key(), inverse=ids.groups,
                       windows={"seen": (begins, lengths)})  # fmt: skip


class Changing:
    """A loader whose second pass has another window."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter([whole(0), whole(1) if self.passes == 1 else moved(whole(1))])


def whole(seed: int) -> KeyedJagged:
    """Return windows that cover both buffers even if one of them moves."""
    ids = shifting(seed)
    begins, lengths = (
        torch.cat([of, more]) for of, more in zip(ids.windows["seen"], torch.tensor([[0, 16], [16, 16]]))
    )
    inverse = ids.groups[("seen",)].clone()
    inverse[-2:] = torch.tensor([8, 9])
    return KeyedJagged(NAMES, ids.values(), lengths=ids.lengths(), strides=ids.stride_per_key(),
                       inverse={"seen": inverse}, windows={"seen": (begins, lengths)})  # fmt: skip


def test_an_epoch_sees_the_windows() -> None:
    """The ids of the unpooled batches are equal, and only a window differs."""
    embeddings = EmbeddingCollection(TABLES, optimizer=SGD(lr=0.1), cache=80)
    with pytest.raises(OrderChanged):
        train(embeddings, Changing(), whole_numbers, depth="epoch")
    embeddings = EmbeddingCollection(TABLES, optimizer=Adagrad(lr=0.1), cache=80)
    assert len(train(embeddings, [whole(0), whole(1)], whole_numbers, depth="epoch")) == 2 * len(NAMES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_with_another_window_is_refused(kind: Any) -> None:
    embeddings = kind(TABLES, optimizer=SGD(lr=0.1), cache=80)
    for wrong in (moved, KeyedJagged.expanded, KeyedJagged.without_windows):
        with skirl.lookahead([whole(0)], embeddings, sparse=lambda ids: ids) as loop:
            for ids in loop:
                with pytest.raises(ValueError, match="got other ids of feature"):
                    embeddings(wrong(ids))
