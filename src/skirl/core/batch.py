"""The input of a training loop: ids of several features, any number per sample, and a batch that carries them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

from skirl.core.inverse import INTS, check_array, inverse_of, no_such


class Sparse(Protocol):
    """The methods that skirl calls on a batch's ids; TorchRec's KeyedJaggedTensor has them."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> torch.Tensor: ...
    def offsets(self) -> torch.Tensor: ...
    def weights_or_none(self) -> torch.Tensor | None: ...


class KeyedJagged:
    """Ids of several features, any number per sample: values ordered by (feature, sample, place in the bag).

    Wherever skirl takes it, it takes TorchRec's KeyedJaggedTensor, and any class with `keys`, `values`, `offsets` and
    `weights_or_none`.

    Samples that have the same ids of a feature may share one bag: `strides` then gives the number of bags of each
    feature, and `inverse` the bag of each sample. TorchRec calls this a batch of variable stride.

    **Arguments**

    - `keys`: the names of the features.
    - `values`: all ids in one int64 or int32 tensor: those of the first feature, bag after bag, then the next feature's.
    - `lengths`: the number of ids in each bag, `[features * batch]`. Pass this or `offsets`, and leave the other None.
    - `offsets`: where each bag starts in `values` and the last one ends, `[features * batch + 1]`, instead; or None.
    - `weights`: one weight per id; None, the default, weighs all ids alike.
    - `strides`: number of bags of each feature, given with `inverse`; None, the default: one bag per sample.
    - `inverse`: by feature, or by a tuple of features that change together: the bag of each sample, `[batch]`. Features
      not named have a bag per sample; with None, the default, all do. Each bag belongs to at least one sample.

    >>> shared = KeyedJagged(["user", "clicked"], torch.tensor([7, 8, 1, 2]), lengths=torch.tensor([1, 1, 2]),
    ...                      strides=[2, 1], inverse={"clicked": torch.tensor([0, 0])})
    >>> shared, shared.expanded().values().tolist()
    (KeyedJagged(2 features, 2 samples, 4 ids, clicked in 1 bags), [7, 8, 1, 2, 1, 2])
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        *,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        strides: Sequence[int] | None = None,
        inverse: Mapping[Any, torch.Tensor] | None = None,
    ) -> None:
        if (lengths is None) == (offsets is None):
            given = "neither lengths nor offsets is" if lengths is None else "lengths and offsets are both"
            raise ValueError(f"KeyedJagged: {given} given, pass one of the two")
        for name, of in (("values", values), ("offsets", offsets)):
            if of is not None and not isinstance(of, torch.Tensor):
                raise TypeError(f"KeyedJagged: {name} are a {type(of).__name__}: pass a torch.Tensor")
        if lengths is not None:
            check_array(lengths, "lengths", INTS)
            if lengths.device.type == "cpu" and (total := int(lengths.sum())) != values.numel():
                raise ValueError(
                    f"KeyedJagged: lengths sum up to {total}, and there are {values.numel()} values: pass how many each "
                    "feature and sample has"
                )
            offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
            torch.cumsum(lengths, 0, out=offsets[1:])
        if (strides is None) != (not inverse):
            raise ValueError(
                f"KeyedJagged: {'inverse' if inverse else 'strides'} is given alone: pass strides and inverse together, how "
                "many bags each feature has and which of them each sample has"
            )
        self._keys = list(keys)
        self._values = values
        assert offsets is not None
        self._offsets = offsets
        self._weights = weights
        self._strides = None if strides is None else [int(stride) for stride in strides]
        self.groups = {
            (names,) if isinstance(names, str) else tuple(names): of for names, of in (inverse or {}).items()
        }
        named = [name for names in self.groups for name in names]
        if not {*named} <= {*self._keys} or len({*named}) < len(named) or len(self.groups) < len(inverse or {}):
            raise ValueError(
                f"the inverse names features {', '.join(map(repr, named))}: there are {', '.join(map(repr, keys))}, name "
                "each once at most"
            )

    @classmethod
    def of(cls, sparse: Any) -> "KeyedJagged":
        """Convert from any class with the methods of a KeyedJaggedTensor, also of variable stride."""
        if isinstance(sparse, cls):
            return sparse
        keys, offsets = list(sparse.keys()), sparse.offsets()
        found = inverse_of(sparse, keys, offsets.numel() - 1)
        options: dict[str, Any] = {}
        if found is not None:
            named = {name: torch.from_numpy(i) for name, i in zip(keys, found[2], strict=True) if i is not None}
            options = {"strides": sparse.stride_per_key(), "inverse": named}
        return cls(keys, sparse.values(), offsets=offsets, weights=sparse.weights_or_none(), **options)

    @classmethod
    def one_hot(cls, keys: Sequence[str], ids: torch.Tensor) -> "KeyedJagged":
        """Build from exactly one id per feature and sample.

        **Arguments**

        - `keys`: the names of the features.
        - `ids`: `[batch, features]`, a column for each name.
        """
        ids = torch.as_tensor(ids)
        if ids.dim() != 2 or ids.shape[1] != len(keys):
            raise ValueError(
                f"KeyedJagged.one_hot: ids are {list(ids.shape)} for {len(keys)} features ({', '.join(keys)}): pass "
                "[batch, features], a column for each"
            )
        batch, features = ids.shape
        return cls(keys, ids.t().reshape(-1), offsets=torch.arange(batch * features + 1, dtype=torch.int32))

    @classmethod
    def of_bags(cls, bags: Mapping[str, Sequence[Any]]) -> "KeyedJagged":
        """Build from the ids of each sample, as in a collate function.

        **Arguments**

        - `bags`: by feature, an entry for each sample: one id, or a list, an array or a tensor of any number of ids.

        >>> sparse = KeyedJagged.of_bags({"user": [7, 8], "seen": [torch.tensor([1, 2]), []]})
        >>> sparse.values().tolist(), sparse.lengths().tolist()
        ([7, 8, 1, 2], [1, 1, 2, 0])
        """
        samples = {len(entries) for entries in bags.values()}
        if len(samples) != 1:
            each = ", ".join(f"{name!r}: {len(entries)}" for name, entries in bags.items())
            raise ValueError(f"features have different numbers of samples ({each}): give an entry for each sample")
        parts = []
        for name, entries in bags.items():
            for sample, entry in enumerate(entries):
                try:
                    part = torch.as_tensor(entry)
                except (TypeError, ValueError):
                    raise TypeError(
                        f"feature {name!r}, sample {sample}: {entry!r} is no id: map ids that are text with skirl.Hashed"
                    ) from None
                part = part.to(torch.int64) if not part.numel() else part  # an empty list becomes float
                if part.dim() > 1 or part.dtype not in (torch.int64, torch.int32):
                    raise TypeError(
                        f"feature {name!r}, sample {sample}: ids are {str(part.dtype).removeprefix('torch.')} of shape "
                        f"{list(part.shape)}: give int64, in one dimension at most"
                    )
                parts.append(part.reshape(-1).to(torch.int64))
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        return cls(list(bags), torch.cat([*parts, torch.empty(0, dtype=torch.int64)]), lengths=lengths)

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def offsets(self) -> torch.Tensor:
        return self._offsets

    def lengths(self) -> torch.Tensor:
        return self._offsets.diff()

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights

    def stride(self) -> int:
        for inverse in self.groups.values():
            return len(inverse)
        return (self._offsets.numel() - 1) // max(1, len(self._keys))

    def stride_per_key(self) -> list[int]:
        """Return the number of bags of each feature."""
        return [self.stride()] * len(self._keys) if self._strides is None else self._strides

    def select(self, features: Sequence[str]) -> "KeyedJagged":
        features = list(features)
        missing = [name for name in features if name not in self._keys]
        if missing or not features:
            raise KeyError(
                f"no feature {missing[0] if missing else None!r}: there are {', '.join(map(repr, self._keys))}"
            )
        kept = {tuple(n for n in names if n in features): inverse for names, inverse in self.groups.items()}
        kept.pop((), None)
        return self.with_bags({}, kept, features)

    def to(self, device: str | torch.device, non_blocking: bool = False) -> "KeyedJagged":
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def unweighted(self) -> "KeyedJagged":
        return KeyedJagged(
            self._keys, self._values, offsets=self._offsets, strides=self._strides, inverse=self.groups or None
        )

    def pin_memory(self) -> "KeyedJagged":
        return self._mapped(lambda tensor: tensor.pin_memory())

    def expanded(self) -> "KeyedJagged":
        """Return the plain batch, in which each sample has a bag of its own."""
        return self.with_bags(self._by_feature()) if self.groups else self

    def samples(self, low: int, high: int) -> "KeyedJagged":
        """Return samples `low` to `high - 1`, with only the bags that they use."""
        there = self.stride()
        if not 0 <= low <= high <= there:
            raise ValueError(f"samples({low}, {high}) of a batch of {there}: pass 0 <= low <= high <= {there}")
        at = torch.arange(low, high, device=self._values.device)
        bags: dict[str, torch.Tensor] = dict.fromkeys(self._keys, at)
        groups, inverse = {}, self._by_feature()
        for names in self.groups:
            used, groups[names] = inverse[names[0]][low:high].unique(return_inverse=True)
            bags.update((name, used) for name in names)
        return self.with_bags(bags, groups)

    def lengths_by_sample(self) -> dict[str, torch.Tensor]:
        """Return how many ids each sample has, by feature: `[batch]`."""
        of = self._by_feature()
        parts = dict(zip(self._keys, self.lengths().split(self.stride_per_key()), strict=True))
        return {name: part[of[name]] if name in of else part for name, part in parts.items()}

    def _by_feature(self) -> dict[str, torch.Tensor]:
        found, bags = {}, dict(zip(self._keys, self.stride_per_key()))
        for names, inverse in self.groups.items():
            there = bags[names[0]]
            if inverse.device.type == "cpu" and ((inverse < 0) | (inverse >= there)).any():
                raise no_such(names[0], inverse, int(((inverse < 0) | (inverse >= there)).int().argmax()), there)
            found.update(dict.fromkeys(names, inverse.to(torch.int64)))
        return found

    def with_bags(
        self,
        bags: Mapping[str, torch.Tensor],
        groups: Mapping[tuple[str, ...], torch.Tensor] | None = None,
        features: Sequence[str] | None = None,
    ) -> "KeyedJagged":
        """Choose the bags of some features, in the order given; the other features keep theirs.

        **Arguments**

        - `bags`: by feature, int64: indices into its bags.
        - `groups`: the new bag of each sample, in the form of `inverse`; None: one for each sample.
        - `features`: those of the result; None: all.
        """
        first, features = list(accumulate(self.stride_per_key(), initial=0)), features or self._keys
        ends, all_lengths = self._offsets[first].tolist(), self.lengths()
        parts: list[tuple[torch.Tensor, Any]] = []
        """By feature: the lengths of its bags, and the indices of its ids."""
        for name in features:
            f = self._keys.index(name)
            lengths, starts = all_lengths[first[f] : first[f + 1]], self._offsets[first[f] : first[f + 1]]
            if name not in bags:
                parts.append((lengths, slice(ends[f], ends[f + 1])))
                continue
            begins, lengths = starts.to(torch.int64)[bags[name]], lengths[bags[name]]
            shift = begins - (lengths.cumsum(0) - lengths)
            every = torch.arange(int(lengths.sum()), device=shift.device)
            parts.append((lengths, every + shift.repeat_interleave(lengths)))
        values, weights = (
            None if of is None else torch.cat([of[at] for _, at in parts]) for of in (self._values, self._weights)
        )
        assert values is not None
        return KeyedJagged(
            features,
            values,
            lengths=torch.cat([lengths for lengths, _ in parts]),
            weights=weights,
            strides=[len(lengths) for lengths, _ in parts] if groups else None,
            inverse=groups or None,
        )

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "KeyedJagged":
        return KeyedJagged(
            self._keys,
            function(self._values),
            offsets=function(self._offsets),
            weights=None if self._weights is None else function(self._weights),
            strides=self._strides,
            inverse={names: function(inverse) for names, inverse in self.groups.items()} or None,
        )

    def __repr__(self) -> str:
        of = {name: f"{stride} bags" for name, stride in zip(self._keys, self.stride_per_key())}
        shared = "".join(f", {', '.join(names)} in {of[names[0]]}" for names in self.groups)
        return f"KeyedJagged({len(self._keys)} features, {self.stride()} samples, {self._values.numel()} ids{shared})"


def moved(tensor: torch.Tensor, at: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy a tensor to a device without waiting for a GPU that is still busy.

    A plain `to` from ordinary memory returns only after the GPU has finished everything queued before. A copy from pinned
    memory is queued on the stream.

    **Arguments**

    - `tensor`: the tensor to copy. If it is not in CPU memory or requires a gradient, a plain `to` copies it.
    - `at`: the device to copy it to.
    - `dtype`: its dtype there; None keeps its own.
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
    - `labels`: `[batch]`, float32: 1 for a click. `[batch, labels]` if the data has several labels.
    """

    dense: torch.Tensor
    sparse: Any
    labels: torch.Tensor
