"""`skirl report` and `skirl export`, which know runs and sweeps. What they need is imported only when they run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from skirl.tools.flags import flags_of
from skirl.tools.progress import size


@dataclass(frozen=True)
class Export:
    """Write the rows of a checkpoint to a file that other software reads."""

    checkpoint: Positional[Path]
    """A folder of checkpoints, or the header of one; with --variant, the folder of a sweep or of its checkpoints."""
    out: Positional[Path]
    """The file to write: .safetensors, .pt for a state dict, or .parquet."""
    variant: str | None = None
    """The variant of a sweep whose rows are exported."""
    table: str | None = None
    """The table to write; all tables if not given."""
    state_dict: bool = False
    """Write every row of the tables, named as in a state dict: TABLE.weight, or weight with --table. A .pt file always
    is one."""
    prefix: str = ""
    """Text to put before TABLE.weight in a state dict, such as embedding_bags. for TorchRec."""
    dense: bool = False
    """Also write the dense parameters and buffers, by their names in the model."""
    limit: str = "16GiB"
    """Refuse to write a file larger than this."""
    force: bool = False
    """Replace the file if it exists."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        if self.out.suffix not in (".safetensors", ".pt", ".parquet"):
            raise ValueError(f"out is {self.out}: name a file that ends with .safetensors, .pt or .parquet")
        if self.out.suffix == ".parquet" and (self.state_dict or self.dense):
            raise ValueError("Parquet holds rows with their numbers: leave state-dict and dense out")
        if self.dense and not (self.state_dict or self.out.suffix == ".pt"):
            raise ValueError("dense parameters go with a state dict: add --state-dict")
        if self.out.exists() and not self.force:
            raise ValueError(
                f"out is {self.out}, which already exists: name another file, or add --force to replace it"
            )

    def run(self) -> dict[str, Any]:
        from skirl.checkpoint.other_formats import write_rows
        from skirl.sweep.checkpoint import checkpoint_of, refuse_whole

        if self.variant is None:
            refuse_whole(self.checkpoint)
        checkpoint = self.checkpoint if self.variant is None else checkpoint_of(self.checkpoint, self.variant)
        write_rows(
            checkpoint, self.out, self.table, state_dict=self.state_dict, prefix=self.prefix, dense=self.dense,
            limit=self.limit,
        )  # fmt: skip
        return {
            "command": "export",
            "checkpoint": str(checkpoint),
            "out": str(self.out),
            "bytes": self.out.stat().st_size,
            "failed": None,
        }

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines = {} if self.variant is None else {"out of": result["checkpoint"]}
        return {**lines, "written": f"{result['out']}, {size(result['bytes'])}"}


@dataclass(frozen=True)
class Report:
    """Summarize what a run or a sweep did, and write a page about it."""

    folder: Positional[Path]
    """The folder of the run or the sweep."""
    page: Path | None = None
    """Where to write the page; report.html in that folder if not given."""
    json: bool = False
    """Print the facts as one line of JSON."""

    def run(self) -> dict[str, Any]:
        from skirl.train.commands import Train
        from skirl.train.report.report import report

        if (self.folder / "sweep.json").is_file():
            from skirl.sweep.report import report as report_of_sweep

            return report_of_sweep(self.folder, self.page)
        return report(self.folder, self.page, {name: flag.default for name, flag in flags_of(Train).items()})

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        if result["command"] == "report of a sweep":
            from skirl.sweep.report import as_text
        else:
            from skirl.train.report.report import as_text
        lines = as_text(result)
        return {**lines, "page": result["page"]}
