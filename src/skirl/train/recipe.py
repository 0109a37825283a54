"""The model, embeddings and data of a run, made from the flags that `skirl train` and `skirl verify` share."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skirl.data.flags import DataFlags
from skirl.models.flags import LayerFlags, ModelFlags
from skirl.tools.flags import Composed, check_types
from skirl.tools.machine import cores
from skirl.train.flags import CacheFlags, DeviceFlags, MovementFlags, OptimizerFlags, RateFlags, StepFlags

if TYPE_CHECKING:  # torch takes 1.4 s to import, which help and a wrong flag do without
    import torch
    from torch import nn

    from skirl.core.optim import RowOptimizer
    from skirl.core.tables import Table
    from skirl.data.source import Source
    from skirl.engine.capacity import CacheSize
    from skirl.models.base import Embeddings, Model
    from skirl.nn.collection import Collection
    from skirl.pipeline.lookahead import Lookahead
    from skirl.train.schedule import Rates, Schedule


@dataclass(frozen=True)
class Recipe(Composed):
    """A model, its data, and how much of its tables the cache holds."""

    data: DataFlags = field(default_factory=DataFlags)
    model: ModelFlags = field(default_factory=ModelFlags)
    layers: LayerFlags = field(default_factory=LayerFlags)
    optimizer: OptimizerFlags = field(default_factory=OptimizerFlags)
    rates: RateFlags = field(default_factory=RateFlags)
    step: StepFlags = field(default_factory=StepFlags)
    cache: CacheFlags = field(default_factory=CacheFlags)
    movement: MovementFlags = field(default_factory=MovementFlags)
    device: DeviceFlags = field(default_factory=DeviceFlags)

    def __post_init__(self) -> None:
        check_types(self)
        from skirl.oracle.planner import Plan

        Plan(self.cache.depth, self.movement.prefetch, self.cache.policy)
        self.layers.of_model(self.model.name)
        if over := self.data.batch % self.step.shards:
            fits = self.data.batch - over
            raise ValueError(
                f"batch is {self.data.batch} and shards is {self.step.shards}: set batch to a multiple of shards, such "
                f"as {fits or self.step.shards}"
            )
        self.tables()
        self.row_optimizer()
        self.schedule()
        if self.row_optimizer().weight_follows_state and (self.rates.schedule != "constant" or self.rates.warmup):
            raise ValueError(
                f"optimizer {self.optimizer.optimizer} makes rows of their state and lr, so another lr would move all of "
                "them: leave schedule and warmup out"
            )

    def check_labels(self) -> None:
        """Refuse data with several labels: the loop of these commands trains on one, another loop may train on more."""
        labels = self.data.stream().labels
        if len(labels) > 1:
            raise ValueError(
                f"data is {self.data.data}, with {len(labels)} labels ({', '.join(labels)}), and {self.model.model} "
                f"predicts one: leave one [[label]] in {self.data.schema or 'the schema'}"
            )

    def stream(self) -> "Source":
        return self.data.stream()

    def in_shards(self) -> "Source":
        """Of one trainer: all shards of each batch, one after the other."""
        return self.data.stream().sharded(0, self.step.shards, self.step.shards)

    def tables(self) -> "list[Table]":
        return self.data.stream().tables(self.model.row_dim)

    def row_optimizer(self) -> "RowOptimizer":
        from skirl.core.optim import row_optimizer

        return row_optimizer(self.optimizer.optimizer)(lr=self.rates.lr)

    @property
    def counts_first(self) -> bool:
        """Whether the cache is a share of the rows that the run touches, which takes a pass to count."""
        return self.cache.parsed()[0] == "touched"

    def cache_size(self, touched: int) -> "CacheSize":
        """The cache as the embeddings take it, once it is known how many rows the run touches."""
        kind, amount = self.cache.parsed()
        if kind == "touched":
            return max(1, int(touched * amount))
        return int(amount) if kind == "rows" else self.cache.cache

    @property
    def pooled(self) -> bool:
        """True if the embeddings pool a feature's ids; DIN and DCAT pool where the data has no list to attend to."""
        return self.model.kind.pools(self.tables(), self.data.stream().lists)

    def embeddings(self, cache: "CacheSize", *, store: str | None = None, resume: bool = False) -> "Collection":
        """The embeddings, their rows where `store` or else the flag says; the store has to be empty but to resume."""
        import torch

        from skirl.nn.collection import EmbeddingBagCollection, EmbeddingCollection
        from skirl.peers.job import trainers
        from skirl.train.placed import placement_of

        placement = placement_of(self, trainers(self.device.device, self.step.peer_timeout).size)
        return (EmbeddingBagCollection if self.pooled else EmbeddingCollection)(
            self.tables(), optimizer=self.row_optimizer(), cache=cache, store=store or self.cache.store,
            seed=self.data.seed, resume=resume, device=self.device.device, dtype=getattr(torch, self.device.dtype),
            placement=placement,
        )  # fmt: skip

    def model_over(self, embeddings: "Embeddings") -> "tuple[Model, torch.optim.Optimizer]":
        import torch

        from skirl.engine.device import torch_device
        from skirl.models.history import OfHistory

        torch.manual_seed(self.data.seed)
        stream, kind = self.data.stream(), self.model.kind
        sizes = self.layers.of_model(self.model.name) | ({"lists": stream.lists} if issubclass(kind, OfHistory) else {})
        make: Any = kind.tiny if self.model.tiny else kind
        model = make(embeddings, dense_features=stream.dense_features, **sizes).to(torch_device(self.device.device))
        return model, torch.optim.Adam(model.parameters(), lr=self.rates.dense_lr, fused=True)

    def schedule(self) -> "Schedule":
        from skirl.train.schedule import Schedule

        kind = self.rates.schedule
        total = None if kind == "constant" else self.data.steps or self.data.stream().steps
        return Schedule(kind, self.rates.warmup, total)

    def rates_of(self, embeddings: Any, dense: "torch.optim.Optimizer") -> "Rates":
        from skirl.train.schedule import Rates

        return Rates(self.schedule(), rows=embeddings.optimizer, dense=dense)

    def lookahead(
        self, model: "nn.Module", stream: "Source | None" = None, *, trace: Path | None = None
    ) -> "Lookahead":
        """The batches, with their rows in place. stream: the source of them, if the caller has one; trace: a file."""
        from skirl.pipeline.lookahead import lookahead

        cache, loader = self.cache, self.in_shards() if stream is None else stream
        plan = {"depth": cache.depth, "prefetch": self.movement.prefetch, "policy": cache.policy}
        return lookahead(loader, model, **plan, shards=self.step.shards, trace=trace)

    def use_threads(self, saved: int | None = None) -> int:
        """Set the number of torch's threads: that of the flag, else of the saved run, else by the cores. Return it."""
        import torch

        # By default those that the environment sets, else one for each core but that of the planner.
        usual = torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else max(1, cores() - 1)
        torch.set_num_threads(self.device.threads or saved or usual)
        return torch.get_num_threads()
