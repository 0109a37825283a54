"""A small TorchRec model under DistributedModelParallel, and the same in plain torch, to compare what plans train."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from skirl.train.placed import PlacedTable, Plan

LR, EPS, DENSE, BATCH = 0.1, 1e-8, 13, 32
TABLES = (("a", 400, 24, 3), ("b", 301, 8, 1), ("c", 77, 16, 6), ("d", 1000, 16, 2), ("e", 5, 4, 1))
"""Name, rows, dim and ids of a sample of each table, which has one feature of its name."""
OPTIMIZERS = ("sgd", "rowwise-adagrad")
Batch = tuple[Any, Tensor, Tensor]


def sharder(optimizer: str) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    kind = EmbOptimType.EXACT_SGD if optimizer == "sgd" else EmbOptimType.EXACT_ROWWISE_ADAGRAD
    return EmbeddingBagCollectionSharder(fused_params={"optimizer": kind, "learning_rate": LR, "eps": EPS})


def batch_of(seed: Sequence[int]) -> Batch:
    """Return ids as a KeyedJaggedTensor, dense features and labels."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    rng = np.random.default_rng(seed)
    lengths = [np.bincount(rng.integers(0, BATCH, pooling * BATCH), minlength=BATCH) for *_, pooling in TABLES]
    ids = [(rows * rng.random(pooling * BATCH) ** 3).astype(np.int64) for _, rows, _, pooling in TABLES]
    values, sizes = (torch.from_numpy(np.concatenate(of)) for of in (ids, lengths))
    kjt = KeyedJaggedTensor(keys=[name for name, *_ in TABLES], values=values, lengths=sizes)
    dense, labels = torch.from_numpy(rng.standard_normal((BATCH, DENSE))), torch.from_numpy(rng.integers(0, 2, BATCH))
    return kjt, dense.float(), labels.float()


class Model(nn.Module):
    """TorchRec's collection without rows, and one dense layer."""

    def __init__(self) -> None:
        super().__init__()
        import torchrec

        configs = [
            torchrec.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
            for name, rows, dim, _ in TABLES
        ]
        self.ebc = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        self.dense = nn.Linear(sum(dim for _, _, dim, _ in TABLES) + DENSE, 1)

    def forward(self, kjt: Any, dense: Tensor) -> Tensor:
        out = self.ebc(kjt).to_dict()  # by name: the order of keys follows the plan
        return self.dense(torch.cat([*(out[name] for name, *_ in TABLES), dense], dim=1))[:, 0]


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(out, labels)


def descend(parameters: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= LR * parameter.grad
                parameter.grad = None


class Plain:
    """The same model in plain torch, in one process, with row optimizers written out."""

    def __init__(self, dense: nn.Linear, rows: dict[str, Tensor], optimizer: str) -> None:
        self.dense, self.optimizer = dense, optimizer
        self.rows = {name: of.clone().requires_grad_() for name, of in rows.items()}
        self.sums = {name: torch.zeros(len(of)) for name, of in rows.items()}

    def step(self, batches: Sequence[Batch]) -> float:
        """Train one step over the batches of all ranks, and return the loss."""
        losses = []
        for kjt, dense, labels in batches:
            pooled = []
            for name, _, dim, _ in TABLES:
                ids, lengths = kjt[name].values(), kjt[name].lengths()
                bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
                pooled.append(torch.zeros(len(lengths), dim).index_add(0, bags, self.rows[name][ids]))
            losses.append(loss_of(self.dense(torch.cat([*pooled, dense], dim=1))[:, 0], labels))
        loss = torch.stack(losses).mean()
        loss.backward()
        descend([*self.dense.parameters()])
        with torch.no_grad():
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


def plan_by_hand(kind: str, world: int) -> Plan:
    """Return a plan that cuts all tables in one way: "whole", "rows" or "columns"."""
    tables = []
    for n, (name, rows, dim, _) in enumerate(TABLES):
        at: Any = None if kind == "rows" else (n + 1) % world
        if kind == "columns" and dim > 4 and world > 1:
            width = dim - 4 if n % 2 else 4
            at = {n % world: width, (n + 1) % world: dim - width}
        tables.append(PlacedTable(name, rows, dim, at))
    return Plan(world, tuple(tables))


def differences(steps: int, seed: int) -> dict[str, float]:
    """Return how far rows, dense weights and losses are from plain torch at most, by kind of plan and optimizer."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner.types import Topology

    from skirl.torchrec import SkirlPlanner
    from skirl.torchrec import plan as plan_of

    rank, world, found = dist.get_rank(), dist.get_world_size(), dict[str, float]()
    draw = torch.Generator().manual_seed(seed)
    rows = {name: (torch.rand(n, dim, generator=draw) - 0.5) / n**0.5 for name, n, dim, _ in TABLES}
    for kind in ("whole", "rows", "columns", "planned"):
        for optimizer in OPTIMIZERS:
            torch.manual_seed(seed)
            model, sharders = Model(), [sharder(optimizer)]
            plain = Plain(copy.deepcopy(model.dense), rows, optimizer)
            if kind == "planned":
                seen = [batch_of([seed, 0, r])[0] for r in range(world)]
                of = Topology(world, "cpu", ddr_cap=1 << 32, local_world_size=world, intra_host_bw=1.25e6)
                plan = SkirlPlanner(of, batches=seen, seconds=1.0).collective_plan(model, sharders)
            else:
                plan = plan_of(plan_by_hand(kind, world), model, sharders)
            parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
            shards = [
                (key.split("embedding_bags.")[1].rsplit(".", 1)[0], shard)
                for key, of in parallel.state_dict().items() if "embedding_bags." in key for shard in of.local_shards()
            ]  # fmt: skip

            def rows_at(shard: Any, table: Tensor) -> Tensor:
                (row, col), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                return table[row : row + height, col : col + width]

            with torch.no_grad():
                for name, shard in shards:
                    shard.tensor.copy_(rows_at(shard, rows[name]))
            off, weights = [0.0], [of for name, of in parallel.named_parameters() if "embedding_bags." not in name]
            for step in range(steps):
                every = [batch_of([seed, step, r]) for r in range(world)]
                kjt, dense, labels = every[rank]
                loss = loss_of(parallel(kjt, dense), labels)
                loss.backward()  # rows are updated in it
                descend(weights)
                total = loss.detach().clone()
                dist.all_reduce(total)
                off.append(abs(float(total) / world - plain.step(every)))
            off += [float((a - b).abs().max()) for a, b in zip(weights, plain.dense.parameters(), strict=True)]
            off += [float((s.tensor - rows_at(s, plain.rows[n])).abs().max()) for n, s in shards if s.tensor.numel()]
            numbers = torch.tensor([max(off), float(sum(s.tensor.numel() for _, s in shards))], dtype=torch.float64)
            every_rank = [torch.zeros_like(numbers) for _ in range(world)]
            dist.all_gather(every_rank, numbers)
            most, held = torch.stack(every_rank).T.tolist()
            assert sum(held) == sum(n * dim for _, n, dim, _ in TABLES), "shards do not have each number once"
            found[f"{kind}, {optimizer}"] = max(most)
    return found
