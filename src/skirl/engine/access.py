"""Rows by id, outside of a step: read as the executed steps left them, and set."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from skirl.core.initial import fill
from skirl.core.keys import ROW_BITS, key_of, table_of
from skirl.core.tables import Table
from skirl.engine.device.base import expanded, packed
from skirl.engine.engine import Engine
from skirl.tools.hash_index import distinct
from skirl.tools.threads import run

RowIds = Sequence[int] | np.ndarray | Tensor
PIECE = 1 << 16


def bank_of(engine: Engine, table: int) -> int:
    return next(i for i, bank in enumerate(engine.schema.banks) if table in bank.tables)


def peek(engine: Engine, keys: np.ndarray, bank: int) -> np.ndarray:
    """Return these rows, with their state, as the last executed step left them. This changes nothing."""
    rows = np.empty((len(keys), engine.widths[bank]), engine.dtype)
    slots = engine.caches[bank].find(keys) if engine.caches else np.full(len(keys), -1)
    found = slots >= 0
    if engine.caches:
        rows[found] = _numbers(engine, engine.banks[bank].read(slots[found]), bank)
    away = np.flatnonzero(~found)
    known = away[engine.seen.has(keys[away])]
    if len(known):
        at_once = len(known) == len(keys) and not engine.half
        records = rows if at_once else np.empty((len(known), engine.held[bank]), engine.dtype)
        held = engine.store.read(keys[known], records)
        if not at_once:
            rows[known[held]] = _numbers(engine, records[held], bank)
        found[known[held]] = True
    fresh = np.flatnonzero(~found).astype(np.int32)
    make(engine, bank, keys[fresh], fresh, rows)
    if engine.half:
        rows[fresh] = _numbers(engine, packed(rows[fresh], engine.half), bank)
    return rows


def weights_of_all(engine: Engine, keys: np.ndarray, bank: int) -> np.ndarray:
    """Return rows as `peek` does, whichever trainer owns them. With several trainers, all must call this at
    the same time, and only weights are returned.
    """
    dim = engine.schema.banks[bank].dim
    return engine.rows.look_up(keys, dim, lambda keys: peek(engine, keys, bank))


def make(engine: Engine, bank: int, keys: np.ndarray, slots: np.ndarray, into: np.ndarray) -> None:
    """Write the first record of keys[i] to into[slots[i]], in host memory."""
    dim, initial = engine.schema.banks[bank].dim, engine.initial
    run(
        fill, len(keys), keys, slots, into, dim, engine.seed, initial.kind, initial.scale, initial.quantiles,
        engine.optimizers[engine.schema.banks[bank].tables[0]].initial_state, threads=torch.get_num_threads(),
    )  # fmt: skip
    if engine.first_values.of:
        given = np.flatnonzero(np.isin(table_of(keys), list(engine.first_values.of)))
        weights = np.empty((len(given), dim), engine.dtype)
        engine.first(keys[given], weights)
        into[slots[given], :dim] = weights


def put(engine: Engine, keys: np.ndarray, records: np.ndarray, bank: int) -> None:
    if not engine.rows.local:
        owned = engine.rows.owns(keys)
        keys, records = keys[owned], records[owned]
    records = packed(records, engine.half) if engine.half else records
    engine.store.write(keys, records)
    engine.seen.add(keys)
    engine.first_values.wrote(keys)
    if engine.caches:
        slots = engine.caches[bank].find(keys)
        here = np.flatnonzero(slots >= 0)
        engine.caches[bank].changing(slots[here])
        engine.banks[bank].write(slots[here], records[here])


def put_rows(engine: Engine, table: int, rows: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
    """Replace `weight`, parts of the optimizer's state or `all` of these rows, between steps. The rest starts anew."""
    bank = bank_of(engine, table)
    optimizer = engine.optimizers[table]
    records = np.full((len(rows), engine.widths[bank]), optimizer.initial_state, engine.dtype)
    places = optimizer.unpack(engine.schema.tables[table].dim) | {"all": slice(None)}
    for part, value in values.items():
        records[:, places[part]] = value
    put(engine, rows | (table << ROW_BITS), records, bank)


def put_weight(engine: Engine, table: int, weight: torch.Tensor) -> None:
    """Replace all rows of a table by `weight`, one piece at a time. Their optimizer state starts anew."""
    for start in range(0, len(weight), PIECE):
        part = weight[start : start + PIECE].detach().cpu()
        part = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
        put_rows(engine, table, np.arange(start, start + len(part)), {"weight": part.numpy()})


def _numbers(engine: Engine, records: np.ndarray, bank: int) -> np.ndarray:
    return expanded(records, engine.widths[bank], engine.half) if engine.half else records


def weights_of(engine: Engine, table: str, ids: RowIds) -> Tensor:
    number, here = _table(engine, table)
    rows, bank = _rows(here, ids), bank_of(engine, number)
    out = np.empty((len(rows), here.dim), engine.dtype)
    for start in range(0, _most(engine, table, len(rows)), PIECE):  # all trainers make the same number of calls
        keys, place = distinct(key_of(number, rows[start : start + PIECE]))
        out[start : start + PIECE] = weights_of_all(engine, keys, bank)[place, : here.dim]
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
    number, here = _table(engine, table)
    if state == "keep" and engine.optimizers[number].weight_follows_state:
        raise ValueError(
            f"table {table!r} is trained by {engine.optimizers[number].name}, which computes rows from their state: pass "
            "state='reset' as well, or the next step would undo the change"
        )
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
                records = peek(engine, keys, bank)
                records[:, : here.dim] = weights[piece]
                put(engine, keys, records, bank)

    return replace


def _table(engine: Engine, name: str) -> tuple[int, Table]:
    tables = engine.schema.tables
    for number, table in enumerate(tables):
        if table.name == name:
            return number, table
    of = next((each.name for each in tables if name in each.features), None)
    if of is not None:
        raise ValueError(f"{name!r} is a feature of table {of!r}: name the table")
    raise ValueError(f"no table {name!r}: there are {', '.join(repr(each.name) for each in tables)}")


def _rows(table: Table, ids: RowIds) -> np.ndarray:
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
    if not (finite := given.isfinite().all(dim=1)).all():
        raise ValueError(
            f"values at place {int(finite.int().argmin())}, for table {table.name!r}, are not finite: give numbers"
        )
    allowed = {engine.torch_dtype, torch.float32} if engine.half else {engine.torch_dtype}
    if given.dtype not in allowed:
        names = [str(dtype).removeprefix("torch.") for dtype in (given.dtype, engine.torch_dtype)]
        raise TypeError(
            f"values are {names[0]}, rows of table {table.name!r} are {names[1]}: convert them to {names[1]}"
        )
    return given.detach().cpu().to(torch.float32 if engine.half else engine.torch_dtype).numpy()
