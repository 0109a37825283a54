"""A lower bound on the vectors that trainers exchange in a step, whatever rows they own and whether rows or sums travel."""

import numpy as np

from skirl.placement.exchange import TableIds

ROUNDS = 120
"""Steps towards the best bound; each of them gives a valid one."""
STRIDE, WARM, COLD = 10.0, 0.3, 0.02
"""Length of a step relative to the temperature, and the temperature of the first step and of the last ones."""
_HEAD = 8
"""Weights begin with this power of the share of a row's readers that cannot own it."""


def least_vectors(ids: TableIds, rounds: int = ROUNDS) -> float:
    """Return a number of vectors that no plan goes below, counted in one direction.

    In any plan, each row has one owner in a step. A bag of another trainer gets each of its rows either as the row, sent
    once to that trainer, or in a sum of rows of one owner, sent for that bag.

    Give each use of a row by a bag a weight of 0 or more, such that the weights of a bag, and those of a row at a
    trainer, sum to at most 1. A vector then serves uses whose weights sum to at most 1. All uses have to be served but
    those of each row at its owner. So the sum of all weights, less the largest that each row has at a trainer, is a bound.
    Weights are moved to where they raise it.

    **Arguments**

    - `ids`: what a batch looks up in one table.
    - `rounds`: number of steps.

    >>> bags = [np.array([0, 1]), np.array([0]), np.array([0])]
    >>> least_vectors(TableIds([np.array([5, 5]), np.array([5]), np.array([9])], [2, 1, 1], bags))
    1.0
    """
    bag, pair, row = _uses(ids)
    if not len(bag):
        return 0.0
    first = np.flatnonzero(np.r_[True, row[1:] != row[:-1]])  # the first pair of each row
    readers = np.bincount(row)
    weights = (((readers - 1) / readers)[row] ** _HEAD)[pair] + 1e-12
    best = 0.0
    for number in range(rounds):
        weights /= np.bincount(bag, weights)[bag]
        sums = np.bincount(pair, weights)
        used = np.minimum(sums, 1)  # what a pair has above 1 is left out
        most = np.maximum.reduceat(used, first)
        best = max(best, float(used.sum() - most.sum()))
        heat = max(WARM * (1 - number / rounds), COLD)
        owns = np.exp((used - most[row]) / heat)  # who may own the row, smoothed: there a weight gains nothing
        owns /= np.bincount(row, owns)[row]
        full = 1 / (1 + np.exp(np.minimum((1 - sums) / (heat / 2), 50)))
        weights *= np.exp(STRIDE * heat * (1 - owns) * (1 - full))[pair]
    return best


def _uses(ids: TableIds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bag and the pair of each use, and the row of each pair; a pair is a row with a trainer that reads it.

    All are numbered from 0 on; a row that a bag has twice is used once. Pairs of a row follow one another.
    """
    trainers = len(ids.rows)
    trainer = np.repeat(np.arange(trainers), [len(rows) for rows in ids.rows])
    firsts = np.cumsum([0, *ids.bags])
    bag = np.concatenate([np.empty(0, np.int64), *(of + first for of, first in zip(ids.of, firsts[:-1], strict=True))])
    _, row = np.unique(np.concatenate([np.empty(0, np.int64), *ids.rows]), return_inverse=True)
    pairs, pair = np.unique(row * trainers + trainer, return_inverse=True)
    uses = np.unique(bag * len(pairs) + pair)
    return uses // max(1, len(pairs)), uses % max(1, len(pairs)), pairs // trainers
