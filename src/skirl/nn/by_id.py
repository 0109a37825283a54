"""Reads rows by id, as the executed steps left them, and replaces them; outside of a lookup."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from skirl.core.keys import key_of
from skirl.core.optim import RowOptimizer
from skirl.core.tables import Table
from skirl.engine.access import PIECE, bank_of, peek, put, put_rows, weights_of_all
from skirl.engine.engine import Engine
from skirl.tools.hash_index import distinct

RowIds = Sequence[int] | np.ndarray | Tensor


def weights_of(engine: Engine, table: str, ids: RowIds) -> Tensor:
    """Return the weights of rows as they are now, [n, dim], on the engine's device. Nothing changes."""
    number = _number(engine, table)
    rows, bank, dim = (
        _rows(engine.schema.tables[number], ids),
        bank_of(engine, number),
        engine.schema.tables[number].dim,
    )
    out = np.empty((len(rows), dim), engine.dtype)
    for start in range(0, _most(engine, table, len(rows)), PIECE):  # all trainers make the same number of calls
        keys, place = distinct(key_of(number, rows[start : start + PIECE]))
        out[start : start + PIECE] = weights_of_all(engine, keys, bank)[place, :dim]
    return torch.from_numpy(out).to(engine.device.at)


def _most(engine: Engine, table: str, asked: int) -> int:
    """Return the most rows that any trainer asks for now. Raise unless all ask about one table after one step."""
    if engine.rows.local:
        return asked
    mine = {"rows": asked, "where": f"table {table!r} after {engine.counters.steps} steps"}
    told = engine.rows.peers.channel("lookups").told(mine, "rows by id")
    for rank, their in enumerate(told):
        if their["where"] != told[0]["where"]:
            raise ValueError(
                f"rank 0 asks for rows of {told[0]['where']}, and rank {rank} for rows of {their['where']}: call rows() on "
                "all trainers at once, for the same table after the same step"
            )
    return max(their["rows"] for their in told)


def _check_same(engine: Engine, table: str, arrays: Sequence[np.ndarray], state: str) -> None:
    """Raise if trainers set rows to different values."""
    if engine.rows.local:
        return
    digest = sha256(f"{table} {state} ".encode() + b" ".join(array.tobytes() for array in arrays)).hexdigest()
    told = engine.rows.peers.channel("lookups").told(digest, "rows that are set")
    for rank, their in enumerate(told):
        if their != told[0]:
            raise ValueError(
                f"set_rows of table {table!r} got other ids or values on rank {rank} than on rank 0: call it with the same "
                "on all trainers, each takes those of its own rows"
            )


def replacement(
    engine: Engine, table: str, ids: RowIds, values: np.ndarray | Tensor, state: Literal["keep", "reset"]
) -> Callable[[], None]:
    """Check everything, and return a function that replaces the weights, to be called between steps."""
    if state not in ("keep", "reset"):
        raise ValueError(f"state is {state!r}: set it to 'keep' or 'reset'")
    number = _number(engine, table)
    if state == "keep" and engine.optimizers[number].weight_follows_state:
        raise ValueError(
            f"table {table!r} is trained by {engine.optimizers[number].name}, which computes rows from their state: pass "
            "state='reset' as well, or the next step would undo the change"
        )
    here = engine.schema.tables[number]
    rows = _rows(here, ids)
    weights = _values(engine, here, len(rows), values)
    order = np.argsort(rows, kind="stable")
    rows, weights = rows[order], weights[order]
    if (twice := np.flatnonzero(rows[1:] == rows[:-1])).size:
        raise ValueError(f"ids of table {table!r} have {rows[twice[0]]} twice: give each row once, with one value")
    bank = bank_of(engine, number)
    _check_same(engine, table, (rows, weights), state)
    owned = engine.rows.owns(key_of(number, rows))
    rows, weights = rows[owned], weights[owned]

    def replace() -> None:
        for start in range(0, len(rows), PIECE):
            piece = slice(start, start + PIECE)
            if state == "reset":
                put_rows(engine, number, rows[piece], {"weight": weights[piece]})
            else:
                keys = key_of(number, rows[piece])
                records, _ = peek(engine, keys, bank)  # in the order of the keys, since they ascend
                records[:, : here.dim] = weights[piece]
                put(engine, keys, records, bank)

    return replace


def described(engine: Engine) -> str:
    """Describe tables, row optimizers, cache and store for repr, with a line per table; many tables are abridged."""
    lines, rules = [], engine.optimizers
    for number, table in enumerate(engine.schema.tables):
        features = "" if table.features == (table.name,) else f", for {', '.join(table.features)}"
        pooling = f", {table.pooling}" if engine.pooled else ""
        rule = f", {_named(rules[number])}" if len(rules.all) > 1 else ""
        frozen = ", frozen" if engine.frozen[number] else ""
        lines.append(f"({table.name}): {table.rows:,} x {table.dim}{pooling}{features}{rule}{frozen}")
    if len(lines) > _MOST_LINES:
        left = len(lines) - _MOST_LINES + 1
        lines[_MOST_LINES - 3 : -2] = [f"... {left:,} more tables ..."]
    last = f"cache={engine.capacity.cache!r}, store={engine.store!r}, device={str(engine.device.at)!r}"
    return "\n".join([*lines, last if len(rules.all) > 1 else f"optimizer={_named(rules[0])}, {last}"])


_MOST_LINES = 12


def _named(rule: RowOptimizer) -> str:
    """Describe a row optimizer by its learning rate and its other arguments that differ from the defaults."""
    values = {field.name: (getattr(rule, field.name), field.default) for field in fields(rule)}
    given = [f"{name}={value!r}" for name, (value, default) in values.items() if name == "lr" or value != default]
    return f"{type(rule).__name__}({', '.join(given)})"


def _number(engine: Engine, table: str) -> int:
    names = [each.name for each in engine.schema.tables]
    if table in names:
        return names.index(table)
    of = next((each.name for each in engine.schema.tables if table in each.features), None)
    if of is not None:
        raise ValueError(f"{table!r} is a feature of table {of!r}: name the table")
    raise ValueError(f"no table {table!r}: there are {', '.join(map(repr, names))}")


def _rows(table: Table, ids: RowIds) -> np.ndarray:
    """Return row numbers as int64. Raise if one is outside the table."""
    found = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if found.ndim == 1 and not found.size and not isinstance(ids, Tensor | np.ndarray):
        found = found.astype(np.int64)  # an empty list
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(
            f"ids of table {table.name!r} are {found.dtype} of shape {list(found.shape)}: give whole numbers in one "
            "dimension"
        )
    wrong = (found < 0) | (found >= table.rows)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise IndexError(
            f"ids of table {table.name!r} have {found[place]} at place {place}: it has rows 0 to {table.rows - 1}"
        )
    return found.astype(np.int64)


def _values(engine: Engine, table: Table, n: int, values: Any) -> np.ndarray:
    """Check weights and return them in the dtype that the engine computes in."""
    if not isinstance(values, np.ndarray | Tensor):
        raise TypeError(f"values are a {type(values).__name__}: give a tensor or an array, [{n}, {table.dim}]")
    if tuple(values.shape) != (n, table.dim):
        raise ValueError(
            f"values are {list(values.shape)}, for {n} rows of table {table.name!r}: give [{n}, {table.dim}]"
        )
    given = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    allowed = {engine.torch_dtype, torch.float32} if engine.half else {engine.torch_dtype}
    if given.dtype not in allowed:
        names = [str(dtype).removeprefix("torch.") for dtype in (given.dtype, engine.torch_dtype)]
        raise TypeError(
            f"values are {names[0]}, rows of table {table.name!r} are {names[1]}: convert them to {names[1]}"
        )
    return given.detach().cpu().to(torch.float32 if engine.half else engine.torch_dtype).numpy()
