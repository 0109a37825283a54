"""The embedding step of `skirl bench rows`, by skirl and by other libraries: a class per side, all driven alike."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from skirl.core.batch import KeyedJagged
from skirl.core.id_hash import hashes_of
from skirl.core.ids import Captured
from skirl.core.keys import key_of
from skirl.core.optim import SGD, RowOptimizer
from skirl.core.tables import Table
from skirl.engine.access import make
from skirl.engine.device.host import array_of
from skirl.engine.work import Micro, Work
from skirl.measure.bench.others import fbgemm
from skirl.nn.collection import EmbeddingBagCollection
from skirl.oracle.step import Step


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


class Side(Protocol):
    """A library's embedding step: forward, then backward, which includes the row optimizer."""

    def forward(self, given: SidesBatch) -> Tensor: ...

    def backward(self, out: Tensor) -> None: ...

    def output(self, out: Tensor) -> Tensor:
        """Return the output as [batch, features, dim], to compare."""
        ...

    def weights(self) -> Tensor:
        """Return the weights as [rows of all tables, dim], to compare."""
        ...


class Skirl:
    """Our module, with all rows in its cache: slot = id + the rows of earlier tables."""

    def __init__(self, tables: list[Table], optimizer: RowOptimizer, grad: Tensor) -> None:
        self.module = EmbeddingBagCollection(tables, optimizer=optimizer, cache=sum(t.rows for t in tables))
        engine = self.module.engine
        rows = sum(table.rows for table in tables)
        engine.make_caches([rows], [1], in_flight=1)
        keys = np.concatenate([key_of(i, np.arange(t.rows, dtype=np.int64)) for i, t in enumerate(tables)])
        make(engine, 0, keys, np.arange(rows, dtype=np.int32), array_of(engine.banks[0]))
        self.module.opened(cast(Any, self))  # acts as a lookahead, which says which step is next
        self.grad = grad

    def forward(self, given: SidesBatch) -> Tensor:
        given.micro.entered = given.micro.returned = False
        given.micro.captured.hashes = given.micro.captured.hashes or hashes_of(given.micro.captured)
        self.module.current.expect(Work(given.step.number, [given.micro], [given.step]), 0)
        return self.module(given.sparse).stacked()

    def backward(self, out: Tensor) -> None:
        out.backward(self.grad)

    def coming(self) -> list[Captured]:
        """Return no batches, like a lookahead that has read no further."""
        return []

    def output(self, out: Tensor) -> Tensor:
        return out.detach()

    def weights(self) -> Tensor:
        engine = self.module.engine
        return torch.from_numpy(array_of(engine.banks[0]))[:, : engine.schema.banks[0].dim]


class Fbgemm:
    """FBGEMM's table-batched operator on the CPU: all tables in one call, optimizer in its backward."""

    def __init__(self, tables: list[Table], optimizer: RowOptimizer, grad: Tensor, weights: Tensor) -> None:
        rowwise = not isinstance(optimizer, SGD)
        self.module = fbgemm(tables, lr=optimizer.lr, rowwise=rowwise, eps=getattr(optimizer, "eps", 0.0))
        self.shape = grad.shape
        self.grad = grad.reshape(len(grad), -1)
        begin = 0
        for mine in self.module.split_embedding_weights():
            mine.copy_(weights[begin : begin + len(mine)])
            begin += len(mine)

    def forward(self, given: SidesBatch) -> Tensor:
        return self.module(given.sparse.values(), given.offsets)

    def backward(self, out: Tensor) -> None:
        out.backward(self.grad)

    def output(self, out: Tensor) -> Tensor:
        return out.detach().reshape(self.shape)

    def weights(self) -> Tensor:
        return torch.cat(self.module.split_embedding_weights())


class TorchBags:
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
        self.grad = grad
        self._inputs: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def forward(self, given: SidesBatch) -> Tensor:
        inputs = self._inputs.get(id(given)) or self._inputs.setdefault(id(given), self._split(given))
        return torch.stack([bag(ids, offsets) for bag, (ids, offsets) in zip(self.bags, inputs, strict=True)], 1)

    def backward(self, out: Tensor) -> None:
        out.backward(self.grad)
        self.sgd.step()
        self.sgd.zero_grad()

    def output(self, out: Tensor) -> Tensor:
        return out.detach()

    def weights(self) -> Tensor:
        return torch.cat([bag.weight.detach() for bag in self.bags])

    def _split(self, given: SidesBatch) -> list[tuple[Tensor, Tensor]]:
        batch, values, offsets = len(self.grad), given.sparse.values(), given.offsets
        starts = [offsets[f * batch : (f + 1) * batch + 1] for f in range(len(self.bags))]
        return [(values[int(s[0]) : int(s[-1])], s - s[0]) for s in starts]
