"""Costs of parts of tables for a rank: a sum of a few terms, alone or corrected by a net; and the file that keeps them.

The file is JSON with a digest. Nothing in it is run or unpickled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np

from skirl.core.optim import ROW_OPTIMIZERS
from skirl.placement.tables.named import BACKENDS, OURS, flag_of
from skirl.placement.tables.nets import SUMS, ComputeNet, features_of
from skirl.placement.tables.spec import TableSpec
from skirl.placement.tables.terms import TERMS, terms_of
from skirl.placement.tables.wire import Wire
from skirl.tools.sealed_json import AMOUNT, ANY, TEXT, Readable, misfit

FORMAT, VERSION = "skirl-costs", 2
BACKEND = OURS
"""The backend of the costs that come with skirl."""
SHIPPED = Path(__file__).with_name("costs_cpu.json")
"""Costs measured on one machine; `skirl place costs` adapts them to another."""
_MOST = 1 << 20
_FORM = {
    "backend": TEXT, "terms": [TEXT], "noise": ANY, "ms": {...: [AMOUNT]}, "chosen": TEXT, "net": ANY, "report": {...: ANY},
    "exchange": ANY,
}  # fmt: skip
_MACHINE = {"processor": TEXT, "device": TEXT}
FILES = Readable(
    FORMAT, VERSION, "file of costs", "skirl place costs", _FORM, most=_MOST, what="costs", again="measure again"
)
"""The format of files of costs."""
_FLOAT = 4
_NOTHING = np.zeros(SUMS)
Kind = Literal["additive", "net"]
Part = tuple[TableSpec, int, int]
"""A part of a table: its spec, and the part's rows and columns."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds that parts of tables take.

    **Arguments**

    - `ms`: for each row optimizer, a number for each of `TERMS`.
    - `link`: bytes per second of pooled rows and their gradients that a rank sends, and that it receives.
    - `ranks`: number of ranks that exchange them.
    - `backend`: the kernels that compute.
    - `noise`: relative difference between two measurements of the same thing; None: not known.
    - `net`: corrects the sum of terms; None: none was trained.
    - `kind`: which of the two predicts: "additive", or "net".
    - `report`: how good each was on tables that it had not seen, and why the kind was chosen.
    - `wire`: how fast ranks exchange, if that was measured.
    - `machine`: where they were measured, its `processor` and `device` among other facts; None: not known.
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
    machine: Mapping[str, Any] | None = None

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
            raise ValueError(f"kind of costs is {_brief(self.kind)}: set it to additive, or to net with a trained net")

    @property
    def by_net(self) -> bool:
        """True if parts that are together cost something other than their sum."""
        return self.kind == "net"

    def of(self, spec: TableSpec, rows: int, dim: int) -> tuple[float, float, int]:
        """Return the milliseconds per step of computing and of exchange, and the bytes, for a part of a table.

        **Arguments**

        - `spec`: the table.
        - `rows`, `dim`: size of the part.
        """
        return self.compute(spec, rows, dim), self.exchange(spec, dim), spec.nbytes(rows, dim)

    def compute(self, spec: TableSpec, rows: int, dim: int) -> float:
        """Return the milliseconds to look up, pool and update."""
        return self.part(spec, rows, dim)[0]

    def part(self, spec: TableSpec, rows: int, dim: int) -> tuple[float, np.ndarray]:
        """Return the same, and what the part adds to the sums of its set, from which `factors` makes a factor.

        **Arguments**

        - `spec`: the table.
        - `rows`, `dim`: size of the part.
        """
        of = self.ms.get(spec.optimizer)
        if of is None:
            raise ValueError(
                f"the costs have no {spec.optimizer}, which table {spec.name!r} has; they have {', '.join(self.ms)}: "
                f"measure it with `skirl place costs --optimizers {spec.optimizer}{flag_of(self.backend)}`"
            )
        ms = sum(a * b for a, b in zip(of, terms_of(spec, rows, dim), strict=True))
        if not self.by_net or self.net is None:
            return ms, _NOTHING
        factor, adds = self.net.parts(features_of(spec, rows, dim)[None])
        return ms * float(factor[0]), adds[0]

    def factors(self, sums: np.ndarray) -> np.ndarray:
        """Return the factor for the milliseconds of each set's parts that accounts for their being together.

        **Arguments**

        - `sums`: what the parts of each set add up to, [sets, SUMS].
        """
        return np.ones(len(sums)) if not self.by_net or self.net is None else self.net.factors(sums)

    def together(self, sets: Sequence[Sequence[Part]]) -> np.ndarray:
        """Return the milliseconds of sets of parts, each set on a rank of its own.

        **Arguments**

        - `sets`: table, rows and dim of each part.
        """
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
    """Write fitted costs.

    **Arguments**

    - `costs`: costs of one backend.
    - `path`: a JSON file.
    """
    FILES.write(path, {
        "backend": costs.backend, "terms": list(TERMS), "noise": costs.noise,
        "ms": {name: list(of) for name, of in costs.ms.items()}, "chosen": costs.kind,
        "net": None if costs.net is None else costs.net.body(), "report": dict(costs.report),
        "exchange": None if costs.wire is None else costs.wire.body(),
        "machine": None if costs.machine is None else dict(costs.machine),
    })  # fmt: skip


def load_costs(path: Path, *, link: float, ranks: int, backends: Sequence[str] = (BACKEND,)) -> Costs:
    """Read fitted costs. Raise a ValueError that names the file if it is wrong.

    **Arguments**

    - `path`: the file.
    - `link`, `ranks`: as in `Costs`.
    - `backends`: the backends that it may be for.
    """
    return FILES.load(path, lambda text: _parsed(text, link, ranks, backends))


def shipped(link: float, ranks: int) -> Costs:
    """Return the costs that come with skirl.

    **Arguments**

    - `link`, `ranks`: as in `Costs`.
    """
    return load_costs(SHIPPED, link=link, ranks=ranks)


def costs_for(backend: str, path: Path | None, *, link: float, ranks: int) -> Costs:
    """Read the costs of a backend from a file, or return those that come with skirl.

    **Arguments**

    - `backend`: its name.
    - `path`: the file; None: those that come with skirl, if they are of this backend.
    - `link`, `ranks`: as in `Costs`.
    """
    if path is None and backend != BACKEND:
        raise ValueError(
            f"skirl comes with no costs of backend {backend}: measure them with `skirl place costs --backend {backend}`, "
            "and set --costs to that file"
        )
    return load_costs(path or SHIPPED, link=link, ranks=ranks, backends=(backend,))


def check_backend(backend: str, backends: Sequence[str], what: str = "the costs are") -> None:
    """Raise if costs are for another backend.

    **Arguments**

    - `backend`: the backend that they are for.
    - `backends`: those that they may be for.
    - `what`: what is for it, as the error begins.
    """
    if backend not in backends:
        wanted = " or ".join(map(repr, backends))
        asked = len(backends) == 1 and backend in BACKENDS  # by a command, which has the flag
        also = f", or set --backend to {backend}" if asked else ""
        raise ValueError(f"{what} for backend {_brief(backend)}, not for {wanted}: measure costs for {wanted}{also}")


def _parsed(text: str, link: float, ranks: int, backends: Sequence[str]) -> Costs:
    body = FILES.body(text)
    check_backend(body["backend"], backends, "it is")
    if tuple(body["terms"]) != TERMS:
        raise ValueError(f"its terms are {', '.join(body['terms'])[:300]}, skirl has {', '.join(TERMS)}: measure again")
    noise = body["noise"]
    if noise is not None and not (AMOUNT.fits(noise) and noise >= 0):
        raise ValueError(f"its noise is {_brief(noise)}: measure again")
    machine = body.get("machine")  # files of earlier versions have none
    if machine is not None and (wrong := misfit(machine, _MACHINE, "machine")) is not None:
        raise ValueError(f"{wrong}: measure again")
    try:
        net = None if body["net"] is None else ComputeNet.parsed(body["net"])
        wire = None if body["exchange"] is None else Wire.parsed(body["exchange"])
    except ValueError as error:
        raise ValueError(f"{error}: measure again") from None
    numbers = {name: tuple(of) for name, of in body["ms"].items()}
    return Costs(numbers, link, ranks, body["backend"], noise, net, body["chosen"], body["report"], wire, machine)


def _brief(value: Any, most: int = 40) -> str:
    """Return any value as an error shows it."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
