"""Models over batches with windows, compared with the same models over the lists of each sample, in doubles."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from skirl import SGD, EmbeddingCollection, KeyedJagged, Table
from skirl.core.batch import Batch
from skirl.models import DCAT, DIN

TABLES = (Table("item", 30, 4, ("item", "seen")), Table("word", 20, 4, ("words",)), Table("tag", 9, 4, pooling="mean"))


def batch() -> Batch:
    """Return samples whose history `seen` and list `words` are windows, some empty, and `tag` shared lists."""
    item = torch.tensor([1, 7, 3, 9, 2])
    seen, words, tags = torch.arange(20) % 13, torch.arange(9) * 2, torch.tensor([3, 4, 5])
    ids = KeyedJagged(
        ["item", "seen", "words", "tag"], torch.cat([item, seen, words, tags]),
        lengths=torch.tensor([1] * 5 + [12, 8] + [9] + [2, 1]), strides=[5, 2, 1, 2],
        inverse={"seen": torch.tensor([2, 0, 1, 0, 3]), "tag": torch.tensor([0, 1, 1, 0, 0])},
        windows={
            "seen": (torch.tensor([0, 12, 3, 5]), torch.tensor([9, 8, 9, 0])),
            "words": (torch.tensor([4, 0, 2, 2, 9]), torch.tensor([5, 4, 3, 3, 0])),
        },
    )  # fmt: skip
    return Batch(torch.randn(5, 2, generator=torch.Generator().manual_seed(1)), ids, torch.tensor([1.0, 0, 0, 1, 1]))


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize(("kind", "sizes"), [(DIN, {}), (DCAT, {}), (DCAT, {"newest": 4})])
def test_logits_and_gradients_are_those_of_the_lists(
    kind: Any, sizes: dict[str, int], loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """loops: whether our own loops run, where they can; without them, as on a GPU, windows are copied."""
    if not loops:
        for module in ("din", "dcat", "sums"):
            monkeypatch.setattr(f"skirl.models.{module}.fit", lambda *of: False)
    found = []
    given = batch()
    for sparse in (given.sparse, given.sparse.expanded()):
        torch.manual_seed(0)
        rows = EmbeddingCollection(TABLES, optimizer=SGD(lr=1.0), cache=59, dtype=torch.float64)
        model = kind.tiny(rows, dense_features=2, lists=["seen", "words", "tag"], **sizes).double()
        before = [rows.rows(table.name, range(table.rows)) for table in TABLES]
        logits = model(replace(given, sparse=sparse))
        (logits * torch.arange(5).sin()).sum().backward()
        took = [rows.rows(table.name, range(table.rows)) - was for table, was in zip(TABLES, before, strict=True)]
        dense = [weights.grad for weights in model.parameters() if weights.grad is not None and weights.numel()]
        found.append([logits.detach(), *took, *dense])
    assert len(found[0]) == len(found[1]) > 9 and found[0][1].abs().sum() > 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["windows", "shared bags"])
@pytest.mark.parametrize("kind", [DIN, DCAT])
def test_autocast_gives_what_it_gives_for_the_lists(kind: Any, form: str) -> None:
    """Within half precision: logits and gradients of rows differ by less than a hundredth of the largest."""
    given, found = batch(), []
    shared = given.sparse if form == "windows" else given.sparse.without_windows()
    for sparse, half in ((shared, True), (shared.expanded(), True), (shared, False)):
        torch.manual_seed(0)
        rows = EmbeddingCollection(TABLES, optimizer=SGD(lr=1.0), cache=59)
        model = kind.tiny(rows, dense_features=2, lists=["seen", "words", "tag"])
        before = [rows.rows(table.name, range(table.rows)) for table in TABLES]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            logits = model(replace(given, sparse=sparse))
        (logits.float() * torch.arange(5).sin()).sum().backward()
        took = [rows.rows(table.name, range(table.rows)) - was for table, was in zip(TABLES, before, strict=True)]
        found.append([logits.detach().float(), *took])
    for one, other in zip(*found[:2], strict=True):
        assert (one - other).abs().max() < 0.01 * other.abs().max()
    assert not torch.equal(found[0][0], found[2][0]), "autocast rounds"
