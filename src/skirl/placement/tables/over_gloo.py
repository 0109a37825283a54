"""What plans exchange, measured: as many processes as ranks send over gloo what the ranks of each plan would."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from skirl.placement.tables import gloo
from skirl.placement.tables.timed import TimedPlans
from skirl.placement.tables.wire_fit import wire_of

ROUNDS = 6
SECONDS = 900.0
"""Timeout for all plans of one number of ranks."""
_FLOAT = 4


def over_gloo(
    tasks: Sequence[TimedPlans], seed: int, exchanged: Callable[..., np.ndarray] = gloo.exchanged
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return for each task what each rank of each plan exchanges, in milliseconds, and how that was found.

    All plans of one number of ranks take turns. Where repeats vary too much, a latency and a rate are fitted to them and
    tell the time of all, `unvalidated`.

    **Arguments**

    - `tasks`: measured plans of each task, with what each rank sends.
    - `seed`: the random seed.
    - `exchanged`: measures; `gloo.exchanged` by default.
    """
    found: list[np.ndarray] = [np.zeros(0)] * len(tasks)
    by_ranks = {}
    for ranks in sorted({of.exchange.shape[1] for of in tasks}):
        mine = [n for n, of in enumerate(tasks) if of.exchange.shape[1] == ranks]
        sent = np.concatenate([tasks[n].sent for n in mine])
        ms, by_ranks[str(ranks)] = _of(sent, seed, exchanged)
        for n, part in zip(mine, np.split(ms, np.cumsum([len(tasks[n].names) for n in mine])[:-1]), strict=True):
            found[n] = part
    return found, by_ranks


def _of(sent: np.ndarray, seed: int, exchanged: Callable[..., np.ndarray]) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the milliseconds of all plans, forward and backward together, [plans, ranks], and how they were found."""
    starts = np.zeros(sent.shape[:2])
    rounds = exchanged(sent, starts, ROUNDS, SECONDS)
    away = (sent.sum(axis=2) - sent.diagonal(axis1=1, axis2=2)) * float(_FLOAT)
    wire = wire_of(away, starts, rounds, seed, nets=False)  # where nets could be trained, what was measured is taken
    told = wire.said() | {"kind": "measured" if wire.validated else "unvalidated"}
    if wire.validated:
        return np.median(rounds, axis=0).sum(axis=0), told
    forward, backward = wire.told(away, starts)
    return forward + backward, told
