"""A hash of each feature's ids. It shows whether forward gets the batch of the loop, and unchanged."""

from functools import lru_cache

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
    array = np.zeros((2, len(captured.keys)), np.int64)
    numbers = [captured.values]
    if captured.weights is not None:
        numbers.append(captured.weights.view(np.int32 if captured.weights.itemsize == 4 else np.int64))
    for out, of in zip(array, numbers):
        if not captured.shares:
            _hash(of, captured.offsets, captured.samples, _of_one_each(captured.samples), out)
        else:
            _hash_shared(of, captured, out)
    return {name: (ids, weights) for name, ids, weights in zip(captured.keys, *array.tolist(), strict=True)}


def _hash_shared(numbers: np.ndarray, captured: Ids, out: np.ndarray) -> None:
    for f, inverse in enumerate(captured.inverse):
        starts = captured.starts(f)
        _hash(numbers, starts, len(starts) - 1, _of_one_each(len(starts) - 1), out[f : f + 1])
        if inverse is not None:
            # Hashed like the lengths of bags; the product keeps it apart from those and from ids.
            ends = np.concatenate([[0], np.cumsum(inverse.astype(np.int64) + 1)])
            out[f : f + 1].view(np.uint64)[:] *= np.uint64(_STEP)
            out[f : f + 1].view(np.uint64)[:] += np.uint64(_of_lengths(ends))


@lru_cache(maxsize=64)
def _of_one_each(batch: int) -> np.uint64:
    """Return what bags of one id each add to a feature's hash."""
    return np.uint64(_of_lengths(np.arange(batch + 1)))


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
def _hash(values, offsets, batch, one_each, out):
    """Fill out, int64 [features]: the sum of all numbers, each mixed with its position. Without the shift the hash
    would be linear, and a 2 in one position could hash like a 1 in another. one_each: the hash of lengths that are all
    1."""
    step, mix, half = np.uint64(_STEP), np.uint64(_MIX), np.uint64(32)
    for f in range(len(out)):
        total = place = np.uint64(0)
        ends = offsets[f * batch : (f + 1) * batch + 1]
        ids = values[ends[0] : ends[batch]]
        for i in range(len(ids)):
            place += step
            z = (np.uint64(ids[i]) + place) * mix
            total += z ^ (z >> half)
        others = 0
        for i in range(batch):
            others += ends[i + 1] - ends[i] != 1
        out[f] = np.int64(total + (_of_lengths(ends) if others else one_each))
