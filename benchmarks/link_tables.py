"""A rank of `link.py --tables production`: one model over skirl's rows, by hash and placed, and over TorchRec's tables."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from network import CHANNELS, batches_of, part_of
from skirl.core.jagged import KeyedJagged
from skirl.core.optim import RowwiseAdagrad
from skirl.core.tables import Table
from skirl.nn.collection import EmbeddingBagCollection
from skirl.peers.base import Peers
from skirl.pipeline.lookahead import lookahead
from skirl.train.placed import WORTH, count, dealt

LR, EPS, READ, SCALE = 0.02, 1e-8, 4, 16
"""Different batches, which repeat; the share of the published rows that tables have, since TorchRec holds all of them."""
HIDDEN = 32


class Model(nn.Module):
    """Two dense layers over pooled rows."""

    def __init__(self, embeddings: Any, tables: Sequence[Table], read: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self._read = embeddings, read
        width = sum(table.dim for table in tables)
        self.layers = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, ids: Any) -> torch.Tensor:
        return self.layers(self._read(self.embeddings(ids)))


def skirls(tables: Sequence[Table], parts: Sequence[KeyedJagged], owners: Mapping[str, int], stack: ExitStack) -> Any:
    """Yield after each step over skirl's rows."""
    rows = EmbeddingBagCollection(tables, optimizer=RowwiseAdagrad(lr=LR), cache="2GiB", placement=dict(owners))
    stack.callback(rows.close)
    model = Model(rows, tables, lambda out: torch.cat([out[table.name] for table in tables], 1))
    dense = torch.optim.SGD(model.layers.parameters(), lr=0.01)
    batches = stack.enter_context(
        lookahead(itertools.cycle(parts), model, depth=4, shards=2, sparse=lambda ids: ids)  # type: ignore[arg-type]
    )
    yield from trained(model, dense, batches)


def torchrecs(tables: Sequence[Table], parts: Sequence[KeyedJagged], owners: Mapping[str, int]) -> Iterator[None]:
    """Yield after each step of TorchRec's DistributedModelParallel, each table whole at its owner."""
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from skirl.placement.spec import Piece, TablePlan
    from skirl.torchrec import plan

    configs = [torchrec.EmbeddingBagConfig(t.rows, t.dim, name=t.name, feature_names=[t.name]) for t in tables]
    whole = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    model = Model(whole, tables, lambda out: torch.cat([out.to_dict()[table.name] for table in tables], 1))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS}
    sharders: Any = [EmbeddingBagCollectionSharder(fused_params=fused)]
    pieces = tuple(((Piece(n, 0, t.rows, 0, t.dim), owners[t.name]),) for n, t in enumerate(tables))
    facts = tuple((t.name, t.rows, t.dim, "rowwise-adagrad") for t in tables)
    of = plan(TablePlan(2, facts, pieces), model, sharders)
    parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=of, sharders=sharders)
    weights = [weight for name, weight in parallel.named_parameters() if "embedding" not in name]
    kjts = [torchrec.KeyedJaggedTensor(p.keys(), p.values().long(), lengths=p.lengths().int()) for p in parts]
    yield from trained(parallel, torch.optim.SGD(weights, lr=0.01), itertools.cycle(kjts))


def trained(model: nn.Module, dense: torch.optim.Optimizer, batches: Any) -> Iterator[None]:
    for ids in batches:
        loss = model(ids).square().mean()
        dense.zero_grad()
        loss.backward()
        dense.step()
        loss.item()
        yield


def of_rank(batch: int, steps: int, rounds: int, peers: Peers) -> dict[str, Any]:
    """Return the median seconds of a step, by way, and the bytes that skirl's ways send."""
    torch.set_num_threads(1)
    tables, whole = batches_of("production", batch, READ, 0)
    tables = [Table(t.name, -(-t.rows // SCALE), t.dim) for t in tables]
    for ids in whole:
        rows = np.repeat([t.rows for t in tables], ids.lengths().reshape(len(tables), -1).sum(1))
        ids.values().remainder_(torch.from_numpy(rows))
    counted = count(whole, tables, peers.size)
    placed = dealt({n: load for n, (of, load) in counted.items() if of.whole < WORTH * of.rows}, peers.size)
    parts = [part_of(ids, peers.rank, peers.size) for ids in whole]
    seconds, sent = {name: list[float]() for name in ("hash", "placed", "torchrec")}, dict[str, float]()
    with ExitStack() as stack:
        ways = {
            "hash": skirls(tables, parts, {}, stack),
            "placed": skirls(tables, parts, placed, stack),
            "torchrec": torchrecs(tables, parts, dealt({n: load for n, (_, load) in counted.items()}, peers.size)),
        }
        for _ in range(1 + rounds):
            for name, way in ways.items():
                next(way)  # and then together
                peers.channel("start").exchange([np.zeros(0, np.uint8)] * peers.size, f"before {name}")
                before, began = _sent(peers), time.perf_counter()
                for _ in range(steps):
                    next(way)
                seconds[name].append((time.perf_counter() - began) / steps)
                sent[name] = (_sent(peers) - before) / steps
    return {"seconds": {name: statistics.median(of[1:]) for name, of in seconds.items()}, "sent": sent}


def _sent(peers: Peers) -> int:
    return sum(sum(of["bytes_sent"]) for name, of in peers.counted().items() if name in CHANNELS)


def compared(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = {name: max(rank["seconds"][name] for rank in ranks) for name in ranks[0]["seconds"]}
    sent = {name: sum(rank["sent"][name] for rank in ranks) for name in ("hash", "placed")}
    return {
        "vs_torchrec": seconds["torchrec"] / seconds["placed"], "vs_hash": seconds["hash"] / seconds["placed"],
        "bytes_vs_hash": sent["hash"] / sent["placed"], "seconds": seconds, "sent": sent,
    }  # fmt: skip
