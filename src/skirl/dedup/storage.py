"""`skirl bench dedup`: what it gains to have lists that repeat once, in the embedding step, in files, and in the reader."""

import json
import os
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from skirl.measure.bench.dedup import Dedup as Step
from skirl.measure.bench.helpers import child, result


@dataclass(frozen=True)
class Dedup(Step):
    """What it gains to have lists that repeat once: in the embedding step, in files, and in the reader."""

    part: tuple[Literal["lookup", "storage", "reader"], ...] = ("lookup",)  # type: ignore[assignment]
    """lookup: the step of an embedding collection; storage: bytes of files of sessions; reader: from files to batches."""
    _: KW_ONLY
    samples: int = 200_000
    """Samples of the files."""
    rows_scale: float = 100.0
    """Multiplies the ids that the files' samples are drawn from: 2 million items."""
    change: float = 0.05
    """Of the files: the probability that a list differs from that of the sample before."""
    at_once: tuple[int, ...] = (1_000, 10_000)
    """Sessions that run at the same time, in the files in order of time."""

    compression: Literal["none", "snappy", "zstd"] = "none"
    """Of the files that are read: of clustered rows and of those that leave lists out; `skirl convert`'s if not set."""
    mind: str | None = None
    """A behaviors.tsv, whose files are measured too; that of $SKIRL_DATA if not set and there is one."""

    def run(self) -> dict[str, Any]:
        """Measure each part."""
        found: dict[str, Any] = {}
        if "lookup" in self.part:
            names = [field.name for field in fields(Step) if field.name != "part"]
            found |= Step(("lookup",), **{name: getattr(self, name) for name in names}).run()
        if "storage" in self.part:
            from skirl.dedup.sizes import stored

            mind = self.mind or _of_environment()
            figures = stored(self.samples, self.change, self.rows_scale, self.at_once, mind)
            found |= result("dedup", self, "part samples rows_scale change at_once", **figures)
        if "reader" in self.part:
            asked = [self.samples, self.rows_scale, self.rounds, self.compression]
            reader = child(["-m", "skirl.dedup.reading", json.dumps(asked)], {})
            found |= result("dedup", self, "part samples rows_scale rounds compression", reader=reader)
        return found | {"part": list(self.part)}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        told = super().summary(result) if "lookup" in self.part else {}
        if "storage" in self.part:
            from skirl.dedup.sizes import told_of

            told |= told_of(result)
        if "reader" in self.part:
            for factor, speeds in result["reader"]["rows_a_second"].items():
                told[f"reader, factor {factor}"] = ", ".join(f"{of}: {n:,} rows/s" for of, n in speeds.items())
        return told


def _of_environment() -> str | None:
    folder = os.environ.get("SKIRL_DATA")
    found = sorted(Path(folder, "mind").glob("*.tsv")) if folder else []
    return str(found[0]) if found else None
