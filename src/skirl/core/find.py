"""Finds samples that have the same ids of a feature: by hash first, then by comparison."""

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch

from skirl.core.batch import KeyedJagged
from skirl.core.ids import capture, mixed
from skirl.core.inverse import grouped, pays
from skirl.tools.jit import kernel


def find(batch: Any, *, features: Sequence[str] | None = None) -> Any:
    """Return the batch with repeated bags stored once, for features where that pays.

    A feature stays plain if its factor, ids over ids left, is small. It also stays plain if fewer ids are saved than
    there are samples, since copying a bag to a sample costs about as much as an id; so features with one id per sample
    stay plain. Features that change together share one inverse. Features that are already shared stay so.

    **Arguments**

    - `batch`: ids with the methods of a KeyedJagged, or a dataclass such as `skirl.Batch` that has them as `sparse`.
    - `features`: consider only these, and share them whatever that saves; None: consider all.

    >>> ids = KeyedJagged(["seen"], torch.tensor([1, 2, 3, 1, 2, 3]), lengths=torch.tensor([3, 3]))
    >>> find(ids), find(ids).expanded().values().tolist()
    (KeyedJagged(1 features, 2 samples, 3 ids, seen in 1 bags), [1, 2, 3, 1, 2, 3])
    """
    if is_dataclass(batch) and hasattr(batch, "sparse"):
        found: Any = replace(batch, sparse=find(batch.sparse, features=features))  # type: ignore[type-var]
        return found
    return _of_ids(batch, features)


def _of_ids(ids: Any, features: Sequence[str] | None, mask: int = (1 << 64) - 1) -> KeyedJagged:
    """Tests pass a mask to make hashes collide."""
    whole = KeyedJagged.of(ids)
    captured = capture(whole, (), copy=False)
    if unknown := [name for name in features or () if name not in captured.keys]:
        raise ValueError(f"no feature {unknown[0]!r}: there are {', '.join(map(repr, captured.keys))}")
    samples = captured.samples
    inverses = dict(zip(captured.keys, captured.inverse))
    weights = np.empty(0, np.int32) if captured.weights is None else captured.weights
    bits = weights.view(np.int32 if weights.itemsize == 4 else np.int64)
    table = np.empty(1 << max(1, (2 * samples - 1)).bit_length(), np.int32)
    hashes = np.empty(samples, np.uint64)
    bags: dict[str, torch.Tensor] = {}
    for place, name in enumerate(captured.keys):
        starts = captured.starts(place)
        count = int(starts[-1] - starts[0])
        if inverses[name] is not None or (count <= samples if features is None else name not in features):
            continue
        inverse, first = np.empty(samples, np.int32), np.empty(samples, np.int32)
        table.fill(-1)
        found, left = _find(captured.values, bits, starts, np.uint64(mask), table, hashes, inverse, first)
        if features is not None or pays(count, left, samples):
            inverses[name], bags[name] = inverse, torch.from_numpy(first[:found].astype(np.int64))
    return whole.to("cpu").with_bags(bags, grouped(inverses)) if bags else whole


@kernel
def _find(values, weights, starts, mask, table, hashes, inverse, first):
    """Number the distinct bags by their first appearance. Return how many there are, and their ids."""
    bags = left = 0
    last = len(table) - 1
    weighted = len(weights) > 0
    for sample in range(len(starts) - 1):
        begin, end = np.uint64(starts[sample]), np.uint64(starts[sample + 1])  # no index has to be checked for its sign
        bag = -1
        h = mixed(values[begin:end], np.uint64(0))
        if weighted:
            h += mixed(weights[begin:end], end - begin)
        h &= mask
        place = np.int64(h >> np.uint64(20)) & last
        while table[place] >= 0:
            other = table[place]
            if hashes[other] == h:
                low, high = np.uint64(starts[first[other]]), np.uint64(starts[first[other] + 1])
                if _same(values, weights, weighted, begin, end, low, high):
                    bag = other
                    break
            place = (place + 1) & last
        if bag < 0:
            bag = bags
            table[place], hashes[bag], first[bag] = bag, h, sample
            bags += 1
            left += starts[sample + 1] - starts[sample]
        inverse[sample] = bag
    return bags, left


@kernel
def _same(values, weights, weighted, begin, end, low, high):
    if end - begin != high - low:
        return False
    for i in range(end - begin):
        if values[begin + i] != values[low + i]:
            return False
    if weighted:
        for i in range(end - begin):
            if weights[begin + i] != weights[low + i]:
                return False
    return True
