"""A wire fitted to measured exchanges. How much repeats vary decides whether nets are trained."""

import numpy as np

from skirl.placement.tables import gloo
from skirl.placement.tables.terms import fitted
from skirl.placement.tables.training import moments, regressed
from skirl.placement.tables.wire import MOST_NOISE, Wire, WireNets, inputs_of, sent, waits

CASES, ROUNDS = 40, 6
COLUMNS = 1024
"""Most columns of a rank."""
LATEST = 4.0
"""The latest that a rank starts, in milliseconds."""
_HELD_OUT = 5


def cases_of(ranks: int, cases: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return random columns and start times for each rank: some cases are balanced, some not.

    **Arguments**

    - `ranks`, `cases`: number of ranks and of cases.
    - `rng`: the random generator.
    """
    total = rng.integers(ranks, COLUMNS + 1, (cases, 1))
    uneven = rng.random((cases, 1))
    shares = (1 - uneven) + uneven * ranks * rng.dirichlet(np.ones(ranks), cases)
    dims = np.maximum(4, np.minimum(COLUMNS, total * shares / 4).astype(np.int64) * 4)
    return dims, rng.random((cases, ranks)) * rng.random((cases, 1)) * LATEST


def measured(ranks: int, batch: int, seed: int, cases: int = CASES, rounds: int = ROUNDS) -> Wire:
    """Measure how fast processes of this machine exchange over gloo.

    **Arguments**

    - `ranks`: number of processes.
    - `batch`: samples of all processes.
    - `seed`: the random seed.
    - `cases`, `rounds`: number of cases and of rounds to measure.
    """
    dims, starts = cases_of(ranks, cases, np.random.default_rng(seed))
    numbers = np.repeat(dims[:, :, None] * (batch // ranks), ranks, axis=2)
    return wire_of(sent(dims, batch), starts, gloo.exchanged(numbers, starts, rounds), seed)


def wire_of(nbytes: np.ndarray, starts: np.ndarray, rounds: np.ndarray, seed: int, *, nets: bool = True) -> Wire:
    """Fit a wire to some exchanges.

    **Arguments**

    - `nbytes`, `starts`: as for `Wire.told`.
    - `rounds`: milliseconds, [rounds, forward and backward, cases, ranks].
    - `seed`: the random seed.
    - `nets`: whether to train nets, if repeats vary little enough.
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
    if noise > MOST_NOISE or not nets:
        return found
    x = inputs_of(nbytes, starts)
    mean, deviation = moments(x[~held_out])
    wanted = np.log(ms / (plain.latency + plain.per_byte * most[:, None]))[:, ~held_out]
    rest = (x[~held_out] - mean) / deviation
    trained = WireNets(mean, deviation, regressed(rest, wanted[0], seed), regressed(rest[:, :ranks], wanted[1], seed))
    better = Wire(ranks, plain.latency, plain.per_byte, noise, 0.0, trained)
    if error(better) >= found.error:
        return found
    return Wire(ranks, plain.latency, plain.per_byte, noise, error(better), trained)
