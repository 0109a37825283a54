"""What a training loop passes in: the ids of many features, any number for each sample, and a batch that carries them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Sparse(Protocol):
    """The methods that skirl calls on a batch's ids; TorchRec's KeyedJaggedTensor has them."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> torch.Tensor: ...
    def offsets(self) -> torch.Tensor: ...
    def weights_or_none(self) -> torch.Tensor | None: ...


class KeyedJagged:
    """Ids of several features, any number for each sample: values in order of (feature, sample, place in the bag).

    It has the methods of TorchRec's KeyedJaggedTensor that skirl calls; wherever one is taken, so is the other, and any
    class with these methods.

    **Arguments**

    - `keys`: the names of the features.
    - `values`: all ids in one int64 or int32 tensor: those of the first feature, sample after sample, then the next
      feature's.
    - `lengths`: the number of ids in each bag, `[features * batch]`. Pass this or `offsets`, not both.
    - `offsets`: where each bag starts in `values`, and where the last one ends, `[features * batch + 1]`.
    - `weights`: one weight per id; None, the default, weighs all ids alike.

    >>> sparse = KeyedJagged(["user", "clicked"], values=torch.tensor([7, 8, 1, 2, 3]), lengths=torch.tensor([1, 1, 2, 1]))
    >>> sparse.offsets().tolist()
    [0, 1, 2, 4, 5]
    >>> sparse.stride()
    2
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        *,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> None:
        if (lengths is None) == (offsets is None):
            raise ValueError("pass either lengths or offsets, one of the two")
        self._keys = list(keys)
        self._values = values
        self._lengths = lengths
        self._offsets = offsets
        self._weights = weights

    @classmethod
    def one_hot(cls, keys: Sequence[str], ids: torch.Tensor) -> "KeyedJagged":
        """For exactly one id per feature and sample.

        **Arguments**

        - `keys`: the names of the features.
        - `ids`: `[batch, features]`, a column for each name.

        >>> KeyedJagged.one_hot(["a", "b"], torch.tensor([[1, 2], [3, 4]])).values().tolist()
        [1, 3, 2, 4]
        """
        batch, features = ids.shape
        if features != len(keys):
            raise ValueError(f"ids has {features} columns for {len(keys)} features: they must be as many")
        return cls(keys, ids.t().reshape(-1), offsets=torch.arange(batch * features + 1, dtype=torch.int32))

    def select(self, features: Sequence[str]) -> "KeyedJagged":
        """Some of the features, in this order.

        **Arguments**

        - `features`: names of features of this batch.

        >>> ids = KeyedJagged(["a", "b", "c"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 2, 1]))
        >>> ids.select(["c", "a"]).values().tolist(), ids.select(["c", "a"]).lengths().tolist()
        ([4, 1], [1, 1])
        """
        features, batch = list(features), self.stride()
        missing = [name for name in features if name not in self._keys]
        if missing or not features:
            raise KeyError(
                f"no feature {missing[0] if missing else None!r}: there are {', '.join(map(repr, self._keys))}"
            )
        places = [self._keys.index(name) for name in features]
        starts = self.offsets()[[place * batch for place in range(len(self._keys) + 1)]].tolist()
        parts = [slice(starts[place], starts[place + 1]) for place in places]
        lengths = torch.cat([self.lengths()[place * batch : (place + 1) * batch] for place in places])
        values, weights = (
            None if of is None else torch.cat([of[part] for part in parts]) for of in (self._values, self._weights)
        )
        assert values is not None
        return KeyedJagged(features, values, lengths=lengths, weights=weights)

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def values(self) -> torch.Tensor:
        """All ids, feature after feature."""
        return self._values

    def offsets(self) -> torch.Tensor:
        """Where each bag starts, feature after feature; one more at the end."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = torch.zeros(self._lengths.numel() + 1, dtype=torch.int64)
            torch.cumsum(self._lengths, 0, out=self._offsets[1:])
        return self._offsets

    def lengths(self) -> torch.Tensor:
        """The number of ids in each bag."""
        if self._lengths is None:
            self._lengths = self.offsets().diff()
        return self._lengths

    def weights_or_none(self) -> torch.Tensor | None:
        """A weight for each id, if there are weights."""
        return self._weights

    def stride(self) -> int:
        """The number of samples."""
        return (self.offsets().numel() - 1) // max(1, len(self._keys))

    def __repr__(self) -> str:
        return f"KeyedJagged({len(self._keys)} features, {self.stride()} samples, {self._values.numel()} ids)"


def moved(tensor: torch.Tensor, at: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy a tensor to a device without waiting for a GPU that is still at work.

    A plain `to` from ordinary memory returns only when the GPU has done everything it was asked before, so the next
    step could not be launched while this one runs. A copy from pinned memory is put on the stream, and torch keeps that
    memory until then.

    **Arguments**

    - `tensor`: what to copy. On another device already, or with a gradient, it is copied with a plain `to`.
    - `at`: the device to copy it to.
    - `dtype`: the dtype it gets there; None keeps its own.

    >>> moved(torch.tensor([1, 2]), torch.device("cpu"), torch.float32)
    tensor([1., 2.])
    """
    tensor = tensor.to(dtype or tensor.dtype)
    waits = tensor.device.type != "cpu" or tensor.requires_grad or torch.compiler.is_compiling()
    if at.type != "cuda" or waits:
        return tensor.to(at)
    return tensor.contiguous().pin_memory().to(at, non_blocking=True)


@dataclass
class Batch:
    """Samples of a click log, as skirl's own readers yield them.

    **Arguments**

    - `dense`: `[batch, dense features]`, float32.
    - `sparse`: the ids: a KeyedJagged, or anything with its methods.
    - `labels`: `[batch]`, float32: 1 for a click. `[batch, labels]` where the data has several.
    """

    dense: torch.Tensor
    sparse: Any
    labels: torch.Tensor
