"""The terms whose sum is the cost of a part of a table, and the fit of their coefficients to measured times."""

from math import log2

import numpy as np

from skirl.placement.tables.spec import TableSpec

TERMS = (
    "table", "ids", "ids*dim", "distinct", "distinct*dim", "distinct*log2(distinct)", "batch*dim",
    "odd distinct", "odd ids*dim", "odd distinct*dim",
)  # fmt: skip
"""The last three are for rows that are no multiple of 16 numbers, which take the plain loops. The logarithm is there
because many rows do not stay in the caches from the forward pass to the backward one, so that each costs more."""
WIDE = 16
_CYCLES, _TURNS = 1000, 12
_CLOSE = 0.01
"""Errors up to this have the same weight."""


def terms_of(spec: TableSpec, rows: int, dim: int) -> tuple[float, ...]:
    """Return the terms for this many rows and columns of a table, whose lookups are spread over its rows.

    **Arguments**

    - `spec`: the table.
    - `rows`, `dim`: size of the part.

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
    """Fit coefficients of 0 or more to the terms, with about the least sum of relative errors.

    This repeats least squares with less weight on what was far off: a busy neighbour of the machine makes measurements
    too long, never too short, and plain squares would follow it.

    **Arguments**

    - `terms`: [measurements, terms].
    - `ms`: measured milliseconds.
    - `counts`: how many measurements each one counts as; 1 if not given.

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
    """Set one coefficient after the other to where it is best, or to 0."""
    for _ in range(_CYCLES):
        before = out.copy()
        for n in range(len(out)):
            if products[n, n] > 0:
                out[n] = max(0.0, out[n] + (wanted[n] - products[n] @ out) / products[n, n])
        if np.abs(out - before).max() <= 1e-9 * out.max():
            break
