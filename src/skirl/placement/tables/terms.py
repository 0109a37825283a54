"""The terms whose sum is what a part of a table costs, and the fit of their numbers to measured times."""

from math import log2

import numpy as np

from skirl.placement.tables.spec import TableSpec

TERMS = (
    "table", "ids", "ids*dim", "distinct", "distinct*dim", "distinct*log2(distinct)", "batch*dim",
    "odd distinct", "odd ids*dim", "odd distinct*dim",
)  # fmt: skip
"""The last three are of rows that are no multiple of 16 numbers, which take the plain loops. Many rows do not stay in the
caches from the forward pass to the backward one, so that each costs more: the logarithm."""
WIDE = 16
_CYCLES, _TURNS = 1000, 12
_CLOSE = 0.01
"""Errors up to this count alike."""


def terms_of(spec: TableSpec, rows: int, dim: int) -> tuple[float, ...]:
    """The terms of so many rows and columns of a table, whose lookups are spread over its rows.

    **Arguments**

    - `spec`: the table.
    - `rows`, `dim`: of the part.

    >>> terms_of(TableSpec("a", rows=1024, dim=8, batch=4, ids=8.0, distinct=8.0), 512, 8)
    (1.0, 4.0, 32.0, 4.0, 32.0, 8.0, 32.0, 4.0, 32.0, 32.0)
    """
    part = rows / spec.rows
    ids, distinct, odd = spec.ids * part, spec.distinct * part, dim % WIDE != 0
    looked, updated = ids * dim, distinct * dim
    return (
        1.0, ids, looked, distinct, updated, distinct * log2(max(2.0, distinct)), float(spec.batch * dim),
        odd * distinct, odd * looked, odd * updated,
    )  # fmt: skip


def fitted(terms: np.ndarray, ms: np.ndarray, counts: np.ndarray | None = None) -> tuple[float, ...]:
    """Numbers of 0 or more whose products with the terms have about the least sum of relative errors.

    Least squares in turns, in each of which what was far off counts less: a neighbour of the machine makes measurements too
    long and never too short, and squares would follow it.

    **Arguments**

    - `terms`: [measurements, terms].
    - `ms`: of each measurement.
    - `counts`: as how many measurements each counts; one if not given.

    >>> terms = np.array([[1, 2.0], [1, 3], [1, 5]])
    >>> [round(x, 3) for x in fitted(terms, terms @ [0.5, 2])]
    [0.5, 2.0]
    """
    scaled = terms / ms[:, None]
    sizes = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    scaled, out = scaled / sizes, np.zeros(terms.shape[1])
    counts = np.ones(len(ms)) if counts is None else counts
    weights = counts / counts.mean()
    for _ in range(_TURNS):
        _solve((scaled * weights[:, None]).T @ scaled, scaled.T @ weights, out)
        weights = counts / np.maximum(np.abs(scaled @ out - 1), _CLOSE)
        weights /= weights.mean()
    return tuple((out / sizes).tolist())


def _solve(products: np.ndarray, wanted: np.ndarray, out: np.ndarray) -> None:
    """One number after the other to where it is best, or to 0."""
    for _ in range(_CYCLES):
        before = out.copy()
        for n in range(len(out)):
            if products[n, n] > 0:
                out[n] = max(0.0, out[n] + (wanted[n] - products[n] @ out) / products[n, n])
        if np.abs(out - before).max() <= 1e-9 * out.max():
            break
