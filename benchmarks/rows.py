"""Claim: the embedding step is faster than FBGEMM's CPU operator and nn.EmbeddingBag ("Row kernels" in docs/performance.md).

All rows are resident. `vs_X` is the time of X over ours with the oracle's share in ours, `kernels_vs_X` without it: above 1,
skirl is faster. Without FBGEMM its keys are null. The loops are bound by memory, which neighbours share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, product
from statistics import median
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from common import Bench, FbgemmTables, TorchTables, has_fbgemm, in_turns, main, ratio, result
from skirl.core.batch import KeyedJagged
from skirl.core.ids import Ids, Resolver, hashes_of
from skirl.core.keys import key_of, row_of, table_of
from skirl.core.optim import SGD, RowOptimizer, RowwiseAdagrad
from skirl.core.tables import Schema, Table
from skirl.data import Synthetic
from skirl.engine.work import Work
from skirl.nn.collection import EmbeddingBagCollection
from skirl.oracle import loops
from skirl.oracle.bank import BankPlanner
from skirl.oracle.distinct import Finder
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step

OPTIMIZERS: dict[str, RowOptimizer] = {"sgd": SGD(lr=0.01), "rowwise-adagrad": RowwiseAdagrad(lr=0.01)}


@dataclass
class Given:
    """One batch as every side gets it."""

    sparse: KeyedJagged
    step: Step
    """The oracle's Step; its slots are those of contiguous tables, as in the other libraries."""
    micro: Ids


class Skirl:
    """Our module, with all rows in its cache: slot = id + the rows of earlier tables."""

    def __init__(self, tables: list[Table], optimizer: RowOptimizer) -> None:
        self.module = EmbeddingBagCollection(tables, optimizer=optimizer, cache=sum(t.rows for t in tables))
        engine = self.module.engine
        rows = sum(table.rows for table in tables)
        engine.allocate(engine.capacity.decide([[1]], [rows], in_flight=1))
        keys = np.concatenate([key_of(i, np.arange(t.rows, dtype=np.int64)) for i, t in enumerate(tables)])
        engine.banks[0].write(np.arange(rows), engine.begin(0, keys))
        self.module.opened(cast(Any, self))  # acts as a lookahead, which says which step is next

    def __call__(self, given: Given) -> Any:
        given.micro.returned = False
        given.micro.hashes = given.micro.hashes or hashes_of(given.micro)
        self.module.current.expect(Work([given.micro], given.step.number, [given.step]), 0)
        return self.module(given.sparse)

    def coming(self) -> list[Ids]:
        """Return no batches, like a lookahead that has read no further."""
        return []

    def weights(self) -> Tensor:
        engine = self.module.engine
        return torch.from_numpy(engine.banks[0].array)[:, : engine.schema.banks[0].dim]


@dataclass(frozen=True)
class RowsSpeed(Bench):
    """Time of the embedding step against FBGEMM's CPU operator and nn.EmbeddingBag, with all rows resident."""

    batch: tuple[int, ...] = (2048, 8192)
    """Samples in a batch."""
    dim: tuple[int, ...] = (16, 64)
    """Numbers in a row."""
    optimizer: tuple[Literal["sgd", "rowwise-adagrad"], ...] = ("sgd", "rowwise-adagrad")
    """The row optimizers to time."""
    data: str = "criteo-kaggle"
    """The data set whose table sizes and skew to use."""
    rows_scale: float = 0.1
    """Multiply the rows of each table by this. The default gives 3.4 million rows, 0.9 GB per side at dim 64."""
    rounds: int = 15
    """Timed steps per side, over four batches in turn."""

    def run(self) -> dict[str, Any]:
        torch.set_num_threads(1)
        each = product(self.batch, self.dim, self.optimizer)
        return result(
            "rows", self, "data rounds", cases=[_Case(self, *case).measure() for case in each],
            rows=sum(Synthetic(self.data, rows_scale=self.rows_scale).rows.values()),
        )  # fmt: skip


class _Case:
    """The measurement of one batch size, dim and optimizer."""

    def __init__(self, bench: RowsSpeed, batch: int, dim: int, name: str) -> None:
        self.named, self.rounds = {"batch": batch, "dim": dim, "optimizer": name}, bench.rounds
        data = Synthetic(bench.data, batch_size=batch, rows_scale=bench.rows_scale)
        tables, optimizer = data.tables(dim), OPTIMIZERS[name]
        self.grad = torch.empty(batch, len(tables), dim).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
        self.given = [_given(data.batch(i).sparse, tables, i) for i in range(4)]
        self.groupings = [_grouping(given, tables) for given in self.given]
        ours = Skirl(tables, optimizer)
        self.sides: dict[str, Any] = {"skirl": ours}
        weights = ours.weights().split([table.rows for table in tables])
        if has_fbgemm():
            rowwise, eps = not isinstance(optimizer, SGD), getattr(optimizer, "eps", 0.0)
            self.sides["fbgemm"] = FbgemmTables(tables, weights, lr=optimizer.lr, rowwise=rowwise, eps=eps)
        if isinstance(optimizer, SGD):
            bags = self.sides["embeddingbag"] = TorchTables(tables, (part.clone() for part in weights))
            self.sgd = torch.optim.SGD(bags.parameters(), lr=optimizer.lr)

    def measure(self) -> dict[str, Any]:
        """Return the milliseconds of each side and the medians of the ratios. Raise if the sides disagree."""
        for given, group in zip(self.given, self.groupings, strict=True):  # compiles, and touches memory
            group()
            self._compare("outputs", {name: self._step(name, given) for name in self.sides})
        turns, groupings = {name: cycle(self.given) for name in self.sides}, cycle(self.groupings)
        sides: dict[str, Any] = {"group": lambda: next(groupings)()}
        sides |= {name: lambda name=name: self._step(name, next(turns[name])) for name in self.sides}
        took = {name: [one.seconds for one in of] for name, of in in_turns(sides, self.rounds, untimed=0).items()}
        self._compare("rows", {name: side.weights() for name, side in self.sides.items()})
        both = [step + group for step, group in zip(took["skirl"], took["group"], strict=True)]
        facts = {**self.named, "ms": {name: 1e3 * median(of) for name, of in took.items()}}
        for other in ("fbgemm", "embeddingbag"):
            facts[f"vs_{other}"] = ratio(took.get(other), both)
            facts[f"kernels_vs_{other}"] = ratio(took.get(other), took["skirl"])
        return facts

    def _step(self, name: str, given: Given) -> Tensor:
        """Forward, then backward, which includes the row optimizer. Return the output [batch, features, dim]."""
        out = self.sides[name](given if name == "skirl" else given.sparse).stacked()
        out.backward(self.grad)
        if name == "embeddingbag":
            self.sgd.step()
            self.sgd.zero_grad()
        return out.detach()

    def _compare(self, what: str, found: dict[str, Tensor]) -> None:
        for name, theirs in found.items():
            torch.testing.assert_close(
                found["skirl"], theirs, rtol=1e-3, atol=1e-4,
                msg=lambda text, name=name: f"{what} of skirl and {name} differ in {self.named}: no ratio is given. {text}",
            )  # fmt: skip


def _given(sparse: KeyedJagged, tables: list[Table], number: int) -> Given:
    """Return a batch and its Step, with slots laid out like the other libraries' tables."""
    schema = Schema.of(tables)
    resolver = Resolver(schema, np.dtype(np.float32), pooled=True)
    micro = resolver.resolve(resolver.check(resolver.capture(sparse)))
    planner = BankPlanner(schema, 0, capacity=micro.banks[0].count, depth=1, seen=Seen(schema))
    planner.enter(micro.banks[0])
    step = planner.plan()
    base = np.cumsum([0, *(table.rows for table in tables)])
    step.rows = (base[table_of(step.keys)] + row_of(step.keys)).astype(np.int32)
    step.slots[step.group_pos] = np.repeat(step.rows, np.diff(step.group_start))
    step.number = number
    return Given(sparse, step, micro)


def _grouping(given: Given, tables: list[Table]) -> Callable[[], Any]:
    """Return a call of what the planner does instead of FBGEMM's sort: find the distinct rows, group positions by them."""
    batch = given.micro.banks[0]
    finder = Finder(Schema.of(tables), 0)
    rows, ids = given.step.rows, batch.count

    def group() -> None:
        distinct = finder.find(batch)
        out = (np.empty(ids, np.int32), np.empty(len(rows) + 1, np.int32), np.empty(ids, np.int32))
        loops.group(distinct.parts, distinct.part_at, distinct.at, distinct.first, distinct.row_of, rows, *out)

    return group


if __name__ == "__main__":
    main(RowsSpeed)
