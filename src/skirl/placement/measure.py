"""Measuring lookups and updates of parts of tables on this machine, in rounds, of which the least counts. The last-level
cache is evicted before each run, and everything that is measured takes turns, so that a busy neighbour affects all of
it alike. The engine's CPU kernels are here; FBGEMM's operator, behind the same three methods, is in fbgemm.py."""

from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any

import numpy as np

from skirl.core.optim import row_optimizer
from skirl.engine.kernels import choice, cpu
from skirl.engine.kernels.buffers import empty
from skirl.placement.costs import Kernel
from skirl.placement.lookups import Lookups
from skirl.placement.pieces import Piece
from skirl.placement.spec import TableSpec

ARENA, OUTPUTS, EVICTED = 1 << 26, 1 << 24, 1 << 23
"""Number of floats: for rows, for pooled vectors and their gradients, and to read in order to evict the cache."""
INSTALL = "pip install fbgemm_gpu-cpu, or fbgemm_gpu for a GPU, of the release for this torch"
_LR = 1e-6
_LINE = 16


class Arena:
    """The memory that holds all that is measured, and how that is run: this one runs the engine's CPU kernels.

    With `plain`, all rows take the plain loops, as where loops compiled by dim cannot be built.
    """

    device = "cpu"
    """The device whose name the costs depend on."""

    def __init__(self, floats: int = ARENA, *, plain: bool = False) -> None:
        self.plain = plain
        self.rows, self.outputs, self.evicted = (empty(n, np.float32) for n in (floats, OUTPUTS, EVICTED))
        for of in (self.rows, self.outputs, self.evicted):
            of[:] = 1.0  # touch every page
        self._next = 0

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

    def evict(self) -> None:
        """Read enough to evict everything else from the last-level cache."""
        self.evicted[::_LINE].sum()

    def ready(self, lookups: Lookups, piece: Piece) -> Any:
        """Return a part of a table, ready to be run."""
        return Ready(self, lookups, piece)

    def together(self, parts: Sequence[Any]) -> Any:
        """Return what `run_ms` takes for a rank with these parts."""
        return parts

    def run_ms(self, parts: Any) -> float:
        """Return the CPU milliseconds that a rank takes for a step."""
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
        self.group_pos = np.argsort(inverse, kind="stable").astype(np.int32)
        self.group_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.bag_of = bags.astype(np.int32)
        self.keys = np.zeros(len(self.rows), np.int64)
        self.scalars = optimizer.scalars(_LR, np.array([1]))
        self.cache = arena.rows[: len(arena.rows) // width * width].reshape(-1, width)
        self.out, self.grads = arena.output(spec.batch, piece.dim), arena.output(spec.batch, piece.dim)
        self.none, self.live = np.empty(0, np.float32), np.ones(1, np.bool_)
        self.pool, self.update = cpu.pool, cpu.update_kernel(optimizer.rule)
        if not arena.plain:
            self.pool = choice.pool_for(piece.dim, width, self.out, False)
            self.update = choice.update_for(piece.dim, self.cache.dtype, optimizer.rule)

    def forward(self) -> None:
        """Look up and pool."""
        self.pool(self.cache, self.dim, self.slots, self.offsets, 1, self.none, self.out, 0, len(self.out))

    def backward(self) -> None:
        """Sum gradients and update rows."""
        self.update(
            self.cache, self.dim, self.rows, self.keys, self.group_start, self.group_pos, self.bag_of,
            self.none, self.grads, self.live, self.scalars, 0, len(self.rows),
        )  # fmt: skip


def missing(kernel: Kernel) -> str | None:
    """Return why a kernel cannot be measured here, and what to do; None if it can."""
    if kernel == "skirl-cpu":
        return None
    import torch

    if kernel == "fbgemm-cuda" and not torch.cuda.is_available():
        return (
            f"kernel {kernel} runs on a GPU, and torch {torch.__version__} sees none: measure on a machine that has one, "
            "or set kernel to fbgemm-cpu"
        )
    try:
        import fbgemm_gpu
        from fbgemm_gpu import split_table_batched_embeddings_ops_training  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # of another release than torch, or a library is missing
        return f"kernel {kernel} needs FBGEMM, which does not load ({str(error).partition(chr(10))[0]}): {INSTALL}"
    if kernel == "fbgemm-cuda" and getattr(fbgemm_gpu, "__variant__", "") == "cpu":
        return f"kernel {kernel} needs FBGEMM's CUDA build, and its CPU build is installed: {INSTALL}"
    return None


def check_specs(kernel: Kernel, specs: Sequence[TableSpec], no_measure: bool) -> None:
    """Raise if a kernel cannot run some tables, or cannot be measured here although it is to be."""
    if kernel != "skirl-cpu":
        from skirl.placement.fbgemm import check_dim, check_optimizers

        check_optimizers([spec.optimizer for spec in specs], kernel.rpartition("-")[2])
        for spec in specs:
            check_dim(spec.name, spec.dim)
    if not no_measure and (why := missing(kernel)) is not None:
        raise ValueError(f"{why}; or plan with --no-measure")


def arena_of(kernel: Kernel) -> Arena:
    """Return the memory in which a kernel is measured, and which runs it. Raise if it cannot be measured here."""
    if (why := missing(kernel)) is not None:
        raise ValueError(why)
    if kernel == "skirl-cpu":
        return Arena()
    from skirl.placement.fbgemm import FbgemmArena

    return FbgemmArena(device="cpu" if kernel == "fbgemm-cpu" else "cuda")


def rounds_of(
    arena: Arena, combinations: Sequence[Sequence[Any]], rounds: int, seed: int, *,
    late: Callable[[], bool] = lambda: False, seen: Callable[[int], None] = lambda done: None,
) -> np.ndarray:  # fmt: skip
    """Return the ms of each combination of parts in each round, [rounds, combinations]. When time is up, stop after two.

    The order differs in each round. `seen` is called with the number of rounds that are done.
    """
    together, done = [arena.together(parts) for parts in combinations], list[np.ndarray]()
    for parts in together:  # compiles the loops and touches the pages
        arena.run_ms(parts)
    for number in range(rounds):
        if number >= 2 and late():
            break
        ms = np.zeros(len(together))
        for n in np.random.default_rng([seed, number]).permutation(len(together)).tolist():
            ms[n] = arena.run_ms(together[n])
        done.append(ms)
        seen(len(done))
    return np.array(done)


def noise_of(rounds: np.ndarray) -> float:
    """Return the median relative difference between the minima of every other round and those of the rest.

    >>> noise_of(np.array([[1.0, 2.0], [1.1, 2.0], [1.0, 3.0]]))
    0.05
    """
    one, other = rounds[::2].min(axis=0), rounds[1::2].min(axis=0)
    return float(np.round(np.median(np.abs(one - other) / np.minimum(one, other)), 6))
