"""A model over two tables with the same dim, with skirl's rows and with `nn.EmbeddingBag`, both in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import skirl
from skirl.core.initial import first_rows

ROWS, DIM = 40, 3
NAMES = ["user", "item"]
TABLES = [skirl.Table(name, ROWS, DIM) for name in NAMES]
EVERY = skirl.KeyedJagged.one_hot(NAMES, torch.arange(ROWS)[:, None].expand(ROWS, 2))


def loader(steps: int = 12, seed: int = 0) -> list[skirl.KeyedJagged]:
    chance = torch.Generator().manual_seed(seed)
    return [
        skirl.KeyedJagged.one_hot(NAMES, torch.randint(0, ROWS, (6, 2), generator=chance).sort(0).values)
        for _ in range(steps)
    ]


class Model(nn.Module):
    """A dense layer over the rows of both tables."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        torch.manual_seed(0)
        self.top = nn.Linear(2 * DIM, 1, dtype=torch.float64)

    def forward(self, ids: skirl.KeyedJagged) -> Tensor:
        out = self.rows(ids)
        return self.top(torch.cat([out[name] for name in NAMES], 1)).square().sum()


class Bags(nn.Module):
    """The same rows in nn.EmbeddingBag."""

    def __init__(self) -> None:
        super().__init__()
        keys = [np.arange(ROWS) | t << 48 for t in range(2)]
        weights = [torch.from_numpy(first_rows(k, TABLES[0].initial, DIM, 1, np.float64)) for k in keys]
        self.bags = nn.ModuleDict(
            {name: nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=w) for name, w in zip(NAMES, weights, strict=True)}
        )

    def forward(self, ids: skirl.KeyedJagged) -> dict[str, Tensor]:
        return {
            name: self.bags[name](part[:, None]) for name, part in zip(NAMES, ids.values().view(2, -1), strict=True)
        }


def collection(optimizer: Any = None, cache: int | str = 16, **options: Any) -> skirl.EmbeddingBagCollection:
    return skirl.EmbeddingBagCollection(
        TABLES, optimizer=optimizer or skirl.SGD(lr=0.1), cache=cache, seed=1, dtype=torch.float64, **options
    )


def rows_of(model: Model) -> dict[str, Tensor]:
    """Return every row, by table."""
    with torch.no_grad():
        return {name: rows.clone() for name, rows in model.rows(EVERY).items()}


def train(
    model: Model,
    *,
    each: Callable[[int], object] = lambda step: None,
    rows: Any = None,
    loss: Any = None,
    steps: int = 12,
) -> dict[str, Tensor]:
    """Return the weights after some steps. each: called before each step; rows: an optimizer of plain rows; loss: of
    model and ids."""
    dense = torch.optim.SGD(model.top.parameters(), lr=0.1)
    ours = isinstance(model.rows, skirl.EmbeddingBagCollection)
    data = loader(steps)
    with skirl.lookahead(data, model, sparse=lambda ids: ids, depth=3) if ours else _plainly(data) as batches:
        for step, ids in enumerate(batches):
            each(step)
            (loss or (lambda model, ids: model(ids)))(model, ids).backward()
            for optimizer in (dense, rows):
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
    return {**rows_of(model), **{name: p.detach() for name, p in model.top.named_parameters()}}


class _plainly(list[Any]):
    def __enter__(self) -> "_plainly":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
