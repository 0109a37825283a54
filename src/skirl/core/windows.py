"""Windows: lists that overlap are parts of a buffer, so that an id that many of them have is stored once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from skirl.core.inverse import BadIds, Inverse
from skirl.core.shared import pays
from skirl.core.stretches import Stretches, at_windows, indices

Window = tuple[torch.Tensor, torch.Tensor]
"""Where each window of a feature begins among the feature's ids, and how many ids it has."""


def check_form(given: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Window]:
    """Return windows as they were given. Raise if they are no pairs of tensors, or name a feature that is not there.

    **Arguments**

    - `given`: by feature.
    - `keys`: names of the features.
    """
    found: dict[str, Window] = {}
    for name, pair in given.items():
        if name not in keys:
            raise ValueError(f"windows name feature {name!r}: there are {', '.join(map(repr, keys))}")
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(torch.is_tensor, pair)):
            raise ValueError(
                f"the windows of feature {name!r} are {type(pair).__name__}: pass two tensors, where each window begins and "
                "how long it is"
            )
        for what, of in zip(("begins", "lengths"), pair, strict=True):
            if of.dtype not in (torch.int64, torch.int32):
                raise TypeError(
                    f"the {what} of the windows of feature {name!r} are {str(of.dtype).removeprefix('torch.')}: pass int64 "
                    "or int32"
                )
            if of.dim() != 1:
                raise ValueError(
                    f"the {what} of the windows of feature {name!r} have shape {list(of.shape)}: pass one dimension"
                )
        begins, lengths = pair
        if len(begins) != len(lengths):
            raise ValueError(
                f"feature {name!r} has {len(begins)} begins and {len(lengths)} lengths of windows: pass both for each one"
            )
        found[name] = (begins, lengths)
    return found


def checked(name: str, window: Window, starts: np.ndarray) -> np.ndarray:
    """Return a feature's windows as int64 [2, windows]: begins and lengths. Raise if one is outside its buffer.

    **Arguments**

    - `name`: the feature.
    - `window`: its windows.
    - `starts`: where each buffer begins in the batch's values, and where the last one ends.
    """
    found = np.stack([of.detach().cpu().numpy().astype(np.int64) for of in window])
    if not found.shape[1]:
        return found
    starts = starts.astype(np.int64) - int(starts[0])
    begins, lengths = found
    buffer = (np.searchsorted(starts, begins, side="right") - 1).clip(0, max(0, len(starts) - 2))
    end = starts[np.minimum(buffer + 1, len(starts) - 1)]
    wrong = (begins < 0) | (lengths < 0) | (begins > starts[-1]) | ((lengths > 0) & (lengths > end - begins))
    if wrong.any():
        at = int(np.argmax(wrong))
        low = starts[buffer[at]]
        raise BadIds(
            f"window {at} of feature {name!r} has {lengths[at]} ids from id {begins[at]} on, outside its buffer, which has "
            f"{end[at] - low} from id {low} on: a window lies in one buffer, and ids are counted from the feature's first"
        )
    return found


def lengths_of(name: str, window: Window) -> torch.Tensor:
    """Return the lengths of a feature's windows. Raise if one is negative; on a GPU they are not looked at.

    **Arguments**

    - `name`: the feature.
    - `window`: its windows.
    """
    lengths = window[1]
    if lengths.device.type == "cpu" and (lengths < 0).any():
        at = int((lengths < 0).int().argmax())
        raise BadIds(f"window {at} of feature {name!r} has {lengths[at]} ids: pass lengths of 0 or more")
    return lengths


def some_of(windows: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, ...]:
    """Choose some windows of a feature. Return their begins in what is left of the buffers, their lengths, the lengths of
    the stretches that are left, and the indices of the ids in these.

    **Arguments**

    - `windows`: int64 [2, windows], as `checked` returns them.
    - `which`: int64: their indices.
    """
    begins, lengths = windows.take(which, axis=1)
    found = Stretches.of(begins, lengths)
    return found.places, lengths, found.sizes, indices(found.begins, found.sizes)


def trimmed(values: np.ndarray, offsets: np.ndarray, inverse: Inverse) -> tuple[np.ndarray, np.ndarray, Inverse]:
    """Return a batch's values, offsets and inverse without windows that no sample has, and without ids outside of windows.

    **Arguments**

    - `values`, `offsets`: those of all features.
    - `inverse`: the bags, buffers and windows.
    """
    of, windows, parts, sizes, whole = [], [], [], [], True
    for place, (array, window) in enumerate(zip(inverse.of, inverse.windows, strict=True)):
        own, lengths = _part(values, offsets, inverse, place)
        if window is not None and array is not None:
            used, array = np.unique(array, return_inverse=True)
            (begins, ids), array = window.take(used, axis=1), array.astype(np.int32)
            stretches = Stretches.of(begins, ids)
            if len(used) < window.shape[1] or stretches.ids < len(own):
                own, lengths, whole = stretches.taken(own), stretches.sizes, False
                window = np.stack([stretches.places, ids])
        of.append(array)
        windows.append(window)
        parts.append(own)
        sizes.append(lengths)
    if whole:
        return values, offsets, inverse
    first, ends = _sums(sizes)
    return np.concatenate(parts), ends, Inverse(inverse.batch, first, tuple(of), tuple(windows))


def as_bags(values: np.ndarray, offsets: np.ndarray, inverse: Inverse) -> tuple[np.ndarray, np.ndarray, Inverse | None]:
    """Return a batch's values, offsets and inverse with each window as a bag of its own. Samples share bags as they shared
    windows if that pays.

    **Arguments**

    - `values`, `offsets`, `inverse`: as for `trimmed`.
    """
    of, parts, sizes = [], [], []
    for place, array in enumerate(inverse.of):
        own, lengths = _part(values, offsets, inverse, place)
        if (window := inverse.window(place)) is not None:
            assert array is not None
            if not pays(int(window[1][array].sum()), int(window[1].sum()), inverse.batch):
                window, array = window.take(array, axis=1), None
            own, lengths = at_windows(own, *window), window[1]
        of.append(array)
        parts.append(own)
        sizes.append(lengths)
    first, ends = _sums(sizes)
    bags = None if all(each is None for each in of) else Inverse(inverse.batch, first, tuple(of))
    return np.concatenate(parts), ends, bags


def _part(values: np.ndarray, offsets: np.ndarray, inverse: Inverse, place: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a feature, and how many each of its bags has."""
    starts = offsets[inverse.first[place] : inverse.first[place + 1] + 1]
    return values[starts[0] : starts[-1]], np.diff(starts)


def _sums(sizes: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return each feature's first bag, and where each bag begins, given the ids of each bag by feature."""
    first = np.concatenate([[0], np.cumsum([len(each) for each in sizes])]).astype(np.int64)
    return first, np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
