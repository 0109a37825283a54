"""DCAT: a transformer runs once per distinct history; targets attend to its keys and values (arXiv 2507.12704)."""

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from skirl.core.once import Distinct, expand
from skirl.models.attention import attend
from skirl.models.base import Embeddings, fit, last, linear, mlp
from skirl.models.history import OfHistory, SamplesByBag


class DCAT(OfHistory):
    """DCAT over any embeddings module; `forward` returns logits.

        history h_1 .. h_n     -> causal transformer -> keys and values of each layer, once for each distinct history
        target t               -> the same layers: it attends to these keys and values, and to itself
        logit                  [dense, all vectors, t's last state] -> MLP -> linear

    So t gets the same state as at the end of [h_1 .. h_n, t]: no h sees it, and all candidates of a history share the
    work. Each vector is added to sines of its age, which is 0 for t and 1 for the newest h.

    A list, oldest first, is the history of the single feature that has the same table, such as `table = "item"` for both
    `item` and `clicked` in a schema, and has a transformer of its own; other lists are pooled as their table says. Without
    such a pair, as in Criteo and Avazu, the feature of the largest table is the target and the others are its history.

    The defaults are smaller than the paper's, whose transformer is pretrained.

    **Arguments** beside those of `Model`

    - `embeddings`: looks up ids. If a list shares its table with a single feature, an `EmbeddingCollection`, which does
      not pool; otherwise an `EmbeddingBagCollection`.
    - `lists`: the features with any number of ids per sample; none by default, as in Criteo.
    - `width`: length of a state of the transformer; a multiple of `2 * heads`. 64, small enough to train
      from scratch.
    - `heads`: attention heads; 4, each with 16 numbers of the default width.
    - `layers`: layers of the transformer; 2, few for the same reason as the width.
    - `newest`: the most ids of a history that it sees, the last ones; 256, since the time of attention grows with their
      square.
    - `deep`: hidden layers; (256, 128), small like the transformer.

    >>> import skirl
    >>> tables = [skirl.Table("item", rows=50, dim=8, features=("item", "clicked")), skirl.Table("user", rows=100, dim=8)]
    >>> rows = skirl.EmbeddingCollection(tables, optimizer=skirl.SGD(lr=0.1), cache=100)
    >>> model = DCAT.tiny(rows, dense_features=4, lists=["clicked"])
    >>> ids = skirl.KeyedJagged(["item", "clicked", "user"], torch.arange(7), lengths=torch.tensor([1, 1, 3, 1, 1]),
    ...                         strides=[2, 1, 2], inverse={"clicked": torch.tensor([0, 0])})
    >>> model(skirl.Batch(dense=torch.zeros(2, 4), sparse=ids, labels=torch.zeros(2))).shape
    torch.Size([2])
    """

    name = "DCAT"
    small: ClassVar = {"width": 16, "heads": 2, "deep": (32, 16)}

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        lists: Sequence[str] = (),
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        newest: int = 256,
        deep: Sequence[int] = (256, 128),
    ) -> None:
        super().__init__(embeddings, dense_features, lists)
        self.newest = newest
        self.encoders = nn.ModuleList(Transformer(self.dim, width, heads, layers) for _ in range(self.attended))
        inputs = dense_features + (self.vectors - len(self.history)) * self.dim + self.attended * width
        self.deep = mlp(inputs, *deep)
        self.head = linear(last(deep, inputs), 1)

    def attend(self, number: int, lists: Distinct, target: Tensor) -> Tensor:
        return self.encoders[number](_newest(lists, self.newest), target)

    def attend_to_features(self, others: Tensor, target: Tensor) -> Tensor:
        ends = torch.arange(len(others) + 1, device=others.device)
        return self.attend(0, Distinct(others.flatten(0, 1), ends * others.shape[1], ends[:-1]), target)


class Transformer(nn.Module):
    """Layers over histories, and over targets that attend to them."""

    def __init__(self, dim: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width is {width} and heads is {heads}: set width to a multiple of {2 * heads}")
        self.enter = linear(dim, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, bags: Distinct, target: Tensor) -> Tensor:
        """Take histories and a target per sample, [batch, dim]. Return the targets' last states, [batch, width]."""
        if not bags.plain and fit(bags.rows, target):
            return self._by_id(bags, target)
        rows, mask = bags.padded()
        lengths = mask.sum(dim=1, keepdim=True)
        ages = sines(rows.shape[1] + 1, self.enter.out_features, rows)
        places = torch.arange(rows.shape[1], device=rows.device)
        x = self.enter(rows) + ages[(lengths - places).clamp(min=0)]
        t = self.enter(target) + ages[0]
        of_samples = mask[bags.inverse]
        for number, layer in enumerate(cast(list[Layer], self.layers)):
            queries, keys, values = layer.split(x)
            t = layer.attend(t, bags.for_samples(keys), bags.for_samples(values), of_samples)
            if number + 1 < len(self.layers):  # nothing after the last layer needs the history
                seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
                x = layer.rest(x, joined(seen))
        return self.norm(t)

    def _by_id(self, bags: Distinct, target: Tensor) -> Tensor:
        """Return the same without padding and without copies of shared bags: what is not attention runs by id."""
        states = self.enter(bags.rows)
        lengths, by_bag = bags.offsets.diff(), SamplesByBag.of(bags)
        ages = sines(int(lengths.max()) + 1, self.enter.out_features, states)
        x = states + ages[bags.offsets[1:].repeat_interleave(lengths) - torch.arange(len(states))]
        t = self.enter(target) + ages[0]
        *before, last = cast(list[Layer], list(self.layers))
        for layer in before:
            of_ids = layer.inputs(layer.first(x))
            t = layer.rest(t, attend(layer.inputs(layer.first(t)), of_ids, by_bag, layer.heads))
            x = layer.rest(x, causal(of_ids, bags, layer.heads))
        only = last.inputs.out_features // 3  # nothing asks for the queries of the last layer's ids
        of_ids = functional.linear(last.first(x), last.inputs.weight[only:], last.inputs.bias[only:])
        return self.norm(last.rest(t, attend(last.inputs(last.first(t)), of_ids, by_bag, last.heads)))


class Layer(nn.Module):
    """Attention, then two linear layers, each of the two blocks after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each [.., heads, n, width / heads], of states [.., n, width]."""
        of_heads = self.inputs(self.first(x)).unflatten(-1, (3, self.heads, -1))
        return tuple(part.transpose(-3, -2) for part in of_heads.unbind(-3))

    def rest(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return the next states, [.., width], given the states and what attention returned, [.., width]."""
        x = x + self.output(seen)
        return x + self.down(functional.gelu(self.up(self.second(x))))

    def attend(self, t: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return the next states of targets, [batch, width], which attend to their history and to themselves.

        Keys and values of each sample's history are [batch, heads, n, width / heads]; `mask`, [batch, n], says which are.
        """
        query, own_key, own_value = (part.transpose(0, 1) for part in self.split(t))  # [batch, heads, width / heads]
        query = query * query.shape[-1] ** -0.5
        scores = query[:, :, None] @ keys.transpose(-1, -2)
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)  # [batch, heads, 1, n]
        own = (query * own_key).sum(-1, keepdim=True)[:, :, None]
        of_history, of_own = torch.cat([scores, own], dim=-1).softmax(dim=-1).split([scores.shape[-1], 1], dim=-1)
        seen = of_history @ values + of_own * own_value[:, :, None]
        return self.rest(t[:, None], joined(seen)).squeeze(1)


def causal(of_ids: Tensor, bags: Distinct, heads: int) -> Tensor:
    """Return what each id sees of those before it, [ids, width], given queries, keys and values, [ids, 3 * width]."""
    rows, mask = Distinct(of_ids, bags.offsets, bags.inverse).padded()
    queries, keys, values = (part.transpose(1, 2) for part in rows.unflatten(2, (3, heads, -1)).unbind(2))
    seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return joined(seen).flatten(0, 1).index_select(0, mask.flatten().nonzero()[:, 0])


def joined(of_heads: Tensor) -> Tensor:
    return of_heads.transpose(-3, -2).flatten(-2)


def sines(ages: int, width: int, like: Tensor) -> Tensor:
    """Return a vector for each age from 0, [ages, width]: sines and cosines of wavelengths from 2 pi to 20,000 pi."""
    rates = 10_000 ** -(torch.arange(width // 2, device=like.device, dtype=like.dtype) / max(1, width // 2))
    angles = torch.arange(ages, device=like.device, dtype=like.dtype)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _newest(bags: Distinct, most: int) -> Distinct:
    ends, lengths = bags.offsets[1:], bags.offsets.diff()
    if not bool((lengths > most).any()):
        return bags
    lengths = lengths.clamp(max=most)
    offsets = torch.cat([ends.new_zeros(1), lengths.cumsum(0)])
    shift = (ends - lengths - offsets[:-1]).repeat_interleave(lengths)
    return Distinct(expand(bags.rows, torch.arange(len(shift), device=shift.device) + shift), offsets, bags.inverse)
