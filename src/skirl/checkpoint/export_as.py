"""Write trained rows to a file that other software reads, in the format that its suffix names."""

import secrets
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from skirl.checkpoint.export import rows_of, to_safetensors
from skirl.data.vocabulary.vocabulary import Origins
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
    """Write the rows of one table, or of all, to a file. Inside a lookahead, rows are as the steps so far left them.

    The suffix of the file's name decides its format, as for `skirl export`. A .safetensors file has the rows that were used.
    A .pt file is a state dict of every row: `TABLE.weight`, or `weight` for one table. A .parquet file has the rows that
    were used, in the columns table, row and weight.

    For one table, a safetensors file has `ids`, int64 `[n]`, ascending; `weight`, `[n, dim]`; and each part of the
    optimizer's state by its name in torch (`sum`, `exp_avg`, ...). For all tables, these names begin with the table's
    name and a dot. Its metadata has a JSON object under `tables`, with the `rows` of each table and the `steps` that
    trained it, without which Adam's moments are meaningless.

    **Arguments**

    - `model`: the model, or the collection itself.
    - `path`: the file to write. An existing file is replaced only once the new one is complete.
    - `table`: the table to write; None, the default, writes all.
    - `untouched`: for .safetensors: write `weight` of every row of the tables instead; rows that were never trained have
      their initial values. False by default, because a table may have billions of rows that were never used.
    - `limit`: refuse to write a larger file, in bytes or as text. The default keeps a mistake from filling the disk.

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
    """Write every row of the tables as a state dict, together with the tensors in `dense`."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        draft = Path(folder) / "rows.safetensors"
        to_safetensors(rows, draft, table, untouched=True, limit=limit)
        state = {prefix + name: tensor for name, tensor in load_file(draft).items()}  # mapped into memory, not read
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
    """Write the columns table, row and weight, ordered by table and row, and the origin of each row if it is known."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = pa.float32() if next(iter(collections_of(rows).values())).engine.dtype == np.float32 else pa.float64()
    fields = [("table", pa.string()), ("row", pa.int64())]
    if origins is not None:
        fields += [("what", pa.string()), ("id", pa.string()), ("fingerprint", pa.uint64())]
    schema = pa.schema([*fields, ("weight", pa.list_(number))])
    draft = path.with_name(f"{path.name}-{secrets.token_hex(8)}.tmp")  # unique, as others may write to that path too
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
