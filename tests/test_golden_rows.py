"""A golden trace of rows: equal on every machine, because rows need no matrix product.

Their bits rest only on what is the same on every CPU: additions, multiplications, divisions and square roots, which
IEEE 754 rounds in exactly one way, with no fused multiply-add and in a summation order that is part of the promise;
integers; and values that are rounded to float32 once. The numbers here need nothing more: gradients, weights and ids
come from integers, and Adam's betas are 0.5 and 0.75, whose powers are exact, because a C library's `pow` need not be.
One table starts from normals, whose tails need a logarithm: its last bit in float64 almost never affects the float32
that it is rounded to (1 in 10,000, for all of them together). A machine that flushes denormals to zero would differ;
torch and Numba do so only on request.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import skirl
from skirl import SGD, Adagrad, Adam, Constant, KeyedJagged, Normal, RowwiseAdagrad, Table, Uniform
from skirl.core.initial import first_rows
from skirl.core.optim import RowOptimizer
from skirl.core.reference import Bags, Reference, initial_values
from tests.streams import stored_rows

TABLES = (
    Table("a", 40, 3, features=("x", "y"), init=Uniform(0.5)),
    Table("b", 50_000_000, 8, pooling="mean", init=Normal(0.1)),
    Table("c", 30, 3, pooling="mean", init=Constant(0.25)),
)
FEATURES = {"x": 0, "y": 0, "b": 1, "c": 2}
OPTIMIZERS: dict[str, RowOptimizer] = {
    "sgd": SGD(lr=0.3),
    "adagrad": Adagrad(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "rowwise-adagrad": RowwiseAdagrad(lr=0.1, weight_decay=0.01, clip=0.5),
    "adam": Adam(lr=0.05, betas=(0.5, 0.75)),
}
SAMPLES = 4
CACHE = 48
"""Rows in the cache, of about 90: they come and go."""
STEPS = (1, 10, 30)
"""Digests are taken after these steps."""


def drawn(seed: int, n: int, below: int) -> list[int]:
    """Draw numbers from a plain congruential generator, using its upper bits."""
    out, state = [], seed * 2654435761 + 1
    for _ in range(n):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((state >> 33) % below)
    return out


def bags_of(step: int) -> dict[str, Bags]:
    """Return ids, offsets and weights of each feature; some bags are empty, and some ids are in two features."""
    bags: dict[str, Bags] = {}
    for number, (name, table) in enumerate(FEATURES.items()):
        sizes = drawn(1000 * step + 10 * number, SAMPLES, 4)
        offsets = [sum(sizes[:i]) for i in range(SAMPLES + 1)]
        ids = drawn(1000 * step + 10 * number + 1, offsets[-1], min(TABLES[table].rows, 30))
        weights = [(w - 3) / 4 for w in drawn(1000 * step + 10 * number + 2, offsets[-1], 8)]
        bags[name] = ids, offsets, weights
    return bags


def grads_of(step: int) -> dict[str, np.ndarray]:
    """Return gradients in sevenths, so that they and their sums are rounded."""
    grads = {}
    for number, (name, table) in enumerate(FEATURES.items()):
        dim = TABLES[table].dim
        whole = np.array(drawn(1000 * step + 10 * number + 3, SAMPLES * dim, 65), np.float32) - np.float32(32)
        grads[name] = (whole / np.float32(7)).reshape(SAMPLES, dim)
    return grads


def batch_of(step: int) -> KeyedJagged:
    bags = bags_of(step)
    return KeyedJagged(
        keys=list(bags),
        values=torch.tensor([i for ids, _, _ in bags.values() for i in ids]),
        lengths=torch.tensor([n for _, offsets, _ in bags.values() for n in np.diff(offsets)]),
        weights=torch.tensor([w for _, _, weights in bags.values() for w in weights or ()]),
    )


def trained(optimizer: RowOptimizer) -> Iterator[dict[int, np.ndarray]]:
    """Yield all rows with their state after each of STEPS, trained with a small cache."""
    embeddings = skirl.EmbeddingBagCollection(TABLES, optimizer=optimizer, cache=CACHE, seed=5)
    for begin, end in zip((0, *STEPS), STEPS):
        with skirl.lookahead([batch_of(i) for i in range(begin, end)], embeddings, sparse=lambda ids: ids) as batches:
            for step, ids in enumerate(batches, begin):
                out, grads = embeddings(ids), grads_of(step)
                torch.autograd.backward([out[name] for name in grads], [torch.from_numpy(g) for g in grads.values()])
        embeddings.flush()
        yield stored_rows(embeddings.engine)
    assert embeddings.engine.counters.fetched > 100  # rows came and went


def plainly_trained(optimizer: RowOptimizer) -> Iterator[dict[int, np.ndarray]]:
    reference = Reference(TABLES, optimizer, seed=5)
    for step in range(STEPS[-1]):
        reference.forward(bags_of(step))
        reference.backward(grads_of(step))
        if step + 1 in STEPS:
            yield reference.rows


def digest(rows: dict[int, np.ndarray]) -> str:
    """Return the digest of keys and records, in key order, as little-endian bytes."""
    sha = hashlib.sha256()
    for key in sorted(rows):
        sha.update(key.to_bytes(8, "little") + rows[key].astype("<f4").tobytes())
    return sha.hexdigest()


def trace(plain: bool) -> dict[str, str]:
    """Return all digests, from the kernels with a small cache or from the plain reference."""
    digests = {}
    for t, table in enumerate(TABLES):
        keys = [t << 48 | i for i in range(30)]
        facts = table.initial, table.dim, 5
        values = initial_values(facts[0], keys, *facts[1:]) if plain else first_rows(keys, *facts)
        digests[f"initial values of {table.name}"] = digest(dict(zip(keys, values)))
    for name, optimizer in OPTIMIZERS.items():
        for step, rows in zip(STEPS, (plainly_trained if plain else trained)(optimizer), strict=True):
            digests[f"{name}, step {step}"] = digest(rows)
    return digests


@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "reference"])
def test_golden_rows(golden: Any, plain: bool) -> None:
    """Both sides have the recorded bits, so recording also compares them."""
    golden("rows", trace(plain), everywhere=True)
