"""A count, from ids, of what ranks send each other under a plan: the vectors of samples that have an id there at all."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from skirl.placement.exchange import partial_sums
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.problem import Placed, Problem

_FLOAT = 4


def sums_sent(placed: Placed, ids: Sequence[tuple[np.ndarray, np.ndarray]], batch: int) -> np.ndarray:
    """Return the numbers that each rank has for the samples of each, int64 [ranks, ranks]; its own do not travel.

    A rank with some rows of a table sends a sum only for samples that look up any of these. A rank with a whole table
    sends nothing for samples without ids, either.

    **Arguments**

    - `placed`: a plan.
    - `ids`: for each table, the row and the sample of each id.
    - `batch`: samples of all ranks; each has an equal stretch of them.
    """
    ranks = len(placed.load)
    home = np.searchsorted([batch * n // ranks for n in range(1, ranks)], np.arange(batch), side="right")
    of: dict[int, list[tuple[Piece, int]]] = {}
    for item, rank in zip(placed.items, placed.at.tolist(), strict=True):
        for piece in item:
            of.setdefault(piece.table, []).append((piece, rank))
    sent = np.zeros((ranks, ranks), np.int64)
    for table, pieces in of.items():
        rows, samples = ids[table]
        for begin, end in pairwise(sorted({edge for piece, _ in pieces for edge in (piece.col, piece.col_end)})):
            here = sorted(
                (piece.row_end, rank) for piece, rank in pieces if piece.col <= begin and end <= piece.col_end
            )
            ends, at = np.array(here).T
            sample, rank = partial_sums(samples, at[np.searchsorted(ends, rows, side="right")], ranks)
            np.add.at(sent, (rank, home[sample]), end - begin)
    return sent


def sent_ms(problem: Problem, sent: np.ndarray) -> np.ndarray:
    """Return the milliseconds that each rank sends, and gets as much back as gradients.

    **Arguments**

    - `problem`: ranks, and costs with the rate of their link.
    - `sent`: what `sums_sent` returned.
    """
    away = sent.sum(axis=1) - sent.diagonal()
    return 2e3 * away * _FLOAT / problem.costs.link * problem.ranks.far
