"""Compares batches whose samples share bags with the same batches expanded: equal outputs and rows, close gradients."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.core.batch import Batch, KeyedJagged, moved
from skirl.core.initial import Constant
from skirl.core.inverse import is_shared
from skirl.core.optim import SGD
from skirl.engine.access import peek_distinct
from skirl.nn.collection import Collection, EmbeddingBagCollection, EmbeddingCollection
from skirl.pipeline.lookahead import lookahead
from skirl.train.fingerprints import rows_of
from skirl.train.recipe import Recipe

MOST_GRADIENT = 1e-6
"""Maximum difference of gradients relative to the largest gradient, for sums of floats in another order."""


def verify_expanded(recipe: Recipe) -> dict[str, Any] | None:
    """Compare runs on a recipe's batches with runs on the same batches expanded. None if the first batches share no bags.

    `optimizer`: the recipe's, which trains the rows between the outputs that are compared; the rest is by SGD.
    `forward_equal`: whether all outputs of each step are equal, from equal rows. `gradient_rel`: the largest difference of
    the first step's gradients. `integer_equal`: whether rows are equal after whole runs with whole numbers as gradients,
    which floats add exactly in any order.
    """
    if not any(is_shared(batch.sparse) for batch in islice(recipe.stream(), 8)):
        return None
    return {
        "optimizer": recipe.optimizer.optimizer,
        "forward_equal": _forward_equal(recipe),
        "gradient_rel": _gradient_rel(recipe),
        "integer_equal": _integer_equal(recipe),
    }


def failed(found: dict[str, Any] | None) -> list[str]:
    """Return a sentence for each comparison that failed."""
    if found is None:
        return []
    said = [
        ("the outputs of a batch and of the same batch expanded differ", found["forward_equal"]),
        (
            f"gradients of a batch and of the same batch expanded differ by {found['gradient_rel']:.1e} of the largest",
            found["gradient_rel"] <= MOST_GRADIENT,
        ),
        ("rows of runs with whole numbers as gradients differ from those of expanded batches", found["integer_equal"]),
    ]
    return [text for text, holds in said if not holds]


def _expanded(batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        yield replace(batch, sparse=KeyedJagged.of(batch.sparse).expanded())


def _forward_equal(recipe: Recipe) -> bool:
    embeddings = recipe.embeddings(_all_rows(recipe))
    model, dense = recipe.model_over(embeddings)
    equal = True
    for batch in recipe.stream():
        embeddings.eval()
        outs = [dict(embeddings(one.sparse)) for one in (batch, *_expanded([batch]))]
        equal = equal and all(_same_bits(outs[0][name], outs[1][name]) for name in outs[0])
        embeddings.train()
        dense.zero_grad()
        _loss(model, batch).backward()
        dense.step()
    embeddings.close()
    return equal


def _gradient_rel(recipe: Recipe) -> float:
    """Compare the first gradients. Momentum that begins at 0 equals the first gradient, to the bit."""
    found = []
    for batches in (recipe.stream(), _expanded(recipe.stream())):
        embeddings = _embeddings(recipe, recipe.tables(), SGD(lr=0.1, momentum=0.5))
        model, _ = recipe.model_over(embeddings)
        batch = next(iter(batches))
        _loss(model, batch).backward()
        found.append(_records(embeddings, [batch]))
    (a, b), dim = found, recipe.model.row_dim
    return float(np.abs(a[:, dim:] - b[:, dim:]).max() / max(np.abs(b[:, dim:]).max(), 1e-30))


def _integer_equal(recipe: Recipe) -> bool:
    tables = [replace(table, pooling="sum", init=Constant(0.0)) for table in recipe.tables()]
    names = [name for table in tables for name in table.features]
    found = []
    for stream in (recipe.stream(), _Again(recipe)):
        embeddings, seen = _embeddings(recipe, tables, SGD(lr=1.0)), []
        with lookahead(stream, embeddings, depth=recipe.cache.depth, prefetch=recipe.movement.prefetch) as batches:
            for batch in batches:
                out = embeddings(batch.sparse)
                _whole_numbers([out[name] for name in names]).backward()
                seen.append(batch)
        found.append(_records(embeddings, seen))
    return found[0].tobytes() == found[1].tobytes()


class _Again:
    """A recipe's batches, expanded, for any number of passes."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __iter__(self) -> Iterator[Batch]:
        return _expanded(self._recipe.stream())


def _whole_numbers(outs: list[torch.Tensor]) -> torch.Tensor:
    """Return a loss whose gradients are small whole numbers that vary between rows and samples."""
    losses = []
    for out in outs:
        places = torch.arange(len(out), dtype=out.dtype, device=out.device)[:, None]
        losses.append((((out.detach() + places) % 7 - 3) * out).sum())
    return torch.stack(losses).sum()


def _loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    logit = model(batch)
    return binary_cross_entropy_with_logits(logit, moved(batch.labels, logit.device, logit.dtype))


def _embeddings(recipe: Recipe, tables: Any, optimizer: SGD) -> Collection:
    kind = EmbeddingBagCollection if recipe.pooled else EmbeddingCollection
    return kind(
        tables, optimizer=optimizer, cache=_all_rows(recipe), seed=recipe.data.seed, device=recipe.device.device
    )


def _all_rows(recipe: Recipe) -> int:
    return sum(table.rows for table in recipe.tables())


def _records(embeddings: Collection, batches: list[Batch]) -> np.ndarray:
    """Return the current records of the rows of these batches."""
    embeddings.flush()
    return peek_distinct(embeddings.engine, rows_of(batches, embeddings.engine.schema), 0)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.cpu().numpy().tobytes() == other.cpu().numpy().tobytes()
