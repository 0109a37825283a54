"""The hash table of fingerprints: open addressing over plain arrays, at most half full; 0 marks a free slot.

Fingerprints are well spread already, so their lower bits select the slot. Keys are not: see `tools/hash_index.py`.
"""

import numpy as np

from skirl.tools.jit import kernel

SMALLEST = 1 << 10


def places_for(keys: int) -> int:
    """Return the size of a table that `keys` keys fill at most half: a power of two.

    >>> places_for(0), places_for(600)
    (1024, 2048)
    """
    return max(SMALLEST, 1 << (2 * keys - 1).bit_length()) if keys else SMALLEST


@kernel
def probe(keys, key):
    """Return the slot of a fingerprint, or the free slot where it belongs; it is there if `keys[place] == key`."""
    mask = np.uint64(keys.size - 1)
    place = key & mask
    while keys[place] != key and keys[place] != 0:
        place = (place + np.uint64(1)) & mask
    return place


@kernel
def look_up(keys, rows, fingerprints, out):
    """Fill `out` with the row of each fingerprint: 0 for a missing value, 1 for one without a row of its own."""
    for i in range(fingerprints.size):
        key = fingerprints[i]
        place = probe(keys, key)
        out[i] = 0 if key == 0 else rows[place] if keys[place] == key and rows[place] != 0 else 1
