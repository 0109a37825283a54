"""Rows by their keys, outside of training: looked up as they are now, or replaced by what comes from elsewhere."""

from collections.abc import Mapping

import numpy as np
import torch

from skirl.core.half import expanded, packed
from skirl.core.initial import fill
from skirl.core.keys import ROW_BITS, table_of
from skirl.engine.engine import Engine
from skirl.tools.threads import run

PIECE = 1 << 16
"""Rows moved at a time."""


def bank_of(engine: Engine, table: int) -> int:
    """The bank that a table is in."""
    return next(i for i, bank in enumerate(engine.schema.banks) if table in bank.tables)


def peek(engine: Engine, keys: np.ndarray, bank: int) -> tuple[np.ndarray, np.ndarray]:
    """The executed state of some rows, changing nothing: records of the distinct ones, and each key's place among them."""
    distinct, place = np.unique(keys, return_inverse=True)
    return peek_distinct(engine, distinct, bank), place.astype(np.int32)


def peek_distinct(engine: Engine, distinct: np.ndarray, bank: int) -> np.ndarray:
    """The same of rows that are distinct, in their order."""
    rows = np.empty((len(distinct), engine.widths[bank]), engine.dtype)
    slots = engine.caches[bank].find(distinct) if engine.caches else np.full(len(distinct), -1)
    found = slots >= 0
    if engine.caches:
        rows[found] = _numbers(engine, engine.banks[bank].read(slots[found]), bank)
    away = np.flatnonzero(~found)
    known = away[engine.seen.has(distinct[away])]
    if len(known):
        at_once = len(known) == len(distinct) and not engine.half
        records = rows if at_once else np.empty((len(known), engine.held[bank]), engine.dtype)
        held = engine.store.read(distinct[known], records)
        if not at_once:
            rows[known[held]] = _numbers(engine, records[held], bank)
        found[known[held]] = True
    fresh = np.flatnonzero(~found).astype(np.int32)
    make(engine, bank, distinct[fresh], fresh, rows)
    if engine.half:
        rows[fresh] = _numbers(engine, packed(rows[fresh], engine.half), bank)
    return rows


def weights_of_all(engine: Engine, distinct: np.ndarray, bank: int) -> np.ndarray:
    """Rows as `peek_distinct` gives them, whoever owns them; of several trainers all ask at once, for weights alone."""
    if engine.exchange is None:
        return peek_distinct(engine, distinct, bank)
    dim = engine.schema.banks[bank].dim
    engine.settle()
    return engine.exchange.look_up(distinct, dim, lambda keys: peek_distinct(engine, keys, bank))


def make(engine: Engine, bank: int, keys: np.ndarray, slots: np.ndarray, into: np.ndarray) -> None:
    """First records of some rows, in the host's memory: into[slots[i]] for keys[i]."""
    dim, initial = engine.schema.banks[bank].dim, engine.initial
    run(
        fill, len(keys), keys, slots, into, dim, engine.seed, initial.kind, initial.scale, initial.quantiles,
        engine.optimizers[engine.schema.banks[bank].tables[0]].initial_state, threads=torch.get_num_threads(),
    )  # fmt: skip
    if engine.begun.of:
        given = np.flatnonzero(np.isin(table_of(keys), list(engine.begun.of)))
        weights = np.empty((len(given), dim), engine.dtype)
        engine.first(keys[given], weights)
        into[slots[given], :dim] = weights


def put(engine: Engine, keys: np.ndarray, records: np.ndarray, bank: int) -> None:
    """Records from elsewhere replace those of these rows, as far as this trainer owns them; between steps."""
    if engine.exchange is not None:
        mine = engine.exchange.owns(keys)
        keys, records = keys[mine], records[mine]
    records = packed(records, engine.half) if engine.half else records
    engine.store.write(keys, records)
    engine.seen.add(keys)
    engine.begun.wrote(keys)
    if engine.caches:
        slots = engine.caches[bank].find(keys)
        here = np.flatnonzero(slots >= 0)
        engine.caches[bank].changing(slots[here])
        engine.banks[bank].write(slots[here], records[here])


def put_rows(engine: Engine, table: int, rows: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
    """Weights from elsewhere replace those of these rows; between steps. What `values` does not have starts anew.

    values: by name, `weight` and the parts of the optimizer's state; `all`: whole records.
    """
    bank = bank_of(engine, table)
    optimizer = engine.optimizers[table]
    records = np.full((len(rows), engine.widths[bank]), optimizer.initial_state, engine.dtype)
    places = optimizer.unpack(engine.schema.tables[table].dim) | {"all": slice(None)}
    for part, value in values.items():
        records[:, places[part]] = value
    put(engine, rows | (table << ROW_BITS), records, bank)


def put_weight(engine: Engine, table: int, weight: torch.Tensor) -> None:
    """The weight of a whole table replaces its rows, some at a time; their optimizer state starts anew."""
    for start in range(0, len(weight), PIECE):
        part = weight[start : start + PIECE].detach().cpu()
        part = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
        put_rows(engine, table, np.arange(start, start + len(part)), {"weight": part.numpy()})


def _numbers(engine: Engine, records: np.ndarray, bank: int) -> np.ndarray:
    """Rows out of their records."""
    return expanded(records, engine.widths[bank], engine.half) if engine.half else records
