"""A small TorchRec model and the same in plain torch, to compare what a plan trains under DistributedModelParallel."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skirl.placement.tables.pool import Head, ids_of
from skirl.placement.tables.spec import TableSpec

LR, EPS = 0.1, 1e-8
DENSE = 13
"""Dense features of a sample."""


@dataclass(frozen=True)
class TrainedTable:
    """A table and how its ids are made. Each table has one feature, of the same name.

    **Arguments**

    - `name`, `rows`, `dim`: of the table.
    - `pooling`: ids of a sample, on average.
    - `head`: how many of its rows are looked up alike, before Zipf's law begins; None: nothing is known of it.
    """

    name: str
    rows: int
    dim: int
    pooling: float
    head: Head

    def ids(self, batch: int, seed: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a batch, and how many each sample has.

        **Arguments**

        - `batch`: samples.
        - `seed`: the random seed.
        """
        rng = np.random.default_rng(seed)
        count = max(1, round(batch * self.pooling))
        lengths = np.bincount(rng.integers(0, batch, count), minlength=batch)
        return ids_of(TableSpec(self.name, self.rows, self.dim, batch, float(count), 1.0), self.head, rng), lengths


def batch_of(tables: Sequence[TrainedTable], batch: int, seed: Sequence[int]) -> tuple[Any, Tensor, Tensor]:
    """Return ids as a KeyedJaggedTensor, dense features and labels.

    **Arguments**

    - `tables`: tables to look up.
    - `batch`: samples.
    - `seed`: the random seed.
    """
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    parts = [table.ids(batch, [*seed, n]) for n, table in enumerate(tables)]
    rng = np.random.default_rng([*seed, len(tables)])
    kjt = KeyedJaggedTensor(
        keys=[table.name for table in tables],
        values=torch.from_numpy(np.concatenate([ids for ids, _ in parts])),
        lengths=torch.from_numpy(np.concatenate([lengths for _, lengths in parts])),
    )
    dense, labels = rng.standard_normal((batch, DENSE)), rng.integers(0, 2, batch)
    return kjt, torch.from_numpy(dense).float(), torch.from_numpy(labels).float()


class DensePart(nn.Module):
    """The dense part, which both kinds of model have.

    **Arguments**

    - `width`: width of all pooled rows together.
    - `hidden`: sizes of the hidden layers.
    """

    def __init__(self, width: int, hidden: Sequence[int]) -> None:
        super().__init__()
        sizes = [width + DENSE, *hidden]
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def forward(self, pooled: Tensor, dense: Tensor) -> Tensor:
        return self.layers(torch.cat([pooled, dense], dim=1))[:, 0]


class Theirs(nn.Module):
    """A model of TorchRec.

    **Arguments**

    - `tables`: tables of its collection.
    - `hidden`: sizes of the hidden layers of its dense part.
    - `device`: device of its rows; "meta" has none.
    """

    def __init__(self, tables: Sequence[TrainedTable], hidden: Sequence[int] = (), device: str = "cpu") -> None:
        super().__init__()
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        self.names = [table.name for table in tables]
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name]
                )
                for t in tables
            ],
            device=torch.device(device),
        )  # fmt: skip
        self.dense = DensePart(sum(table.dim for table in tables), hidden)

    def forward(self, kjt: Any, dense: Tensor) -> Tensor:
        out = self.ebc(kjt).to_dict()  # by name: the order of keys follows the plan
        return self.dense(torch.cat([out[name] for name in self.names], dim=1), dense)


class Plain:
    """The same model in plain torch, in one process, with row optimizers written out.

    **Arguments**

    - `tables`: of the model.
    - `dense`: its dense part, which is trained in place.
    - `rows`: first rows of each table, of which a copy is trained.
    - `optimizer`: "sgd" or "rowwise-adagrad".
    """

    def __init__(
        self, tables: Sequence[TrainedTable], dense: DensePart, rows: dict[str, Tensor], optimizer: str
    ) -> None:
        self.tables, self.dense, self.optimizer = tables, dense, optimizer
        self.rows = {name: of.clone().requires_grad_() for name, of in rows.items()}
        self.sums = {name: torch.zeros(len(of)) for name, of in rows.items()}

    def step(self, batches: Sequence[tuple[Any, Tensor, Tensor]]) -> float:
        """Train one step over the batches of all ranks, and return the loss.

        **Arguments**

        - `batches`: the batch of each rank.
        """
        losses = []
        for kjt, dense, labels in batches:
            pooled = []
            for table in self.tables:
                ids, lengths = kjt[table.name].values(), kjt[table.name].lengths()
                bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
                pooled.append(torch.zeros(len(lengths), table.dim).index_add(0, bags, self.rows[table.name][ids]))
            losses.append(loss_of(self.dense(torch.cat(pooled, dim=1), dense), labels))
        loss = torch.stack(losses).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in self.dense.parameters():
                assert parameter.grad is not None
                parameter -= LR * parameter.grad
                parameter.grad = None
            for name, rows in self.rows.items():
                grad = rows.grad
                assert grad is not None
                if self.optimizer == "sgd":
                    rows -= LR * grad
                else:
                    self.sums[name] += grad.square().mean(dim=1)
                    rows -= LR * grad / (self.sums[name].sqrt()[:, None] + EPS)
                rows.grad = None
        return float(loss)


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of one batch.

    **Arguments**

    - `out`, `labels`: those of each sample.
    """
    return nn.functional.binary_cross_entropy_with_logits(out, labels)


class Parallel:
    """A model under DistributedModelParallel with a plan, in one of several processes.

    **Arguments**

    - `model`: a model of TorchRec.
    - `plan`: a ShardingPlan.
    - `optimizer`: "sgd" or "rowwise-adagrad".
    """

    def __init__(self, model: Theirs, plan: Any, optimizer: str) -> None:
        from torchrec.distributed.model_parallel import DistributedModelParallel

        self.model = DistributedModelParallel(
            model,
            device=torch.device("cpu"),
            plan=plan,
            sharders=[sharder(optimizer)],
        )
        named = dict(self.model.named_parameters())
        self.parameters = list(named.values())
        """Fused rows never have a gradient; tables that TorchRec copies to each rank have one."""
        self.dense = [of for name, of in named.items() if "embedding_bags." not in name]
        self.losses = list[float]()

    def shards(self) -> list[tuple[str, Tensor, tuple[slice, slice]]]:
        """Return, for each shard here, its table, its weights and their place in the table."""
        found = []
        for key, of in self.model.state_dict().items():
            if "embedding_bags." in key:
                table = key.split("embedding_bags.")[1].rsplit(".", 1)[0]
                for shard in of.local_shards():
                    (row, col), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                    found.append((table, shard.tensor, (slice(row, row + rows), slice(col, col + columns))))
        return found

    def take(self, rows: dict[str, Tensor]) -> None:
        """Set the weights to begin with.

        **Arguments**

        - `rows`: rows of each table.
        """
        with torch.no_grad():
            for table, weights, where in self.shards():
                weights.copy_(rows[table][where])

    def step(self, batch: tuple[Any, Tensor, Tensor]) -> None:
        """Train one step with this rank's batch.

        **Arguments**

        - `batch`: the batch.
        """
        kjt, dense, labels = batch
        loss = loss_of(self.model(kjt, dense), labels)
        loss.backward()  # rows are updated in it
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter -= LR * parameter.grad
                    parameter.grad = None
        self.losses.append(float(loss.detach()))


def sharder(optimizer: str) -> Any:
    """Return TorchRec's sharder, with the fused optimizer.

    **Arguments**

    - `optimizer`: "sgd" or "rowwise-adagrad".
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    kind = EmbOptimType.EXACT_SGD if optimizer == "sgd" else EmbOptimType.EXACT_ROWWISE_ADAGRAD
    return EmbeddingBagCollectionSharder(fused_params={"optimizer": kind, "learning_rate": LR, "eps": EPS})


def rows_of(tables: Sequence[TrainedTable], seed: int) -> dict[str, Tensor]:
    """Return first weights, the same at every rank.

    **Arguments**

    - `tables`: of the model.
    - `seed`: the random seed.
    """
    draw = torch.Generator().manual_seed(seed)
    return {t.name: (torch.rand(t.rows, t.dim, generator=draw) - 0.5) / t.rows**0.5 for t in tables}
