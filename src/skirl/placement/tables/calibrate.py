"""Measured costs: combinations of parts of tables made by chance, timed and fitted; those held out say how good it is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from skirl.placement.tables.costs import Costs, fitted, save_costs, terms_of
from skirl.placement.tables.measure import Arena, Lookups, Part, Rounds, noise_of, rounds_of
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.pool import Made, pool
from skirl.tools.progress import Progress

DIMS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BATCHES = (256, 512, 1024)
MOST_TABLES = 15
ROUNDS = 12
_TABLES = 120


@dataclass(frozen=True)
class Combination:
    """Parts of tables that one rank has.

    **Arguments**

    - `parts`: table, its number, and rows and columns of the part.
    """

    parts: tuple[tuple[Made, int, int, int], ...]

    def terms(self) -> np.ndarray:
        """Of all parts together."""
        return np.sum([terms_of(made.spec, rows, dim) for made, _, rows, dim in self.parts], axis=0)

    def ready(self, arena: Arena) -> list[Part]:
        """The parts with their ids."""
        return [
            Part(arena, Lookups(replace(made, spec=replace(made.spec, dim=dim)), number), Piece(0, 0, rows, 0, dim))
            for made, number, rows, dim in self.parts
        ]


def combinations_of(
    tables: Sequence[Made], count: int, rng: np.random.Generator, dims: Sequence[int] = DIMS, halves: bool = True
) -> list[Combination]:
    """By chance: 1 to 15 tables, other dims, and whole, half or a quarter of the rows.

    **Arguments**

    - `tables`: to draw from.
    - `count`: how many.
    - `rng`: chance.
    - `dims`: to choose from.
    - `halves`: whether tables are cut by rows.
    """
    found = []
    for _ in range(count):
        some = rng.choice(len(tables), int(rng.integers(1, MOST_TABLES + 1)))
        parts = []
        for n in some.tolist():
            rows = tables[n].spec.rows >> int(rng.integers(0, 3) if halves else 0)
            parts.append((tables[n], n, max(1, rows), int(rng.choice(dims))))
        found.append(Combination(tuple(parts)))
    return found


def training(optimizer: str, count: int, seed: int, batches: Sequence[int] = BATCHES) -> list[Combination]:
    """What costs are fitted to: tables of several batch sizes.

    **Arguments**

    - `optimizer`: of rows.
    - `count`: combinations.
    - `seed`: of chance.
    - `batches`: samples of a step.
    """
    rng, found = np.random.default_rng([seed, 1]), list[Combination]()
    for n, batch in enumerate(batches):
        tables = pool(_TABLES, batch=batch, max_dim=128, seed=seed + 100 + n, optimizer=optimizer)
        found += combinations_of(tables, -(-count // len(batches)), rng)
    return found[:count]


def calibrated(
    optimizers: Sequence[str],
    minutes: float,
    count: int,
    seed: int,
    out: Path,
    *,
    quiet: bool,
    to: TextIO | None = None,
) -> dict[str, Any]:
    """Measure, fit and write; one part in five is held out and says how good it is.

    **Arguments**

    - `optimizers`: of rows; each is fitted by itself.
    - `minutes`: for all rounds together.
    - `count`: combinations of each optimizer.
    - `seed`: of chance.
    - `out`: the file; rounds are kept beside it until it is written.
    - `quiet`: whether no progress is shown.
    - `to`: where it is shown.
    """
    arena = Arena()
    all_of = [combination for name in optimizers for combination in training(name, count, seed)]
    what = {"optimizers": list(optimizers), "count": count, "seed": seed}
    known = Rounds(out.with_name(out.name + ".rounds"), what)
    with Progress("prepare", steps=len(all_of), to=to, quiet=quiet) as progress:
        ready = []
        for done, combination in enumerate(all_of, start=1):
            ready.append(combination.ready(arena))
            progress(done, lambda: {"tables": f"{len(ready[-1])}"})
        until = time.monotonic() + 60 * minutes
        rounds = rounds_of(arena, ready, ROUNDS, seed, known=known, late=lambda: time.monotonic() >= until)
    ms, terms = rounds.min(axis=0), np.array([combination.terms() for combination in all_of])
    held_out = np.arange(len(all_of)) % 5 == 4
    fits, errors = {}, {}
    for n, name in enumerate(optimizers):
        mine = np.arange(len(all_of)) // count == n
        trial = fitted(terms[mine & ~held_out], ms[mine & ~held_out])
        of = terms[mine & held_out] @ trial
        errors[name] = float(np.median(np.abs(of / ms[mine & held_out] - 1)))
        fits[name] = fitted(terms[mine], ms[mine])
    noise = noise_of(rounds)
    save_costs(Costs(fits, 1.0, 1, noise=noise), out)
    known.path.unlink()
    return {
        "out": str(out), "rounds": len(rounds), "combinations": len(all_of), "noise": noise, "median_error": errors,
    }  # fmt: skip
