"""The inverse of a batch: a feature's distinct bags are stored once, and the inverse gives the bag of each sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skirl.tools.jit import kernel


class BadIds(ValueError):
    """Raised for ids that cannot be looked up; the message says which, where, and what is allowed."""


@dataclass(slots=True)
class Inverse:
    """The bag of each sample, by feature. A plain batch has no inverse: each sample has a bag of its own."""

    batch: int
    """The number of samples."""
    first: np.ndarray
    """int64 [features + 1]: each feature's first bag."""
    of: tuple[np.ndarray | None, ...]
    """By feature: int32 [batch], the same array for features that share it; None if each sample has its own bag."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that its arrays take; a shared array counts once."""
        arrays = {id(i): i for i in self.of if i is not None}
        return self.first.nbytes + sum(each.nbytes for each in arrays.values())

    @property
    def digest(self) -> int:
        """A 63-bit hash: two different inverses collide with a probability of about one in 2**63."""
        told = _mixed(self.first, 1)
        for place, array in enumerate(self.of):
            if array is not None:
                told = _mixed(array, told + place)
        return int(told)

    def used(self) -> np.ndarray | None:
        """Return a mask, bool [bags], of the bags that some sample uses; None if all are used."""
        used = np.ones(int(self.first[-1]), np.bool_)
        for place, array in enumerate(self.of):
            if array is not None:
                own = used[self.first[place] : self.first[place + 1]]
                own[:] = False
                own[array] = True
        return None if used.all() else used

    def only(self, used: np.ndarray) -> "Inverse | None":
        """Drop the bags that no sample uses and renumber the rest. Return None if that leaves a plain batch.

        - `used`: bool [bags], as `used()` returns it.
        """
        ends = np.concatenate([[0], np.cumsum(used)])
        first = ends[self.first]
        of: list[np.ndarray | None] = []
        for place, array in enumerate(self.of):
            if array is not None:
                array = (ends[self.first[place] + array.astype(np.int64)] - first[place]).astype(np.int32)
                bags = int(first[place + 1] - first[place])
                array = None if bags == self.batch and _look(array, bags)[1] else array
            of.append(array)
        return None if all(each is None for each in of) else Inverse(self.batch, first, tuple(of))

    def with_empty(self, features: int) -> "Inverse":
        """Append features whose samples each have a bag of their own."""
        more = self.first[-1] + self.batch * np.arange(1, features + 1)
        none = (None,) * features
        return Inverse(self.batch, np.concatenate([self.first, more]), self.of + none)


def is_shared(sparse: Any) -> bool:
    """Return whether samples of a batch may share bags, without looking at the bags."""
    return bool(getattr(sparse, "variable_stride_per_key", bool)()) or (
        getattr(sparse, "inverse_indices_or_none", lambda: None)() is not None
    )


def inverse_of(sparse: Any, keys: Sequence[str], bags: int) -> Inverse | None:
    """Check and return the inverse of a KeyedJagged, or of a TorchRec batch of variable stride. None for a plain batch.

    >>> from skirl import KeyedJagged
    >>> ids = KeyedJagged(["a", "b"], torch.arange(4), lengths=torch.tensor([2, 1, 1]), strides=[1, 2],
    ...                   inverse={"a": torch.tensor([0, 0])})
    >>> found = inverse_of(ids, ids.keys(), 3)
    >>> found.batch, found.first.tolist(), found.of[0].tolist(), found.of[1]
    (2, [0, 1, 3], [0, 0], None)
    """
    given = _given(sparse)
    if given is None:
        return None
    strides, by_name = given
    check_strides(strides, keys, bags)
    lengths = {name: len(tensor) for name, tensor in by_name.items()}
    batch = next(iter(lengths.values()))
    if other := next((name for name, length in lengths.items() if length != batch), None):
        raise BadIds(
            f"the inverse of feature {other!r} has {lengths[other]} entries, that of feature {next(iter(lengths))!r} has "
            f"{batch}: give each one entry per sample"
        )
    arrays: dict[int, np.ndarray] = {}
    of: list[np.ndarray | None] = []
    for name, stride in zip(keys, strides, strict=True):
        tensor = by_name.get(name)
        if tensor is None:
            if stride != batch:
                raise BadIds(
                    f"feature {name!r} has {stride} bags for {batch} samples and no inverse: give it one, or a bag for each "
                    "sample"
                )
            of.append(None)
            continue
        key = id(tensor)
        if key not in arrays:
            arrays[key] = _array(name, tensor)
        wrong, own = _look(arrays[key], stride)
        if wrong >= 0:
            raise _no_such(name, tensor, wrong, stride)
        of.append(None if own and stride == batch else arrays[key])
    if all(each is None for each in of):
        return None
    return Inverse(batch, np.concatenate([[0], np.cumsum(strides)]).astype(np.int64), tuple(of))


def by_feature(groups: Mapping[tuple[str, ...], torch.Tensor], bags: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the inverse by feature, int64. On the CPU, raise if a sample has a bag that does not exist."""
    found = {}
    for names, inverse in groups.items():
        there = bags[names[0]]
        if inverse.device.type == "cpu" and ((inverse < 0) | (inverse >= there)).any():
            wrong = int(((inverse < 0) | (inverse >= there)).int().argmax())
            raise _no_such(names[0], inverse, wrong, there)
        found.update(dict.fromkeys(names, inverse.to(torch.int64)))
    return found


def _no_such(name: str, inverse: torch.Tensor, sample: int, there: int) -> BadIds:
    """Return the error for a sample whose bag does not exist."""
    return BadIds(
        f"the inverse of feature {name!r} gives bag {inverse[sample]} for sample {sample}, but there are {there} bags: "
        "number bags from 0"
    )


def check_samples(low: int, high: int, there: int) -> None:
    """Raise unless a batch of `there` samples has samples `low` to `high - 1`."""
    if not 0 <= low <= high <= there:
        raise ValueError(f"samples({low}, {high}) of a batch of {there}: pass 0 <= low <= high <= {there}")


def check_strides(strides: Sequence[int], keys: Sequence[str], bags: int) -> None:
    """Raise if the numbers of bags do not match the features and the offsets."""
    if len(strides) != len(keys):
        raise BadIds(
            f"strides has {len(strides)} entries for {len(keys)} features: pass how many bags each feature has"
        )
    if any(stride < 0 for stride in strides):
        raise BadIds(f"strides has {min(strides)}: pass how many bags each feature has")
    if sum(strides) != bags:
        raise BadIds(
            f"strides add up to {sum(strides)}, but there are {bags} bags: pass how many bags of lengths each feature has"
        )


def check_groups(inverse: Mapping[Any, torch.Tensor], bags: Mapping[str, int]) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the inverse by tuples of features. Raise if its form is wrong; its values may be on a GPU."""
    groups = {(names,) if isinstance(names, str) else tuple(names): of for names, of in inverse.items()}
    named = [name for names in groups for name in names]
    if wrong := [name for name in named if name not in bags]:
        raise ValueError(f"the inverse names feature {wrong[0]!r}: there are {', '.join(map(repr, bags))}")
    if (twice := [name for name in named if named.count(name) > 1]) or len(groups) < len(inverse):
        twice = twice or named
        raise ValueError(f"the inverse names feature {twice[0]!r} twice: put each feature in only one group")
    for names, tensor in groups.items():
        of = {name: bags[name] for name in names}
        if len(set(of.values())) > 1:
            each = ", ".join(f"{name}: {stride}" for name, stride in of.items())
            raise ValueError(
                f"features of one group have different numbers of bags ({each}): group only features that have the same "
                "bags"
            )
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
            what = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f"the inverse of {', '.join(names)} is {what}: pass a tensor with one entry per sample")
    return groups


def _given(sparse: Any) -> tuple[list[int], dict[str, torch.Tensor]] | None:
    """Return the number of bags of each feature and the inverse by feature, unchecked; None for a plain batch."""
    groups = getattr(sparse, "groups", None)
    if isinstance(groups, dict):  # a KeyedJagged
        return (sparse.stride_per_key(), {n: i for names, i in groups.items() for n in names}) if groups else None
    pair = getattr(sparse, "inverse_indices_or_none", lambda: None)()
    if pair is None:
        if not getattr(sparse, "variable_stride_per_key", bool)():
            return None
        if hasattr(sparse, "stride_per_key") and len(set(sparse.stride_per_key())) == 1:
            return None
        raise BadIds(
            "the features of the batch have different numbers of bags (stride_per_key), and nothing says which bag each "
            "sample has: pass inverse_indices as well, or a KeyedJaggedTensor of one stride"
        )
    names, matrix = pair
    if not isinstance(matrix, torch.Tensor) or matrix.dim() != 2 or len(matrix) != len(names):
        shape = list(matrix.shape) if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        raise BadIds(f"inverse_indices are {shape} for {len(names)} features: pass [features, samples]")
    return list(sparse.stride_per_key()), dict(zip(names, matrix, strict=True))


def _array(name: str, tensor: torch.Tensor) -> np.ndarray:
    """Copy an inverse to int32, into memory that nothing else writes to."""
    if tensor.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"the inverse of feature {name!r} is {str(tensor.dtype).removeprefix('torch.')}: pass int64 or int32"
        )
    if tensor.dim() != 1:
        raise ValueError(f"the inverse of feature {name!r} has shape {list(tensor.shape)}: pass one dimension")
    array = np.empty(len(tensor), np.int32)
    _narrowed(tensor.detach().cpu().numpy(), array)
    return array


@kernel
def _narrowed(given, out):
    """Narrow to int32, with -1 for numbers that do not fit."""
    for i in range(len(given)):
        out[i] = given[i] if 0 <= given[i] < 2147483648 else -1


@kernel
def _look(inverse, stride):
    """Return the first sample whose bag does not exist, or -1, and whether every sample i has bag i."""
    wrong, own = -1, True
    for i in range(len(inverse)):
        if wrong < 0 and (inverse[i] < 0 or inverse[i] >= stride):
            wrong = i
        own = own and inverse[i] == i
    return wrong, own


@kernel
def _mixed(inverse, told):
    """Return a hash of an array, seeded with another hash."""
    step, mix, half = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(32)
    place = np.uint64(told) * mix
    total = place ^ (place >> half)
    for i in range(len(inverse)):
        place += step
        z = (np.uint64(inverse[i]) + place) * mix
        total += z ^ (z >> half)
    return np.int64(total >> np.uint64(1))
