"""One small model in plain PyTorch and over skirl's rows, both in float64, trained by the same loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import skirl
from skirl import KeyedJagged, Table

ROWS, DIM, RATE = 50, 3, 0.1
FEATURES = {"user": "user", "clicked": "item", "bought": "item"}
TABLES = [Table("user", ROWS, DIM), Table("item", ROWS, DIM, features=("clicked", "bought"))]


def batches(number: int, samples: int = 8) -> list[KeyedJagged]:
    """Return ids of one user and any number of items per sample."""
    chance = torch.Generator().manual_seed(number)
    out = []
    for _ in range(number):
        lengths = torch.cat([torch.ones(samples), torch.randint(0, 4, (2 * samples,), generator=chance)]).long()
        ids = torch.randint(1, ROWS, (int(lengths.sum()),), generator=chance)
        out.append(KeyedJagged(list(FEATURES), ids, lengths=lengths))
    return out


def first_rows(table: str) -> Tensor:
    """Return the initial rows of a table, as skirl makes them."""
    rows = skirl.EmbeddingBagCollection(TABLES, optimizer=skirl.SGD(), cache="100%", dtype=torch.float64)
    feature = next(name for name, of in FEATURES.items() if of == table)
    with torch.no_grad():
        return rows(KeyedJagged.one_hot([feature], torch.arange(ROWS)[:, None]))[feature].clone()


class Tower(nn.Module):
    """A loss over three features, with skirl's rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = skirl.EmbeddingBagCollection(
            TABLES, **{"optimizer": skirl.SGD(lr=RATE), "cache": 70, "dtype": torch.float64, **options}
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
        self.tables = nn.ModuleDict(
            {table.name: nn.EmbeddingBag.from_pretrained(first_rows(table.name), False, mode="sum") for table in TABLES}
        )
        self.top = top()

    def look_up(self, ids: KeyedJagged) -> dict[str, Tensor]:
        out, batch = {}, ids.stride()
        for i, feature in enumerate(ids.keys()):
            offsets = ids.offsets()[i * batch : (i + 1) * batch + 1]
            values = ids.values()[offsets[0] : offsets[-1]]
            out[feature] = self.tables[FEATURES[feature]](values, offsets[:-1] - offsets[0])
        return out

    def forward(self, ids: KeyedJagged) -> Tensor:
        return loss_of(self.top, self.look_up(ids))


def top() -> nn.Linear:
    """Return the dense part, always the same."""
    torch.manual_seed(0)
    return nn.Linear(DIM, 1, dtype=torch.float64)


def loss_of(layer: nn.Linear, out: dict[str, Tensor]) -> Tensor:
    """Return a loss to which each feature contributes."""
    return layer(out["user"] * (out["clicked"] - 2 * out["bought"])).square().sum() + out["clicked"].square().sum()


Forward = Callable[[Any, KeyedJagged], Tensor]


def _forward(model: Any, ids: KeyedJagged) -> Tensor:
    return model(ids)


def skirl_run(data: list[KeyedJagged], *, forward: Forward = _forward, **options: Any) -> dict[str, Tensor]:
    """Return all weights after training with skirl."""
    tower = Tower()
    dense = torch.optim.SGD(tower.parameters(), lr=RATE)
    with skirl.lookahead(data, tower, sparse=lambda ids: ids, **options) as ahead:
        for ids in ahead:
            forward(tower, ids).backward()
            if ahead.ends_step:
                dense.step()
                dense.zero_grad()
    with torch.no_grad():
        every = torch.arange(ROWS)[:, None]
        rows = {t: tower.rows(KeyedJagged.one_hot([f], every))[f].clone() for f, t in FEATURES.items() if f != "bought"}
    return {**rows, **{name: p.detach() for name, p in tower.top.named_parameters()}}


def plain_run(data: list[KeyedJagged], *, forward: Forward = _forward, accumulate: int = 1) -> dict[str, Tensor]:
    """Do the same in plain PyTorch, with one optimizer for rows and dense weights."""
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step, ids in enumerate(data, 1):
        forward(model, ids).backward()
        if step % accumulate == 0 or step == len(data):
            optimizer.step()
            optimizer.zero_grad()
    rows = {name: table.weight.detach() for name, table in model.tables.items()}
    return {**rows, **{name: p.detach() for name, p in model.top.named_parameters()}}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Return whether all weights agree to float64's last digits, and have changed at all."""
    assert ours.keys() == theirs.keys()
    moved = not torch.equal(theirs["item"], first_rows("item"))
    return moved and all(torch.allclose(ours[name], theirs[name], rtol=1e-12, atol=1e-14) for name in ours)
