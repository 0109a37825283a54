"""Costs of parts of tables for a rank: a sum of a few terms, corrected by a net if one was trained; and their file."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from skirl.placement.nets import SUMS, ComputeNet, features_of
from skirl.placement.spec import TableSpec
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import read_sealed, skirl_version, write_sealed

Kernel = Literal["skirl-cpu", "fbgemm-cpu", "fbgemm-cuda"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
"""The kernels whose costs can be measured. The last one is unproven: nobody has run it on a GPU."""
SHIPPED = Path(__file__).with_name("costs_cpu.json")
"""Costs of skirl's kernels, measured on one machine; measuring adapts them to another."""
Part = tuple[TableSpec, int, int]
"""A part of a table: its spec, and the part's rows and columns."""
TERMS = (
    "table", "ids", "ids*dim", "distinct", "distinct*dim", "distinct*log2(distinct)", "batch*dim",
    "odd distinct", "odd ids*dim", "odd distinct*dim",
)  # fmt: skip
"""The last three are for rows that are no multiple of 16 numbers, which take the plain loops. The logarithm is there
because many rows do not stay in the caches from the forward pass to the backward one, so that each costs more."""
FORMAT, VERSION = "skirl-costs", 3
_WIDE, _FLOAT = 16, 4
_NOTHING = np.zeros(SUMS)


def terms_of(spec: TableSpec, rows: int, dim: int) -> tuple[float, ...]:
    """Return the terms for this many rows and columns of a table, whose lookups are spread over its rows.

    >>> terms_of(TableSpec("a", rows=1024, dim=8, batch=4, ids=8.0, distinct=8.0), 512, 8)
    (1.0, 4.0, 32.0, 4.0, 32.0, 8.0, 32.0, 4.0, 32.0, 32.0)
    """
    share = rows / spec.rows
    ids, distinct, odd = spec.ids * share, spec.distinct * share, dim % _WIDE != 0
    looked, updated = ids * dim, distinct * dim
    return (
        1.0, ids, looked, distinct, updated, distinct * log2(max(2.0, distinct)), float(spec.batch * dim),
        odd * distinct, odd * looked, odd * updated,
    )  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Milliseconds that parts of tables take.

    `ms` has a number for each of `TERMS` by row optimizer; `link` is the bytes per second that each of `ranks` sends, and
    receives; `noise` the relative difference between two measurements of the same thing, None if it is not known.
    """

    ms: Mapping[str, tuple[float, ...]]
    link: float
    ranks: int
    kernel: str = KERNELS[0]
    noise: float | None = None
    net: ComputeNet | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] | None = None

    def part(self, spec: TableSpec, rows: int, dim: int) -> tuple[float, np.ndarray]:
        """Return the milliseconds to look up, pool and update, and what the part adds to the sums of its rank."""
        of = self.ms.get(spec.optimizer)
        if of is None:
            raise ValueError(
                f"the costs have no {spec.optimizer}, which table {spec.name!r} has; they have {', '.join(self.ms)}: "
                "measure costs with this optimizer"
            )
        ms = sum(a * b for a, b in zip(of, terms_of(spec, rows, dim), strict=True))
        if self.net is None:
            return ms, _NOTHING
        factor, adds = self.net.parts(features_of(spec, rows, dim)[None])
        return ms * float(factor[0]), adds[0]

    def factors(self, sums: np.ndarray) -> np.ndarray:
        """Return the factor of each set of parts that accounts for their being together, from their sums [sets, SUMS]."""
        return np.ones(len(sums)) if self.net is None else self.net.factors(sums)

    def together(self, sets: Sequence[Sequence[Part]]) -> np.ndarray:
        """Return the milliseconds of sets of parts, each set on a rank of its own."""
        parts = [[self.part(*part) for part in of] for of in sets]
        sums = np.array([np.sum([_NOTHING, *(adds for _, adds in of)], axis=0) for of in parts])
        return np.array([sum(ms for ms, _ in of) for of in parts]) * self.factors(sums)

    def exchange(self, spec: TableSpec, dim: int) -> float:
        """Return the milliseconds to send pooled rows and to receive their gradients: bytes over rate.

        A part of the rows takes as long as the whole table, since it has sums for all samples.
        """
        others = (self.ranks - 1) / self.ranks
        return 2e3 * spec.batch * dim * _FLOAT * others / self.link


def save_costs(costs: Costs, path: Path) -> None:
    """Write a file of costs."""
    body = {
        "format": FORMAT, "format_version": VERSION, "skirl": skirl_version(), "backend": costs.kernel, "terms": list(TERMS),
        "noise": costs.noise, "ms": {name: list(of) for name, of in costs.ms.items()},
        "net": None if costs.net is None else costs.net.body(), "report": dict(costs.report), "machine": costs.machine,
    }  # fmt: skip
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, body, secrets.token_hex(8))


def load_costs(path: Path, *, link: float, ranks: int, kernels: Sequence[str] = KERNELS[:1]) -> Costs:
    """Read costs of one of some kernels. Raise a ValueError that names the file if it is damaged, or not of these."""
    body = read_sealed(path, format=FORMAT, version=VERSION, what="file of costs")
    check_kernel(body["backend"], kernels, f"{path} is")
    if tuple(body["terms"]) != TERMS:
        raise ValueError(f"{path} has other terms than those of this skirl: measure again")
    net = None if body["net"] is None else ComputeNet.parsed(body["net"])
    ms = {name: tuple(of) for name, of in body["ms"].items()}
    return Costs(ms, link, ranks, body["backend"], body["noise"], net, body["report"], body["machine"])


def shipped(link: float, ranks: int) -> Costs:
    """Return the costs that come with skirl."""
    return load_costs(SHIPPED, link=link, ranks=ranks)


def check_kernel(kernel: str, kernels: Sequence[str], what: str = "the costs are") -> None:
    """Raise if costs are for other kernels than those that they may be for."""
    if kernel not in kernels:
        wanted = " or ".join(map(repr, kernels))
        raise ValueError(f"{what} for kernel {kernel!r:.40}, not for {wanted}: measure costs for {wanted}")
