"""What a run trains and on what: the flags that `skirl train` and `skirl verify` share.

A recipe is data; nothing is opened or counted until a method is called. All flags are checked when it is made, by the
classes that own them, so a wrong one ends the command before anything runs. A configuration file would carry the same
fields in a second syntax; a shell script of flags is as repeatable.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from skirl.core.batch import Sparse
from skirl.core.ids import capture, positions_of
from skirl.core.optim import SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad
from skirl.core.tables import Schema, Table
from skirl.data import DataFlags, Source
from skirl.engine.capacity import CacheSize, parse_cache
from skirl.engine.device import torch_device
from skirl.models import DIN, DLRM, DCNv2, DeepCross, DeepFM, Embeddings, Model, WideDeep
from skirl.models.flags import ModelFlags
from skirl.nn.collection import Collection, EmbeddingBagCollection, EmbeddingCollection
from skirl.oracle.options import Depth, Plan
from skirl.oracle.seen import Seen
from skirl.pipeline.lookahead import Lookahead, lookahead
from skirl.store import Link
from skirl.train.schedule import Rates, Schedule, ScheduleFlags

MODELS: dict[str, type[Model]] = {
    "dlrm": DLRM,
    "wide-deep": WideDeep,
    "deep-cross": DeepCross,
    "deepfm": DeepFM,
    "dcnv2": DCNv2,
    "din": DIN,
}
ModelName = Literal[
    "dlrm", "dlrm-tiny", "wide-deep", "wide-deep-tiny", "deep-cross", "deep-cross-tiny",
    "deepfm", "deepfm-tiny", "dcnv2", "dcnv2-tiny", "din", "din-tiny",
]  # fmt: skip
ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "rowwise-adagrad": RowwiseAdagrad,
    "sgd": SGD,
    "adagrad": Adagrad,
    "adam": Adam,
}
OptimizerName = Literal["rowwise-adagrad", "sgd", "adagrad", "adam"]
_TOUCHED = re.compile(r"\s*touched:(.*)", re.DOTALL)


@dataclass(frozen=True)
class Recipe(ModelFlags, ScheduleFlags, DataFlags):
    """A model, its data, and how much of its tables the cache holds.

    >>> Recipe(data="synthetic:tiny", cache="touched:20%").cache_size(touched=1000)
    200
    >>> Recipe(cache="4GiB").cache_size(touched=0)
    '4GiB'
    """

    model: ModelName = "dlrm"
    """The model, with the sizes of its paper; with -tiny some thousand weights."""
    optimizer: OptimizerName = "rowwise-adagrad"
    """The optimizer of the rows; dense weights have Adam."""
    lr: float = 0.02
    """Learning rate of the rows, at its highest."""
    dense_lr: float = 1e-3
    """Learning rate of the dense weights, at its highest."""
    dim: int = 48
    """Numbers in the vector of one row; wide-deep and deepfm keep one more beside it, its first-order weight."""
    cache: str = "10%"
    """Rows on the device: a number, 10% (of all), 4GiB, auto (half of what is free), touched:10% (of those the run uses)."""
    depth: Depth = "auto"
    """Batches the oracle reads ahead: a number, auto (four times the cache in rows) or epoch (the whole run, read twice)."""
    prefetch: int = 2
    """Steps ahead that rows travel; changes when, never what."""
    policy: Literal["min", "lru", "lfu", "ttl"] = "min"
    """Which rows leave the cache: min is the optimum, the others are there to compare."""
    store: str = "memory"
    """Where the other rows are: memory, or disk:FOLDER."""
    link: str | None = None
    """Between cache and store: RATE,DELAY such as 1Gbit,100us, emulated; none if not given."""
    device: str = "cpu"
    """Where rows are cached and the model computes: cpu, cuda, cuda:N, or interpret, the GPU's code on the CPU, to test."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What rows are held in. 16 bits need a GPU; they are computed on in float32 and rounded by dice that repeat."""
    threads: int | None = None
    """Threads that compute; torch's choice if not given. The bits of a run belong to its number of threads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}: set it to 1 or more")
        if not 0 <= self.dense_lr < float("inf"):
            raise ValueError(f"dense_lr is {self.dense_lr}: set it to a finite number, 0 or more")
        if self.store != "memory" and not re.fullmatch(r"disk:.+", self.store):
            raise ValueError(f"store is {self.store!r}: set it to memory or disk:FOLDER")
        if self.link is not None:
            Link.parse(self.link)
        torch_device(self.device)
        if self.dtype != "float32" and self.device == "cpu":
            raise ValueError(
                f"dtype is {self.dtype!r} and device 'cpu': rows of 16 bits are trained on a GPU, set device to cuda"
            )
        self._cache()
        Plan(self.depth, self.prefetch, self.policy)
        self.sizes_of_model()
        if self.target is not None:
            DIN.target_of(self.tables(), self.stream().lists, self.target)
        self.tables()
        self.row_optimizer()
        self.rate_schedule()

    def check_labels(self) -> None:
        """Refuse data with several labels, which a loop of one's own may have; `skirl size` and `vocab` look at none."""
        labels = self.stream().labels
        if len(labels) > 1:
            raise ValueError(
                f"data {self.data} has {len(labels)} labels ({', '.join(labels)}), and {self.model} predicts one: leave one "
                f"[[label]] in {self.schema or 'the schema'}"
            )

    def tables(self) -> list[Table]:
        """The tables that the data looks rows up in."""
        return self.stream().tables(self.model_class.row_dim(self.dim))

    def row_optimizer(self) -> RowOptimizer:
        """The optimizer of the rows."""
        return ROW_OPTIMIZERS[self.optimizer](lr=self.lr)

    @property
    def counts_first(self) -> bool:
        """Whether the cache is a share of the rows that the run touches, which takes a pass to know."""
        return self._cache()[0] == "touched"

    def cache_size(self, touched: int) -> CacheSize:
        """The cache as the embeddings take it, once it is known how many rows the run touches."""
        kind, amount = self._cache()
        if kind == "touched":
            return max(1, int(touched * amount))
        return int(amount) if kind == "rows" else self.cache

    @property
    def model_class(self) -> type[Model]:
        """The model's class."""
        return MODELS[self.model.removesuffix("-tiny")]

    def sizes_of_model(self) -> dict[str, Any]:
        """What of the model is not as its paper, or -tiny, has it."""
        return self.sizes(self.model.removesuffix("-tiny"), MODELS)

    @property
    def pooled(self) -> bool:
        """Whether the embeddings pool a feature's ids; DIN pools itself where the data has lists to attend to."""
        return self.model_class is not DIN or not DIN.pairs(self.tables(), self.stream().lists)

    def embeddings(self, cache: CacheSize, *, resume: bool = False) -> Collection:
        """The embeddings, their rows where `store` says; the store has to be empty but to resume."""
        return (EmbeddingBagCollection if self.pooled else EmbeddingCollection)(
            self.tables(),
            optimizer=self.row_optimizer(),
            cache=cache,
            store=self.store if self.link is None else f"link:{self.link}:{self.store}",
            seed=self.seed,
            resume=resume,
            device=self.device,
            dtype=getattr(torch, self.dtype),
        )

    def model_over(self, embeddings: Embeddings) -> tuple[Model, torch.optim.Optimizer]:
        """The model with its initial weights, and its dense optimizer."""
        torch.manual_seed(self.seed)
        stream, kind = self.stream(), self.model_class
        make = kind.tiny if self.model.endswith("-tiny") else kind.paper
        told = {"lists": stream.lists} if kind is DIN else {}
        model = make(embeddings, dense_features=stream.dense_features, **told, **self.sizes_of_model())
        model = model.to(torch_device(self.device))
        return model, torch.optim.Adam(model.parameters(), lr=self.dense_lr)

    def rate_schedule(self) -> Schedule:
        """How both learning rates change."""
        total = None if self.schedule == "constant" else self.steps or self.stream().steps
        return Schedule(self.schedule, self.warmup, total)

    def rates(self, embeddings: Any, dense: torch.optim.Optimizer) -> Rates:
        """The learning rates of both optimizers, as the schedule has them."""
        return Rates(self.rate_schedule(), rows=embeddings.optimizer, dense=dense)

    def lookahead(self, model: nn.Module, stream: Source | None = None, *, trace: Path | None = None) -> Lookahead:
        """The batches, with their rows in place. stream: the source of them, if the caller has one; trace: a file."""
        ahead = {"depth": self.depth, "prefetch": self.prefetch, "policy": self.policy}
        return lookahead(stream or self.stream(), model, **ahead, trace=trace)

    def use_threads(self) -> None:
        """Compute with as many threads as the recipe says."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def _cache(self) -> tuple[str, float]:
        """What the flag means: ("rows", n), ("share", of all rows), ("bytes", n) or ("touched", share)."""
        of_touched = _TOUCHED.fullmatch(self.cache)
        if of_touched is None:
            text = self.cache.strip()
            return parse_cache(int(text) if re.fullmatch(r"[-+]?\d+", text) else text)
        try:
            kind, share = parse_cache(of_touched[1])
        except ValueError:
            kind, share = "none", 0.0
        if kind != "share":
            raise ValueError(f"cache is {self.cache!r}: after touched: comes a share above 0% and up to 100%, like 10%")
        return "touched", share


class Touched:
    """Counts the distinct rows of batches that pass by.

    >>> import skirl
    >>> touched = Touched([Table("a", rows=10, dim=2)])
    >>> touched.add(skirl.KeyedJagged.one_hot(["a"], torch.tensor([[3], [4], [3]])))
    >>> touched.rows
    2
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self.schema = Schema.of(list(tables))
        self._seen = Seen(self.schema)

    @property
    def rows(self) -> int:
        """How many rows were in a batch so far."""
        return len(self._seen)

    def add(self, sparse: Sparse) -> None:
        """One more batch."""
        self._seen.add(keys_of(sparse, self.schema))


def keys_of(sparse: Sparse, schema: Schema) -> np.ndarray:
    """The key of every id of a batch."""
    captured = capture(sparse, schema.features, copy=False)
    return np.concatenate([positions_of(captured, schema, bank).keys() for bank in range(len(schema.banks))])
