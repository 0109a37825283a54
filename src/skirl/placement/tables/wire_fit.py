"""A wire of measured exchanges: what repeats vary by decides whether nets are trained."""

import numpy as np

from skirl.placement.tables import gloo
from skirl.placement.tables.terms import fitted
from skirl.placement.tables.training import moments, regressed
from skirl.placement.tables.wire import MOST_NOISE, Wire, WireNets, inputs_of, sent, waits

CASES, ROUNDS = 40, 6
COLUMNS = 1024
"""The most that a rank has."""
LATEST = 4.0
"""Milliseconds."""
_HELD_OUT = 5


def cases_of(ranks: int, cases: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Columns that each rank has, and when it starts, by chance: some cases are balanced, some not.

    **Arguments**

    - `ranks`, `cases`: how many.
    - `rng`: chance.
    """
    total = rng.integers(ranks, COLUMNS + 1, (cases, 1))
    uneven = rng.random((cases, 1))
    shares = (1 - uneven) + uneven * ranks * rng.dirichlet(np.ones(ranks), cases)
    dims = np.maximum(4, np.minimum(COLUMNS, total * shares / 4).astype(np.int64) * 4)
    return dims, rng.random((cases, ranks)) * rng.random((cases, 1)) * LATEST


def measured(ranks: int, batch: int, seed: int, cases: int = CASES, rounds: int = ROUNDS) -> Wire:
    """How fast processes of this machine exchange over gloo.

    **Arguments**

    - `ranks`: processes.
    - `batch`: samples of all.
    - `seed`: of chance.
    - `cases`, `rounds`: to measure.
    """
    dims, starts = cases_of(ranks, cases, np.random.default_rng(seed))
    return wire_of(sent(dims, batch), starts, gloo.exchanged(dims, starts, batch, rounds), seed)


def wire_of(nbytes: np.ndarray, starts: np.ndarray, rounds: np.ndarray, seed: int) -> Wire:
    """The wire of some exchanges.

    **Arguments**

    - `nbytes`, `starts`: as `Wire.told` has them.
    - `rounds`: milliseconds, [rounds, forward and backward, cases, ranks].
    - `seed`: of chance.
    """
    cases, ranks = nbytes.shape
    wait = np.stack([waits(starts), np.zeros_like(starts)])
    moved = np.maximum(rounds - wait, 1e-3)
    noise = float(np.median(moved.std(axis=0) / moved.mean(axis=0)))
    ms = np.median(moved, axis=0)  # [forward and backward, cases, ranks]
    held_out = np.arange(cases) % _HELD_OUT == _HELD_OUT - 1
    most = nbytes.max(axis=1)
    terms = np.stack([np.ones(cases), most], axis=1)[~held_out]
    last = ms.max(axis=2)  # an exchange is over when the last rank has all
    latency, per_byte = fitted(np.concatenate([terms, terms]), last[:, ~held_out].reshape(-1))
    plain = Wire(ranks, latency, max(per_byte, 1e-12), noise, 0.0)

    def error(wire: Wire) -> float:
        forward, backward = wire.told(nbytes[held_out], starts[held_out])
        wrong = np.stack([forward - wait[0][held_out], backward]) / ms[:, held_out] - 1
        return float(np.median(np.abs(wrong)))

    found = Wire(ranks, plain.latency, plain.per_byte, noise, error(plain))
    if noise > MOST_NOISE:
        return found
    x = inputs_of(nbytes, starts)
    mean, deviation = moments(x[~held_out])
    wanted = np.log(ms / (plain.latency + plain.per_byte * most[:, None]))[:, ~held_out]
    rest = (x[~held_out] - mean) / deviation
    nets = WireNets(mean, deviation, regressed(rest, wanted[0], seed), regressed(rest[:, :ranks], wanted[1], seed))
    better = Wire(ranks, plain.latency, plain.per_byte, noise, 0.0, nets)
    if error(better) >= found.error:
        return found
    return Wire(ranks, plain.latency, plain.per_byte, noise, error(better), nets)
