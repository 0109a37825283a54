"""Costs of this machine: random combinations of parts of tables are timed, a sum of terms is fitted to the times, and a
net that corrects it is kept if it is better on other tables."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from skirl.placement.costs import (
    KERNELS,
    Costs,
    Kernel,
    Part,
    Sets,
    features_of,
    load_costs,
    save_costs,
    shipped,
    terms_of,
    train_net,
)  # fmt: skip
from skirl.placement.measure import Arena, Lookups, arena_of, generate, rounds_of
from skirl.placement.spec import Piece
from skirl.tools.progress import progress_of

DIMS = (4, 8, 12, 16, 24, 28, 32, 48, 60, 64, 96, 128)
BATCHES, OTHER_BATCHES = (256, 512, 1024), (384, 768)
"""Batch sizes that costs are fitted to, and those that judge them."""
TABLES, MOST_PARTS, ROUNDS, COMBINATIONS = 120, 15, 12, 120
"""Generated tables of a batch size, most parts of a combination, most rounds, and combinations to fit to."""
_BEFORE = 0.25  # weight of a time predicted by another machine's costs, compared with a measured one
_CHANCE = 2.0  # standard errors within which the gain of a net counts as chance
_FAR = 0.5  # larger errors count as this
_CYCLES, _TURNS, _CLOSE = 1000, 12, 0.01  # most cycles and turns of a fit; errors up to the last have the same weight


@dataclass(frozen=True)
class Combination:
    """Parts of tables on one rank, all with one optimizer; `numbers` are those of the tables, which draw their ids."""

    parts: tuple[Part, ...]
    numbers: tuple[int, ...]

    def ready(self, arena: Arena) -> list[object]:
        return [
            arena.ready(Lookups(replace(spec, dim=dim), number), Piece(0, 0, rows, 0, dim))
            for (spec, rows, dim), number in zip(self.parts, self.numbers, strict=True)
        ]


def training(optimizer: str, count: int, seed: int, batches: Sequence[int]) -> list[Combination]:
    """Return random combinations of generated tables of several batch sizes, to fit costs to or to judge them.

    Each has 1 to 15 tables with other dims, and with all, half or a quarter of their rows.
    """
    rng, found = np.random.default_rng([seed, 1]), list[Combination]()
    for n, batch in enumerate(batches):
        tables = generate(TABLES, batch=batch, max_dim=max(DIMS), seed=seed + 100 + n, optimizer=optimizer)
        for _ in range(-(-count // len(batches))):
            numbers = rng.choice(len(tables), int(rng.integers(1, MOST_PARTS + 1))).tolist()
            parts = []
            for table in numbers:
                rows = max(1, tables[table].rows >> int(rng.integers(0, 3)))
                parts.append((tables[table], rows, int(rng.choice(DIMS))))
            found.append(Combination(tuple(parts), tuple(numbers)))
    return found[:count]


@dataclass(frozen=True)
class Measured:
    combinations: Sequence[Combination]
    ms: np.ndarray

    def sets(self, numbers: Mapping[str, tuple[float, ...]]) -> Sets:
        """The sets for a net to learn from, based on sums of terms with these numbers."""
        parts = [(n, part) for n, of in enumerate(self.combinations) for part in of.parts]
        base = [float(np.dot(numbers[part[0].optimizer], terms_of(*part))) for _, part in parts]
        features = np.array([features_of(*part) for _, part in parts])
        return Sets(features, np.array(base), np.array([n for n, _ in parts]), self.ms)

    def fitted(self, start: Costs | None = None) -> dict[str, tuple[float, ...]]:
        """Fit the numbers of the terms for each optimizer; `start` says, up to one factor, what was not measured well."""
        of = np.array([combination.parts[0][0].optimizer for combination in self.combinations])
        terms = np.array([np.sum([terms_of(*part) for part in c.parts], axis=0) for c in self.combinations])
        found = {}
        for name in dict.fromkeys(of.tolist()):
            x, ms = terms[of == name], self.ms[of == name]
            counts = np.ones(len(ms))
            if start is not None and name in start.ms:
                before = x @ np.array(start.ms[name])
                x, ms = np.concatenate([x, x]), np.concatenate([ms, before * np.median(ms / before)])
                counts = np.repeat([1.0, _BEFORE], len(before))
            found[name] = fit(x, ms, counts)
        return found


def fit(terms: np.ndarray, ms: np.ndarray, counts: np.ndarray | None = None) -> tuple[float, ...]:
    """Fit coefficients of 0 or more to terms [measurements, terms], with about the least sum of relative errors.

    This repeats least squares with less weight on what was far off: a busy neighbour of the machine makes measurements
    too long, never too short, and plain squares would follow it.
    """
    scaled = terms / ms[:, None]
    sizes = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    scaled, out = scaled / sizes, np.zeros(terms.shape[1])
    counts = np.ones(len(ms)) if counts is None else counts
    weights = counts / counts.mean()
    for _ in range(_TURNS):
        products, wanted = (scaled * weights[:, None]).T @ scaled, scaled.T @ weights
        for _ in range(_CYCLES):  # set one coefficient after the other to where it is best, or to 0
            before = out.copy()
            for n in range(len(out)):
                if products[n, n] > 0:
                    out[n] = max(0.0, out[n] + (wanted[n] - products[n] @ out) / products[n, n])
            if np.abs(out - before).max() <= 1e-9 * out.max():
                break
        weights = counts / np.maximum(np.abs(scaled @ out - 1), _CLOSE)
        weights /= weights.mean()
    return tuple((out / sizes).tolist())


def fit_costs(
    learned: Measured, judges: Measured, seed: int, start: Costs | None = None, kernel: Kernel = KERNELS[0]
) -> Costs:
    """Fit a sum of terms and a net to measurements, from another machine's costs if there are any.

    The net is kept if it predicts the judges, which neither has seen, better by more than chance.
    """
    numbers = learned.fitted(start)
    net = train_net(learned.sets(numbers), seed, None if start is None else start.net)
    by_net = Costs(numbers, 1.0, 1, kernel, net=net)
    by_sum, sets = replace(by_net, net=None), [of.parts for of in judges.combinations]
    off = [np.abs(costs.together(sets) / judges.ms - 1) for costs in (by_sum, by_net)]
    gains = np.minimum(off[0], _FAR) - np.minimum(off[1], _FAR)
    better = float(gains.mean()) > _CHANCE * float(gains.std()) / len(gains) ** 0.5
    return by_net if better else by_sum


def measure_machine(kernel: Kernel, optimizers: Sequence[str], *, minutes: float, out: Path | None = None) -> Costs:
    arena = arena_of(kernel)
    start = shipped(1.0, 1) if kernel == "skirl-cpu" else None
    learned = [c for name in optimizers for c in training(name, COMBINATIONS, 0, BATCHES)]
    judges = [c for name in optimizers for c in training(name, COMBINATIONS // 4, 5000, OTHER_BATCHES)]
    with progress_of("prepare", steps=len(learned) + len(judges)) as progress:
        ready = []
        for done, combination in enumerate([*learned, *judges], start=1):
            ready.append(combination.ready(arena))
            progress(done, dict)
    until = time.monotonic() + 60 * minutes
    rounds = list[np.ndarray]()
    with progress_of("measure", steps=ROUNDS) as progress:
        for ms in rounds_of(arena, ready, ROUNDS, 0):
            rounds.append(ms)
            progress(len(rounds), dict)
            if len(rounds) > 1 and time.monotonic() >= until:
                break
    ms = np.min(rounds, axis=0)
    parts = Measured(learned, ms[: len(learned)]), Measured(judges, ms[len(learned) :])
    costs = fit_costs(*parts, 0, start, kernel)
    if out is not None:
        save_costs(costs, out)
    return costs


def costs_for(
    kernel: Kernel, optimizers: Collection[str], path: Path | None, *, link: float, ranks: int, minutes: float | None,
) -> Costs:  # fmt: skip
    """The costs that a file keeps; what it lacks is measured and kept. Without minutes nothing is measured, and without a
    path the costs are those that come with skirl."""
    if path is None and kernel != KERNELS[0]:
        raise ValueError(f"skirl comes with no costs of kernel {kernel}: leave --no-measure out, or name --costs")
    if path is None:
        found = shipped(link, ranks)
    else:
        found = load_costs(path, link=link, ranks=ranks, kernels=(kernel,)) if path.is_file() else None
    known = set() if found is None else {*found.ms}
    if found is not None and known >= {*optimizers}:
        return found
    if minutes is None:
        what = f"{path} is no file of" if found is None else f"{path} has no"
        lacking = ", ".join(sorted({*optimizers} - known))
        raise ValueError(f"{what} costs for {lacking}: leave --no-measure out, and they are measured")
    costs = measure_machine(kernel, sorted(known | {*optimizers}), minutes=minutes, out=path)
    return replace(costs, link=link, ranks=ranks)
