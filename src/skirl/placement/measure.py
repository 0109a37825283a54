"""What batches look up in tables, and how long kernels take for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

import numpy as np

from skirl.core.keys import ROW_BITS
from skirl.core.optim import row_optimizer
from skirl.core.tables import Schema
from skirl.engine import kernels
from skirl.engine.device.host import empty
from skirl.engine.kernels.tree import ONE, Gradients
from skirl.placement.costs import Kernel
from skirl.placement.problem import Placed, Problem
from skirl.placement.search import SearchResult
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
        """What `run_ms` takes for a rank with these parts."""
        return parts

    def run_ms(self, parts: Any) -> float:
        """CPU milliseconds that a rank takes for a step."""
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
        self.scalars = optimizer.scalars(_LR, np.array([1]))
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


def missing(kernel: Kernel) -> str | None:
    """Why a kernel cannot be measured here, and what to do; None if it can."""
    if kernel == "skirl-cpu":
        return None
    import torch

    if kernel == "fbgemm-cuda" and not torch.cuda.is_available():
        return f"kernel {kernel} runs on a GPU, and torch {torch.__version__} sees none: set kernel to fbgemm-cpu"
    try:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # of another release than torch, or a library is missing
        return f"kernel {kernel} needs FBGEMM, which does not load ({str(error).partition(chr(10))[0]}): {INSTALL}"
    return None


def check_specs(kernel: Kernel, specs: Sequence[TableSpec], no_measure: bool) -> None:
    if kernel != "skirl-cpu":
        from skirl.placement.fbgemm import check_dim, check_optimizers

        check_optimizers([spec.optimizer for spec in specs], kernel.rpartition("-")[2])
        for spec in specs:
            check_dim(spec.name, spec.dim)
    if not no_measure and (why := missing(kernel)) is not None:
        raise ValueError(f"{why}; or plan with --no-measure and the --costs of a machine that has it")


def arena_of(kernel: Kernel) -> Arena:
    if (why := missing(kernel)) is not None:
        raise ValueError(why)
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


def noise_of(rounds: np.ndarray) -> float:
    """Return the median relative difference between the minima of every other round and those of the rest."""
    one, other = rounds[::2].min(axis=0), rounds[1::2].min(axis=0)
    return float(np.round(np.median(np.abs(one - other) / np.minimum(one, other)), 6))


PLANS, ROUNDS = 3, 4
"""Plans that are measured, and rounds in which they take turns; the least time of each rank counts."""


@dataclass(frozen=True)
class Checked:
    """The plan to use, its measured milliseconds of computing by rank, those of each plan's busiest rank, and the noise."""

    placed: Placed
    compute: np.ndarray
    busiest: list[float]
    chosen: int
    noise: float


def exchange_of(problem: Problem, placed: Placed) -> np.ndarray:
    exchange = problem.arrays(placed.items)[1]
    return np.bincount(placed.at, exchange, minlength=len(problem.caps))


def computing_ms(
    problem: Problem, plans: Sequence[Placed], arena: Arena, seed: int, count: int = ROUNDS
) -> tuple[np.ndarray, float]:
    """Measure the milliseconds that each rank of each plan computes, [plans, ranks], and the noise of measuring."""
    lookups = [Lookups(spec, seed * 1000 + n) for n, spec in enumerate(problem.specs)]
    ready = {p: arena.ready(lookups[p.table], p) for p in {piece for plan in plans for piece in plan.items}}
    ranks = range(len(problem.caps))
    combinations = [[ready[piece] for piece in plan.pieces(rank)] for plan in plans for rank in ranks]
    rounds = np.array([*rounds_of(arena, combinations, count, seed)])
    busy = np.array([bool(of) for of in combinations])  # an empty rank computes nothing
    return (rounds.min(axis=0) * busy).reshape(len(plans), -1), noise_of(rounds[:, busy])


def check_plans(problem: Problem, found: SearchResult, arena: Arena, seed: int = 0) -> Checked:
    """Measure the best plans of a search; one replaces the plan predicted to be best if it is better than the noise."""
    plans = [found.placed, *found.others][:PLANS]
    ms, noise = computing_ms(problem, plans, arena, seed)
    busiest = [float((of + exchange_of(problem, plan)).max()) for of, plan in zip(ms, plans, strict=True)]
    least = int(np.argmin(busiest))
    chosen = least if busiest[least] < busiest[0] * (1 - noise) else 0
    return Checked(plans[chosen], ms[chosen], busiest, chosen, noise)
