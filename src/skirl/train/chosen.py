"""The flags that `skirl evaluate` and `skirl predict` share: a saved run, and what to predict."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from skirl.tools.progress import clock, size
from skirl.train.commands import described


@dataclass(frozen=True)
class Chosen:
    """A saved run, and what it is to predict. Flags that are not given are as in the run."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "files": ("schema", "vocab", "workers", "bad_rows"),
        "device": ("device", "threads"),
        "output": ("json", "quiet"),
    }

    common: ClassVar[tuple[str, ...]] = ("data", "save", "into", "held_out", "valid")

    _: KW_ONLY
    save: Path
    """The folder that `skirl train --save` wrote, to use its newest whole checkpoint, or the header of one
    checkpoint."""
    data: str | None = None
    """The data to predict, as for `skirl train`: criteo:, avazu:, mind:, csv: or parquet:PATH; the run's data if not
    given."""
    held_out: bool = False
    """Use only the part that the run held out of its training."""
    valid: str | None = None
    """Use only the part that this would hold out: 20% (the last rows in order), or a time: time>=14102900,
    time>=2026-03-01."""
    schema: str | None = None
    """A TOML file that names the columns; if not given, the run's, or the one inside a converted file."""
    vocab: str | None = None
    """Where the run's vocabulary is now, if it has moved."""
    batch: int | None = None
    """Samples in a batch; as in the run if not given, since the last bits of a prediction may depend on it."""
    workers: int | None = None
    """Processes that read files; as in the run if not given."""
    bad_rows: Literal["refuse", "skip"] | None = None
    """Treatment of malformed rows: refuse the data, or leave the row out; as in the run if not given."""
    device: str | None = None
    """Where the model computes: cpu, cuda or cuda:N; as in the run if not given."""
    threads: int | None = None
    """Compute threads; as in the run if not given, since the last bits of a prediction may depend on it."""
    json: bool = False
    """Print the results as one line of JSON; progress goes to standard error."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        if self.held_out and self.valid is not None:
            raise ValueError(
                "--held-out is the part that the run held out, and --valid another one: set one of the two"
            )
        if self.data is None and not self.held_out and self.valid is None:
            raise ValueError(
                "nothing says what to predict: set --data, or --held-out for the samples that the run held out"
            )

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        lines = {
            "checkpoint": f"{result['checkpoint']}, after step {result['step']:,}",
            "samples": f"{result['samples']:,} of {result['data']}"
            + (f", those that --valid {result['part']} holds out" if result["part"] else ""),
        }
        if "auc" in result:
            lines["metrics"] = described(result)
        if (rate := result["samples_per_second"]) is not None:
            lines["speed"] = (
                f"{rate:,.0f} samples/s and {result['cpu_us_per_sample']:.1f} us of CPU each after the first batch, "
                f"{clock(result['seconds'])} in all"
            )
        if result["bad_rows_skipped"]:
            lines["skipped"] = f"{result['bad_rows_skipped']:,} malformed rows"
        if result["into"] is not None:
            lines["written"] = f"{result['into']}, {size(result['bytes'])}"
        return lines
