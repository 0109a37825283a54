"""What a part of a table costs a rank: a sum of a few terms, fitted to measured times; and the file that keeps it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, log2
from pathlib import Path
from typing import Any

import numpy as np

from skirl.core.optim import ROW_OPTIMIZERS
from skirl.placement.tables.spec import TableSpec
from skirl.tools.os_errors import writing
from skirl.tools.shape_of import AMOUNT, ANY, TEXT, misfit

FORMAT, VERSION = "skirl-costs", 1
TERMS = ("table", "ids", "ids*dim", "distinct", "distinct*dim", "batch*dim", "ids*log2(rows)")
SHIPPED = Path(__file__).with_name("costs_cpu.json")
"""Measured on one machine; `skirl place costs` measures another."""
_FLOAT = 4
_FORM = {"format": TEXT, "backend": TEXT, "terms": [TEXT], "noise": ANY, "ms": {...: [AMOUNT]}}


def terms_of(spec: TableSpec, rows: int, dim: int) -> tuple[float, ...]:
    """The terms of so many rows and columns of a table, whose lookups are spread over its rows.

    **Arguments**

    - `spec`: the table.
    - `rows`, `dim`: of the part.

    >>> terms_of(TableSpec("a", rows=1024, dim=8, batch=4, ids=8.0, distinct=6.0), 512, 8)
    (1.0, 4.0, 32.0, 3.0, 24.0, 32.0, 36.0)
    """
    part = rows / spec.rows
    ids, distinct = spec.ids * part, spec.distinct * part
    return 1.0, ids, ids * dim, distinct, distinct * dim, float(spec.batch * dim), ids * log2(rows)


@dataclass(frozen=True)
class Costs:
    """Milliseconds of parts of tables.

    **Arguments**

    - `ms`: of each row optimizer a number for each of `TERMS`.
    - `link`: bytes a second that a rank sends, and receives, of pooled rows and their gradients.
    - `ranks`: among which they are exchanged.
    - `backend`: what computes.
    - `noise`: by how much two measurements of one thing differ, as a share; None: not known.
    """

    ms: Mapping[str, tuple[float, ...]]
    link: float
    ranks: int
    backend: str = "skirl-cpu"
    noise: float | None = None

    def __post_init__(self) -> None:
        for optimizer, of in self.ms.items():
            if optimizer not in ROW_OPTIMIZERS:
                raise ValueError(f"costs are of optimizer {optimizer!r}: set it to one of {', '.join(ROW_OPTIMIZERS)}")
            if len(of) != len(TERMS) or not all(isfinite(value) and value >= 0 for value in of) or not sum(of) > 0:
                raise ValueError(
                    f"costs of {optimizer} are {list(of)}: give {len(TERMS)} finite numbers of 0 or more, not all 0"
                )
        if not 0 < self.link < float("inf"):
            raise ValueError(f"link is {self.link}: set it to bytes a second above 0")

    def of(self, spec: TableSpec, rows: int, dim: int) -> tuple[float, float, int]:
        """Compute and exchange of a step in milliseconds, and bytes of memory, of a part of a table.

        **Arguments**

        - `spec`: the table.
        - `rows`, `dim`: of the part.
        """
        return self.compute(spec, rows, dim), self.exchange(spec, dim), spec.nbytes(rows, dim)

    def compute(self, spec: TableSpec, rows: int, dim: int) -> float:
        """Milliseconds to look up, pool and update."""
        of = self.ms.get(spec.optimizer)
        if of is None:
            raise ValueError(
                f"the costs have no {spec.optimizer}, which table {spec.name!r} has; they have {', '.join(self.ms)}: "
                f"measure it with `skirl place costs --optimizers {spec.optimizer}`"
            )
        return sum(a * b for a, b in zip(of, terms_of(spec, rows, dim), strict=True))

    def exchange(self, spec: TableSpec, dim: int) -> float:
        """Milliseconds to send pooled rows and to receive their gradients: bytes over rate, of parts of rows as of whole
        tables, since each has sums for all samples."""
        others = (self.ranks - 1) / self.ranks
        return 2e3 * spec.batch * dim * _FLOAT * others / self.link


def fitted(terms: np.ndarray, ms: np.ndarray) -> tuple[float, ...]:
    """Numbers of 0 or more whose products with the terms have the least squared relative error.

    **Arguments**

    - `terms`: [measurements, terms].
    - `ms`: of each measurement.

    >>> terms = np.array([[1, 2.0], [1, 3], [1, 5]])
    >>> [round(x, 6) for x in fitted(terms, terms @ [0.5, 2])]
    [0.5, 2.0]
    """
    scaled = terms / ms[:, None]
    sizes = np.maximum(np.abs(scaled).max(axis=0), 1e-300)
    kept = np.arange(terms.shape[1])
    out = np.zeros(terms.shape[1])
    while len(kept):
        found = np.linalg.lstsq(scaled[:, kept] / sizes[kept], np.ones(len(ms)), rcond=None)[0]
        if found.min() >= 0:
            out[kept] = found / sizes[kept]
            break
        kept = np.delete(kept, found.argmin())
    return tuple(out.tolist())


def save_costs(costs: Costs, path: Path) -> None:
    """Write what was fitted.

    **Arguments**

    - `costs`: of a backend.
    - `path`: a JSON file.
    """
    body = {
        "format": FORMAT, "format_version": VERSION, "backend": costs.backend, "terms": list(TERMS),
        "noise": costs.noise, "ms": {name: list(of) for name, of in costs.ms.items()},
    }  # fmt: skip
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def load_costs(path: Path, *, link: float, ranks: int, backend: str = "skirl-cpu") -> Costs:
    """Read what was fitted; a ValueError that names the file where it is wrong.

    **Arguments**

    - `path`: the file.
    - `link`, `ranks`: as `Costs` has them.
    - `backend`: that it has to be of.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file: name costs that `skirl place costs` wrote")
    try:
        body = json.loads(path.read_bytes()[: 1 << 20].decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is cut short, or no JSON ({error}): measure again") from None
    try:
        return _parsed(body, link, ranks, backend)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parsed(body: Any, link: float, ranks: int, backend: str) -> Costs:
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError("it is no file of costs: name one that `skirl place costs` wrote")
    if body.get("format_version") != VERSION:
        raise ValueError(f"its format is {body.get('format_version')!r}, skirl reads {VERSION}: measure again")
    if (wrong := misfit(body, _FORM)) is not None:
        raise ValueError(f"{wrong}: measure again")
    if body["backend"] != backend:
        raise ValueError(f"it is of backend {body['backend']!r}, and {backend!r} is to be placed: measure that one")
    if tuple(body["terms"]) != TERMS:
        raise ValueError(f"its terms are {', '.join(body['terms'])}, skirl has {', '.join(TERMS)}: measure again")
    noise = body["noise"]
    if noise is not None and not (AMOUNT.fits(noise) and noise >= 0):
        raise ValueError(f"its noise is {noise!r}: measure again")
    return Costs({name: tuple(of) for name, of in body["ms"].items()}, link, ranks, backend, noise)


def shipped(link: float, ranks: int) -> Costs:
    """The costs that come with skirl.

    **Arguments**

    - `link`, `ranks`: as `Costs` has them.
    """
    return load_costs(SHIPPED, link=link, ranks=ranks)
