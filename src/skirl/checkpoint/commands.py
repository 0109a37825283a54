"""`skirl export` and `skirl import`: convert rows from checkpoints and to them, in formats that other software reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from skirl.core.optimizer_names import OptimizerName


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
        from skirl.checkpoint.other_formats import read_rows

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
        steps = result["steps"]
        told = (
            "its state starts from zero"
            if steps is None
            else f"its state came along, after {max(steps.values()):,} steps"
        )
        lines = {name: f"{n:,} rows" for name, n in result["tables"].items()}
        return lines | {"optimizer": f"{result['optimizer']}; {told}", "saved": f"in {result['out']}"}
