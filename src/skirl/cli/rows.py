"""The commands about files and folders of rows: export, import, info."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from skirl.cli.show import facts
from skirl.core.optimizer_names import OptimizerName


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
        from skirl.checkpoint.export import write_rows
        from skirl.checkpoint.without_model import opened
        from skirl.data.vocabulary.vocabulary import Origins
        from skirl.sweep.checkpoint import checkpoint_of, refuse_whole
        from skirl.tools.os_errors import writing

        if self.variant is None:
            refuse_whole(self.checkpoint)
        checkpoint = self.checkpoint if self.variant is None else checkpoint_of(self.checkpoint, self.variant)
        with opened(checkpoint) as (rows, parameters, data, _), writing(self.out):
            origins = Origins.of(data) if self.out.suffix == ".parquet" else None
            write_rows(
                rows, self.out, self.table, state_dict=self.state_dict, prefix=self.prefix,
                dense=parameters if self.dense else None, origins=origins, limit=self.limit,
            )  # fmt: skip
        return {
            "command": "export",
            "checkpoint": str(checkpoint),
            "out": str(self.out),
            "bytes": self.out.stat().st_size,
            "failed": None,
        }

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        return facts(result, "checkpoint", "out", "bytes")


@dataclass(frozen=True)
class Import:
    """Make a checkpoint of the rows of a trained PyTorch model. `skirl.import_rows(model, FOLDER)` reads it."""

    source: Positional[Path]
    """A state dict, as .safetensors or as written by torch.save, or a file written by `skirl export`."""
    out: Positional[Path]
    """The folder to write the checkpoint to."""
    tables: tuple[str, ...] = ()
    """Names of the tables, each the end of a weight's name; if not given, every two-dimensional NAME.weight under
    --prefix."""
    prefix: str = ""
    """Text before the tables' names, such as embedding_bags."""
    pooling: Literal["sum", "mean"] = "sum"
    """The pooling of all tables."""
    optimizer: OptimizerName | None = None
    """The optimizer that will train the rows; if not given, that of a file of `skirl export`, else rowwise-adagrad.
    Such a file also gives the optimizer's state, if the optimizer is the same; otherwise the state starts from
    zero."""
    store: str = "memory"
    """Where rows are held during the import: memory, or disk:FOLDER for tables larger than memory."""
    json: bool = False
    """Print one line of JSON."""

    def run(self) -> dict[str, Any]:
        from skirl.checkpoint.import_rows import read_rows

        found = read_rows(
            self.source,
            self.out,
            names=self.tables,
            prefix=self.prefix,
            pooling=self.pooling,
            optimizer=self.optimizer,
            store=self.store,
        )
        return {"command": "import", "out": str(self.out), **found, "failed": None}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        state = f"after {max(steps.values()):,} steps" if (steps := result["steps"]) is not None else "from zero"
        return facts(result, "tables", "optimizer") | {"state": state} | facts(result, "out")


@dataclass(frozen=True)
class Info:
    """Say what a file or folder is: a checkpoint, a disk store, a vocabulary, a plan, data, predictions, a run, a sweep."""

    path: Positional[Path]
    """The file or folder; nothing in it is changed or locked."""
    check: bool = False
    """Read a whole checkpoint and compare its checksums; without this, only sizes are checked."""
    json: bool = False
    """Print one line of JSON."""

    def run(self) -> dict[str, Any]:
        from skirl.sizing.look import look

        return {"command": "info", "path": str(self.path), **look(self.path, check=self.check)}

    def summary(self, result: Mapping[str, Any]) -> dict[str, str]:
        return facts({name: value for name, value in result.items() if name not in ("command", "path", "failed")})
