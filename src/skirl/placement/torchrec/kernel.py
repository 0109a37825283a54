"""Costs of FBGEMM's kernel, which TorchRec runs, on this CPU: measured and fitted as `skirl place costs` does."""

from dataclasses import replace
from time import thread_time
from typing import Any

import numpy as np

from skirl.placement.tables.costs import Costs
from skirl.placement.tables.measure import noise_of
from skirl.placement.tables.pool import Made, ids_of, pool
from skirl.placement.tables.terms import fitted, terms_of
from skirl.placement.torchrec.models import needed

BACKEND = "fbgemm-cpu"
COMBINATIONS, ROUNDS = 60, 6
BATCHES = (256, 512, 1024, 2048)
MOST_ROWS = 1 << 17
"""Most rows of a table that is measured."""
_PARTS = 6
_EVICTED = 1 << 23


class Kernel:
    """FBGEMM's operator with some tables and a batch of ids, ready to run a step.

    **Arguments**

    - `tables`: tables whose rows fit into memory.
    - `optimizer`: "sgd", "rowwise-adagrad", "adagrad" or "adam".
    - `seed`: random seed of the ids.
    """

    def __init__(self, tables: "list[Made]", optimizer: str, seed: int) -> None:
        import torch
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            EmbeddingLocation,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kinds = {
            "sgd": EmbOptimType.EXACT_SGD, "rowwise-adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD, "adam": EmbOptimType.ADAM,
        }  # fmt: skip
        if optimizer not in kinds:
            raise ValueError(f"optimizer is {optimizer!r}: set it to one of {', '.join(kinds)}")
        specs = [made.spec for made in tables]
        self.of = SplitTableBatchedEmbeddingBagsCodegen(
            [(spec.rows, spec.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for spec in specs],
            optimizer=kinds[optimizer], learning_rate=1e-6, device=torch.device("cpu"),
        )  # fmt: skip
        rng = np.random.default_rng(seed)
        parts = [ids_of(made.spec, made.head, rng) for made in tables]
        lengths = [
            np.bincount(rng.integers(0, s.batch, len(i)), minlength=s.batch) for s, i in zip(specs, parts, strict=True)
        ]
        self.ids = torch.from_numpy(np.concatenate(parts))
        self.offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]))
        self.grads = torch.ones(specs[0].batch, sum(spec.dim for spec in specs))

    def step(self) -> None:
        """Look up, pool and update."""
        self.of(self.ids, self.offsets).backward(self.grads)


def measure_costs(optimizer: str = "rowwise-adagrad", combinations: int = COMBINATIONS, seed: int = 0) -> Costs:
    """Measure what parts of tables cost FBGEMM's kernel on one thread of this CPU.

    The result is for `SkirlPlanner(costs=...)` and `hardware_config`. Random combinations of tables are timed in some
    rounds, and their least CPU times are fitted to the terms of `skirl place costs`.

    **Arguments**

    - `optimizer`: the row optimizer: "sgd", "rowwise-adagrad", "adagrad" or "adam".
    - `combinations`: number of random combinations of tables; half a second each.
    - `seed`: the random seed.
    """
    needed()
    import torch

    threads, evicted = torch.get_num_threads(), np.ones(_EVICTED, np.float32)
    torch.set_num_threads(1)
    rounds, terms = np.zeros((ROUNDS, combinations)), []
    try:
        for n in range(combinations):
            parts = drawn(n, optimizer, seed)
            terms.append(_terms(parts))
            kernel = Kernel(parts, optimizer, seed + n)
            kernel.step()
            for round_ in range(ROUNDS):
                evicted.sum()
                began = thread_time()
                kernel.step()
                rounds[round_, n] = 1e3 * (thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return Costs({optimizer: fitted(np.array(terms), rounds.min(axis=0))}, 1.0, 1, BACKEND, noise_of(rounds))


def drawn(n: int, optimizer: str, seed: int) -> list[Made]:
    """Return one random combination of tables.

    **Arguments**

    - `n`: its number.
    - `optimizer`: the row optimizer.
    - `seed`: the random seed.
    """
    rng = np.random.default_rng([seed, n])
    batch = BATCHES[n % len(BATCHES)]
    tables = pool(int(rng.integers(1, _PARTS + 1)), batch=batch, max_dim=128, seed=seed * 7919 + n, optimizer=optimizer)
    return [resized(made, int(10 ** rng.uniform(2.5, np.log10(MOST_ROWS))), rng) for made in tables]


def resized(made: Made, rows: int, rng: np.random.Generator) -> Made:
    """Return a table with another number of rows, and the number of distinct rows that its ids then have.

    **Arguments**

    - `made`: the table.
    - `rows`: its new number of rows.
    - `rng`: the random generator.
    """
    spec = replace(made.spec, rows=rows, distinct=1.0, reuse=())
    return replace(made, spec=replace(spec, distinct=float(len(np.unique(ids_of(spec, made.head, rng))))))


def _terms(parts: list[Made]) -> Any:
    return np.sum([terms_of(made.spec, made.spec.rows, made.spec.dim) for made in parts], axis=0)
