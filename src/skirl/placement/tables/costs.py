"""What parts of tables cost a rank: a sum of a few terms, or with a net that corrects it; and the file that keeps them.

The file is JSON with a digest. Nothing in it is run or unpickled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np

from skirl.core.optim import ROW_OPTIMIZERS
from skirl.placement.tables.nets import SUMS, ComputeNet, features_of
from skirl.placement.tables.spec import TableSpec
from skirl.placement.tables.terms import TERMS, terms_of
from skirl.placement.tables.wire import Wire
from skirl.tools.sealed_json import Readable
from skirl.tools.shape_of import AMOUNT, ANY, TEXT

FORMAT, VERSION = "skirl-costs", 2
BACKEND = "skirl-cpu"
"""Skirl's own kernels."""
SHIPPED = Path(__file__).with_name("costs_cpu.json")
"""Measured on one machine; `skirl place costs` adapts it to another."""
_MOST = 1 << 20
_FORM = {
    "backend": TEXT, "terms": [TEXT], "noise": ANY, "ms": {...: [AMOUNT]}, "chosen": TEXT, "net": ANY, "report": {...: ANY},
    "exchange": ANY,
}  # fmt: skip
FILES = Readable(
    FORMAT, VERSION, "file of costs", "skirl place costs", _FORM, most=_MOST, what="costs", again="measure again"
)
"""The files."""
_FLOAT = 4
_NOTHING = np.zeros(SUMS)
Kind = Literal["additive", "net"]
Part = tuple[TableSpec, int, int]
"""Of a table, so many rows and columns."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds of parts of tables.

    **Arguments**

    - `ms`: of each row optimizer a number for each of `TERMS`.
    - `link`: bytes a second that a rank sends, and receives, of pooled rows and their gradients.
    - `ranks`: among which they are exchanged.
    - `backend`: what computes.
    - `noise`: by how much two measurements of one thing differ, as a share; None: not known.
    - `net`: what corrects the sum of terms; None: nothing was trained.
    - `kind`: which of the two predicts: "additive", or "net".
    - `report`: how good each was on tables that it had not seen, and why the kind was chosen.
    - `wire`: how fast ranks exchange, where it was measured.
    """

    ms: Mapping[str, tuple[float, ...]]
    link: float
    ranks: int
    backend: str = BACKEND
    noise: float | None = None
    net: ComputeNet | None = None
    kind: Kind = "additive"
    report: Mapping[str, Any] = field(default_factory=dict)
    wire: Wire | None = None

    def __post_init__(self) -> None:
        for optimizer, of in self.ms.items():
            if optimizer not in ROW_OPTIMIZERS:
                raise ValueError(
                    f"costs are of optimizer {_brief(optimizer)}: set it to one of {', '.join(ROW_OPTIMIZERS)}"
                )
            if len(of) != len(TERMS) or not all(isfinite(value) and value >= 0 for value in of) or not sum(of) > 0:
                raise ValueError(
                    f"costs of {optimizer} are {_brief(list(of), 300)}: give {len(TERMS)} finite numbers of 0 or more, "
                    "not all 0"
                )
        if not 0 < self.link < float("inf"):
            raise ValueError(f"link is {self.link}: set it to bytes a second above 0")
        if self.kind not in ("additive", "net") or (self.kind == "net" and self.net is None):
            raise ValueError(f"costs are of kind {_brief(self.kind)}: set it to additive, or to net and give one")

    @property
    def by_net(self) -> bool:
        """Whether parts that are together cost something else than their sum."""
        return self.kind == "net"

    def of(self, spec: TableSpec, rows: int, dim: int) -> tuple[float, float, int]:
        """Compute and exchange of a step in milliseconds, and bytes of memory, of a part of a table.

        **Arguments**

        - `spec`: the table.
        - `rows`, `dim`: of the part.
        """
        return self.compute(spec, rows, dim), self.exchange(spec, dim), spec.nbytes(rows, dim)

    def compute(self, spec: TableSpec, rows: int, dim: int) -> float:
        """Milliseconds to look up, pool and update."""
        return self.part(spec, rows, dim)[0]

    def part(self, spec: TableSpec, rows: int, dim: int) -> tuple[float, np.ndarray]:
        """The same, and what the part adds to the sums of its set, of which `factors` makes a factor.

        **Arguments**

        - `spec`: the table.
        - `rows`, `dim`: of the part.
        """
        of = self.ms.get(spec.optimizer)
        if of is None:
            raise ValueError(
                f"the costs have no {spec.optimizer}, which table {spec.name!r} has; they have {', '.join(self.ms)}: "
                f"measure it with `skirl place costs --optimizers {spec.optimizer}`"
            )
        ms = sum(a * b for a, b in zip(of, terms_of(spec, rows, dim), strict=True))
        if not self.by_net or self.net is None:
            return ms, _NOTHING
        factor, adds = self.net.parts(features_of(spec, rows, dim)[None])
        return ms * float(factor[0]), adds[0]

    def factors(self, sums: np.ndarray) -> np.ndarray:
        """By what the milliseconds of the parts of each set are multiplied, since they are together.

        **Arguments**

        - `sums`: of what the parts of each set add, [sets, SUMS].
        """
        return np.ones(len(sums)) if not self.by_net or self.net is None else self.net.factors(sums)

    def together(self, sets: Sequence[Sequence[Part]]) -> np.ndarray:
        """Milliseconds of sets of parts, each on a rank of its own.

        **Arguments**

        - `sets`: of tables, rows and dims.
        """
        parts = [[self.part(*part) for part in of] for of in sets]
        sums = np.array([np.sum([_NOTHING, *(adds for _, adds in of)], axis=0) for of in parts])
        return np.array([sum(ms for ms, _ in of) for of in parts]) * self.factors(sums)

    def exchange(self, spec: TableSpec, dim: int) -> float:
        """Milliseconds to send pooled rows and to receive their gradients: bytes over rate, of parts of rows as of whole
        tables, since each has sums for all samples."""
        others = (self.ranks - 1) / self.ranks
        return 2e3 * spec.batch * dim * _FLOAT * others / self.link


def save_costs(costs: Costs, path: Path) -> None:
    """Write what was fitted.

    **Arguments**

    - `costs`: of a backend.
    - `path`: a JSON file.
    """
    FILES.write(path, {
        "backend": costs.backend, "terms": list(TERMS), "noise": costs.noise,
        "ms": {name: list(of) for name, of in costs.ms.items()}, "chosen": costs.kind,
        "net": None if costs.net is None else costs.net.body(), "report": dict(costs.report),
        "exchange": None if costs.wire is None else costs.wire.body(),
    })  # fmt: skip


def load_costs(path: Path, *, link: float, ranks: int, backends: Sequence[str] = (BACKEND,)) -> Costs:
    """Read what was fitted; a ValueError that names the file where it is wrong.

    **Arguments**

    - `path`: the file.
    - `link`, `ranks`: as `Costs` has them.
    - `backends`: it has to be of one of them.
    """
    return FILES.load(path, lambda text: _parsed(text, link, ranks, backends))


def shipped(link: float, ranks: int) -> Costs:
    """The costs that come with skirl.

    **Arguments**

    - `link`, `ranks`: as `Costs` has them.
    """
    return load_costs(SHIPPED, link=link, ranks=ranks)


def _parsed(text: str, link: float, ranks: int, backends: Sequence[str]) -> Costs:
    body = FILES.body(text)
    if body["backend"] not in backends:
        wanted = " or ".join(map(repr, backends))
        raise ValueError(f"it is of backend {_brief(body['backend'])}, and {wanted} is to be placed: measure that one")
    if tuple(body["terms"]) != TERMS:
        raise ValueError(f"its terms are {', '.join(body['terms'])[:300]}, skirl has {', '.join(TERMS)}: measure again")
    noise = body["noise"]
    if noise is not None and not (AMOUNT.fits(noise) and noise >= 0):
        raise ValueError(f"its noise is {_brief(noise)}: measure again")
    try:
        net = None if body["net"] is None else ComputeNet.parsed(body["net"])
        wire = None if body["exchange"] is None else Wire.parsed(body["exchange"])
    except ValueError as error:
        raise ValueError(f"{error}: measure again") from None
    numbers = {name: tuple(of) for name, of in body["ms"].items()}
    return Costs(numbers, link, ranks, body["backend"], noise, net, body["chosen"], body["report"], wire)


def _brief(value: Any, most: int = 40) -> str:
    """A value as an error says it, which may be anything."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
