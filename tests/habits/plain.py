"""One small model in plain PyTorch and over skirl's rows, both in float64, trained by the same loop."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import skirl
from skirl import KeyedJagged, Table
from tests.models.plain import Bags
from tests.streams import jagged

ROWS, DIM, RATE = 50, 3, 0.1
FEATURES = {"user": "user", "clicked": "item", "bought": "item"}
TABLES = [Table("user", ROWS, DIM), Table("item", ROWS, DIM, features=("clicked", "bought"))]


def batches(number: int, samples: int = 8) -> list[KeyedJagged]:
    """Return ids of one user and any number of items per sample."""
    rng = np.random.default_rng(number)
    return [jagged(rng, dict.fromkeys(FEATURES, ROWS), samples, one=["user"]) for _ in range(number)]


def first_rows(table: str) -> Tensor:
    return Tower().rows.rows(table, range(ROWS))


class Tower(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = skirl.EmbeddingBagCollection(
            TABLES, **{"optimizer": skirl.SGD(lr=RATE), "cache": 60, "dtype": torch.float64, **options}
        )
        self.top = top()

    def look_up(self, ids: KeyedJagged) -> dict[str, Tensor]:
        return dict(self.rows(ids))

    def forward(self, ids: KeyedJagged) -> Tensor:
        return loss_of(self.top, self.look_up(ids))


class Plain(nn.Module):
    """The same with `nn.EmbeddingBag`."""

    def __init__(self) -> None:
        super().__init__()
        self.look_up = Bags(Tower().rows)
        self.rows = self.look_up.bags
        self.top = top()

    def forward(self, ids: KeyedJagged) -> Tensor:
        return loss_of(self.top, self.look_up(ids))


def top() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(DIM, 1, dtype=torch.float64)


def loss_of(layer: nn.Linear, out: dict[str, Tensor]) -> Tensor:
    return layer(out["user"] * (out["clicked"] - 2 * out["bought"])).square().sum() + out["clicked"].square().sum()


Forward = Callable[[Any, KeyedJagged], Tensor]


def _forward(model: Any, ids: KeyedJagged) -> Tensor:
    return model(ids)


def train(
    model: Tower | Plain,
    data: list[KeyedJagged],
    *,
    forward: Forward = _forward,
    each: Callable[[int], object] = lambda step: None,
    rows: Any = None,
    accumulate: int = 1,
) -> dict[str, Tensor]:
    """Return all weights after training. each: called before each step; rows: the optimizer of plain rows, if not SGD."""
    optimizers = [torch.optim.SGD(model.top.parameters(), lr=RATE)]
    ahead: Any = nullcontext(data)
    if isinstance(model, Plain):
        optimizers.append(rows or torch.optim.SGD(model.rows.parameters(), lr=RATE))
    else:
        ahead = skirl.lookahead(data, model, sparse=lambda ids: ids, accumulate=accumulate)
    with ahead as loop:
        for step, ids in enumerate(loop):
            each(step)
            forward(model, ids).backward()
            if (step + 1) % accumulate == 0 or step + 1 == len(data):
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    return {**rows_of(model), **{name: p.detach() for name, p in model.top.named_parameters()}}


def rows_of(model: Tower | Plain) -> dict[str, Tensor]:
    if isinstance(model, Plain):
        return {name: table.weight.detach().clone() for name, table in model.rows.items()}  # type: ignore[union-attr]
    return {table.name: model.rows.rows(table.name, range(ROWS)) for table in TABLES}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Assert that all weights agree to float64's last digits."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")
