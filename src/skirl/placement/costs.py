"""Costs of parts of tables for a rank, and their file: a sum of a few terms, corrected by a small net.

It has a net for each part, their sum, and a head over it; it is trained in torch, and predicts in plain numpy, which
takes microseconds."""

import base64
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, log2
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skirl.placement.spec import BINS, TableSpec
from skirl.tools import __version__
from skirl.tools.lanes import counts_of
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import put_whole, read_sealed, seal
from skirl.train.placed import Bytes

OPTIMIZERS = ("rowwise-adagrad", "sgd", "sgd-momentum", "adagrad", "adam", "ftrl")
FEATURES = 8 + BINS + len(OPTIMIZERS)
"""Number of features of a part of a table; unknown ones count as the mean of the training data."""
HIDDEN, SUMS, HEAD = 32, 4, 16
"""Units of a part's net, number of sums that a set of parts has, and units of the head."""
FARTHEST = 4.0  # deviations from the mean at which a feature is cut off, so that an unusual table gets no wild answer
MOST = log(4.0)  # the logarithm of a net's factor lies between this and its negative


def features_of(spec: TableSpec, rows: int, dim: int) -> np.ndarray:
    """Return a net's features for this many rows and columns of a table, whose lookups are spread over its rows."""
    share, found = rows / spec.rows, np.zeros(FEATURES)
    ids = max(spec.ids * share, 1e-3)
    found[:6] = (
        log(rows), log(dim), log(spec.batch), log(ids), log(max(spec.distinct * share, 1e-3)), log(ids / spec.batch)
    )  # fmt: skip
    found[6], found[7] = not counts_of(dim, 16), dim % 8 != 0
    found[8 : 8 + BINS] = spec.reuse or np.nan
    found[8 + BINS :] = [spec.optimizer == name for name in OPTIMIZERS]
    return found


@dataclass(frozen=True)
class Mlp:
    """Two linear layers with a ReLU between them: [units, inputs], [units], [outputs, units], [outputs]."""

    first: np.ndarray
    first_bias: np.ndarray
    last: np.ndarray
    last_bias: np.ndarray

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.maximum(x @ self.first.T + self.first_bias, 0.0) @ self.last.T + self.last_bias


@dataclass(frozen=True)
class ComputeNet:
    """Corrections to sums of terms: a factor for the time of each part, and one for that of a whole set of parts.

    `mean` and `deviation` are those of each feature. `each` tells the logarithm of a part's factor, and what it adds
    to `SUMS` sums; `head`, for these sums, the logarithm of the factor of the whole set.
    """

    mean: np.ndarray
    deviation: np.ndarray
    each: Mlp
    head: Mlp

    def parts(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The factor of each part, [n], and what it adds to the sums of its set, [n, SUMS]."""
        found = self.each(scaled(features, self.mean, self.deviation))
        return np.exp(bounded(found[:, 0])), np.logaddexp(0.0, found[:, 1:])

    def factors(self, sums: np.ndarray) -> np.ndarray:
        """The factor of each set, [n], from sums over its parts, [n, SUMS]."""
        return np.exp(bounded(self.head(np.log1p(sums))[:, 0]))

    def body(self) -> dict[str, Any]:
        layers = {name: [packed(of) for of in vars(getattr(self, name)).values()] for name in ("each", "head")}
        moments = {"mean": packed(self.mean), "deviation": packed(self.deviation)}
        return {**moments, **layers}

    @classmethod
    def parsed(cls, body: Mapping[str, Any]) -> "ComputeNet":
        layers = [Mlp(*map(unpacked, body[name])) for name in ("each", "head")]
        return cls(unpacked(body["mean"]), unpacked(body["deviation"]), *layers)


def scaled(features: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Features in deviations from their means, cut off far away, and 0 for unknown ones."""
    of = (features - mean) / deviation
    of = np.where(np.isnan(of), 0.0, of)
    return np.minimum(np.maximum(of, -FARTHEST), FARTHEST)  # np.clip and np.nan_to_num take 25 us


def bounded(x: np.ndarray) -> np.ndarray:
    return MOST * np.tanh(x / MOST)


def packed(of: np.ndarray) -> dict[str, Any]:
    data = np.ascontiguousarray(of, "<f4")
    return {"shape": list(of.shape), "float32": base64.b64encode(data.tobytes()).decode()}


def unpacked(body: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(body["float32"]), "<f4").astype(float).reshape(body["shape"])


# Training

EPOCHS, TUNED = 150, 60
"""Epochs of training from scratch, and from a net that was trained elsewhere."""
BATCH, RATE, TUNED_RATE, DECAY, DROPPED = 64, 3e-3, 1e-3, 1e-2, 0.1
KEPT = 5  # one set in this many tells when a net is best; nothing is learned from it


@dataclass(frozen=True)
class Sets:
    """Measured sets of parts.

    `features` [parts, FEATURES] and `base`, the milliseconds by a sum of terms, are those of each part; `of` is the set
    that it is in; `ms` are the measured milliseconds of each set.
    """

    features: np.ndarray
    base: np.ndarray
    of: np.ndarray
    ms: np.ndarray


def train_net(sets: Sets, seed: int, start: ComputeNet | None = None) -> ComputeNet:
    """`start`: a net of another machine."""
    generator = torch.Generator().manual_seed(seed)
    each, head = _module(FEATURES, HIDDEN, 1 + SUMS, generator), _module(SUMS, HEAD, 1, generator)
    if start is None:
        deviation = sets.features.std(axis=0)
        mean, deviation = sets.features.mean(axis=0), np.where(deviation > 1e-6, deviation, 1.0)
    else:
        mean, deviation = start.mean, start.deviation
        for module, mlp in ((each, start.each), (head, start.head)):
            with torch.no_grad():
                for p, of in zip(module.parameters(), vars(mlp).values(), strict=True):
                    p.copy_(torch.tensor(of))
    x = torch.tensor(scaled(sets.features, mean, deviation), dtype=torch.float32)
    base, of = torch.tensor(sets.base, dtype=torch.float32), torch.tensor(sets.of)
    wanted = torch.tensor(np.log(sets.ms), dtype=torch.float32)

    def errors(which: Tensor, drop: bool) -> Tensor:
        number = torch.full((len(sets.ms),), -1)
        number[which] = torch.arange(len(which))
        inside = number[of] >= 0
        at, seen = number[of][inside], x[inside]
        if drop:
            seen = seen * (torch.rand(seen.shape, generator=generator) > DROPPED)
        out = each(seen)
        parts = base[inside] * torch.exp(MOST * torch.tanh(out[:, 0] / MOST))
        total = torch.zeros(len(which)).index_add(0, at, parts)
        sums = torch.zeros(len(which), SUMS).index_add(0, at, F.softplus(out[:, 1:]))
        factor = MOST * torch.tanh(head(torch.log1p(sums))[:, 0] / MOST)
        return torch.log(total) + factor - wanted[which]

    order = torch.randperm(len(sets.ms), generator=generator)
    kept, rest = order[: len(order) // KEPT], order[len(order) // KEPT :]
    parameters: Sequence[Tensor] = [*each.parameters(), *head.parameters()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the nets are so small that threads would only wait for each other
    epochs, rate = (EPOCHS, RATE) if start is None else (TUNED, TUNED_RATE)
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=DECAY)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    least, best = float("inf"), list[Tensor]()
    for epoch in range(epochs + 1):
        if epoch:  # the start counts as well
            for which in rest[torch.randperm(len(rest), generator=generator)].split(BATCH):
                optimizer.zero_grad()
                off = errors(which, True)
                F.huber_loss(off, torch.zeros_like(off), delta=0.1).backward()
                optimizer.step()
            slower.step()
        with torch.no_grad():
            error = float(errors(kept, False).abs().mean())
            if error < least or not best:
                least, best = error, [p.detach().clone() for p in parameters]
    torch.set_num_threads(threads)
    numbers = [of.numpy().astype(float) for of in best]
    return ComputeNet(mean, deviation, Mlp(*numbers[:4]), Mlp(*numbers[4:]))


def _module(inputs: int, units: int, outputs: int, generator: torch.Generator) -> nn.Sequential:
    first, last = nn.Linear(inputs, units), nn.Linear(units, outputs)
    with torch.no_grad():
        for layer in (first, last):
            bound = layer.in_features**-0.5
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.zero_()
        last.weight.mul_(0.1)
    return nn.Sequential(first, nn.ReLU(), last)


Kernel = Literal["skirl-cpu", "fbgemm-cpu", "fbgemm-cuda"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)  # the last one is unproven: nobody has run it on a GPU
SHIPPED = Path(__file__).with_name("costs_cpu.json")
"""Costs of skirl's kernels, measured on one machine; measuring adapts them to another."""
Part = tuple[TableSpec, int, int]  # a table's spec, and the part's rows and columns
FORMAT, VERSION = "skirl-costs", 5  # also of the features and the terms
_FLOAT = 4
_NOTHING = np.zeros(SUMS)


def terms_of(spec: TableSpec, rows: int, dim: int) -> tuple[float, ...]:
    """Return the terms for this many rows and columns of a table, whose lookups are spread over its rows.

    The last three are for rows that take the plain loops. The logarithm is there because many rows do not stay in the
    caches from the forward pass to the backward one, so that each costs more.

    >>> terms_of(TableSpec("a", rows=1024, dim=8, batch=4, ids=8.0, distinct=8.0), 512, 8)
    (1.0, 4.0, 32.0, 4.0, 32.0, 8.0, 32.0, 0.0, 0.0, 0.0)
    """
    share = rows / spec.rows
    ids, distinct, odd = spec.ids * share, spec.distinct * share, not counts_of(dim, 16)
    looked, updated = ids * dim, distinct * dim
    return (
        1.0, ids, looked, distinct, updated, distinct * log2(max(2.0, distinct)), float(spec.batch * dim),
        odd * distinct, odd * looked, odd * updated,
    )  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Milliseconds that parts of tables take.

    `ms` has a number for each of `terms_of` by row optimizer; `link` is the bytes per second that each of `ranks` sends, and
    receives.
    """

    ms: Mapping[str, tuple[float, ...]]
    link: float
    ranks: int
    kernel: str = KERNELS[0]
    net: ComputeNet | None = None
    sent: Mapping[str, Bytes] | None = None
    """Where ranks are skirl's trainers, the bytes of each table: they exchange rows of those that are cut by rows."""

    def part(self, spec: TableSpec, rows: int, dim: int) -> tuple[float, np.ndarray]:
        """Milliseconds to look up, pool and update, and what the part adds to the sums of its rank."""
        of = self.ms.get(spec.optimizer)
        if of is None:
            raise ValueError(
                f"the costs have no {spec.optimizer}, which table {spec.name!r} has; they have {', '.join(self.ms)}: "
                "measure them: skirl.torchrec.measure_costs, or `skirl place` without --no-measure"
            )
        ms = sum(a * b for a, b in zip(of, terms_of(spec, rows, dim), strict=True))
        if self.net is None:
            return ms, _NOTHING
        factor, adds = self.net.parts(features_of(spec, rows, dim)[None])
        return ms * float(factor[0]), adds[0]

    def factors(self, sums: np.ndarray) -> np.ndarray:
        """The factor of each set of parts that accounts for their being together, from their sums [sets, SUMS]."""
        return np.ones(len(sums)) if self.net is None else self.net.factors(sums)

    def together(self, sets: Sequence[Sequence[Part]]) -> np.ndarray:
        """Milliseconds of sets of parts, each set on a rank of its own."""
        parts = [[self.part(*part) for part in of] for of in sets]
        sums = np.array([np.sum([_NOTHING, *(adds for _, adds in of)], axis=0) for of in parts])
        return np.array([sum(ms for ms, _ in of) for of in parts]) * self.factors(sums)

    def exchange(self, spec: TableSpec, rows: int, dim: int) -> float:
        """Milliseconds to send pooled rows and receive their gradients; part of the rows has sums for all samples, too."""
        if self.sent is not None:
            of = self.sent[spec.name]
            whole = of.ids + (of.whole - of.ids) * dim / spec.dim
            return 1e3 * (whole if rows == spec.rows else of.rows / self.ranks) / self.link
        others = (self.ranks - 1) / self.ranks
        return 2e3 * spec.batch * dim * _FLOAT * others / self.link


def save_costs(costs: Costs, path: Path) -> None:
    body = {
        "format": FORMAT, "format_version": VERSION, "skirl": __version__, "backend": costs.kernel,
        "ms": {name: list(of) for name, of in costs.ms.items()},
        "net": None if costs.net is None else costs.net.body(),
    }  # fmt: skip
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        put_whole(path, seal(body), secrets.token_hex(8))


def load_costs(path: Path, *, link: float, ranks: int, kernels: Sequence[str] = KERNELS[:1]) -> Costs:
    body = read_sealed(path, format=FORMAT, version=VERSION, what="file of costs")
    check_kernel(body["backend"], kernels, f"{path} is")
    net = None if body["net"] is None else ComputeNet.parsed(body["net"])
    ms = {name: tuple(of) for name, of in body["ms"].items()}
    return Costs(ms, link, ranks, body["backend"], net)


def shipped(link: float, ranks: int) -> Costs:
    return load_costs(SHIPPED, link=link, ranks=ranks)


def check_kernel(kernel: str, kernels: Sequence[str], what: str = "the costs are") -> None:
    if kernel not in kernels:
        wanted = " or ".join(map(repr, kernels))
        raise ValueError(f"{what} for kernel {kernel!r:.40}, not for {wanted}: measure costs for {wanted}")
