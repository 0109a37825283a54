"""Measured costs: random combinations of parts of tables are timed, two kinds of costs fitted, and one chosen."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from skirl.placement.tables.backends import arena_of, check_dims, check_optimizers
from skirl.placement.tables.costs import Costs, Kind, Part, save_costs
from skirl.placement.tables.measure import Lookups, MeasuredTables, Rounds, Sentinel, noise_of, rounds_of
from skirl.placement.tables.named import OURS, Backend
from skirl.placement.tables.nets import features_of
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.pool import Made, pool, rescaled
from skirl.placement.tables.published import published
from skirl.placement.tables.spec import TableSpec
from skirl.placement.tables.terms import fitted, terms_of
from skirl.tools.machine import machine
from skirl.tools.progress import Progress

if TYPE_CHECKING:
    from skirl.placement.tables.training import Sets

DIMS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BATCHES, OTHER_BATCHES = (256, 512, 1024), (384, 768)
"""Batch sizes that costs are fitted to, and those that judge them."""
_BEFORE = 0.25
"""Weight of a time predicted by another machine's costs, compared with a measured one."""
_CHANCE = 2.0
"""Standard errors within which the gain of a net counts as chance."""
_FAR = 0.5
"""Larger errors count as this."""
MOST_TABLES = 15
JUDGING = 4
"""One in this many of the user's own tables judges the costs and is not learned from."""
SINGLE = 4
"""One combination in this many is of published tables with single ids, which are unlike those that are generated."""
ROUNDS = 12
_TABLES = 120


@dataclass(frozen=True)
class Combination:
    """Parts of tables on one rank.

    **Arguments**

    - `parts`: table, its number, and rows and columns of each part.
    """

    parts: tuple[tuple[Made, int, int, int], ...]

    @property
    def pieces(self) -> list[Part]:
        """Table, rows and columns of each part."""
        return [(made.spec, rows, dim) for made, _, rows, dim in self.parts]

    @property
    def optimizer(self) -> str:
        """Row optimizer of all parts."""
        return self.parts[0][0].spec.optimizer

    def terms(self) -> np.ndarray:
        """Return the terms of all parts together."""
        return np.sum([terms_of(*piece) for piece in self.pieces], axis=0)

    def ready(self, arena: MeasuredTables) -> list[Any]:
        """Return the parts with their ids, ready to be run."""
        return [
            arena.ready(Lookups(replace(made, spec=replace(made.spec, dim=dim)), number), Piece(0, 0, rows, 0, dim))
            for made, number, rows, dim in self.parts
        ]


def combinations_of(
    tables: Sequence[Made], count: int, rng: np.random.Generator, dims: Sequence[int] = DIMS, halves: bool = True
) -> list[Combination]:
    """Return random combinations: 1 to 15 tables with other dims, and with all, half or a quarter of their rows.

    **Arguments**

    - `tables`: tables to draw from.
    - `count`: number of combinations.
    - `rng`: the random generator.
    - `dims`: dims to choose from.
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


def training(
    optimizer: str, count: int, seed: int, batches: Sequence[int] = BATCHES, *, own: Sequence[TableSpec] = (),
    single: str = "criteo-kaggle",
) -> list[Combination]:  # fmt: skip
    """Return combinations to fit costs to, with tables of several batch sizes.

    **Arguments**

    - `optimizer`: the row optimizer.
    - `count`: number of combinations.
    - `seed`: the random seed.
    - `batches`: batch sizes of the tables.
    - `own`: tables to draw from; (): generated ones.
    - `single`: published tables that one combination in `SINGLE` is drawn from instead: many are small, and samples have
      one id.
    """
    rng, found = np.random.default_rng([seed, 1]), list[Combination]()
    for n, batch in enumerate(batches):
        if own:
            tables = [rescaled(replace(spec, optimizer=optimizer), min(batch, spec.batch), rng) for spec in own]
        else:
            tables = pool(_TABLES, batch=batch, max_dim=128, seed=seed + 100 + n, optimizer=optimizer)
        dims = (*DIMS, *(spec.dim for spec in own))
        some = -(-count // len(batches))
        others = 0 if own else some // SINGLE
        found += combinations_of(tables, some - others, rng, dims)
        if others:
            made = published(single, batch=batch, dims=dims, seed=seed + 200 + n, optimizer=optimizer)
            found += combinations_of(made, others, rng, dims)
    return found[:count]


def held_out(
    optimizer: str, count: int, seed: int, batches: Sequence[int] = OTHER_BATCHES, *, own: Sequence[TableSpec] = ()
) -> list[Combination]:
    """Return combinations that judge costs: other tables, of other batch sizes.

    **Arguments**

    - `optimizer`, `count`, `seed`, `batches`, `own`: as for `training`.
    """
    return training(optimizer, count, seed + 5000, batches, own=own, single="criteo-terabyte")


@dataclass(frozen=True)
class Own:
    """The user's own tables: those to fit to, those that judge, and batch sizes for both, no larger than the tables'.

    **Arguments**

    - `learned`, `judges`: tables to fit to, and tables that judge: every fourth one.
    - `batches`, `other_batches`: batch sizes to fit to, and to judge with.
    """

    learned: Sequence[TableSpec] = ()
    judges: Sequence[TableSpec] = ()
    batches: Sequence[int] = BATCHES
    other_batches: Sequence[int] = OTHER_BATCHES

    @classmethod
    def of(cls, specs: Sequence[TableSpec], seed: int) -> "Own":
        """Split some tables at random.

        **Arguments**

        - `specs`: the tables, at least four.
        - `seed`: the random seed.
        """
        if len(specs) < JUDGING:
            raise ValueError(f"there are {len(specs)} tables: list at least {JUDGING}, of which one judges the costs")
        order = [specs[n] for n in np.random.default_rng([seed, 2]).permutation(len(specs)).tolist()]
        most, top = max(BATCHES), max(spec.batch for spec in specs)
        own = [tuple(max(1, batch * min(top, most) // most) for batch in of) for of in (BATCHES, OTHER_BATCHES)]
        return cls([spec for n, spec in enumerate(order) if (n + 1) % JUDGING], order[JUDGING - 1 :: JUDGING], *own)


@dataclass(frozen=True)
class Measured:
    """Combinations, and the times that were measured for them.

    **Arguments**

    - `combinations`: of any optimizers; the parts of each have the same one.
    - `ms`: milliseconds of each.
    """

    combinations: Sequence[Combination]
    ms: np.ndarray

    def sets(self, numbers: Mapping[str, tuple[float, ...]]) -> "Sets":
        """Return the sets for a net to learn from, based on sums of terms with these numbers."""
        from skirl.placement.tables.training import Sets

        parts = [(n, part) for n, of in enumerate(self.combinations) for part in of.pieces]
        base = [float(np.dot(numbers[part[0].optimizer], terms_of(*part))) for _, part in parts]
        features = np.array([features_of(*part) for _, part in parts])
        return Sets(features, np.array(base), np.array([n for n, _ in parts]), self.ms)

    def fitted(self, start: Costs | None = None) -> dict[str, tuple[float, ...]]:
        """Fit the numbers of the terms for each optimizer.

        **Arguments**

        - `start`: costs that say, up to one factor, what was not measured well; None: there are none.
        """
        of = np.array([combination.optimizer for combination in self.combinations])
        terms = np.array([combination.terms() for combination in self.combinations])
        found = {}
        for name in dict.fromkeys(of.tolist()):
            x, ms = terms[of == name], self.ms[of == name]
            counts = np.ones(len(ms))
            if start is not None and name in start.ms:
                before = x @ np.array(start.ms[name])
                x, ms = np.concatenate([x, x]), np.concatenate([ms, before * np.median(ms / before)])
                counts = np.repeat([1.0, _BEFORE], len(before))
            found[name] = fitted(x, ms, counts)
        return found


def costs_of(
    learned: Measured, judges: Measured, seed: int, start: Costs | None = None, backend: Backend = OURS
) -> Costs:
    """Fit both kinds of costs to some measurements, and choose the better one by others.

    **Arguments**

    - `learned`: measurements to fit to.
    - `judges`: measurements of tables that are not in `learned`.
    - `seed`: the random seed.
    - `start`: costs of another machine or setting, to be adapted.
    - `backend`: what was measured; skirl's CPU kernels by default.
    """
    from skirl.placement.tables.training import trained

    if start is not None and start.backend != backend:
        raise ValueError(f"costs to start from are for backend {start.backend}, not for {backend}: start from others")

    numbers = learned.fitted(start)
    net = trained(learned.sets(numbers), seed, None if start is None else start.net)
    costs = Costs(numbers, 1.0, 1, backend, net=net)
    sets, off = [of.pieces for of in judges.combinations], dict[str, np.ndarray]()
    report = dict[str, Any]()
    kinds: tuple[Kind, ...] = ("additive", "net")
    for kind in kinds:
        said = replace(costs, kind=kind).together(sets)
        report[kind] = {"median_error": error(said, judges.ms), "tau": tau(said, judges.ms)}
        off[kind] = np.abs(said / judges.ms - 1)
    kind, why = chosen(off["additive"], off["net"])
    return replace(
        costs, kind=kind, report={**report, "learned": len(learned.ms), "held_out": len(judges.ms), "why": why}
    )


def chosen(additive: np.ndarray, net: np.ndarray) -> tuple[Kind, str]:
    """Choose which kind predicts, and say why: the net if it is better by more than chance.

    **Arguments**

    - `additive`, `net`: relative errors for the same sets of tables, which neither has seen.

    >>> chosen(np.array([0.08, 0.02, 0.09]), np.array([0.07, 0.03, 0.08]))[1].partition(" than ")[0]
    'on tables that neither has seen the net is 0.3 +- 1.1 points nearer'
    """
    gains = np.minimum(additive, _FAR) - np.minimum(net, _FAR)
    gain, chance = 100 * float(gains.mean()), 100 * _CHANCE * float(gains.std() / len(gains) ** 0.5)
    said = f"on tables that neither has seen the net is {abs(gain):.1f} +- {chance:.1f} points "
    said += f"{'nearer' if gain > 0 else 'farther off'} than the sum of terms"
    if gain > chance:
        return "net", said
    return "additive", f"{said}: a tie goes to the sum" if gain > -chance else said


def error(said: np.ndarray, ms: np.ndarray) -> float:
    """Return the median relative error.

    **Arguments**

    - `said`, `ms`: predicted and measured times.
    """
    return float(np.round(np.median(np.abs(said / ms - 1)), 4))


def tau(one: np.ndarray, other: np.ndarray) -> float:
    """Return Kendall's tau: the share of pairs in the same order, less the share in the opposite order.

    **Arguments**

    - `one`, `other`: two lists of values for the same things.

    >>> tau(np.array([1, 2, 3]), np.array([1, 3, 2]))
    0.333
    """
    a, b = (np.sign(x[:, None] - x[None]) for x in (one, other))
    upper = np.triu_indices(len(one), 1)
    return float(np.round((a * b)[upper].mean(), 3))


def machine_costs(
    optimizers: Sequence[str],
    minutes: float,
    count: int,
    seed: int,
    out: Path | None,
    *,
    backend: Backend = OURS,
    start: Costs | None = None,
    exchange: int = 0,
    tables: Sequence[TableSpec] = (),
    quiet: bool,
    to: TextIO | None = None,
) -> tuple[Costs, dict[str, Any]]:
    """Measure costs of this machine, fit both kinds, choose one and write the file. Return the costs, and facts of them.

    **Arguments**

    - `optimizers`: the row optimizers.
    - `minutes`: time for all rounds together.
    - `count`: combinations of each optimizer to learn from; a quarter as many judge.
    - `seed`: the random seed.
    - `out`: the file to write; rounds are kept next to it until then. None: neither is written.
    - `backend`: the kernels to measure; skirl's on the CPU by default.
    - `start`: costs to adapt.
    - `exchange`: number of processes whose exchange is measured; 0: none.
    - `tables`: tables to measure; (): generated ones.
    - `quiet`: whether to hide progress.
    - `to`: where to show it.
    """
    check_optimizers(backend, tuple(optimizers))
    check_dims(backend, tables)
    own = Own.of(tables, seed) if tables else Own(batches=BATCHES, other_batches=OTHER_BATCHES)
    learned = [c for name in optimizers for c in training(name, count, seed, own.batches, own=own.learned)]
    some = max(4, count // 4)
    judges = [c for name in optimizers for c in held_out(name, some, seed, own.other_batches, own=own.judges)]
    arena = arena_of(backend)
    sentinel = Sentinel(arena)
    what: dict[str, Any] = {"optimizers": list(optimizers), "count": count, "seed": seed, "backend": backend}
    what["device"] = arena.device
    if tables:
        what["tables"] = blake2b(repr(tables).encode(), digest_size=16).hexdigest()
    with Progress("prepare", steps=len(learned) + len(judges), to=to, quiet=quiet) as progress:
        ready = []
        for done, combination in enumerate([*learned, *judges], start=1):
            ready.append(combination.ready(arena))
            progress(done, lambda: {"tables": f"{len(ready[-1])}"})
    # Only now, when nothing is refused any more: a file of rounds would stand in the way of the next try.
    known = None if out is None else Rounds(out.with_name(out.name + ".rounds"), what)
    until = time.monotonic() + 60 * minutes
    with Progress("measure", steps=ROUNDS, to=to, quiet=quiet) as progress:
        rounds = rounds_of(
            arena, ready, ROUNDS, seed, known=known, late=lambda: time.monotonic() >= until,
            seen=lambda done: progress(done, lambda: {"combinations": f"{len(ready):,}"}), sentinel=sentinel,
        )  # fmt: skip
    ms, noise = rounds.min(axis=0), noise_of(rounds)
    parts = Measured(learned, ms[: len(learned)]), Measured(judges, ms[len(learned) :])
    where = {name: value for name, value in machine().items() if name != "threads"} | {"device": arena.device}
    costs = replace(costs_of(*parts, seed, start, backend), noise=noise, machine=where)
    if exchange:
        from skirl.placement.tables import wire_fit

        costs = replace(costs, wire=wire_fit.measured(exchange, BATCHES[-1], seed))
    if out is not None and known is not None:
        save_costs(costs, out)
        known.path.unlink()
    facts: dict[str, Any] = {"out": None if out is None else str(out), "backend": backend, "rounds": len(rounds)}
    facts |= {"combinations": len(ms), "noise": noise, "chosen": costs.kind, "disturbed": sentinel.disturbed}
    return costs, facts | dict(costs.report) | {"exchange": None if costs.wire is None else costs.wire.said()}
