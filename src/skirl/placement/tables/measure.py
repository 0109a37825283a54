"""Measuring lookups and updates of parts of tables on this machine, in rounds, of which the least counts. The last-level
cache is evicted before each run, and everything that is measured takes turns, so that a busy neighbour affects all of
it alike. The engine's CPU kernels are here; other backends are in fbgemm.py and gpu.py."""

import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np

from skirl.core.optim import row_optimizer
from skirl.engine.kernels import choice, cpu
from skirl.engine.kernels.buffers import empty
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.pool import Made, MultiHot, ids_of
from skirl.tools.machine import machine
from skirl.tools.sealed_json import AMOUNT, misfit, put_whole

ARENA, OUTPUTS, EVICTED = 1 << 26, 1 << 24, 1 << 23
"""Number of floats: for rows, for pooled vectors and their gradients, and to read in order to evict the cache."""
SLOWER, AGAIN = 1.25, 2
"""A round is disturbed if the same small work takes `SLOWER` times its least of all rounds in the half of its turns;
such a round is measured again, up to `AGAIN` times."""
EVERY, WATCHED = 8, 1 << 18
"""Combinations between two turns of that work, and floats that it reads."""
_LR = 1e-6
_LINE = 16


class MeasuredTables:
    """The memory that holds everything that is measured, and how that is run: this one runs the engine's CPU kernels.

    **Arguments**

    - `floats`: number of floats for rows.
    - `plain`: whether all rows take the plain loops, as where loops compiled by dim cannot be built.
    - `threads`: number of threads that share the work of a rank.
    """

    device = "cpu"
    """The device whose name the costs depend on."""
    clock: Callable[[], float] = staticmethod(thread_time)
    """Seconds, for the sentinel."""

    def __init__(self, floats: int = ARENA, *, plain: bool = False, threads: int = 1) -> None:
        self.plain, self.threads = plain, threads
        self.pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None
        self.rows, self.outputs, self.evicted = (empty(n, np.float32) for n in (floats, OUTPUTS, EVICTED))
        for of in (self.rows, self.outputs, self.evicted):
            of[:] = 1.0  # touch every page
        self._next = 0

    def view(self, width: int) -> np.ndarray:
        """Return all rows, as records of this width."""
        return self.rows[: len(self.rows) // width * width].reshape(-1, width)

    def output(self, bags: int, dim: int) -> np.ndarray:
        """Return the next place for pooled vectors. Start over at the end; grow if they do not fit at all."""
        floats = bags * dim
        if floats > len(self.outputs):  # views that were returned before keep the old memory
            self.outputs, self._next = empty(2 * -(-floats // _LINE) * _LINE, np.float32), 0
            self.outputs[:] = 1.0
        if self._next + floats > len(self.outputs):
            self._next = 0
        begin, self._next = self._next, self._next + -(-floats // _LINE) * _LINE
        return self.outputs[begin : begin + floats].reshape(bags, dim)

    def evict(self) -> float:
        """Read enough to evict everything else from the last-level cache."""
        return float(self.evicted[::_LINE].sum())

    def watched(self) -> None:
        """Do the sentinel's small work."""
        self.evicted[:WATCHED].sum()

    def ready(self, lookups: "Lookups", piece: Piece) -> Any:
        """Return a part of a table, ready to be run.

        **Arguments**

        - `lookups`: lookups of the whole table.
        - `piece`: the part.
        """
        return Ready(self, lookups, piece)

    def together(self, parts: Sequence[Any]) -> Any:
        """Return what `run_ms` takes for a rank with these parts.

        **Arguments**

        - `parts`: parts of the rank.
        """
        return parts

    def run_ms(self, parts: Any) -> float:
        """Return the CPU milliseconds that a rank takes for a step, by its slowest thread.

        **Arguments**

        - `parts`: what `together` returned.
        """
        self.evict()

        def share(number: int) -> float:
            began = thread_time()
            for part in parts:
                part.forward(number, self.threads)
            for part in parts:
                part.backward(number, self.threads)
            return 1e3 * (thread_time() - began)

        if self.pool is None:
            return share(0)
        others = [self.pool.submit(share, number) for number in range(1, self.threads)]
        return max(share(0), *(other.result() for other in others))


@dataclass
class Lookups:
    """A random batch of one table, shared by all parts of it. Ids belong to random samples, unless the table's head says
    how many each sample has.

    **Arguments**

    - `made`: the table.
    - `seed`: the random seed; each number gives one batch.
    """

    made: Made
    seed: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.ids = ids_of(self.made.spec, self.made.head, rng)
        batch, head = self.made.spec.batch, self.made.head
        if isinstance(head, MultiHot):  # the ids of one sample after another's
            samples = len(self.ids) // head.hots
            self.bags = np.repeat(np.arange(samples) * batch // samples, head.hots)
        else:
            self.bags = np.sort(rng.integers(0, batch, len(self.ids)))

    def of(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows, counted from the piece's first, and the bags of the ids that fall into a piece."""
        mine = (self.ids >= piece.row) & (self.ids < piece.row_end)
        return self.ids[mine] - piece.row, self.bags[mine]


class Indexed:
    """What the engine's kernels are told of a part of a table: where its rows are, and which ids look up which.

    **Arguments**

    - `lookups`: lookups of the whole table.
    - `piece`: the part.
    - `floats`: floats of the arena, in which rows lie as records of the part's width.
    """

    def __init__(self, lookups: Lookups, piece: Piece, floats: int) -> None:
        spec = lookups.made.spec
        optimizer = row_optimizer(spec.optimizer)(lr=_LR)
        self.batch, self.dim, self.kind, self.width = spec.batch, piece.dim, optimizer.kind, optimizer.width(piece.dim)
        ids, bags = lookups.of(piece)
        offset = lookups.seed * 7919 * 4096 + piece.col * 104729
        self.slots = ((ids + offset) % (floats // self.width)).astype(np.int32)
        self.offsets = np.searchsorted(bags, np.arange(spec.batch + 1)).astype(np.int32)
        self.rows, inverse, counts = np.unique(self.slots, return_inverse=True, return_counts=True)
        self.group_pos = np.argsort(inverse, kind="stable").astype(np.int32)
        self.group_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.bag_of = bags.astype(np.int32)
        self.keys = np.zeros(len(self.rows), np.int64)
        self.scalars = optimizer.scalars(_LR, np.array([1]))


class Ready(Indexed):
    """A part of a table, ready to be run by the engine's CPU kernels.

    **Arguments**

    - `arena`: the arena that holds it.
    - `lookups`, `piece`: as for `Indexed`.
    """

    def __init__(self, arena: MeasuredTables, lookups: Lookups, piece: Piece) -> None:
        super().__init__(lookups, piece, len(arena.rows))
        self.cache = arena.view(self.width)
        self.out = arena.output(self.batch, piece.dim)
        self.grads = arena.output(self.batch, piece.dim)
        self.none, self.live = np.empty(0, np.float32), np.ones(1, np.bool_)
        self.pool, self.update = cpu.pool, cpu.update
        if not arena.plain:
            self.pool = choice.pool_for(piece.dim, self.cache.shape[1], self.out, False)
            self.update = choice.update_for(piece.dim, self.cache.dtype, self.kind)

    def forward(self, number: int = 0, of: int = 1) -> None:
        """Look up and pool the share of one thread."""
        ends = [len(self.out) * n // of for n in (number, number + 1)]
        self.pool(self.cache, self.dim, self.slots, self.offsets, 1, self.none, self.out, *ends)

    def backward(self, number: int = 0, of: int = 1) -> None:
        """Sum gradients and update rows for the share of one thread."""
        ends = [len(self.rows) * n // of for n in (number, number + 1)]
        self.update(
            self.cache, self.dim, self.kind, self.rows, self.keys, self.group_start, self.group_pos, self.bag_of,
            self.none, self.grads, self.live, self.scalars, *ends,
        )  # fmt: skip


class Sentinel:
    """The same small work, timed in each round between the others: it is slow where something else slows them too.

    **Arguments**

    - `arena`: the arena, of which it reads a part.
    - `clock`: the clock; the arena's if not given.
    """

    def __init__(self, arena: MeasuredTables, clock: Callable[[], float] | None = None) -> None:
        self.work, self.clock = arena.watched, clock or arena.clock
        self.least, self.turns = float("inf"), list[float]()
        self.disturbed = 0
        """Rounds that were disturbed, also when they were measured again."""

    def turn(self) -> None:
        """Do the work once, and time it. Before that, do it once more, so that it starts from the same cache."""
        self.work()
        began = self.clock()
        self.work()
        self.turns.append(self.clock() - began)

    def calm(self) -> bool:
        """End a round, and return whether it was not disturbed. Count it otherwise."""
        self.least = min(self.least, *self.turns)
        calm = float(np.median(self.turns)) <= SLOWER * self.least
        self.turns, self.disturbed = [], self.disturbed + (not calm)
        return calm


def rounds_of(
    arena: MeasuredTables,
    combinations: Sequence[Sequence[Any]],
    rounds: int,
    seed: int,
    *,
    known: "Rounds | None" = None,
    late: Callable[[], bool] = lambda: False,
    seen: Callable[[int], None] = lambda done: None,
    sentinel: Sentinel | None = None,
    enough: Callable[[np.ndarray], bool] = lambda rounds: False,
) -> np.ndarray:
    """Return the ms of each combination in each round, [rounds, combinations]. When time is up, stop after two or more.

    A round in which the sentinel was slow is measured again, unless time is up, and the least of both counts.

    **Arguments**

    - `arena`: the arena that holds them.
    - `combinations`: combinations of parts that `MeasuredTables.ready` returned.
    - `rounds`: number of rounds.
    - `seed`: random seed of the order, which differs in each round.
    - `known`: a file of earlier rounds; new ones are added to it.
    - `late`: whether time is up.
    - `seen`: called with the number of rounds that are done.
    - `sentinel`: counts disturbed rounds; a new one if not given.
    - `enough`: asked after each round with those that are done; the last one if it is true.
    """
    sentinel = sentinel or Sentinel(arena)
    done = [] if known is None else known.rounds[:rounds]
    together = [arena.together(parts) for parts in combinations]
    for parts in together:  # compiles the loops and touches the pages
        arena.run_ms(parts)
    for number in range(len(done), rounds):
        if number >= 2 and late():
            break
        ms = np.full(len(together), np.inf)
        for _ in range(1 + AGAIN):
            for turn, n in enumerate(np.random.default_rng([seed, number]).permutation(len(together)).tolist()):
                if turn % EVERY == 0:
                    sentinel.turn()
                ms[n] = min(ms[n], arena.run_ms(together[n]))
            sentinel.turn()
            if sentinel.calm() or late():
                break
        done.append(ms.tolist())
        if known is not None:
            known.add(done[-1])
        seen(len(done))
        if enough(np.array(done)):
            break
    return np.array(done)


def noise_of(rounds: np.ndarray) -> float:
    """Return the median relative difference between the minima of every other round and those of the rest.

    **Arguments**

    - `rounds`: what `rounds_of` returned.

    >>> noise_of(np.array([[1.0, 2.0], [1.1, 2.0], [1.0, 3.0]]))
    0.05
    """
    one, other = rounds[::2].min(axis=0), rounds[1::2].min(axis=0)
    return float(np.round(np.median(np.abs(one - other) / np.minimum(one, other)), 6))


class Rounds:
    """A file of rounds, one per line, from which a killed measurement resumes.

    **Arguments**

    - `path`: the file; it begins with what was measured, and where.
    - `what`: identifies the measurement; the machine is added.
    """

    def __init__(self, path: Path, what: dict[str, Any]) -> None:
        self.path = path
        facts = {name: value for name, value in machine().items() if name != "threads"}
        head = json.dumps({"measured": what, "machine": facts}, sort_keys=True)
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        *lines, cut = text.split("\n")  # the last line was cut off, or is empty
        if text and text.split("\n", 1)[0] != head:
            if len(lines) != 1 or cut or not _is_head(lines[0]):
                raise ValueError(
                    f"{path} has measurements of something else, or of another machine: remove it, or name another"
                )
            lines = []  # nothing was measured yet
        self.rounds = [self._read(line, number) for number, line in enumerate(lines[1:], start=2)]
        if cut or not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            put_whole(path, "\n".join([head, *lines[1:], ""]).encode(), secrets.token_hex(8))

    def _read(self, line: str, number: int) -> list[float]:
        """Parse a line."""
        try:
            ms = json.loads(line)
        except (ValueError, RecursionError):
            ms = None
        if not isinstance(ms, list) or misfit(ms, [AMOUNT]) is not None:
            raise ValueError(f"{self.path}, line {number} is not a round of measurements: remove the line, or the file")
        return ms

    def add(self, ms: list[float]) -> None:
        """Append one round."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(ms) + "\n")


def _is_head(line: str) -> bool:
    """Return whether a line is the first one of a file of rounds."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() == {"measured", "machine"}
