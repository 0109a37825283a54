"""Measured milliseconds of the ranks of some plans, by round: the mean of the least third is the time of a rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skirl.placement.tables.check import exchange_of
from skirl.placement.tables.measure import Lookups, MeasuredTables, rounds_of
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.pool import PlacementTask
from skirl.placement.tables.problem import Placed, Problem, canonical
from skirl.placement.tables.sums_sent import sent_ms, sums_sent

PLAN_ROUNDS, MOST_ROUNDS, SETTLED = 4, 32, 0.02
"""Measure a task's plans `PLAN_ROUNDS` rounds at a time, until every other round tells the same as the rest but for
`SETTLED`, or `MOST_ROUNDS` are done. Remaining noise makes the busiest rank look busier, most of all in an even plan."""
Times = Mapping[str, tuple[float, float, float, float]]
"""For each plan of a task: milliseconds of the busiest rank, of the mean rank, and the most that one rank exchanges and
that one computes."""
Taken = Callable[[np.ndarray], np.ndarray]
"""What is taken of rounds, the first axis, as the time."""


def least_third(rounds: np.ndarray) -> np.ndarray:
    """Return the mean of the least third of rounds, rounded up. The least one alone falls for as long as one measures.

    **Arguments**

    - `rounds`: milliseconds, [rounds, ...].

    >>> least_third(np.array([[5.0], [1.0], [3.0], [9.0]])).tolist()
    [2.0]
    """
    return np.sort(rounds, axis=0)[: -(-len(rounds) // 3)].mean(axis=0)


def least(rounds: np.ndarray) -> np.ndarray:
    """Return the least round.

    **Arguments**

    - `rounds`: milliseconds, [rounds, ...].
    """
    return rounds.min(axis=0)


def halves_of(rounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return every other round, and the rest.

    **Arguments**

    - `rounds`: milliseconds, [rounds, ...].
    """
    return rounds[::2], rounds[1::2]


def differ(rounds: np.ndarray, taken: Taken = least_third) -> float:
    """Return the median relative difference between what both halves of rounds tell of ranks that compute anything.

    **Arguments**

    - `rounds`: milliseconds, [rounds, ...].
    - `taken`: what is taken of rounds; the mean of the least third by default, which is the time of a rank.
    """
    one, other = (taken(of) for of in halves_of(rounds))
    busy = np.minimum(one, other) > 0
    return float(np.median(np.abs(one - other)[busy] / np.minimum(one, other)[busy])) if busy.any() else 0.0


@dataclass(frozen=True)
class TimedPlans:
    """The measured plans of one task.

    **Arguments**

    - `names`: names of the plans.
    - `rounds`: milliseconds that each rank computes, [rounds, plans, ranks].
    - `exchange`: milliseconds that each rank exchanges, [plans, ranks].
    - `sent`: numbers that each rank has for each, [plans, ranks, ranks].
    - `dense`: milliseconds that each rank would exchange with a vector for every sample, [plans, ranks], as TorchRec does.
    """

    names: Sequence[str]
    rounds: np.ndarray
    exchange: np.ndarray
    sent: np.ndarray
    dense: np.ndarray

    def times(self, taken: Taken = least_third, exchange: np.ndarray | None = None) -> Times:
        """Return the times of each plan.

        **Arguments**

        - `taken`: what is taken of rounds; the mean of the least third by default.
        - `exchange`: milliseconds that take the place of those exchanged.
        """
        found, exchange = {}, self.exchange if exchange is None else exchange
        for name, ms, moved in zip(self.names, taken(self.rounds), exchange, strict=True):
            both = ms + moved
            found[name] = (float(both.max()), float(both.mean()), float(moved.max()), float(ms.max()))
        return found

    def halves(self) -> tuple[Times, Times]:
        """Return the times by each half of the rounds."""
        one, other = (replace(self, rounds=of).times() for of in halves_of(self.rounds))
        return one, other

    def noise(self, taken: Taken = least_third) -> float:
        """Return how much both halves of the rounds differ.

        **Arguments**

        - `taken`: what is taken of rounds.
        """
        return differ(self.rounds, taken)


def measure(
    arena: MeasuredTables, of: PlacementTask, problem: Problem, placed: Mapping[str, Placed], seed: int
) -> TimedPlans:
    """Measure what each rank of each plan computes, and count what it exchanges.

    **Arguments**

    - `arena`: the arena to measure in.
    - `of`: the task.
    - `problem`: the task's problem.
    - `placed`: the plans.
    - `seed`: the random seed.
    """
    order = canonical(of.specs)
    lookups = [Lookups(of.tables[n], seed * 1000 + n) for n in order]
    ready: dict[Piece, Any] = {}

    def part(piece: Piece) -> Any:
        if piece not in ready:
            ready[piece] = arena.ready(lookups[piece.table], piece)
        return ready[piece]

    ranks = range(len(of.ranks.caps))
    combinations = [[part(p) for p in plan.pieces(r)] for plan in placed.values() for r in ranks]
    busy = np.array([bool(of) for of in combinations])

    def settled(rounds: np.ndarray) -> bool:
        return len(rounds) % PLAN_ROUNDS == 0 and differ(rounds * busy) <= SETTLED

    rounds = rounds_of(arena, combinations, MOST_ROUNDS, seed, enough=settled) * busy  # an empty rank computes nothing
    ids = [(of.ids, of.bags) for of in lookups]
    sent = np.array([sums_sent(plan, ids, problem.specs[0].batch) for plan in placed.values()])
    exchange = np.array([sent_ms(problem, of) for of in sent])
    dense = np.array([exchange_of(problem, plan) for plan in placed.values()])
    return TimedPlans(tuple(placed), rounds.reshape(len(rounds), len(placed), -1), exchange, sent, dense)
