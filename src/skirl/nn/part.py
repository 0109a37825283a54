"""A part of a collection as a module: some of its features, as bags or as sequences. All parts share its tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from skirl.core.batch import Sparse
from skirl.core.ids import BadIds
from skirl.core.tables import Pooling, Table
from skirl.nn.output import Pooled, Unpooled, uncompiled


class Bags(Mapping[str, Tensor]):
    """The output of a part with `pooled` for a batch: a [batch, dim] tensor for each feature, by name.

    >>> Bags({"seen": torch.zeros(3, 2)}).stacked().shape
    torch.Size([3, 1, 2])
    """

    def __init__(self, bags: Mapping[str, Tensor]) -> None:
        self._bags = dict(bags)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._bags:
            raise KeyError(f"no feature {name!r}: take one of {', '.join(map(repr, self))}")
        return self._bags[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bags)

    def __len__(self) -> int:
        return len(self._bags)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {list(self[name].shape)}' for name in self)})"

    def stacked(self) -> Tensor:
        """Return all features as one [batch, features, dim] tensor, in table order. All dims must be equal."""
        dims = sorted({bag.shape[-1] for bag in self.values()})
        if len(dims) != 1:
            raise ValueError(f"stacked() needs tables of one dim, these have {dims}: take the features one by one")
        return torch.stack([*self.values()], 1)


class Part(nn.Module):
    """Some features of a collection, looked up in it; made by `collection.part`, which documents the arguments."""

    def __init__(self, of: nn.Module, features: Sequence[str], pooled: Pooling | None) -> None:
        super().__init__()
        everything = [name for table in cast(Any, of).tables for name in table.features]
        if not features:
            raise ValueError(f"part() names no feature: name some of {', '.join(map(repr, everything))}")
        for name in features:
            if name not in everything:
                raise ValueError(
                    f"no feature {name!r} in this collection: name some of {', '.join(map(repr, everything))}"
                )
        if pooled is not None and pooled not in get_args(Pooling):
            raise ValueError(
                f"pooled is {pooled!r}: set it to 'sum' or 'mean', or leave it out for one row for each id"
            )
        if pooled is not None and cast(Any, of).pooled:
            raise ValueError(
                f"pooled is {pooled!r}, and an EmbeddingBagCollection pools as its tables say: leave pooled out, or make "
                "one EmbeddingCollection, whose parts have bags or sequences"
            )
        self.of = of
        self.pooled = pooled
        self.features = tuple(name for name in everything if name in features)
        """In the order of the collection's tables."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of the part, each with only the part's features."""
        chosen = ((table, [name for name in table.features if name in self.features]) for table in self._all)
        return tuple(replace(table, features=tuple(names)) for table, names in chosen if names)

    @property
    def _all(self) -> tuple[Table, ...]:
        return cast(Any, self.of).tables

    @uncompiled
    def forward(self, sparse: Sparse) -> Pooled | Unpooled | Bags:
        """Look up the part's features. Parts of one collection share a lookup, and their gradients make one update."""
        if missing := set(self.features) - set(sparse.keys()):
            have = ", ".join(map(repr, sparse.keys())) or "none"
            raise BadIds(
                f"the batch has no feature {sorted(missing)[0]!r}, which this part looks up, it has {have}: pass it the "
                "batch as it was yielded"
            )
        out = self.of(sparse).only(self.features)
        return out if self.pooled is None else Bags({name: out.pooled(name, self.pooled) for name in out})

    def extra_repr(self) -> str:
        """Return what repr shows."""
        return ", ".join([*map(repr, self.features), *([] if self.pooled is None else [f"pooled={self.pooled!r}"])])
