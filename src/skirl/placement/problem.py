"""A placement problem: tables, the memory of ranks, and costs; and placements of pieces, made by compiled loops.

The sum of bytes over the caps counts first, then the time of the busiest rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from skirl.placement.costs import SUMS, Costs
from skirl.placement.spec import Piece, TableSpec, whole
from skirl.tools.jit import kernel

EPS = 1e-9
"""The least that a change has to gain, as a share of the busiest rank's time: less is rounding."""


@kernel
def place_greedily(order, compute, exchange, nbytes, caps, at, load, used):
    """Put each item of `order` on the least busy rank that has room, or else on the one that is then least over.

    Item i has compute[i] and exchange[i] in ms, and nbytes[i]; rank r has room for caps[r] bytes. Out: `at`, the rank of
    each item; the `load` in ms and `used` bytes of each rank grow.
    """
    for i in order:
        best, best_load, best_over = -1, 0.0, 0
        for r in range(len(caps)):
            over = max(0, used[r] + nbytes[i] - caps[r])
            busy = load[r] + compute[i] + exchange[i]
            if best < 0 or over < best_over or (over == best_over and busy < best_load):
                best, best_load, best_over = r, busy, over
        at[i] = best
        load[best] = best_load
        used[best] += nbytes[i]


@kernel
def _over(used, cap):
    return max(0, used - cap)


@kernel
def move_and_swap(compute, exchange, nbytes, slow, caps, at, load, used, base, most):
    """Move or swap items while that reduces the bytes over the caps or the busiest rank's time. Return how often.

    Each change, of at most `most`, is the best one for a single rank: the one most over its cap, or else the busiest.
    """
    ranks, done = len(caps), 0
    while done < most:
        worst, most_over = np.int64(-1), np.int64(0)  # no literals: `_change` would be compiled again for each
        for r in range(ranks):
            over = _over(used[r], caps[r])
            if over > most_over:
                worst, most_over = r, over
        tight = worst >= 0
        if not tight:
            worst = np.argmax(load)
        changed = _change(worst, tight, compute, exchange, nbytes, slow, caps, at, load, used)
        if not changed and tight:  # the bytes over cannot shrink; the busiest rank's time still may
            worst = np.argmax(load)
            changed = _change(worst, np.bool_(False), compute, exchange, nbytes, slow, caps, at, load, used)
        if not changed:
            break
        done += 1
    # The sums have drifted over many steps: add them up again, from what each rank has besides.
    load[:] = base
    for i in range(len(at)):
        load[at[i]] += compute[i] * slow[at[i]] + exchange[i]
    return done


@kernel
def _change(b, tight, compute, exchange, nbytes, slow, caps, at, load, used):
    """Make the best move or swap of an item of rank b, if it gains. Return whether one was made."""
    best_i, best_j, best_r = np.int64(-1), np.int64(-1), np.int64(-1)  # as above, for `_put`
    best_over, best_busy = 0, load[b] * (1 - EPS)
    over_b = _over(used[b], caps[b])
    if tight:
        best_over, best_busy = -1, np.inf  # the bytes over have to become fewer
    n, ranks = len(at), len(caps)
    for i in range(n):
        if at[i] != b:
            continue
        ib = compute[i] * slow[b] + exchange[i]
        left_over = _over(used[b] - nbytes[i], caps[b]) - over_b
        for r in range(ranks):
            if r == b:
                continue
            over = left_over + _over(used[r] + nbytes[i], caps[r]) - _over(used[r], caps[r])
            if over > best_over:
                continue
            busy = max(load[b] - ib, load[r] + compute[i] * slow[r] + exchange[i])
            if over < best_over or busy < best_busy:
                if not tight and busy >= load[b] * (1 - EPS):
                    continue
                best_i, best_j, best_r, best_over, best_busy = i, -1, r, over, busy
        for j in range(n):
            r = at[j]
            if r == b:
                continue
            more = nbytes[j] - nbytes[i]
            over = _over(used[b] + more, caps[b]) - over_b + _over(used[r] - more, caps[r]) - _over(used[r], caps[r])
            if over > best_over:
                continue
            jb = compute[j] * slow[b] + exchange[j]
            jr = compute[j] * slow[r] + exchange[j]
            busy = max(load[b] - ib + jb, load[r] - jr + compute[i] * slow[r] + exchange[i])
            if over < best_over or busy < best_busy:
                if not tight and busy >= load[b] * (1 - EPS):
                    continue
                best_i, best_j, best_r, best_over, best_busy = i, j, r, over, busy
    if best_i < 0:
        return False
    _put(best_i, best_r, compute, exchange, nbytes, slow, at, load, used)
    if best_j >= 0:
        _put(best_j, b, compute, exchange, nbytes, slow, at, load, used)
    return True


@kernel
def _put(i, r, compute, exchange, nbytes, slow, at, load, used):
    before = at[i]
    load[before] -= compute[i] * slow[before] + exchange[i]
    used[before] -= nbytes[i]
    at[i] = r
    load[r] += compute[i] * slow[r] + exchange[i]
    used[r] += nbytes[i]


Columns = Literal["exact", "always", "never"]
UNBOUND = 1 << 52  # bytes of a rank without a limit
_CHANGES = 256  # moves and swaps between two looks at the clock
_SETTLED = 3  # most rounds of moves and swaps, where these change what a rank's parts cost together


@dataclass
class Placed:
    """A placement: the rank `at` of each piece, and the milliseconds, bytes and most bytes of each rank.

    `slow` is the factor of each rank's computing that accounts for its pieces being together.
    """

    items: tuple[Piece, ...]
    at: np.ndarray
    load: np.ndarray
    used: np.ndarray
    caps: np.ndarray
    slow: np.ndarray

    @property
    def over(self) -> np.ndarray:
        return np.maximum(self.used - self.caps, 0)

    @cached_property
    def score(self) -> tuple[int, float]:
        """Bytes over the caps, then milliseconds of the busiest rank: less is better."""
        return int(self.over.sum()), float(self.load.max())

    def pieces(self, rank: int) -> list[Piece]:
        return [self.items[n] for n in np.flatnonzero(self.at == rank).tolist()]


@dataclass
class Problem:
    """A placement problem: tables in their canonical order, bytes that each rank may hold, costs, and how to cut.

    `columns` says whether tables may be cut by columns: "exact", where that trains the same model; "always"; "never".
    """

    specs: Sequence[TableSpec]
    caps: tuple[int, ...]
    costs: Costs
    columns: Columns = "exact"
    by_rows_cut: frozenset[int] = frozenset()
    """Tables that are cut by rows, whose blocks stay at their ranks; the others are to be placed."""
    blocks: np.ndarray = field(default_factory=lambda: np.zeros((3 + SUMS, 0)))
    """Compute ms, exchange ms, bytes and sums for a net of each rank's blocks of these: [3 + SUMS, ranks]."""
    _known: dict[tuple[int, int, int], tuple[float, float, int, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.caps or min(self.caps) <= 0:
            raise ValueError(f"the ranks hold {self.caps} bytes: give each more than 0")
        if len(self.caps) > (rows := sum(spec.rows for spec in self.specs)):
            raise ValueError(f"there are {len(self.caps)} ranks for {rows} rows: set fewer ranks than rows")
        self.bytes_of = np.array(self.caps, np.int64)
        if not self.blocks.size:
            self.blocks = np.zeros((3 + SUMS, len(self.caps)))
        self._ms, self._exchange, self._sums = self.blocks[0], self.blocks[1], self.blocks[3:].T.copy()
        for number, spec in enumerate(self.specs):  # raises before the search if a cost is missing
            self.cost(whole(number, spec))

    def cost(self, piece: Piece) -> tuple[float, float, int, np.ndarray]:
        """Milliseconds of computing and of exchange, bytes, and what is added to the sums of its rank, from which a net
        makes a factor."""
        key = piece.table, piece.rows, piece.dim  # all that they depend on
        found = self._known.get(key)
        if found is None:
            spec, rows, dim = self.specs[key[0]], key[1], key[2]
            compute, adds = self.costs.part(spec, rows, dim)
            found = self._known[key] = (compute, self.costs.exchange(spec, rows, dim), spec.nbytes(rows, dim), adds)
        return found

    def by_columns(self, spec: TableSpec) -> bool:
        may = self.columns == "always" or (self.columns == "exact" and not spec.one_state)
        return may and spec.split in ("any", "columns")

    def root(self) -> tuple[Piece, ...]:
        """Every table whole that is not cut by rows."""
        return tuple(whole(number, spec) for number, spec in enumerate(self.specs) if number not in self.by_rows_cut)

    def arrays(self, items: tuple[Piece, ...]) -> tuple[np.ndarray, ...]:
        """Compute and exchange ms, bytes and what is added to sums, each [items]."""
        costs = [self.cost(piece) for piece in items]
        compute, exchange, nbytes = np.array([cost[:3] for cost in costs]).reshape(-1, 3).T.copy()
        adds = np.array([cost[3] for cost in costs]).reshape(-1, SUMS)
        return compute, exchange, nbytes.astype(np.int64), adds

    def greedy(self, items: tuple[Piece, ...], order: np.ndarray) -> Placed:
        at, load, used = np.zeros(len(items), np.int64), self._ms + self._exchange, self.blocks[2].astype(np.int64)
        args: Any = (order, *self.arrays(items)[:3], self.bytes_of, at, load, used)
        place_greedily(*args)
        return self._together(items, at, used)

    def at(self, items: tuple[Piece, ...], at: np.ndarray) -> Placed:
        used = self.blocks[2].astype(np.int64)
        np.add.at(used, at, self.arrays(items)[2])
        return self._together(items, at, used)

    def improved(self, placed: Placed, clock: Callable[[], bool] = lambda: False) -> Placed:
        """Move and swap items as long as that gains. Repeat where moves change what parts cost together."""
        for _ in range(_SETTLED):
            after = self._moved(placed, clock)
            if self.costs.net is None:
                return after
            if after.score >= placed.score:
                break
            placed = after
        return placed

    def _moved(self, placed: Placed, clock: Callable[[], bool]) -> Placed:
        at, load, used = placed.at.copy(), placed.load.copy(), placed.used.copy()
        base = self._ms * placed.slow + self._exchange
        done = _CHANGES
        while done == _CHANGES and not clock():
            of = (*self.arrays(placed.items)[:3], placed.slow, self.bytes_of)
            args: Any = (*of, at, load, used, base, _CHANGES)
            done = move_and_swap(*args)
        return self._together(placed.items, at, used)

    def _together(self, items: tuple[Piece, ...], at: np.ndarray, used: np.ndarray) -> Placed:
        """By a net, the load of a rank is not the sum over its parts."""
        compute, exchange, _, adds = self.arrays(items)
        ranks, slow = len(self.caps), np.ones(len(self.caps))
        if self.costs.net is not None:
            sums = np.stack([np.bincount(at, column, minlength=ranks) for column in adds.T], axis=1)
            slow = self.costs.factors(sums + self._sums)
        load = np.bincount(at, compute * slow[at] + exchange, minlength=ranks) + self._ms * slow + self._exchange
        return Placed(items, at, load, used, self.bytes_of, slow)
