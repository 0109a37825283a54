"""Claim: skirl hides a slow link between trainers, and where the link is the limit it gains what it saves in bytes.

`--part trainers` ("Several trainers" in docs/benchmarks.md): two trainers in network namespaces with a token bucket between
them; the time of a step is compared with its roof, the least that compute, wire and cores allow. It needs `ip` and `tc`.
`--part bound` ("Where the link is the limit"): train.py behind an emulated link of 100 Mbit/s, for three sizes of the cache.
`--tables production`: over the same links, 60 tables with the published moments, by hash, placed, and by TorchRec.
"""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from common import Bench, RepeatedBatches, Stopwatch, main, result, trainers_of
from network import batches_of, parts_of, placed, sent
from skirl.core.batch import KeyedJagged
from skirl.core.optim import RowwiseAdagrad
from skirl.core.tables import Table
from skirl.nn.collection import EmbeddingBagCollection
from skirl.peers.base import Alone, Peers
from skirl.peers.job import join, trainers, using
from skirl.pipeline.lookahead import lookahead
from skirl.tools.machine import cores
from skirl.tools.units import Link
from skirl.train.placed import PlacedTable, Plan, count, dealt
from train import TrainSpeed

LOOPBACK = "loopback"
EDGE = 2
"""Untimed steps at the beginning of a turn."""
READ = {"criteo": 16, "production": 4}
"""Different batches, which repeat."""
SCALE = {"criteo": 10, "production": 16}
"""What the numbers of rows are divided by: TorchRec holds all of them."""
LR, EPS, HIDDEN = 0.02, 1e-8, 32
"""Of the row optimizers, and the width of the dense layer over tables of production."""
ADDRESS = "10.211.37.{}"
"""Addresses of the trainers, which nobody else sees."""
BURST = 0.0005
"""Size of the bucket in seconds of the rate: about what a network card sends at once."""
LEAST_BURST = 128 << 10
"""Minimum size of the bucket in bytes: twice what the system hands over in one piece."""
BOUND = {
    "modes": "skirl,serial,resident,on_demand,lru", "threads": 1, "link": "100Mbit,100us", "dim": 64, "rows_scale": 0.25,
    "batch": 128, "rounds": 6, "slice": 16, "warm": 450, "depth": 128,
}  # fmt: skip
"""Flags of train.py for `--part bound`: the rate is low enough that bytes decide, whatever the machine."""


@dataclass(frozen=True)
class LinkSpeed(Bench):
    """Time of trainers over links of limited rate, and of one trainer whose store is behind one."""

    part: Literal["trainers", "bound"] = "trainers"
    """trainers: two of them over real links; bound: one behind an emulated link, with several caches."""
    links: tuple[str, ...] = ("1Gbit", "10Gbit")
    """Rate of each link to measure; loopback sets no limit."""
    dense: tuple[int, ...] = (100_000, 400_000, 1_600_000)
    """Numbers of dense weights in the model, one measurement for each."""
    batch: int = 4096
    """Samples in a step, over both trainers."""
    dim: int = 64
    """Numbers in a row."""
    steps: int = 16
    """Steps in a turn."""
    rounds: int = 3
    """Timed turns, alone and together."""
    tables: Literal["criteo", "production"] = "criteo"
    """criteo: an id of each feature a sample; production: 60 tables with bags of 15.8 ids, for part trainers."""

    def run(self) -> dict[str, Any]:
        if self.part == "bound":
            found = {str(percent): TrainSpeed(cache=f"touched:{percent}%", **BOUND).run() for percent in (1, 10, 50)}
            return result("link", self, "part", by_cache=found)
        ranks = {link: [*zip(*self._ranks(link), strict=True)] for link in self.links}
        if self.tables == "production":
            by_link = {link: compared(of[0]) for link, of in ranks.items()}
            return result("link", self, "tables links batch steps rounds", by_link=by_link)
        points = [
            {"link": link, "dense": dense, **judged(each, rate_of(link))}
            for link, of in ranks.items()
            for dense, each in zip(self.dense, of, strict=True)
        ]
        return result(
            "link", self, "part links dense batch dim steps rounds",
            vs_roof=max(point["vs_roof"] for point in points),
            rows_share=max(point["rows_share"] for point in points),
            points=points,
        )  # fmt: skip

    def _ranks(self, link: str) -> list[Any]:
        given = [self.tables, self.dense, self.batch, self.dim, self.steps, self.rounds]
        with nullcontext([]) if link == LOOPBACK else two_namespaces(rate_of(link)) as names:
            return trainers_of(2, __file__, given, names, ADDRESS.format(1) if names else "127.0.0.1")


def rate_of(link: str) -> float:
    return Link().rate if link == LOOPBACK else Link.parse(f"{link},0us").rate


Figures = dict[str, dict[str, float]]
"""Of a trainer, by way to train: what a step takes."""


def judged(ranks: Sequence[Figures], rate: float) -> dict[str, Any]:
    """Compare the time of a step with its roof."""
    together = [rank["together"] for rank in ranks]
    roof = {
        "compute": max(rank["local"]["seconds"] for rank in ranks),
        "wire": max(rank["sent"] for rank in together) / rate,
        "cores": sum(rank["cpu"] for rank in together) / cores(),
    }
    seconds = max(rank["seconds"] for rank in together)
    waited = max(rank["waited"] for rank in together)
    return {"vs_roof": seconds / max(roof.values()), "rows_share": waited / seconds, "seconds": seconds, "roof": roof}


def compared(ranks: Sequence[Figures]) -> dict[str, Any]:
    """Compare the ways to train over tables of production."""
    seconds = {way: max(rank[way]["seconds"] for rank in ranks) for way in ranks[0]}
    bytes_of = {way: sum(rank[way]["of_rows"] for rank in ranks) for way in ("hash", "placed")}
    return {
        "vs_torchrec": seconds["torchrec"] / seconds["placed"], "vs_hash": seconds["hash"] / seconds["placed"],
        "bytes_vs_hash": bytes_of["hash"] / bytes_of["placed"], "seconds": seconds, "sent": bytes_of,
    }  # fmt: skip


class TwoLayers(nn.Module):
    """Two dense layers over pooled rows."""

    def __init__(
        self, embeddings: Any, tables: Sequence[Table], hidden: int, by_table: Callable[[Any], Any] = lambda out: out
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self._names, self._by_table = embeddings, [table.name for table in tables], by_table
        self._alike = len({table.dim for table in tables}) == 1
        width = sum(table.dim for table in tables)
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, ids: Any) -> torch.Tensor:
        out = self._by_table(self.embeddings(ids))
        vectors = out.stacked().flatten(1) if self._alike else torch.cat([out[name] for name in self._names], 1)
        return self.layers(vectors)


@dataclass
class Job:
    """What all ways to train share."""

    tables: Sequence[Table]
    parts: Sequence[KeyedJagged]
    """This trainer's samples of each step."""
    hidden: int
    stack: ExitStack

    def skirl(self, peers: Peers, owners: Mapping[str, int]) -> Iterator[None]:
        """Yield after each step over skirl's rows; with `Alone` all are local."""
        with using(peers):
            rows = EmbeddingBagCollection(
                self.tables, optimizer=RowwiseAdagrad(lr=LR, eps=EPS), cache="2GiB", placement=dict(owners)
            )
        self.stack.callback(rows.close)
        model = TwoLayers(rows, self.tables, self.hidden)
        ahead = lookahead(RepeatedBatches(self.parts * 1000), model, depth=4, shards=peers.size, sparse=lambda ids: ids)
        return trained(model, model.layers.parameters(), self.stack.enter_context(ahead))

    def torchrec(self, owners: Mapping[str, int]) -> Iterator[None]:
        """Yield after each step of TorchRec's DistributedModelParallel, each table whole at its owner."""
        import torchrec
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel

        from skirl.torchrec import plan

        tables = self.tables
        configs = [torchrec.EmbeddingBagConfig(t.rows, t.dim, name=t.name, feature_names=[t.name]) for t in tables]
        rows = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        model = TwoLayers(rows, tables, self.hidden, lambda out: out.to_dict())
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS}
        sharders: Any = [EmbeddingBagCollectionSharder(fused_params=fused)]
        whole = Plan(2, tuple(PlacedTable(t.name, t.rows, t.dim, owners[t.name]) for t in tables))
        of = plan(whole, model, sharders)
        parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=of, sharders=sharders)
        weights = [weight for name, weight in parallel.named_parameters() if "embedding" not in name]
        kjts = [torchrec.KeyedJaggedTensor(p.keys(), p.values().long(), lengths=p.lengths().int()) for p in self.parts]
        return trained(parallel, weights, cycle(kjts))


def trained(model: nn.Module, weights: Any, batches: Any) -> Iterator[None]:
    dense = torch.optim.SGD(weights, lr=0.01)
    for ids in batches:
        loss = model(ids).square().mean()
        dense.zero_grad()
        loss.backward()
        dense.step()
        loss.item()
        yield


def of_rank(kind: str, dense: Sequence[int], batch: int, dim: int, steps: int, rounds: int) -> list[Figures]:
    """Measure all ways to train with each size of the dense layers, taking turns. Return the medians."""
    torch.set_num_threads(1)
    peers = trainers()
    tables, whole = batches_of(kind, batch, READ[kind], dim, SCALE[kind])
    parts, width, found = parts_of(whole, peers), sum(table.dim for table in tables), []
    for hidden in [HIDDEN] if kind == "production" else [max(1, numbers // (width + 2)) for numbers in dense]:
        with ExitStack() as stack:
            job = Job(tables, parts, hidden, stack)
            if kind == "production":  # two streams cannot read ahead over one channel: each way has its own
                of_table = count(whole, tables, peers.size)
                whole_tables = dealt({name: load for name, (_, load) in of_table.items()}, peers.size)
                one, other = (stack.enter_context(join()) for _ in range(2))
                ways = {
                    "hash": (job.skirl(one, {}), one),
                    "placed": (job.skirl(other, placed(of_table, peers.size)), other),
                    "torchrec": (job.torchrec(whole_tables), peers),
                }
            else:
                ways = {"local": (job.skirl(Alone(), {}), peers), "together": (job.skirl(peers, {}), peers)}
            turns: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
            for _ in range(1 + rounds):
                for name, (way, over) in ways.items():
                    peers.channel("start").exchange([np.zeros(0, np.uint8)] * peers.size, f"before {name}")
                    turns[name].append(turn(way, steps, over))
        found.append({
            name: {figure: median(one[figure] for one in of[1:]) for figure in of[0]} for name, of in turns.items()
        })  # fmt: skip
    return found


def turn(way: Iterator[None], steps: int, peers: Peers) -> dict[str, float]:
    """Train a turn and return its averages per step: time, bytes, and the wait for rows."""
    for _ in range(EDGE):
        next(way)
    before = counted(peers)
    with Stopwatch() as watch:
        for _ in range(steps):
            next(way)
    after = counted(peers) | {"seconds": watch.seconds, "cpu": watch.cpu}
    return {name: (value - before.get(name, 0.0)) / steps for name, value in after.items()}


def counted(peers: Peers) -> dict[str, float]:
    channels = {name: of for name, of in peers.counted().items() if name != "start"}
    moved = float(sum(sum(of["bytes_sent"]) for of in channels.values()))
    return {"sent": moved, "of_rows": float(sent(peers).sum()), "waited": channels["rows"]["seconds"]}


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def two_namespaces(rate: float) -> Iterator[list[str]]:
    """Make two network namespaces with a link of so many bytes per second between them and yield their names."""
    names = [f"skirl-{os.getpid()}-{n}" for n in range(2)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        burst = max(LEAST_BURST, int(rate * BURST))
        for n, name in enumerate(names):
            _run("ip", "-n", name, "addr", "add", f"{ADDRESS.format(n + 1)}/24", "dev", "wire")
            _run("ip", "-n", name, "link", "set", "wire", "up")
            limit = ("rate", f"{int(8 * rate)}bit", "burst", str(burst), "latency", "50ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "wire", "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            with suppress(OSError):
                _run("ip", "netns", "del", name)


if __name__ == "__main__":
    main(LinkSpeed, of_rank)
