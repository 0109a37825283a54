"""`skirl bench dedup`: the gain from storing repeated lists once, in files, readers, the embedding step and training."""

import json
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from skirl.measure.bench.dedup import DedupStep
from skirl.measure.bench.helpers import at_least_one, child, result

Part = Literal["storage", "reader", "lookup", "mixed", "train", "order", "cache", "convert"]


@dataclass(frozen=True)
class Dedup(DedupStep):
    """Measures the gain from storing repeated lists once: in files, in the reader, in the embedding step and in training."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "files": ("samples", "rows_scale", "change", "at_once", "compression", "mind", "memory"),
        "training": ("model", "train_batch", "train_steps", "train_rounds", "seeds"),
        "output": ("json",),
    }

    part: tuple[Part, ...] = ("storage", "reader", "lookup", "train")  # type: ignore[assignment]
    """storage: bytes of files of sessions; reader: from files to batches; lookup: the step of an embedding collection with
    all rows resident, on lists, on windows of lists that shift, and on mixed batches; mixed: only mixed batches; train: from
    the file to the updated row, by model and factor; order: a model trained on samples in several orders; cache: the load of
    a cache in those orders; convert: `skirl convert --by session` and `skirl same`."""
    _: KW_ONLY
    samples: int = 200_000
    """Samples in the files."""
    rows_scale: float = 100.0
    """Multiply the number of ids that samples are drawn from by this; the default gives 2 million items."""
    change: float = 0.05
    """In the files: probability that a list differs from the previous sample's."""
    at_once: tuple[int, ...] = (1_000, 10_000)
    """Number of concurrent sessions in the files that are in order of time."""
    compression: Literal["none", "snappy", "zstd"] = "none"
    """Compression of the files to read, those clustered by session and those that leave lists out; none by default, as
    `skirl convert` writes."""
    mind: str | None = None
    """A behaviors.tsv to measure too; if not given, the one in $SKIRL_DATA if there is one."""
    model: tuple[Literal["dcat", "dlrm", "din"], ...] = ("dcat", "dlrm", "din")
    """For part train: dcat and din with three lists, of which they attend to one; dlrm (the small one) with six."""
    train_batch: int = 1024
    """For part train: samples in a batch."""
    train_steps: int = 3
    """For part train: batches in the file that each side reads repeatedly."""
    train_rounds: int = 3
    """For part train: timed passes over the file; the sides take turns."""
    memory: str = "1GiB"
    """For part convert: memory of `skirl convert`."""
    seeds: int = 3
    """For part order: runs of each order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "samples", "train_batch", "train_steps", "train_rounds", "seeds")

    def run(self) -> dict[str, Any]:
        """Measure each part, and return the result."""
        found: dict[str, Any] = {}
        for part in self.part:
            of_part = getattr(self, f"_{part}")()
            found |= of_part | {"window": found.get("window", {}) | of_part.get("window", {})}
        if not found.get("window"):
            found.pop("window", None)
        return found | {"part": list(self.part)}

    def _lookup(self) -> dict[str, Any]:
        from skirl.dedup.shifting import Shifting

        shifting = Shifting(self.batch, self.lists, self.ids, self.dim, self.rows, self.rounds)
        return self._steps("lookup") | {"window": shifting.run()}

    def _mixed(self) -> dict[str, Any]:
        return {} if "lookup" in self.part else self._steps("mixed")  # lookup measures both

    def _steps(self, part: Literal["lookup", "mixed"]) -> dict[str, Any]:
        names = [field.name for field in fields(DedupStep) if field.name != "part"]
        return DedupStep((part,), **{name: getattr(self, name) for name in names}).run()

    def _storage(self) -> dict[str, Any]:
        from skirl.dedup.sizes import stored

        figures = stored(self.samples, self.change, self.rows_scale, self.at_once, self._impressions)
        return result("dedup", self, "samples rows_scale change at_once", **figures)

    def _reader(self) -> dict[str, Any]:
        asked = [self.samples, self.rows_scale, self.rounds, self.compression]
        reader = child(["-m", "skirl.dedup.reading", json.dumps(asked)], {})
        return result("dedup", self, "samples rows_scale rounds compression", reader=reader)

    def _train(self) -> dict[str, Any]:
        from skirl.dedup.training import Training

        shape = (self.train_batch, self.train_steps, self.ids, self.dim, self.rows, self.train_rounds)
        train = Training(self.factor, self.model, *shape).run()
        shifting = Training((0.0,), tuple(model for model in self.model if model != "dlrm"), *shape).run()
        window = {f"train_{name}": {model: of["0"] for model, of in by.items()} for name, by in shifting.items()}
        flags = "train_batch train_steps train_rounds ids dim rows"
        return result("dedup", self, flags, train=train, window=window)

    def _order(self) -> dict[str, Any]:
        from skirl.dedup.ordering import ordered

        return result("dedup", self, "samples seeds", order=ordered(self.samples, self.seeds, self._impressions))

    def _cache(self) -> dict[str, Any]:
        from skirl.dedup.caching import cached

        if self._impressions is None:
            raise ValueError("part cache is measured on MIND: set mind to a behaviors.tsv")
        return result("dedup", self, "", cache=cached(self._impressions))

    def _convert(self) -> dict[str, Any]:
        from skirl.dedup.converting import converted

        figures = converted(self.samples, self.change, self.rows_scale, max(self.at_once), self.memory)
        return result("dedup", self, "samples rows_scale change at_once memory", convert=figures)

    @property
    def _impressions(self) -> str | None:
        folder = os.environ.get("SKIRL_DATA")
        found = sorted(Path(folder, "mind").glob("*.tsv")) if folder else []
        return self.mind or (str(found[0]) if found else None)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as labelled lines for people to read."""
        from skirl.dedup.shifting import told_of as told_of_windows
        from skirl.dedup.training import described

        told: dict[str, str] = {}
        if "storage" in self.part:
            from skirl.dedup.sizes import told_of

            told |= told_of(result)
        if "reader" in self.part:
            for factor, speeds in result["reader"]["rows_a_second"].items():
                told[f"reader, factor {factor}"] = ", ".join(f"{of}: {n:,} rows/s" for of, n in speeds.items())
            told["sessions in chunks"] = (
                f"{result['reader']['shuffled_chunks']} times the rows a second of those in order"
            )
        if {"lookup", "mixed"} & set(self.part):
            told |= super().summary(result)
        if "train" in self.part:
            told |= described(result["train"])
        told |= told_of_windows(result.get("window", {}))
        if "order" in self.part:
            from skirl.dedup.ordering import told_of as told_of_order

            told |= told_of_order(result["order"])
        if "cache" in self.part:
            from skirl.dedup.caching import told_of as told_of_cache

            told |= told_of_cache(result["cache"])
        if "convert" in self.part:
            from skirl.dedup.converting import told_of as told_of_convert

            told |= told_of_convert(result["convert"])
        return told
