"""Convert rows of checkpoints to formats that other software reads, and back: state dicts, safetensors, Parquet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from skirl.checkpoint import numbers, save
from skirl.checkpoint.export import to_safetensors
from skirl.checkpoint.export_as import to_parquet, to_state_dict
from skirl.checkpoint.import_rows import Tensors, import_rows
from skirl.checkpoint.without_model import opened
from skirl.core.optim import ROW_OPTIMIZERS, row_optimizer
from skirl.core.tables import Table
from skirl.data.vocabulary.vocabulary import Origins
from skirl.nn.collection import EmbeddingBagCollection
from skirl.tools.os_errors import writing


def write_rows(
    checkpoint: Path, out: Path, table: str | None, *, state_dict: bool, prefix: str, dense: bool, limit: str
) -> None:
    """Write the rows of a checkpoint to a file. The arguments are the flags of `skirl export`."""
    with opened(checkpoint) as (rows, parameters, data, _), writing(out):
        if out.suffix == ".parquet":
            to_parquet(rows, out, table, Origins.of(data))
        elif state_dict or out.suffix == ".pt":
            to_state_dict(rows, out, table, prefix, parameters if dense else {}, limit)
        else:
            to_safetensors(rows, out, table, limit=limit)


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
    """Make a checkpoint of the rows in a file. The arguments are the flags of `skirl import`."""
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
        has = ", ".join(sorted(by_name or tensors.names)[:9]) or "no tensor"
        then = "set tables to some of these, or " if by_name else ""
        raise ValueError(
            f"{source} has {what}, it has {has}: {then}set prefix to what stands before the tables' names in the file"
        )
    weights = {t: n for t, n in wanted.items() if n is not None}
    bases = {
        t: n.removesuffix("weight") for t, n in weights.items() if f"{n.removesuffix('weight')}ids" in tensors.names
    }
    counts = {t: tensors.shape(n)[0] for t, n in weights.items()}
    for table, base in bases.items():  # these have only the touched rows
        if "rows" not in (facts := tensors.table(base)):
            raise ValueError(f"{source} has ids of {table!r}, but not the number of its rows: export it again")
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
