"""What batches look up in tables, how long kernels take for it, and costs of this machine: random combinations of parts of
tables are timed, a sum of terms is fitted to the times, and a net that corrects it is kept if it judges better."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np

from skirl.core.keys import ROW_BITS
from skirl.core.optim import row_optimizer
from skirl.core.tables import Schema
from skirl.engine import kernels
from skirl.engine.device.host import empty
from skirl.engine.kernels.tree import ONE, Gradients
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
from skirl.placement.search import Placed, Problem, SearchResult
from skirl.placement.spec import BINS, Piece, TableSpec, reuse_of
from skirl.tools.progress import progress_of
from skirl.train.loop import keys_of
from skirl.train.recipe import Recipe

_ODD = 2654435761
_ACTIVE, _HEAD = 0.08, 2.5
"""The share of a generated table's rows that are looked up at all, and the largest exponent of ten of how many of them
are looked up alike, before Zipf's law begins."""


def count_tables(recipe: Recipe) -> list[TableSpec]:
    schema, stream = Schema.of(list(recipe.tables())), recipe.stream()
    ids, distinct = np.zeros(len(schema.tables)), np.zeros(len(schema.tables))
    reuse, batches = np.zeros((len(schema.tables), BINS)), 0
    with progress_of("read", stream.steps) as progress:
        for batch in stream:
            batches += 1
            keys, counts = np.unique(keys_of(batch.sparse, schema), return_counts=True)
            table = keys >> ROW_BITS
            for n in np.unique(table).tolist():
                of_table = counts[table == n]
                ids[n] += of_table.sum()
                distinct[n] += len(of_table)
                reuse[n] += len(of_table) * np.array(reuse_of(of_table))
            progress(batches, dict)
    size, optimizer = recipe.data.batch, recipe.optimizer.optimizer
    if not batches:
        raise ValueError(f"{recipe.data.data} has no batch of {size:,} samples: set batch smaller")
    return [
        TableSpec(
            t.name, t.rows, t.dim, size, float(ids[n] / batches), float(distinct[n] / batches),
            tuple((reuse[n] / max(1, distinct[n])).tolist()), optimizer,
        )
        for n, t in enumerate(schema.tables)
    ]  # fmt: skip


def generate(count: int, *, batch: int, max_dim: int, seed: int, optimizer: str) -> list[TableSpec]:
    """Return random tables of any size and reuse, of which one in three has a single id for each sample."""
    rng, specs = np.random.default_rng(seed), []
    dims = [1 << n for n in range(2, max_dim.bit_length())]
    for n in range(count):
        rows, pooling = int(10 ** rng.uniform(1, 7.3)), 1.0 if n % 3 == 0 else 10 ** rng.uniform(0, 2)
        head, ids = float(10 ** rng.uniform(0, _HEAD)), round(batch * pooling)
        active = max(head, rows * _ACTIVE)
        rank = (((active / head + 1) ** rng.random(ids) - 1) * head).astype(np.int64)
        counts = np.unique(rank * _ODD % rows, return_counts=True)[1]
        facts = (float(ids), float(len(counts)), reuse_of(counts), optimizer)
        specs.append(TableSpec(f"table-{n}", rows, int(rng.choice(dims)), batch, *facts))
    return specs


def draw_ids(spec: TableSpec, rng: np.random.Generator) -> np.ndarray:
    """Return random rows that a batch looks up: as many, as many distinct ones, and as often as the spec says."""
    count = max(1, round(spec.distinct))
    begins = np.arange(count + 1) * spec.rows // count
    rows = begins[:-1] + (rng.random(count) * np.diff(begins)).astype(np.int64)  # one in each stretch
    if spec.reuse:
        often = 2.0 ** np.repeat(np.arange(len(spec.reuse)), rng.multinomial(count, np.array(spec.reuse))) - 1
    else:
        often = 1 / np.arange(1.0, count + 1)
    rng.shuffle(often)
    more = max(0, round(spec.ids) - count)
    often = often if often.sum() > 0 else np.ones(count)
    ids = np.repeat(rows, 1 + rng.multinomial(more, often / often.sum()))
    rng.shuffle(ids)
    return ids


@dataclass
class Lookups:
    """A random batch of one table, shared by all its parts. Each `number` gives one batch; ids belong to random samples."""

    spec: TableSpec
    number: int
    ids: np.ndarray = field(init=False)
    bags: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.number)
        self.ids = draw_ids(self.spec, rng)
        self.bags = np.sort(rng.integers(0, self.spec.batch, len(self.ids)))

    def of(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        """The rows, counted from the piece's first, and the bags of the ids that fall into a piece."""
        inside = (self.ids >= piece.row) & (self.ids < piece.row_end)
        return self.ids[inside] - piece.row, self.bags[inside]


ARENA, OUTPUTS, EVICTED = 1 << 26, 1 << 24, 1 << 23
"""Number of floats: for rows, for pooled vectors and their gradients, and to read in order to evict the cache."""
INSTALL = "pip install fbgemm_gpu-cpu, or fbgemm_gpu for a GPU: 1.8.0 is the release for torch 2.13"
_LR = 1e-6
_LINE = 16


class Arena:
    """The memory that holds all that is measured, and how that is run: this one runs the engine's CPU kernels."""

    device = "cpu"

    def __init__(self, floats: int = ARENA) -> None:
        self.rows, self.outputs, self.evicted = (empty(n, np.float32) for n in (floats, OUTPUTS, EVICTED))
        for of in (self.rows, self.outputs, self.evicted):
            of[:] = 1.0  # touch every page
        self._next = 0

    def output(self, bags: int, dim: int) -> np.ndarray:
        """The next place for pooled vectors. Start over at the end; grow if they do not fit at all."""
        floats = bags * dim
        if floats > len(self.outputs):  # views that were returned before keep the old memory
            self.outputs, self._next = empty(2 * -(-floats // _LINE) * _LINE, np.float32), 0
            self.outputs[:] = 1.0
        if self._next + floats > len(self.outputs):
            self._next = 0
        begin, self._next = self._next, self._next + -(-floats // _LINE) * _LINE
        return self.outputs[begin : begin + floats].reshape(bags, dim)

    def evict(self) -> None:
        self.evicted[::_LINE].sum()

    def ready(self, lookups: Lookups, piece: Piece) -> Any:
        return Ready(self, lookups, piece)

    def together(self, parts: Sequence[Any]) -> Any:
        return parts

    def run_ms(self, parts: Any) -> float:
        self.evict()
        began = thread_time()
        for part in parts:
            part.forward()
        for part in parts:
            part.backward()
        return 1e3 * (thread_time() - began)


class Ready:
    """A part of a table, ready to be run by the engine's CPU kernels."""

    def __init__(self, arena: Arena, lookups: Lookups, piece: Piece) -> None:
        spec = lookups.spec
        optimizer = row_optimizer(spec.optimizer)(lr=_LR)
        self.dim, width = piece.dim, optimizer.width(piece.dim)
        ids, bags = lookups.of(piece)
        offset = lookups.number * 7919 * 4096 + piece.col * 104729
        self.slots = ((ids + offset) % (len(arena.rows) // width)).astype(np.int32)
        self.offsets = np.searchsorted(bags, np.arange(spec.batch + 1)).astype(np.int32)
        self.rows, inverse, counts = np.unique(self.slots, return_inverse=True, return_counts=True)
        self.keys = np.zeros(len(self.rows), np.int64)
        self.scalars = np.array([optimizer.numbers(_LR, 0.0, 1)], np.float32)
        self.cache = arena.rows[: len(arena.rows) // width * width].reshape(-1, width)
        self.out, grads = arena.output(spec.batch, piece.dim), arena.output(spec.batch, piece.dim)
        self.none = np.empty(0, np.float32)
        start, pos = np.concatenate([[0], np.cumsum(counts)]), np.argsort(inverse, kind="stable")
        self.gradients = Gradients(
            start.astype(np.int32), pos.astype(np.int32), bags.astype(np.int32), self.none, grads, np.ones(1, np.bool_)
        )
        self.pool = kernels.pool_for(piece.dim, width, self.out.dtype, False)
        self.update = kernels.update_for(piece.dim, self.cache.dtype, optimizer.rule, True)

    def forward(self) -> None:
        bags = self.offsets, self.offsets[1:]
        self.pool(self.cache, self.dim, self.slots, *bags, 1, self.none, self.out, 0, len(self.out))

    def backward(self) -> None:
        rows = self.rows, self.keys
        self.update(self.cache, self.dim, *rows, self.gradients, ONE, self.scalars, 0, len(self.rows))


def check_kernel_here(kernel: Kernel) -> None:
    """Raise if a kernel cannot be measured here."""
    if kernel == "skirl-cpu":
        return
    import torch

    if kernel == "fbgemm-cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"kernel {kernel} runs on a GPU, and torch {torch.__version__} sees none: set kernel to fbgemm-cpu"
        )
    try:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # of another release than torch, or a library is missing
        why = str(error).partition("\n")[0]
        raise ValueError(f"kernel {kernel} needs FBGEMM, which does not load ({why}): {INSTALL}") from None


def check_specs(kernel: Kernel, specs: Sequence[TableSpec], no_measure: bool) -> None:
    if kernel != "skirl-cpu":
        from skirl.placement.fbgemm import check_dim, check_optimizers

        check_optimizers([spec.optimizer for spec in specs], kernel.rpartition("-")[2])
        for spec in specs:
            check_dim(spec.name, spec.dim)
    if not no_measure:
        check_kernel_here(kernel)


def arena_of(kernel: Kernel) -> Arena:
    check_kernel_here(kernel)
    if kernel == "skirl-cpu":
        return Arena()
    from skirl.placement.fbgemm import FbgemmArena

    return FbgemmArena(device="cpu" if kernel == "fbgemm-cpu" else "cuda")


def rounds_of(arena: Arena, combinations: Sequence[Sequence[Any]], rounds: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the ms of each combination of parts, round by round; the order differs in each."""
    together = [arena.together(parts) for parts in combinations]
    for parts in together:  # compiles the loops and touches the pages
        arena.run_ms(parts)
    for number in range(rounds):
        ms = np.zeros(len(together))
        for n in np.random.default_rng([seed, number]).permutation(len(together)).tolist():
            ms[n] = arena.run_ms(together[n])
        yield ms


PLANS, PLAN_ROUNDS = 3, 8
"""Plans that are measured, and rounds in which they take turns; the least time of each rank counts."""


def exchange_of(problem: Problem, placed: Placed) -> np.ndarray:
    exchange = problem.arrays(placed.items)[1]
    return np.bincount(placed.at, exchange, minlength=len(problem.caps))


def computing_ms(
    problem: Problem, plans: Sequence[Placed], arena: Arena, seed: int, count: int = PLAN_ROUNDS
) -> np.ndarray:
    """Measure the milliseconds that each rank of each plan computes, [plans, ranks]."""
    lookups = [Lookups(spec, seed * 1000 + n) for n, spec in enumerate(problem.specs)]
    ready = {p: arena.ready(lookups[p.table], p) for p in {piece for plan in plans for piece in plan.items}}
    ranks = range(len(problem.caps))
    combinations = [[ready[piece] for piece in plan.pieces(rank)] for plan in plans for rank in ranks]
    busy = np.array([bool(of) for of in combinations])  # an empty rank computes nothing
    return (np.min([*rounds_of(arena, combinations, count, seed)], axis=0) * busy).reshape(len(plans), -1)


def check_plans(
    problem: Problem, found: SearchResult, arena: Arena, seed: int = 0
) -> tuple[Placed, np.ndarray, list[float]]:
    """Measure the best plans of a search. Return the fastest, what each of its ranks computes, and the milliseconds of
    each plan's busiest rank."""
    plans = [found.placed, *found.others][:PLANS]
    ms = computing_ms(problem, plans, arena, seed)
    busiest = [float((of + exchange_of(problem, plan)).max()) for of, plan in zip(ms, plans, strict=True)]
    chosen = int(np.argmin(busiest))
    return plans[chosen], ms[chosen], busiest


DIMS = (4, 8, 12, 16, 24, 28, 32, 48, 60, 64, 96, 128)
BATCHES, OTHER_BATCHES = (256, 512, 1024), (384, 768)
"""Batch sizes that costs are fitted to, and those that judge them."""
TABLES, MOST_PARTS, ROUNDS, COMBINATIONS = 120, 15, 12, 240
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
    ready = [combination.ready(arena) for combination in (*learned, *judges)]
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
