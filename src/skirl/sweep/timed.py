"""The predicted time of a training step, from a few steps that are small enough to take hardly any memory."""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from skirl.train.loop import steps
from skirl.train.recipe import Recipe
from skirl.train.verify import touched_rows

TRIED = 6
"""Batches on which a step is timed; the first compiles and does not count."""
ROOM = 96 << 20
"""Most bytes that timing takes: for rows, the bits that tell which exist, weights, and all that is computed."""
LEAST = 64
"""Fewest samples of a batch from which the time of a larger one can be told."""
_BITS = 3
"""Bits that timing holds for each row of all tables."""
_MULTIPLIED = 256
"""Rows and columns of the matrices whose product tells how fast this machine multiplies."""


@dataclass(frozen=True)
class Pack:
    """What a variant holds, known without allocating any of it.

    >>> Pack.of(Recipe.of(data="synthetic:tiny", model="dlrm-tiny", dim=4, optimizer="adam")).record_bytes
    48.0
    """

    record_bytes: float
    """Bytes of a row and its state, on average over all rows."""
    weights: int
    """Number of dense weights."""
    weight_bytes: int
    """Bytes of these weights with gradients and moments."""
    outputs: int
    """Number of activations for a sample."""

    @classmethod
    def of(cls, recipe: Recipe) -> "Pack":
        """Return what a recipe's variant holds."""
        rows = [table.rows for table in recipe.tables()]
        model, embeddings = recipe.described()
        engine = embeddings.engine
        numbers = sum(
            held * rows[t] for held, bank in zip(engine.held, engine.schema.banks, strict=True) for t in bank.tables
        )
        embeddings.close()
        weights = list(model.parameters())
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        return cls(
            numbers * engine.dtype.itemsize / sum(rows),
            sum(weight.numel() for weight in weights),
            sum(weight.numel() * weight.element_size() for weight in weights),
            sum(layer.out_features for layer in layers),
        )


def seconds_a_step(recipe: Recipe, pack: Pack, ids: float) -> tuple[float, str]:
    """Predict the time of a step of a lone run. Return it, and how it was found.

    If a batch takes too much memory, two smaller ones are timed and a line drawn through them. If even these or the weights
    do, the products of matrices are counted.

    **Arguments**

    - `recipe`: the recipe of the run.
    - `pack`: what it holds.
    - `ids`: ids of a sample, on average.
    """
    batch, fits = recipe.data.batch, largest_batch(recipe, pack, ids)
    if fits >= batch:
        return _timed(recipe, batch), "timed steps"
    if fits < LEAST:
        return _by_products(recipe, pack), "products of matrices"
    few, many = fits // 4, fits
    short, long = _timed(recipe, few), _timed(recipe, many)
    return long + (batch - many) * max(0.0, long - short) / (many - few), "timed steps of smaller batches"


def largest_batch(recipe: Recipe, pack: Pack, ids: float) -> int:
    """Return how many samples a batch may have to be timed in `ROOM`.

    **Arguments**

    - `recipe`, `pack`, `ids`: as for `seconds_a_step`.
    """
    of_rows = sum(table.rows for table in recipe.tables()) / 8 * _BITS
    records = 2 * TRIED * pack.record_bytes  # once in a cache and once in a store
    of_sample = ids * (records + 4 * 4 * recipe.model.row_dim) + 4 * 4 * pack.outputs
    return int(max(0, ROOM - of_rows - 4 * pack.weight_bytes) / of_sample)


def _timed(recipe: Recipe, batch: int) -> float:
    """Time a step of a lone run over the first batches of this size, with room for all their rows."""
    recipe = replace(recipe, data=replace(recipe.data, steps=TRIED, batch=batch, valid=None))
    embeddings = recipe.embeddings(max(1, touched_rows(recipe)), store="memory")
    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.device.threads or 1)
    try:
        model, dense = recipe.model_over(embeddings)
        with recipe.lookahead(model) as batches:
            ends = [time.perf_counter()]
            ends += [time.perf_counter() for _ in steps(model, dense, batches, None, batches.micros)]
            first = min(1, len(ends) - 2)  # the first step counts if it is the only one
            return (ends[-1] - ends[first]) / max(1, len(ends) - 1 - first)
    finally:
        torch.set_num_threads(threads)
        embeddings.close()


def _by_products(recipe: Recipe, pack: Pack) -> float:
    """Each weight takes part in three products of matrices: forward, and the gradients of inputs and of weights."""
    threads, at = torch.get_num_threads(), recipe.device.device
    torch.set_num_threads(recipe.device.threads or 1)
    try:
        one = torch.ones(_MULTIPLIED, _MULTIPLIED, device="cpu" if at == "interpret" else at)
        taken = min(_seconds_of(one) for _ in range(5))
    finally:
        torch.set_num_threads(threads)
    return 3 * pack.weights * recipe.data.batch * taken / _MULTIPLIED**3


def _seconds_of(one: Any) -> float:
    began = time.perf_counter()
    float((one @ one)[0, 0])
    return time.perf_counter() - began
