"""A hash of each feature's ids. It shows whether forward gets the batch of the loop, and unchanged."""

import numpy as np

from skirl.core.ids import Ids
from skirl.tools.jit import kernel

_STEP = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_LENGTHS = 0x94D049BB133111EB  # so that lengths do not hash like ids


Hashes = dict[str, tuple[int, int]]
"""By feature: a hash of its ids and bags, and one of its weights and bags, 0 without weights."""


def hashes_of(captured: Ids) -> Hashes:
    """Hash each feature's ids and weights."""
    hashes = np.zeros((2, len(captured.keys)), np.uint64)
    numbers = [captured.values]
    if captured.weights is not None:
        numbers.append(captured.weights.view(np.int32 if captured.weights.itemsize == 4 else np.int64))
    for of, out in zip(numbers, hashes):
        _hash(of, captured.offsets, captured.first, out)
    for f, inverse in enumerate(captured.inverse):
        if inverse is not None:
            # Hashed like the lengths of bags; the product keeps it apart from those and from ids.
            ends = np.concatenate([[0], np.cumsum(inverse.astype(np.int64) + 1)])
            hashes[: len(numbers), f] = hashes[: len(numbers), f] * np.uint64(_STEP) + np.uint64(_of_lengths(ends))
    return {name: (ids, weights) for name, ids, weights in zip(captured.keys, *hashes.tolist(), strict=True)}


@kernel
def _of_lengths(ends):
    step, mix, place, half = np.uint64(_STEP), np.uint64(_MIX), np.uint64(_LENGTHS), np.uint64(32)
    total = np.uint64(0)
    for i in range(len(ends) - 1):
        place += step  # faster than i * step, a 64-bit product
        z = (np.uint64(ends[i + 1] - ends[i]) + place) * mix
        total += z ^ (z >> half)
    return total


@kernel
def _hash(values, offsets, first, out):
    """Fill out, uint64 [features]: the sum of all numbers and of the lengths of bags, each mixed with its position. Without
    the shift the hash would be linear, and a 2 in one position could hash like a 1 in another."""
    step, mix, half = np.uint64(_STEP), np.uint64(_MIX), np.uint64(32)
    for f in range(len(out)):
        total = place = np.uint64(0)
        ends = offsets[first[f] : first[f + 1] + 1]
        ids = values[ends[0] : ends[len(ends) - 1]]
        for i in range(len(ids)):
            place += step
            z = (np.uint64(ids[i]) + place) * mix
            total += z ^ (z >> half)
        out[f] = total + _of_lengths(ends)
