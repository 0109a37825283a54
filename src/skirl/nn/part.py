"""A part of a collection as a module: some of its features, as bags or as sequences. All parts share its tables."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast, get_args

from torch import nn

from skirl.core.batch import Sparse
from skirl.core.ids import BadIds
from skirl.core.tables import Pooling, Table
from skirl.nn.output import Output, uncompiled


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
    def forward(self, sparse: Sparse) -> Output:
        """Look up the part's features. Parts of one collection share a lookup, and their gradients make one update."""
        if missing := set(self.features) - set(sparse.keys()):
            have = ", ".join(map(repr, sparse.keys())) or "none"
            raise BadIds(
                f"the batch has no feature {sorted(missing)[0]!r}, which this part looks up, it has {have}: pass it the "
                "batch as it was yielded"
            )
        return self.of(sparse).only(self.features).pooling(self.pooled)

    def extra_repr(self) -> str:
        """Return what repr shows."""
        return ", ".join([*map(repr, self.features), *([] if self.pooled is None else [f"pooled={self.pooled!r}"])])
