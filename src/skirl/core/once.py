"""Bags that samples share: found by hash, then by comparison, and computations that run once per bag."""

from collections.abc import Collection, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from skirl.core.batch import KeyedJagged
from skirl.core.ids import capture, mixed
from skirl.core.inverse import grouped, pays
from skirl.tools.jit import kernel

Takes = Literal["rows", "padded", "jagged"]
Kind = Literal["batchnorm", "dropout"]

MEANING: dict[Kind, str] = {
    "batchnorm": "computes its statistics over the batch, but would compute them over distinct bags here",
    "dropout": "draws for each sample, but would draw once for all samples of a bag here",
}


class Distinct(NamedTuple):
    """The distinct bags of a feature."""

    rows: Tensor
    """`[bags, dim]`, or `[ids of all bags, dim]` if nothing is pooled."""
    offsets: Tensor
    """int64 `[bags + 1]`: where the ids of each bag begin, and where those of the last one end."""
    inverse: Tensor
    """int64 `[batch]`: the bag of each sample."""

    @property
    def bags(self) -> int:
        return len(self.offsets) - 1

    @property
    def plain(self) -> bool:
        """True if every sample i has bag i."""
        bags = self.bags
        return bags == len(self.inverse) and torch.equal(self.inverse, torch.arange(bags, device=self.inverse.device))

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return rows as [bags, longest, dim], padded with zeros, and a mask [bags, longest], True where a row is."""
        return padded(self.rows, self.offsets.cpu().numpy())

    def for_samples(self, per_bag: Tensor) -> Tensor:
        """Copy the entry of each bag, `[bags, ...]`, to its samples: `[batch, ...]`."""
        return per_bag if self.plain else expand(per_bag, self.inverse)


class Expand(torch.autograd.Function):
    """Copies entries of bags, by index `at`, to samples. Backward sums by bag, over samples ascending, from 0."""

    @staticmethod
    def forward(ctx: Any, per_bag: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.bags = len(per_bag)
        return per_bag.index_select(0, at)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (at,) = ctx.saved_tensors
        if grad.device.type == "cpu":
            grad = grad.contiguous()  # index_add adds number by number otherwise, in 20 times the time
            return grad.new_zeros(ctx.bags, *grad.shape[1:]).index_add_(0, at, grad), None
        # On a GPU, index_add adds in an undefined order.
        in_order = grad.index_select(0, at.argsort(stable=True))
        lengths = at.bincount(minlength=ctx.bags)
        return torch.segment_reduce(in_order, "sum", lengths=lengths, initial=0.0, unsafe=True), None


def expand(per_bag: Tensor, at: Tensor) -> Tensor:
    """Return `per_bag[at]`, with a backward that repeats bit for bit on every device."""
    return cast(Tensor, Expand.apply(per_bag, at))


def padded(flat: Tensor, offsets: np.ndarray) -> tuple[Tensor, Tensor]:
    """Pad rows of all samples, `[ids, dim]`, with zeros to `[batch, longest, dim]`. Return these and a mask of rows.
    offsets: int [batch + 1], where each sample begins."""
    lengths = np.diff(offsets)
    longest = int(lengths.max(initial=0))
    mask = np.arange(longest) < lengths[:, None]
    places = torch.from_numpy(np.flatnonzero(mask)).to(flat.device)
    empty = flat.new_zeros(len(lengths) * longest, flat.shape[-1])
    rows = empty.index_copy(0, places, flat).view(len(lengths), longest, flat.shape[-1])
    return rows, torch.from_numpy(mask).to(flat.device)


class OncePerBag(nn.Module):
    """Runs an encoder once for each distinct bag, and gives each sample the result of its bag.

    The result is as if it ran for every sample, except for the rounding of matrix products. In backward, the gradients of
    a bag are summed over its samples in ascending order, starting from 0.

    Layers that look at other samples or draw random numbers mean something else over distinct bags. They are refused
    unless allowed by name. Calls of `torch.nn.functional.dropout` inside `forward` are not detected.

    **Arguments**

    - `module`: the encoder. It returns a tensor whose first dimension is the bag, or a tuple, list or dict of tensors.
    - `takes`: what the encoder takes for each feature. "rows", the default, for features that are pooled or have one id
      per bag: `[bags, dim]`. "padded": `[bags, longest, dim]`, padded with zeros, and a mask `[bags, longest]`, True
      where a row is. "jagged": `[ids of all bags, dim]` and offsets `[bags + 1]`.
    - `allow`: kinds of layers to accept anyway; none by default. "batchnorm": statistics are taken over distinct bags,
      so a bag of many samples counts as much as a bag of one. "dropout", which covers all layers that draw: all samples
      of a bag get the same random numbers.

    >>> import skirl
    >>> rows = skirl.EmbeddingBagCollection([skirl.Table("seen", 10, 4)], optimizer=skirl.SGD(lr=0.1), cache=10)
    >>> ids = skirl.KeyedJagged(["seen"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]), strides=[2],
    ...                         inverse={"seen": torch.tensor([0, 0, 0, 1, 1])})
    >>> encoder = OncePerBag(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    >>> encoder(rows(ids).distinct("seen")).shape
    torch.Size([5, 8])
    """

    def __init__(self, module: nn.Module, *, takes: Takes = "rows", allow: Collection[Kind] = ()) -> None:
        super().__init__()
        if takes not in get_args(Takes):
            raise ValueError(f"takes is {takes!r}: set it to 'rows', 'padded' or 'jagged'")
        named: set[str] = {allow} if isinstance(allow, str) else {*allow}
        if wrong := sorted(named - {*MEANING}):
            raise ValueError(f"allow names {wrong[0]!r}: name 'batchnorm' or 'dropout', or neither")
        for name, layer in module.named_modules():
            kind = _kind(layer)
            if kind is not None and kind not in named:
                what = f"layer {name} is {layer}" if name else f"the module is {layer}"
                raise ValueError(f'OncePerBag: {what}, which {MEANING[kind]}: take it out, or pass allow=("{kind}",)')
        self.module = module
        self.takes = takes

    def forward(self, *features: Distinct) -> Any:
        """Run the encoder on `out.distinct(name)` of each feature, all of one inverse. Return a row for each sample."""
        if not features or not all(isinstance(feature, Distinct) for feature in features):
            what = ", ".join(type(feature).__name__ for feature in features) or "nothing"
            raise TypeError(f"OncePerBag was called with {what}: pass out.distinct(name) of each feature it encodes")
        first = features[0]
        for place, other in enumerate(features[1:], 1):
            if other.bags != first.bags or not torch.equal(other.inverse, first.inverse):
                raise ValueError(
                    f"OncePerBag: features 0 and {place} ({first.bags} and {other.bags} bags) have different inverses: pass "
                    "features that change together, or wrap a separate encoder for each"
                )
        made = self.module(*(each for feature in features for each in self._inputs(feature)))
        return tree_map(lambda part: _for_samples(part, first), made)

    def _inputs(self, feature: Distinct) -> tuple[Tensor, ...]:
        if self.takes == "padded":
            return feature.padded()
        if self.takes == "jagged":
            return feature.rows, feature.offsets
        if len(feature.rows) != feature.bags:
            raise ValueError(
                f"OncePerBag: a feature has {len(feature.rows)} rows for {feature.bags} bags, and the encoder takes one for "
                "each: set takes to 'padded' or 'jagged', or use an EmbeddingBagCollection, which pools"
            )
        return (feature.rows,)


def _kind(layer: nn.Module) -> Kind | None:
    if isinstance(layer, _BatchNorm):
        return "batchnorm"
    drawn = layer.p if isinstance(layer, _DropoutNd) else 0.0
    if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
        drawn = layer.dropout
    return "dropout" if drawn > 0 or isinstance(layer, nn.RReLU) else None


def _for_samples(made: Any, bags: Distinct) -> Tensor:
    if not isinstance(made, Tensor) or not made.dim() or len(made) != bags.bags:
        what = f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise ValueError(
            f"OncePerBag: the encoder returned {what} for {bags.bags} bags: return a tensor whose first dimension is the "
            "bag, or a tuple, list or dict of such"
        )
    return bags.for_samples(made)


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
                same = end - begin == high - low and _same(values, begin, low, end - begin)
                if same and (not weighted or _same(weights, begin, low, end - begin)):
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
def _same(numbers, one, other, count):
    for i in range(count):  # noqa: SIM110
        if numbers[one + i] != numbers[other + i]:
            return False
    return True
