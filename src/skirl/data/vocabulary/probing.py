"""The one hash table of fingerprints: open addressing over plain arrays, at most half full; 0 marks a free place.

Fingerprints are well spread already, so their lower bits are the place. `tools/hash_index.py` is for keys, which are not.
"""

import numpy as np

from skirl.tools.jit import kernel

SMALLEST = 1 << 10


def places_for(keys: int) -> int:
    """The size of a table that is at most half full with so many keys: a power of two.

    >>> places_for(0), places_for(600)
    (1024, 2048)
    """
    return max(SMALLEST, 1 << (2 * keys - 1).bit_length()) if keys else SMALLEST


@kernel
def probe(keys, key):
    """The place of a fingerprint, or the free one where it belongs: `keys[place] == key` says which."""
    mask = np.uint64(keys.size - 1)
    place = key & mask
    while keys[place] != key and keys[place] != 0:
        place = (place + np.uint64(1)) & mask
    return place


@kernel
def look_up(keys, rows, fingerprints, out):
    """The row of each fingerprint: 0 of what is missing, 1 of what has no row of its own."""
    for i in range(fingerprints.size):
        key = fingerprints[i]
        place = probe(keys, key)
        out[i] = 0 if key == 0 else rows[place] if keys[place] == key and rows[place] != 0 else 1
