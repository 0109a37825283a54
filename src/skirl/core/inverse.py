"""Bags that samples share: the inverse from samples to bags, and how shared bags are found."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from skirl.tools.jit import kernel

LEAST = 1.1
"""The least ratio of a feature's ids to those of its distinct bags for which sharing pays."""


def pays(ids: int, left: int, samples: int) -> bool:
    """Return whether it pays to share the bags of a feature: copying a bag to a sample costs about as much as an id."""
    return ids >= LEAST * left and ids - left >= samples


@kernel
def fill_bags(starts, weights, first, row, step, sizes, mean, offsets, bag_of, scale):
    """Fill offsets, and unless empty bag_of and scale. Return whether every bag has exactly one id. By feature: its first
    bag in `starts`, the output row of that bag, the distance from one bag's row to the next, and the number of its bags."""
    one = weights.dtype.type(1)
    n = bags = odd = 0
    offsets[0] = 0
    for f in range(len(first)):
        for b in range(sizes[f]):
            begin = starts[first[f] + b]
            end = starts[first[f] + b + 1]
            count = weights.dtype.type(end - begin)
            for p in range(begin, end if len(bag_of) else begin):
                bag_of[n + p - begin] = row[f] + b * step[f]
                if len(scale):
                    factor = weights[p] if len(weights) else one
                    scale[n + p - begin] = factor / count if mean[f] else factor
            n += end - begin
            odd += end - begin != 1
            bags += 1
            offsets[bags] = n
    return odd == 0


class BadIds(ValueError): ...


Inverse = tuple[np.ndarray | None, ...]


def inverse_of(sparse: Any, keys: Sequence[str], bags: int) -> tuple[int, np.ndarray, Inverse] | None:
    """Check and return the number of samples, first bags and inverse of a KeyedJagged, or of a TorchRec batch of variable
    stride, as in `Ids`. None for a plain batch."""
    given = given_inverse(sparse)
    if given is None:
        return None
    strides, by_name = given
    if len(strides) != len(keys) or any(stride < 0 for stride in strides) or sum(strides) != bags:
        raise BadIds(
            f"strides are {list(strides)} for {len(keys)} features and {bags} bags: pass how many each feature has"
        )
    arrays: dict[int, np.ndarray] = {}
    for name, tensor in by_name.items():
        if id(tensor) not in arrays:
            bags_of = array_of(tensor, f"the bags of feature {name!r}", INTS, copy=False)
            arrays[id(tensor)] = np.where((bags_of >= 0) & (bags_of < 1 << 31), bags_of, -1).astype(np.int32)
    batch = len(next(iter(arrays.values())))
    of: list[np.ndarray | None] = []
    for name, stride in zip(keys, strides, strict=True):
        if name not in by_name:
            if stride != batch:
                raise BadIds(
                    f"feature {name!r} has {stride} bags for {batch} samples and no inverse: give it one, or {batch} bags"
                )
            of.append(None)
            continue
        inverse = arrays[id(by_name[name])]
        if len(inverse) != batch:
            raise BadIds(
                f"the inverse of feature {name!r} has {len(inverse)} entries, that of feature {next(iter(by_name))!r} has "
                f"{batch}: give each one entry per sample"
            )
        if (wrong := (inverse < 0) | (inverse >= stride)).any():
            raise no_such(name, by_name[name], int(wrong.argmax()), stride)
        if (unused := np.bincount(inverse, minlength=stride) == 0).any():
            raise BadIds(
                f"no sample has bag {unused.argmax()} of feature {name!r}, and it would be trained all the same: leave such "
                "bags out, as the method samples(0, stride()) of a KeyedJagged does"
            )
        of.append(None if stride == batch and np.array_equal(inverse, np.arange(batch)) else inverse)
    if all(each is None for each in of):
        return None
    return batch, np.concatenate([[0], np.cumsum(strides)]).astype(np.int64), tuple(of)


def grouped(inverses: Mapping[str, np.ndarray | None]) -> dict[tuple[str, ...], torch.Tensor]:
    """Return inverses by the features that have the same one. None: each sample has its own bag."""
    groups: dict[bytes, tuple[list[str], np.ndarray]] = {}
    for name, inverse in inverses.items():
        if inverse is not None:
            groups.setdefault(inverse.tobytes(), ([], inverse))[0].append(name)
    return {tuple(names): torch.from_numpy(inverse) for names, inverse in groups.values()}


def no_such(name: str, inverse: torch.Tensor, sample: int, there: int) -> BadIds:
    return BadIds(
        f"the inverse of feature {name!r} gives bag {inverse[sample]} for sample {sample}, but there are {there} bags: "
        "number bags from 0"
    )


def given_inverse(sparse: Any) -> tuple[list[int], dict[str, torch.Tensor]] | None:
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
        raise BadIds(f"inverse_indices do not fit {len(names)} features: pass a tensor, [features, samples]")
    return list(sparse.stride_per_key()), dict(zip(names, matrix, strict=True))


INTS = (torch.int64, torch.int32)


def check_array(tensor: torch.Tensor, what: str, allowed: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} are a {type(tensor).__name__}: pass a torch.Tensor")
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed[:2])
        raise TypeError(f"{what} are {str(tensor.dtype).removeprefix('torch.')}: pass {names}")
    if tensor.dim() != 1:
        raise ValueError(f"{what} have shape {list(tensor.shape)}: pass one dimension")


def array_of(tensor: torch.Tensor, what: str, allowed: tuple[torch.dtype, ...], copy: bool) -> np.ndarray:
    check_array(tensor, what, allowed)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    array = tensor.cpu().contiguous().numpy()
    return array.copy() if copy and tensor.device.type == "cpu" else array
