"""Rows by id, outside of a step: read as the executed steps left them, and set."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from skirl.core.keys import ROW_BITS, key_of, table_of
from skirl.core.tables import Table
from skirl.engine.device import expanded, packed
from skirl.engine.engine import Engine
from skirl.tools.hash_index import distinct

RowIds = Sequence[int] | np.ndarray | Tensor
PIECE = 1 << 16


def bank_of(engine: Engine, table: int) -> int:
    return next(i for i, bank in enumerate(engine.schema.banks) if table in bank.tables)


def peek(engine: Engine, keys: np.ndarray, bank: int, pack: int = 0) -> np.ndarray:
    """Return these rows, with their state, as the last executed step left them. This changes nothing."""
    records = records_of(engine, keys, bank, pack)
    return expanded(records, engine.packs[pack].widths[bank], engine.half) if engine.half else records


def records_of(engine: Engine, keys: np.ndarray, bank: int, pack: int | None = None) -> np.ndarray:
    """Return whole records, or one pack's columns of them."""
    whole = engine.held[bank]
    own = slice(0, whole) if pack is None else engine.packs[pack].own(bank)
    records = np.empty((len(keys), own.stop - own.start), engine.dtype)
    slots = engine.caches[bank].find(keys) if engine.caches else np.full(len(keys), -1)
    found = slots >= 0
    if engine.caches:
        records[found] = engine.banks[bank].read(slots[found])[:, own]
    away = np.flatnonzero(~found)
    known = away[engine.seen.has(keys[away])]
    if len(known):
        at_once = len(known) == len(keys) and records.shape[1] == whole
        held = records if at_once else np.empty((len(known), whole), engine.dtype)
        there = engine.store.read(keys[known], held)
        if not at_once:
            records[known[there]] = held[there, own]
        found[known[there]] = True
    if len(fresh := keys[~found]):
        engine.check_new(fresh[np.isin(table_of(fresh), engine.first_values.tables)])
        records[~found] = engine.begin(bank, fresh)[:, own]
    return records


def weights_of_all(engine: Engine, keys: np.ndarray, bank: int, pack: int = 0) -> np.ndarray:
    """Return weights as `peek` does, whichever trainer owns them. With several trainers, all must call this at the same
    time."""
    of = engine.packs[pack].schema.banks[bank]
    return engine.rows.look_up(keys, of.tables[0], of.dim, lambda keys: peek(engine, keys, bank, pack))


def put(engine: Engine, keys: np.ndarray, rows: np.ndarray, bank: int, pack: int = 0) -> None:
    if not engine.rows.local:
        owned = engine.rows.owns(keys)
        keys, rows = keys[owned], rows[owned]
    put_records(engine, keys, packed(rows, engine.half) if engine.half else rows, bank, pack)


def put_records(engine: Engine, keys: np.ndarray, own: np.ndarray, bank: int, pack: int) -> None:
    """Replace one pack's columns of some records. Rows that were never used begin in the others."""
    records = np.ascontiguousarray(own)
    if len(engine.packs) > 1:
        records = records_of(engine, keys, bank)
        records[:, engine.packs[pack].own(bank)] = own
    engine.store.write(keys, records)
    engine.seen.add(keys)
    engine.first_values.wrote(keys)
    if engine.caches:
        slots = engine.caches[bank].find(keys)
        here = np.flatnonzero(slots >= 0)
        engine.caches[bank].changing(slots[here])
        engine.banks[bank].write(slots[here], records[here])


def put_rows(engine: Engine, table: int, rows: np.ndarray, values: Mapping[str, np.ndarray], pack: int = 0) -> None:
    """Replace `weight`, parts of the optimizer's state or `all` of these rows, between steps. The rest starts anew."""
    bank, own = bank_of(engine, table), engine.packs[pack]
    optimizer = own.optimizers[table]
    records = np.full((len(rows), own.widths[bank]), optimizer.initial_state, engine.dtype)
    dim, here = own.tables[table].dim, own.columns[bank]
    places = optimizer.unpack(here.dim)
    if "all" in values:
        values = {part: values["all"][:, at] for part, at in optimizer.unpack(dim).items()}
    for part, value in values.items():
        records[:, places[part]] = value if here.dim == dim else value[:, here.of_table]
    put(engine, rows | (table << ROW_BITS), records, bank, pack)


def put_weight(engine: Engine, table: int, weight: torch.Tensor) -> None:
    """Replace all rows of a table by `weight`, one piece at a time. Their optimizer state starts anew."""
    for start in range(0, len(weight), PIECE):
        part = weight[start : start + PIECE].detach().cpu()
        part = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
        put_rows(engine, table, np.arange(start, start + len(part)), {"weight": part.numpy()})


def weights_of(engine: Engine, table: str, ids: RowIds, pack: int = 0) -> Tensor:
    number, here = _table(engine, table, pack)
    rows, bank = _rows(here, ids), bank_of(engine, number)
    out = np.empty((len(rows), here.dim), engine.dtype)
    most = _most(engine, f"reads rows of table {table!r}", len(rows))  # all trainers make the same number of calls
    for start in range(0, most, PIECE):
        keys, place = distinct(key_of(number, rows[start : start + PIECE]))
        out[start : start + PIECE] = weights_of_all(engine, keys, bank, pack)[place, : here.dim]
    return torch.from_numpy(out).to(engine.device.at)


def _most(engine: Engine, does: str, count: int) -> int:
    """Return the most rows that any trainer names now. Raise unless all do the same, after one step."""
    if engine.rows.local:
        return count
    mine = {"rows": count, "does": f"{does} after {engine.counters.steps} steps"}
    told = engine.rows.peers.channel("lookups").told(mine, "rows by id")
    for rank, their in enumerate(told):
        if their["does"] != told[0]["does"]:
            raise ValueError(
                f"rank 0 {told[0]['does']}, and rank {rank} {their['does']}: call rows() or set_rows() on all trainers at "
                "once, for the same table after the same step, and set_rows() with the same ids and values"
            )
    return max(their["rows"] for their in told)


def replacement(
    engine: Engine,
    table: str,
    ids: RowIds,
    values: np.ndarray | Tensor,
    state: Literal["keep", "reset"],
    pack: int = 0,
) -> Callable[[], None]:
    """Check everything, and return a function that replaces the weights, to be called between steps."""
    if state not in ("keep", "reset"):
        raise ValueError(f"state is {state!r}: set it to 'keep' or 'reset'")
    number, here = _table(engine, table, pack)
    optimizer = engine.packs[pack].optimizers[number]
    if state == "keep" and optimizer.weight_follows_state:
        raise ValueError(
            f"table {table!r} is trained by {optimizer.name}, which computes rows from their state: pass "
            "state='reset' as well, or the next step would undo the change"
        )
    rows = _rows(here, ids)
    weights = _values(engine, here, len(rows), values)
    order = np.argsort(rows, kind="stable")
    rows, weights = rows[order], weights[order]
    if (twice := np.flatnonzero(rows[1:] == rows[:-1])).size:
        raise ValueError(f"ids of table {table!r} have {rows[twice[0]]} twice: give each row once, with one value")
    bank = bank_of(engine, number)
    if not engine.rows.local:
        digest = sha256(rows.tobytes() + weights.tobytes() + state.encode()).hexdigest()[:16]
        _most(engine, f"sets rows of table {table!r} (digest {digest} of ids, values and state)", len(rows))
    owned = engine.rows.owns(key_of(number, rows))
    rows, weights, columns = rows[owned], weights[owned], engine.packs[pack].columns[bank]

    def replace() -> None:
        for start in range(0, len(rows), PIECE):
            piece = slice(start, start + PIECE)
            if state == "reset":
                put_rows(engine, number, rows[piece], {"weight": weights[piece]}, pack)
            else:
                keys = key_of(number, rows[piece])
                own = peek(engine, keys, bank, pack)
                own[:, : columns.dim] = weights[piece, columns.of_table]
                put(engine, keys, own, bank, pack)

    return replace


def _table(engine: Engine, name: str, pack: int) -> tuple[int, Table]:
    tables = engine.packs[pack].tables
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
