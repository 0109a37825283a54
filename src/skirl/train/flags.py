"""The flags of training, except those of data and model. Each part is checked when it is made."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from skirl.core import OptimizerName
from skirl.core.tree import check_shards
from skirl.store import shards
from skirl.store.remote.meeting import hush

RUNS = "SKIRL_RUNS"
"""The environment variable that says where to make run folders if no flag does; "none" for nowhere."""
WAYS = ("auto", "rows", "whole", "columns", "mixed")
_HIGHEST = 1e37
"""Highest learning rate: Adam divides it by 0.1 at its first step, and float32 ends at 3.4e38."""


@dataclass(frozen=True)
class OptimizerFlags:
    group: ClassVar[str] = "learning"

    optimizer: OptimizerName = "rowwise-adagrad"
    """The optimizer of the rows; dense weights use Adam."""


@dataclass(frozen=True, kw_only=True)
class RateFlags:
    group: ClassVar[str] = "learning"

    lr: float = 0.02
    """Peak learning rate of the rows."""
    dense_lr: float = 1e-3
    """Peak learning rate of the dense weights."""
    schedule: Literal["constant", "linear", "cosine", "step"] = "constant"
    """The course of both rates: linear and cosine fall to 0; step to a tenth at half of the steps, to a hundredth at 3/4."""
    warmup: int = 0
    """Steps over which both learning rates rise to their peak."""

    def __post_init__(self) -> None:
        for name in ("lr", "dense_lr"):
            if not 0 <= getattr(self, name) <= _HIGHEST:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to a number from 0 to {_HIGHEST:g}")


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """The division of a step, maybe between trainers."""

    group: ClassVar[str] = "learning"

    shards: int = 1
    """Parts of each batch with a forward and backward of their own, a power of two. The bits depend on this number."""
    placement: str = "auto"
    """The way of tables with several trainers: auto (one looks a table up for all where that moves under half the bytes),
    rows (all spread by hash), whole, columns or mixed for all, or a plan of `skirl place --trainers`. Bits stay the same."""
    peer_timeout: float | None = None
    """Seconds to wait for another trainer before the job ends with its name; $SKIRL_TIMEOUT or 600 if not given."""

    def __post_init__(self) -> None:
        check_shards(self.shards)
        if self.placement not in WAYS and not self.placement.endswith(".json"):
            raise ValueError(
                f"placement is {self.placement!r}: set it to {', '.join(WAYS)}, or to a plan in a .json file"
            )
        if self.peer_timeout is not None and not self.peer_timeout > 0:
            raise ValueError(f"peer_timeout is {self.peer_timeout}: set it to seconds above 0")


@dataclass(frozen=True, kw_only=True)
class CacheFlags:
    group: ClassVar[str] = "cache"

    cache: str = "10%"
    """Rows on the device: a number, 10% (of all), 4GiB, auto (half of what is free), touched:10% (of those the run uses)."""
    depth: int | Literal["auto", "epoch"] = "auto"
    """Batches that the oracle reads ahead: a number, auto (until they use four caches) or epoch (all, read twice)."""
    policy: Literal["min", "lru", "lfu", "ttl"] = "min"
    """Which rows the cache evicts: min is optimal, the others are for comparison."""
    store: str = "memory"
    """Where the rows outside the cache are: memory, disk:FOLDER, rpc://HOST:PORT for memory nodes, or several of these with
    weights: disk:a,disk:b*2."""

    def __post_init__(self) -> None:
        if any(store.startswith("rpc:") for store, _ in shards(self.store)):
            hush()
        self.parsed()

    def parsed(self) -> tuple[str, float]:
        """Parse `cache`. Return what `parse_cache` does, or ("touched", share)."""
        from skirl.engine.capacity import parse_cache

        text = self.cache.strip()
        if not text.startswith("touched:"):
            try:
                return parse_cache(int(text) if re.fullmatch(r"[-+]?\d+", text) else text)
            except ValueError as error:
                raise ValueError(str(error).replace(" or 'auto'", ", 'auto' or 'touched:10%'")) from None
        try:
            kind, share = parse_cache(text.removeprefix("touched:"))
        except ValueError:
            kind, share = "none", 0.0
        if kind != "share":
            raise ValueError(
                f"cache is {self.cache!r}: set it to touched: and a share above 0% and up to 100%, like touched:10%"
            )
        return "touched", share


@dataclass(frozen=True, kw_only=True)
class MovementFlags:
    group: ClassVar[str] = "cache"

    prefetch: int = 2
    """Number of steps ahead that rows are fetched; this changes when they move, never the result."""

    def __post_init__(self) -> None:
        if not 0 <= self.prefetch <= 1024:
            raise ValueError(f"prefetch is {self.prefetch}: set it between 0 and 1024 steps")


@dataclass(frozen=True, kw_only=True)
class DeviceFlags:
    group: ClassVar[str] = "device"

    device: str = "cpu"
    """Where rows are cached and the model computes: cpu, cuda, cuda:N, or interpret: the GPU's code on the CPU."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type that rows are stored in; 16 bits need a GPU, where rows are rounded stochastically, by a seed."""
    threads: int | None = None
    """Compute threads; all cores but one if not given. The bits depend on this number, so a resumed run keeps it."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}: set it to 1 or more")
        if self.dtype != "float32" and self.device == "cpu":
            raise ValueError(
                f"dtype is {self.dtype!r} and device 'cpu': rows of 16 bits are trained on a GPU, set device to cuda"
            )
        if self.device != "cpu":
            from skirl.engine.device import torch_device

            torch_device(self.device)


@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    group: ClassVar[str] = "evaluation"

    eval_every: int | None = None
    """Steps between two evaluations on the samples that --valid holds out; there is always one at the end."""
    patience: int | None = None
    """Stop after this many evaluations in a row without a better test log loss."""

    def __post_init__(self) -> None:
        for name in ("eval_every", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: set it to 1 or more")
        if self.patience is not None and self.eval_every is None:
            raise ValueError("patience counts evaluations: set eval_every to the steps between two")


def check_evaluated(evaluation: EvaluationFlags, *, valid: str | None, keep_best: bool = False) -> None:
    if evaluation.eval_every is not None and valid is None:
        raise ValueError("eval_every needs samples that are held out: set valid, to 20% say")
    if keep_best and evaluation.eval_every is None:
        raise ValueError(
            "--keep-best keeps the checkpoint with the best held-out log loss: set --eval-every to the steps between "
            "two evaluations, and --valid to what is held out"
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """When a run or a sweep is saved."""

    group: ClassVar[str] = "save"

    save: Path | None = None
    """The folder to go on from: rows, weights and place in the data, saved at the run's beginning, end, and when stopped."""
    save_every: int | None = None
    """Steps between two checkpoints."""
    save_minutes: float | None = None
    """Minutes between two checkpoints."""
    resume: bool = False
    """Resume from the newest whole checkpoint in --save; if there is none yet, start the run."""

    def __post_init__(self) -> None:
        names = [n for n in ("save_every", "save_minutes", "keep_last", "keep_best", "resume") if hasattr(self, n)]
        if self.save is None and any(getattr(self, name) for name in names):
            raise ValueError(f"{', '.join(names[:-1])} and {names[-1]} need a folder: set save")
        if self.save_every is not None and self.save_every < 1:
            raise ValueError(f"save_every is {self.save_every}: set it to 1 or more steps")
        if self.save_minutes is not None and not self.save_minutes > 0:
            raise ValueError(f"save_minutes is {self.save_minutes}: set it to minutes above 0")


@dataclass(frozen=True, kw_only=True)
class SaveFlags(CheckpointFlags):
    keep_last: int | None = None
    """Number of newest checkpoints to keep in the folder; 2 if not given."""
    keep_best: bool = False
    """Also keep the checkpoint with the best held-out log loss, in SAVE/best; needs --valid and --eval-every."""
    from_: Path | None = None
    """Start with rows and dense weights of another run: its folder, or the header of a checkpoint. With --resume, only if
    --save holds no checkpoint yet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last is {self.keep_last}: set it to 1 or more checkpoints")


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    group: ClassVar[str] = "output"

    run: str = "auto"
    """The folder to look at: metrics and result, for `skirl report` and TensorBoard; auto: a new one in runs/ or
    $SKIRL_RUNS; or none."""
    log_every: int = 50
    """Steps between two lines of metrics.jsonl; the console shows one every few seconds."""
    trace: Path | None = None
    """A file for the timeline of all stages, 1.3 KB a step; open it in https://ui.perfetto.dev."""

    def __post_init__(self) -> None:
        if self.log_every < 1:
            raise ValueError(f"log_every is {self.log_every}: set it to 1 or more steps")
        if not self.run:
            raise ValueError("run is empty: set it to a folder, auto or none")

    def folder(self) -> str:
        """$SKIRL_RUNS=none turns auto into "none"."""
        return "none" if self.run == "auto" and os.environ.get(RUNS) == "none" else self.run


@dataclass(frozen=True, kw_only=True)
class SavedFlags:
    """A saved run, and what it is to predict. Flags that are not given are as in the run."""

    checkpoint: Path
    """The folder that `skirl train --save` wrote, to use its newest whole checkpoint, or the header of one."""
    data: str | None = None
    """The data to predict, as for `skirl train`: criteo:, avazu:, mind:, csv: or parquet:PATH. With --held-out or --valid,
    the run's if not given."""
    held_out: bool = False
    """Use only the part that the run held out of its training."""
    valid: str | None = None
    """Use only the part that this would hold out: 20% (the last rows), or from a time on: time>=14102900."""
    schema: str | None = None
    """A TOML file that names the columns; if not given, the run's, or the one inside a converted file."""
    vocab: str | None = None
    """Where the run's vocabulary is now, if it has moved."""
    batch: int | None = None
    """Samples in a batch; as in the run if not given. The last bits of a prediction may depend on it."""
    workers: int | None = None
    """Processes that read files; as in the run if not given."""
    bad_rows: Literal["refuse", "skip"] | None = None
    """Treatment of malformed rows: refuse the data, or leave the row out; as in the run if not given."""
    device: str | None = None
    """Where the model computes: cpu, cuda or cuda:N; as in the run if not given."""
    threads: int | None = None
    """Compute threads; as in the run if not given. The last bits of a prediction may depend on it."""

    def __post_init__(self) -> None:
        if self.held_out and self.valid is not None:
            raise ValueError("--held-out is the part that the run held out, and --valid another one: set one of them")
        if not self.checkpoint.exists():
            raise ValueError(f"{self.checkpoint} does not exist: name the folder of --save, or a checkpoint in it")
        if self.data is None and not self.held_out and self.valid is None:
            raise ValueError(
                "the data is missing: name it after the checkpoint, such as parquet:new, or set --held-out for "
                "what the run held out"
            )
