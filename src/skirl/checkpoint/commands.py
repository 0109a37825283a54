"""`skirl export` and `skirl import`: rows out of checkpoints and into them, in formats that others read.

A state dict of nn.EmbeddingBag holds every row of a table, touched or not, so it is written from its first row on to a file
that is then mapped: it takes a piece of 65,536 rows, whatever the table's size. The rows of a store in memory are loaded
whole, as they were when it trained; those of a disk store are read from its files. Our own file and Parquet hold the
touched rows with their numbers, Parquet also with the ids that an open vocabulary gave them to.
Converting in the notebook of whoever wants the rows would need skirl there.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from tyro.conf import Positional

from skirl.checkpoint import numbers, save
from skirl.checkpoint.export import export, rows_of
from skirl.checkpoint.import_rows import import_rows
from skirl.checkpoint.without_model import opened
from skirl.core.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from skirl.core.tables import Table
from skirl.data.vocabulary.origins import Origins
from skirl.nn.collection import EmbeddingBagCollection, collections_of
from skirl.tools.progress import size

_OPTIMIZERS = {"rowwise-adagrad": RowwiseAdagrad, "sgd": SGD, "adagrad": Adagrad, "adam": Adam}


@dataclass(frozen=True)
class Export:
    """Write the rows of a checkpoint to a file that others read."""

    checkpoint: Positional[Path]
    """A folder of checkpoints, or the header of one."""
    out: Positional[Path]
    """The file: .safetensors; .pt for a state dict; .parquet."""
    table: str | None = None
    """One table; all if not given."""
    state_dict: bool = False
    """Every row of the tables, named as in a state dict (always so in .pt): TABLE.weight, or weight with --table."""
    prefix: str = ""
    """Stands before TABLE.weight in a state dict: embedding_bags. for TorchRec."""
    dense: bool = False
    """Also the dense parameters and buffers, by their names in the model."""
    limit: str = "16GiB"
    """A larger file is refused."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        if self.out.suffix not in (".safetensors", ".pt", ".parquet"):
            raise ValueError(f"out is {self.out}: name a file that ends with .safetensors, .pt or .parquet")
        if self.out.suffix == ".parquet" and (self.state_dict or self.dense):
            raise ValueError("Parquet holds rows with their numbers: leave state-dict and dense out")
        if self.dense and not (self.state_dict or self.out.suffix == ".pt"):
            raise ValueError("dense parameters go with a state dict: add --state-dict")

    def run(self) -> dict[str, Any]:
        """Write it."""
        with opened(self.checkpoint) as (rows, dense, data):
            if self.out.suffix == ".parquet":
                _to_parquet(rows, self.out, self.table, Origins.of(data))
            elif self.state_dict or self.out.suffix == ".pt":
                self._to_state_dict(rows, dense)
            else:
                export(rows, self.out, self.table, limit=self.limit)
            return {"command": "export", "out": str(self.out), "bytes": self.out.stat().st_size, "failed": None}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        return {"written": f"{result['out']}, {size(result['bytes'])}"}

    def _to_state_dict(self, rows: nn.Module, dense: dict[str, torch.Tensor]) -> None:
        with tempfile.TemporaryDirectory(dir=self.out.parent) as folder:
            draft = Path(folder) / "rows.safetensors"
            export(rows, draft, self.table, untouched=True, limit=self.limit)
            state = {self.prefix + name: tensor for name, tensor in load_file(draft).items()}  # mapped, not read
            if self.dense:
                state |= dense
            whole = Path(folder) / "whole"
            if self.out.suffix == ".pt":
                torch.save(state, whole)
            elif self.prefix or self.dense:
                save_file(state, whole, metadata={"format": "pt"})
            else:
                whole = draft
            whole.replace(self.out)


@dataclass(frozen=True)
class Import:
    """Make a checkpoint of the rows of a trained PyTorch model; `skirl.import_rows(model, FOLDER)` takes them from there."""

    source: Positional[Path]
    """A state dict: .safetensors, or what torch.save wrote; or a file of skirl export."""
    out: Positional[Path]
    """The folder of the checkpoint."""
    tables: tuple[str, ...] = ()
    """Names of the tables, each the end of a weight's name; every two-dimensional NAME.weight under --prefix otherwise."""
    prefix: str = ""
    """What stands before the tables' names: embedding_bags. say."""
    pooling: Literal["sum", "mean"] = "sum"
    """Of all tables."""
    optimizer: Literal["rowwise-adagrad", "sgd", "adagrad", "adam"] | None = None
    """That will train the rows; that of a file of skirl export if not set, else rowwise-adagrad. Its state comes along from
    such a file, if it is of the same optimizer, and begins anew otherwise."""
    store: str = "memory"
    """memory, or disk:FOLDER for tables that are larger."""
    json: bool = False
    """Print one line of JSON."""

    def run(self) -> dict[str, Any]:
        """Read the source and save."""
        from skirl.checkpoint.import_rows import _Tensors

        if self.out.is_dir() and numbers(self.out):
            raise ValueError(f"{self.out} holds checkpoints: name another folder")
        tensors = _Tensors(self.source)
        found = sorted(n for n in tensors.names if n.startswith(self.prefix) and n.endswith("weight"))
        by_name = {
            n.removeprefix(self.prefix).removesuffix("weight").removesuffix(".") or tensors.alone or "table": n
            for n in found
        }
        wanted = {t: by_name.get(t) for t in self.tables} or {
            t: n for t, n in by_name.items() if len(tensors.shape(n)) == 2
        }
        missing = [t for t, n in wanted.items() if n is None]
        if missing or not wanted:
            what = f"no table {missing[0]!r}" if wanted else f"no weight under {self.prefix!r}"
            raise ValueError(f"{self.source} has {what}: it has {', '.join(sorted(tensors.names)[:9])}")
        names = {t: n for t, n in wanted.items() if n is not None}
        bases = {
            t: n.removesuffix("weight") for t, n in names.items() if f"{n.removesuffix('weight')}ids" in tensors.names
        }
        counts = {t: tensors.shape(n)[0] for t, n in names.items()}
        for table, base in bases.items():  # the touched rows alone
            if "rows" not in (facts := tensors.table(base)):
                raise ValueError(f"{self.source} has ids of {table!r}, and not how many rows it has: export it anew")
            counts[table] = facts["rows"]
        theirs = next((o for o, kind in _OPTIMIZERS.items() if kind.__name__ == tensors.about.get("optimizer")), None)
        chosen = self.optimizer or theirs or "rowwise-adagrad"
        tables = [Table(t, counts[t], tensors.shape(n)[1], pooling=self.pooling) for t, n in names.items()]
        rows = EmbeddingBagCollection(tables, optimizer=_OPTIMIZERS[chosen](), cache=1, store=self.store)
        taken = import_rows(rows, self.source, names=names)
        steps = dict(zip(names, rows.engine.table_steps.tolist(), strict=True))
        save(self.out, model=rows)
        rows.close()
        return {
            "command": "import",
            "out": str(self.out),
            "tables": taken,
            "optimizer": chosen,
            "steps": steps if chosen == theirs and bases else None,
            "failed": None,
        }

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        steps = result["steps"]
        told = (
            "its state begins anew" if steps is None else f"its state came along, after {max(steps.values()):,} steps"
        )
        lines = {name: f"{n:,} rows" for name, n in result["tables"].items()}
        return lines | {"optimizer": f"{result['optimizer']}; {told}", "saved": f"in {result['out']}"}


def _to_parquet(rows: nn.Module, path: Path, table: str | None, origins: Origins | None) -> None:
    """Columns table, row and weight, in order of tables and rows; and what each row is of, where the run read files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = pa.float32() if next(iter(collections_of(rows).values())).engine.dtype == np.float32 else pa.float64()
    fields = [("table", pa.string()), ("row", pa.int64())]
    if origins is not None:
        fields += [("what", pa.string()), ("id", pa.string()), ("fingerprint", pa.uint64())]
    schema = pa.schema([*fields, ("weight", pa.list_(number))])
    draft = path.with_name(f"{path.name}.tmp")
    try:
        with pq.ParquetWriter(draft, schema) as writer:
            for name, ids, weights in rows_of(rows, table):
                flat = pa.array(np.ascontiguousarray(weights).reshape(-1), number)
                offsets = pa.array(np.arange(len(ids) + 1, dtype=np.int32) * weights.shape[1])
                columns = [pa.array([name] * len(ids)), pa.array(ids)]
                if origins is not None:
                    what, texts, prints = origins.of_rows(name, ids)
                    columns += [pa.array(what), pa.array(texts, pa.string()), pa.array(prints, mask=prints == 0)]
                columns.append(pa.ListArray.from_arrays(offsets, flat))
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
