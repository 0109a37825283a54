"""Rows of checkpoints in formats that others read, and out of them: state dicts, safetensors, Parquet."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from skirl.checkpoint import numbers, save
from skirl.checkpoint.export import export, rows_of
from skirl.checkpoint.import_rows import Tensors, import_rows
from skirl.checkpoint.without_model import opened
from skirl.core.optim import ROW_OPTIMIZERS, row_optimizer
from skirl.core.tables import Table
from skirl.data.vocabulary.origins import Origins
from skirl.nn.collection import EmbeddingBagCollection, collections_of


def write_rows(
    checkpoint: Path, out: Path, table: str | None, *, state_dict: bool, prefix: str, dense: bool, limit: str
) -> None:
    """Write the rows of a checkpoint to a file; the arguments are the flags of `skirl export`."""
    with opened(checkpoint) as (rows, parameters, data):
        if out.suffix == ".parquet":
            _to_parquet(rows, out, table, Origins.of(data))
        elif state_dict or out.suffix == ".pt":
            _to_state_dict(rows, out, table, prefix, parameters if dense else {}, limit)
        else:
            export(rows, out, table, limit=limit)


def read_rows(
    source: Path,
    out: Path,
    *,
    names: Sequence[str],
    prefix: str,
    pooling: Literal["sum", "mean"],
    optimizer: str | None,
    store: str,
) -> dict[str, Any]:
    """Make a checkpoint of the rows in a file; the arguments are the flags of `skirl import`."""
    if out.is_dir() and numbers(out):
        raise ValueError(f"{out} holds checkpoints: name another folder")
    tensors = Tensors(source)
    found = sorted(n for n in tensors.names if n.startswith(prefix) and n.endswith("weight"))
    by_name = {
        n.removeprefix(prefix).removesuffix("weight").removesuffix(".") or tensors.alone or "table": n for n in found
    }
    wanted = {t: by_name.get(t) for t in names} or {t: n for t, n in by_name.items() if len(tensors.shape(n)) == 2}
    missing = [t for t, n in wanted.items() if n is None]
    if missing or not wanted:
        what = f"no table {missing[0]!r}" if wanted else f"no weight under {prefix!r}"
        raise ValueError(f"{source} has {what}: it has {', '.join(sorted(tensors.names)[:9])}")
    weights = {t: n for t, n in wanted.items() if n is not None}
    bases = {
        t: n.removesuffix("weight") for t, n in weights.items() if f"{n.removesuffix('weight')}ids" in tensors.names
    }
    counts = {t: tensors.shape(n)[0] for t, n in weights.items()}
    for table, base in bases.items():  # the touched rows alone
        if "rows" not in (facts := tensors.table(base)):
            raise ValueError(f"{source} has ids of {table!r}, and not how many rows it has: export it anew")
        counts[table] = facts["rows"]
    short = {make().name: short for short, make in ROW_OPTIMIZERS.items()}
    by = {t: short.get(str(tensors.optimizer(base))) for t, base in bases.items()}
    theirs = next(iter(by.values())) if len(set(by.values())) == 1 else None
    chosen = optimizer or theirs or "rowwise-adagrad"
    tables = [Table(t, counts[t], tensors.shape(n)[1], pooling=pooling) for t, n in weights.items()]
    rows = EmbeddingBagCollection(tables, optimizer=row_optimizer(chosen)(), cache=1, store=store)
    taken = import_rows(rows, source, names=weights)
    steps = dict(zip(weights, rows.engine.table_steps.tolist(), strict=True))
    save(out, model=rows)
    rows.close()
    return {
        "tables": taken,
        "optimizer": chosen,
        "steps": steps if chosen == theirs and bases else None,
    }


def _to_state_dict(
    rows: nn.Module, out: Path, table: str | None, prefix: str, dense: dict[str, torch.Tensor], limit: str
) -> None:
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        draft = Path(folder) / "rows.safetensors"
        export(rows, draft, table, untouched=True, limit=limit)
        state = {prefix + name: tensor for name, tensor in load_file(draft).items()}  # mapped, not read
        state |= dense
        whole = Path(folder) / "whole"
        if out.suffix == ".pt":
            torch.save(state, whole)
        elif prefix or dense:
            save_file(state, whole, metadata={"format": "pt"})
        else:
            whole = draft
        whole.replace(out)


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
