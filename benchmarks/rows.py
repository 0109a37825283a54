"""Claim: the embedding step is faster than FBGEMM's CPU operator and nn.EmbeddingBag ("Row kernels" in docs/performance.md).

All rows are resident. `vs_X` is the time of X over ours with the oracle's share in ours, `kernels_vs_X` without it: above 1,
skirl is faster. `kept_...` is the same where malloc returns no memory to the system, on all sides. Without FBGEMM its keys
are null. The loops are bound by memory, which neighbours share: run it on a quiet machine.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import geometric_mean, median
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from common import Stopwatch, at_least_one, child, fbgemm, has_fbgemm, main, result
from skirl.core.batch import KeyedJagged
from skirl.core.id_hash import hashes_of
from skirl.core.ids import Captured, Resolver
from skirl.core.keys import key_of, row_of, table_of
from skirl.core.optim import SGD, RowOptimizer, RowwiseAdagrad
from skirl.core.tables import Schema, Table
from skirl.data import Synthetic
from skirl.engine.access import make
from skirl.engine.device.host import array_of
from skirl.engine.work import Micro, Work
from skirl.nn.collection import EmbeddingBagCollection
from skirl.oracle import loops
from skirl.oracle.bank import BankPlanner
from skirl.oracle.distinct import Finder
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step

OPTIMIZERS: dict[str, RowOptimizer] = {"sgd": SGD(lr=0.01), "rowwise-adagrad": RowwiseAdagrad(lr=0.01)}
KEPT = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
"""GLIBC_TUNABLES under which malloc returns no page to the system."""
Memory = Literal["system", "kept"]
OTHERS = ("fbgemm", "embeddingbag")


@dataclass
class SidesBatch:
    """One batch as every side gets it."""

    sparse: KeyedJagged
    step: Step
    """The oracle's Step; its slots are those of contiguous tables, as in the other libraries."""
    micro: Micro

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [features * batch + 1]."""
        return self.sparse.offsets().long()


class Side:
    """A library's embedding step: forward, then backward, which includes the row optimizer."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad

    def forward(self, given: SidesBatch) -> Tensor:
        raise NotImplementedError

    def backward(self, out: Tensor) -> None:
        out.backward(self.grad)

    def output(self, out: Tensor) -> Tensor:
        """Return the output as [batch, features, dim], to compare."""
        return out.detach()

    def weights(self) -> Tensor:
        """Return the weights as [rows of all tables, dim], to compare."""
        raise NotImplementedError


class Skirl(Side):
    """Our module, with all rows in its cache: slot = id + the rows of earlier tables."""

    def __init__(self, tables: list[Table], optimizer: RowOptimizer, grad: Tensor) -> None:
        self.module = EmbeddingBagCollection(tables, optimizer=optimizer, cache=sum(t.rows for t in tables))
        engine = self.module.engine
        rows = sum(table.rows for table in tables)
        engine.make_caches([rows], [1], in_flight=1)
        keys = np.concatenate([key_of(i, np.arange(t.rows, dtype=np.int64)) for i, t in enumerate(tables)])
        make(engine, 0, keys, np.arange(rows, dtype=np.int32), array_of(engine.banks[0]))
        self.module.opened(cast(Any, self))  # acts as a lookahead, which says which step is next
        super().__init__(grad)

    def forward(self, given: SidesBatch) -> Tensor:
        given.micro.entered = given.micro.returned = False
        given.micro.captured.hashes = given.micro.captured.hashes or hashes_of(given.micro.captured)
        self.module.current.expect(Work(given.step.number, [given.micro], [given.step]), 0)
        return self.module(given.sparse).stacked()

    def coming(self) -> list[Captured]:
        """Return no batches, like a lookahead that has read no further."""
        return []

    def weights(self) -> Tensor:
        engine = self.module.engine
        return torch.from_numpy(array_of(engine.banks[0]))[:, : engine.schema.banks[0].dim]


class Fbgemm(Side):
    """FBGEMM's table-batched operator on the CPU: all tables in one call, optimizer in its backward."""

    def __init__(self, tables: list[Table], optimizer: RowOptimizer, grad: Tensor, weights: Tensor) -> None:
        rowwise = not isinstance(optimizer, SGD)
        self.module = fbgemm(tables, lr=optimizer.lr, rowwise=rowwise, eps=getattr(optimizer, "eps", 0.0))
        self.shape = grad.shape
        super().__init__(grad.reshape(len(grad), -1))
        begin = 0
        for mine in self.module.split_embedding_weights():
            mine.copy_(weights[begin : begin + len(mine)])
            begin += len(mine)

    def forward(self, given: SidesBatch) -> Tensor:
        return self.module(given.sparse.values(), given.offsets)

    def output(self, out: Tensor) -> Tensor:
        return out.detach().reshape(self.shape)

    def weights(self) -> Tensor:
        return torch.cat(self.module.split_embedding_weights())


class TorchBags(Side):
    """One nn.EmbeddingBag per table with sparse gradients, and torch.optim.SGD.

    The outputs are stacked to [batch, features, dim], since the other sides produce that without further work.
    """

    def __init__(self, tables: list[Table], optimizer: RowOptimizer, grad: Tensor, weights: Tensor) -> None:
        parts = weights.split([table.rows for table in tables])
        self.bags = [
            nn.EmbeddingBag.from_pretrained(
                part.clone(), freeze=False, mode="sum", sparse=True, include_last_offset=True
            )
            for part in parts
        ]
        self.sgd = torch.optim.SGD([bag.weight for bag in self.bags], lr=optimizer.lr)
        super().__init__(grad)
        self._inputs: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def forward(self, given: SidesBatch) -> Tensor:
        inputs = self._inputs.get(id(given)) or self._inputs.setdefault(id(given), self._split(given))
        return torch.stack([bag(ids, offsets) for bag, (ids, offsets) in zip(self.bags, inputs, strict=True)], 1)

    def backward(self, out: Tensor) -> None:
        out.backward(self.grad)
        self.sgd.step()
        self.sgd.zero_grad()

    def weights(self) -> Tensor:
        return torch.cat([bag.weight.detach() for bag in self.bags])

    def _split(self, given: SidesBatch) -> list[tuple[Tensor, Tensor]]:
        batch, values, offsets = len(self.grad), given.sparse.values(), given.offsets
        starts = [offsets[f * batch : (f + 1) * batch + 1] for f in range(len(self.bags))]
        return [(values[int(s[0]) : int(s[-1])], s - s[0]) for s in starts]


@dataclass(frozen=True)
class RowsSpeed:
    """Time of the embedding step against FBGEMM's CPU operator and nn.EmbeddingBag, with all rows resident."""

    batch: tuple[int, ...] = (2048, 8192)
    """Samples in a batch."""
    dim: tuple[int, ...] = (16, 48, 64)
    """Numbers in a row."""
    optimizer: tuple[Literal["sgd", "rowwise-adagrad"], ...] = ("sgd", "rowwise-adagrad")
    """The row optimizers to time."""
    pooling: tuple[int, ...] = (1, 4)
    """Ids in a bag: 1 is exactly one; more is the mean of 0 to twice as many, measured for the smallest batch only."""
    data: Literal["tiny", "avazu", "criteo-kaggle"] = "criteo-kaggle"
    """The data set whose table sizes and skew to use."""
    rows_scale: float = 0.1
    """Multiply the rows of each table by this. The default gives 3.4 million rows, 0.9 GB per side at dim 64."""
    rounds: int = 15
    """Timed steps per side, over four batches in turn."""
    memory: tuple[Memory, ...] = ("system", "kept")
    """The allocator of all sides: system is malloc as it is, kept never returns memory to the system. The first one
    named gives the overall figures."""
    threads: int = 1
    """Threads of every side."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "rounds", "threads")
        if any(dim % 4 for dim in self.dim):
            raise ValueError(f"dim is {self.dim}: FBGEMM takes only multiples of 4, so set it to those")

    def run(self) -> dict[str, Any]:
        """Measure every case, in one child process per allocator."""
        first, *others = [self._child(memory) for memory in self.memory]
        cases = first.pop("cases")
        for more in others:
            cases += more["cases"]
            first |= {f"{more['memory']}_{key}": value for key, value in more.items() if "_vs_" in f"_{key}"}
        return first | {"memory": list(self.memory), "cases": cases}

    def _child(self, memory: Memory) -> dict[str, Any]:
        flags = json.dumps(asdict(self) | {"memory": [memory], "record": None})
        env = {"GLIBC_TUNABLES": KEPT} if memory == "kept" else {}
        return child([__file__, "child", flags], env)

    def measure(self) -> dict[str, Any]:
        """Measure every case in this process, with its allocator."""

        torch.set_num_threads(self.threads)
        cases = []
        for pooling in self.pooling:
            for batch in self.batch if pooling == 1 else [min(self.batch)]:
                for dim in self.dim:
                    for optimizer in self.optimizer:
                        case = _Case(self, batch, dim, optimizer, pooling)
                        cases.append(case.measure())
        return result(
            "rows", self, "threads data rounds", memory=self.memory[0], **_overall(cases), cases=cases,
            rows=sum(Synthetic(self.data, rows_scale=self.rows_scale).rows.values()),
            missing=None if has_fbgemm() else "fbgemm: not installed",
        )  # fmt: skip


def _overall(cases: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return geometric means and minima of the ratios over the cases that have the other library."""
    facts: dict[str, float | None] = {}
    for other in OTHERS:
        for key in (f"vs_{other}", f"kernels_vs_{other}"):
            ratios = [case[key] for case in cases if case[key] is not None]
            facts[f"{key}_geomean"] = round(geometric_mean(ratios), 3) if ratios else None
            facts[f"{key}_min"] = min(ratios) if ratios else None
    return facts


class _Case:
    """The measurement of one batch size, dim, optimizer and pooling."""

    def __init__(self, bench: RowsSpeed, batch: int, dim: int, optimizer: str, pooling: int) -> None:

        self.bench = bench
        self.named = {"memory": bench.memory[0], "batch": batch, "dim": dim, "optimizer": optimizer, "pooling": pooling}
        data = Synthetic(bench.data, batch_size=batch, rows_scale=bench.rows_scale, pooling_factor=pooling)
        tables = data.tables(dim)
        features = len(tables)
        self.grad = torch.empty(batch, features, dim).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
        ours = Skirl(tables, OPTIMIZERS[optimizer], self.grad)
        self.sides: dict[str, Side] = {"skirl": ours}
        if has_fbgemm():
            self.sides["fbgemm"] = Fbgemm(tables, OPTIMIZERS[optimizer], self.grad, ours.weights())
        if optimizer == "sgd":
            self.sides["embeddingbag"] = TorchBags(tables, OPTIMIZERS[optimizer], self.grad, ours.weights())
        self.given = [_given(data.batch(i).sparse, tables, i) for i in range(4)]
        self.groupings = [_grouping(given, tables) for given in self.given]

    def measure(self) -> dict[str, Any]:
        """Return the milliseconds of each side and the medians of the ratios. Raise if the sides disagree."""

        rounds: list[dict[str, float]] = []
        for number in range(-len(self.given), self.bench.rounds):  # below 0: steps that compile and touch memory
            given, group = self.given[number % len(self.given)], self.groupings[number % len(self.given)]
            names = list(self.sides)
            turn = number % len(names)
            outs, took = {}, {"group": _time(group)[0]}
            for name in names[turn:] + names[:turn]:
                side = self.sides[name]
                took[f"{name}_forward"], out = _time(side.forward, given)
                took[f"{name}_backward"], _ = _time(side.backward, out)
                took[name] = took[f"{name}_forward"] + took[f"{name}_backward"]
                outs[name] = side.output(out) if number < 0 else None
                del out
            if number < 0:
                self._compare("outputs", outs)
            else:
                rounds.append(took)
        self._compare("rows", {name: side.weights() for name, side in self.sides.items()})
        return self._facts(rounds)

    def _facts(self, rounds: list[dict[str, float]]) -> dict[str, Any]:
        ms = {name: round(median(r[name] for r in rounds) * 1e3, 3) for name in rounds[0]}
        ms["kernels"], ms["skirl"] = ms["skirl"], round(median(r["skirl"] + r["group"] for r in rounds) * 1e3, 3)
        facts: dict[str, Any] = {**self.named, "ids": len(self.given[0].step.slots), "ms": ms}
        for other in OTHERS:
            has = other in self.sides
            facts[f"vs_{other}"] = (
                round(median(r[other] / (r["skirl"] + r["group"]) for r in rounds), 3) if has else None
            )
            facts[f"kernels_vs_{other}"] = round(median(r[other] / r["skirl"] for r in rounds), 3) if has else None
        return facts

    def _compare(self, what: str, outs: dict[str, Tensor]) -> None:

        ours = outs["skirl"]
        for name, theirs in outs.items():
            if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4):
                worst = float((ours - theirs).abs().max())
                raise AssertionError(
                    f"{what} of skirl and {name} differ by {worst:g} in {self.named}: no ratio is given"
                )


def _given(sparse: KeyedJagged, tables: list[Table], number: int) -> SidesBatch:
    """Return a batch and its Step, with slots laid out like the other libraries' tables."""

    schema = Schema.of(tables)
    resolver = Resolver(schema, np.dtype(np.float32), pooled=True)
    micro = Micro.of(resolver.capture(sparse), resolver)
    planner = BankPlanner(schema, 0, capacity=micro.ids[0].count, depth=1, seen=Seen(schema))
    planner.enter(micro.positions[0])
    step = planner.plan()
    base = np.cumsum([0, *(table.rows for table in tables)])
    step.rows = (base[table_of(step.keys)] + row_of(step.keys)).astype(np.int32)
    step.slots[step.group_pos] = np.repeat(step.rows, np.diff(step.group_start))
    step.number = number
    return SidesBatch(sparse, step, micro)


def _grouping(given: SidesBatch, tables: list[Table]) -> Callable[[], Any]:
    """Return a call of what the planner does instead of FBGEMM's sort: find the distinct rows, group positions by them."""

    batch, whole = given.micro.ids[0].positions, np.array([0, len(tables)])
    finder = Finder(Schema.of(tables), 0)
    rows, ids = given.step.rows, len(batch)

    def group() -> None:
        layout, distinct = finder.find_all(batch)
        out = (np.empty(ids, np.int32), np.empty(len(rows) + 1, np.int32), np.empty(ids, np.int32))
        loops.group(whole, layout.parts, layout.first, layout.at, distinct.first, distinct.row_of, rows, *out, 0, 1)

    return group


def _time(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    with Stopwatch() as watch:
        out = call(*args)
    return watch.seconds, out


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(sys.argv[2]).items()}
        given.pop("record", None)
        print(json.dumps(RowsSpeed(**given).measure()))
    else:
        main(RowsSpeed)
