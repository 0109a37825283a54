"""Write trained rows to a file that others read: what it is, its suffix says."""

import secrets
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from skirl.checkpoint.export import rows_of, to_safetensors
from skirl.data.vocabulary.origins import Origins
from skirl.nn.collection import collections_of

SUFFIXES = (".safetensors", ".pt", ".parquet")


def export(
    model: nn.Module,
    path: str | Path,
    table: str | None = None,
    *,
    untouched: bool = False,
    limit: int | str = "16GiB",
) -> None:
    """Write the rows of one table, or of all, to a file; inside a lookahead, as the steps so far left them.

    What the file is, its name says, as for `skirl export`: .safetensors has the rows that were used; .pt is a state dict of
    every row, `TABLE.weight`, or `weight` for one table; .parquet has the rows that were used, in the columns table, row
    and weight.

    For one table a safetensors file has `ids`, int64 `[n]`, ascending; `weight`, `[n, dim]`; and each part of the
    optimizer's state by the name that torch gives it (`sum`, `exp_avg`, ...). For all tables these names begin with the
    table's name and a dot. Its metadata has a JSON object under `tables`: the `rows` of each table, and the `steps` that
    trained it, without which Adam's moments mean nothing.

    **Arguments**

    - `model`: the model, or the collection itself.
    - `path`: the file to write, whose suffix decides; it is replaced only once the new one is complete.
    - `table`: the table to write; None, the default, writes all.
    - `untouched`: of .safetensors: write every row of the tables instead, those never trained with their initial values,
      and `weight` alone. False because a table may have billions of rows that nobody has used.
    - `limit`: a file larger than this is refused, in bytes or as text; the default keeps a slip from filling the disk.

    >>> import tempfile, skirl, torch
    >>> from safetensors.numpy import load_file
    >>> tables = [skirl.Table("item", rows=1000, dim=2, init=skirl.Constant(1.0))]
    >>> rows = skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adagrad(lr=0.5), cache=10)
    >>> rows(skirl.KeyedJagged.one_hot(["item"], torch.tensor([[7], [3]])))["item"].sum().backward()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(rows, f"{folder}/rows.safetensors", "item")
    ...     out = load_file(f"{folder}/rows.safetensors")
    >>> {name: array.tolist() for name, array in sorted(out.items())}
    {'ids': [3, 7], 'sum': [[1.0, 1.0], [1.0, 1.0]], 'weight': [[0.5, 0.5], [0.5, 0.5]]}
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"path is {path}: name a file that ends with .safetensors, .pt or .parquet")
    if untouched and path.suffix == ".parquet":
        raise ValueError(
            "Parquet holds the rows that were used: leave untouched out, or name a .safetensors or .pt file"
        )
    if path.suffix == ".safetensors":
        to_safetensors(model, path, table, untouched=untouched, limit=limit)
    elif path.suffix == ".pt":
        to_state_dict(model, path, table, "", {}, limit)
    else:
        to_parquet(model, path, table, None)


def to_state_dict(
    rows: nn.Module, out: Path, table: str | None, prefix: str, dense: dict[str, torch.Tensor], limit: int | str
) -> None:
    """Every row of the tables as a state dict, with what else is given."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        draft = Path(folder) / "rows.safetensors"
        to_safetensors(rows, draft, table, untouched=True, limit=limit)
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


def to_parquet(rows: nn.Module, path: Path, table: str | None, origins: Origins | None) -> None:
    """Columns table, row and weight, in order of tables and rows; and what each row is of, where the run read files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = pa.float32() if next(iter(collections_of(rows).values())).engine.dtype == np.float32 else pa.float64()
    fields = [("table", pa.string()), ("row", pa.int64())]
    if origins is not None:
        fields += [("what", pa.string()), ("id", pa.string()), ("fingerprint", pa.uint64())]
    schema = pa.schema([*fields, ("weight", pa.list_(number))])
    draft = path.with_name(f"{path.name}-{secrets.token_hex(8)}.tmp")  # nobody else's, who may write to that path too
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
