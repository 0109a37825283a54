"""Copies of batches that the window may keep, and their size."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

_MOST_PARTS = 10_000


def own(batch: Any) -> Any:
    """Return a copy that shares nothing with the batch.

    >>> data = torch.arange(1000)
    >>> mine = own({"x": data[10:12]})["x"]
    >>> mine.tolist(), mine.untyped_storage().nbytes()
    ([10, 11], 16)
    """
    memo: dict[int, Any] = {}
    for part in _leaves(batch):
        if type(part) is torch.Tensor and part.layout == torch.strided:
            memo[id(part)] = part.detach().clone().requires_grad_(part.requires_grad)
    return copy.deepcopy(batch, memo)


def weigh(batch: Any) -> int:
    """Return the bytes of a batch's tensors and arrays, as far as they are found in containers and attributes.

    >>> weigh({"ids": torch.zeros(3, dtype=torch.int64), "labels": [np.zeros(2, np.float32)]})
    32
    """
    return sum(
        part.numel() * part.element_size() if isinstance(part, torch.Tensor) else _bytes_of(part)
        for part in _leaves(batch)
    )


def _leaves(batch: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and bytes of a batch, each once."""
    looked_at, left = set(), [batch]
    while left and len(looked_at) < _MOST_PARTS:
        part = left.pop()
        if part is None or isinstance(part, bool | int | float | str | type) or id(part) in looked_at:
            continue
        looked_at.add(id(part))
        if isinstance(part, torch.Tensor | np.ndarray | np.generic | bytes | bytearray):
            yield part
        elif isinstance(part, dict):
            left.extend(part.values())
        elif isinstance(part, list | tuple | set | frozenset):
            left.extend(part)
        else:
            left.extend(_attributes(part))


def _attributes(part: Any) -> Iterable[Any]:
    if hasattr(part, "__dict__"):
        return vars(part).values()
    slots = getattr(type(part), "__slots__", ())
    return [getattr(part, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]


def _bytes_of(part: Any) -> int:
    return len(part) if isinstance(part, bytes | bytearray) else part.nbytes
