"""How often each row is looked up: a power law whose hot rows are scattered over the table.

Rank x of a table (0 = hottest) has density proportional to (x + OFFSET) ** -EXPONENT.
"""

import numpy as np

from skirl.core.initial import _MIX1, _MIX2, mix
from skirl.tools.jit import kernel

EXPONENT = 0.992
OFFSET = 1.0

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)


@kernel
def fold(state, word):
    """Return the state of a random stream whose name has one more word."""
    return mix((state ^ word) + GOLDEN)


def named(*words: int | np.uint64) -> np.uint64:
    """Return the random stream named by these words.

    A compiled function returns a plain int, so the state is wrapped again after each step.

    >>> named(1, 2) == named(1, 2) != named(2, 1)
    np.True_
    """
    stream = np.uint64(0)
    for word in words:
        stream = np.uint64(fold(stream, np.uint64(int(word) % 2**64)))
    return stream


@kernel
def unit(stream, i):
    """Draw i of a stream: a float64 in [0, 1) with 53 random bits."""
    return np.float64(mix(stream + i * GOLDEN) >> np.uint64(11)) * 2.0**-53


@kernel
def mass_of(rows):
    """Return the density's integral over a table. Separate from `rank_at`, which would take twice as long with it."""
    return (1.0 + rows / OFFSET) ** (1.0 - EXPONENT) - 1.0


@kernel
def rank_at(u, rows, mass):
    """Return the rank at quantile u of a table; 0 is the hottest.

    >>> [rank_at(u, 1_000_000, mass_of(1_000_000)) for u in (0.0, 0.5, 0.9)]
    [0, 1209, 268518]
    """
    return min(int(OFFSET * ((1.0 + u * mass) ** (1.0 / (1.0 - EXPONENT)) - 1.0)), rows - 1)


@kernel
def bits_for(rows):
    """Return the smallest number of bits that hold any row of a table."""
    bits = np.uint64(0)
    while (_ONE << bits) < np.uint64(rows):
        bits += _ONE
    return bits


@kernel
def scatter(rank, rows, bits, table_key):
    """Return the row of a rank: a bijection of [0, rows) that depends on `table_key`.

    Multiply and xor-shift are bijections of `bits` bits; a result outside the table is mapped again, less than once on
    average. An affine map modulo `rows` is as cheap, but sends the hottest rows to an arithmetic progression.

    >>> sorted(int(scatter(rank, 5, bits_for(5), np.uint64(9))) for rank in range(5))
    [0, 1, 2, 3, 4]
    """
    mask = (_ONE << bits) - _ONE
    half = (bits + _ONE) >> _ONE
    x = np.uint64(rank)
    while True:
        x = (x * (table_key | _ONE) + (table_key >> np.uint64(7))) & mask
        x ^= x >> half
        x = (x * _MIX2 + table_key) & mask
        x ^= x >> half
        x = (x * _MIX1) & mask
        x ^= x >> half
        if x < np.uint64(rows):
            return np.int64(x)
