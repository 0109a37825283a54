"""The smallest few of many by two keys, for policies that choose among all resident rows."""

import numpy as np


def smallest(count: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the indices of the `count` smallest by `first`, ties by `second`, in this order; all, if there are fewer.

    >>> smallest(3, np.array([5, 1, 5, 5]), np.array([3, 0, 2, 1])).tolist()
    [1, 3, 2]
    """
    if not 0 < count < len(first):
        chosen = np.arange(len(first) if count else 0)
        return chosen[np.lexsort((second[chosen], first[chosen]))]
    bound = np.partition(first, count - 1)[count - 1]
    below, tied = np.flatnonzero(first < bound), np.flatnonzero(first == bound)
    room = count - len(below)
    if room < len(tied):
        tied = tied[np.argpartition(second[tied], room - 1)[:room]]
    chosen = np.concatenate([below, tied])
    return chosen[np.lexsort((second[chosen], first[chosen]))]
