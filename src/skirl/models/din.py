"""Deep Interest Network: past actions count by their relevance to the target (Zhou et al., arXiv 1706.06978)."""

from collections.abc import Sequence
from typing import ClassVar, cast

from torch import Tensor, nn

from skirl.core.once import Distinct
from skirl.models.base import Embeddings, fit, last, linear, mlp
from skirl.models.history import OfHistory, SamplesByBag, owners, sums
from skirl.models.weighing import interests


class DIN(OfHistory):
    """DIN over any embeddings module; `forward` returns logits. The defaults are the paper's sizes.

        target t         the row of the item shown                      behaviour h_1 .. h_n: rows of past actions
        activation a_i   A h_i + B t + C (h_i * t) + b -> PReLU -> linear -> a number
        interest         sum of a_i h_i, not normalised: many relevant actions count for more than one
        logit            [dense, all vectors, the interests] -> MLP with PReLU -> linear

    A list is the behaviour of the single feature that has the same table, such as `table = "item"` for both `item` and
    `clicked` in a schema, and has an activation unit of its own; other lists are pooled as their table says. Without such a
    pair, as in Criteo and Avazu, the feature of the largest table is the target and the others are the behaviour.

    If samples share bags, on a CPU the targets of a bag share a product: (A + C t) h for all of them at once.

    **Arguments** beside those of `Model`

    - `embeddings`: looks up ids. If a list shares its table with a single feature, an `EmbeddingCollection`, which does
      not pool; otherwise an `EmbeddingBagCollection`.
    - `lists`: the features with any number of ids per sample; none by default, as in Criteo.
    - `activation`: width of the activation unit; 36 as in the paper.
    - `deep`: hidden layers; (200, 80) as in the paper.

    >>> import skirl, torch
    >>> tables = [skirl.Table("item", rows=50, dim=8, features=("item", "clicked")), skirl.Table("user", rows=100, dim=8)]
    >>> DIN.pairs(tables, lists=["clicked"])
    {'clicked': 'item'}
    >>> rows = skirl.EmbeddingCollection(tables, optimizer=skirl.SGD(lr=0.1), cache=100)
    >>> model = DIN(rows, dense_features=4, lists=["clicked"])
    >>> ids = skirl.KeyedJagged(["item", "clicked", "user"], torch.arange(8), lengths=torch.tensor([1, 1, 0, 4, 1, 1]))
    >>> model(skirl.Batch(dense=torch.zeros(2, 4), sparse=ids, labels=torch.zeros(2))).shape
    torch.Size([2])
    """

    name = "DIN"
    small: ClassVar = {"activation": 8, "deep": (32, 16)}

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        lists: Sequence[str] = (),
        activation: int = 36,
        deep: Sequence[int] = (200, 80),
    ) -> None:
        super().__init__(embeddings, dense_features, lists)
        self.units = nn.ModuleList(ActivationUnit(self.dim, activation) for _ in range(self.attended))
        width = dense_features + (self.vectors - len(self.history) + self.attended) * self.dim
        self.deep = mlp(width, *deep, activation=nn.PReLU)
        self.head = linear(last(deep, width), 1)

    def attend(self, number: int, lists: Distinct, target: Tensor) -> Tensor:
        return _interest(cast(ActivationUnit, self.units[number]), lists, target)

    def attend_to_features(self, others: Tensor, target: Tensor) -> Tensor:
        return (self.units[0](others, target[:, None]) * others).sum(dim=1)


class ActivationUnit(nn.Module):
    """Computes how much each past action counts for a target."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.of_behaviour = linear(dim, width)
        self.of_target = linear(dim, width, bias=False)
        self.of_product = linear(dim, width, bias=False)
        self.rest = nn.Sequential(nn.PReLU(), linear(width, 1))

    def forward(self, h: Tensor, t: Tensor) -> Tensor:
        """Return the activations, [.., 1], of past actions `h`, [.., dim], for targets `t` that broadcast with them."""
        return self.rest(self.of_behaviour(h) + self.of_target(t) + self.of_product(h * t))

    def matrices(self, t: Tensor) -> Tensor:
        """Return A + C t, [.., width, dim], of targets, [.., dim]."""
        return self.of_behaviour.weight + self.of_product.weight * t[..., None, :]

    def interests(self, bags: Distinct, t: Tensor) -> Tensor:
        """Return the interests, [batch, dim], of targets, [batch, dim], in their lists, by our own loops."""
        prelu, last = cast(nn.PReLU, self.rest[0]), cast(nn.Linear, self.rest[1])
        hidden = self.of_target(t) + self.of_behaviour.bias
        by_bag = SamplesByBag.of(bags)
        return interests(bags.rows, self.matrices(t), hidden, prelu.weight, last.weight[0], last.bias, by_bag)


def _interest(unit: ActivationUnit, lists: Distinct, target: Tensor) -> Tensor:
    """Sum each sample's history, weighted by how much each id counts for the sample's target: [batch, dim]."""
    if lists.plain:
        lengths, h = lists.offsets.diff(), lists.rows
        sample = owners(lengths, h.device)
        return sums(unit(h, target.index_select(0, sample)) * h, sample, len(lengths))
    if fit(lists.rows, target):
        return unit.interests(lists, target)
    h = lists.for_samples(lists.padded()[0])  # padding is zeros, so its activations add nothing
    hidden = unit.matrices(target) @ h.transpose(1, 2)  # [batch, width, n]
    hidden = unit.rest[0](hidden + (unit.of_target(target) + unit.of_behaviour.bias)[:, :, None])
    return ((unit.rest[1].weight @ hidden + unit.rest[1].bias) @ h).squeeze(1)
