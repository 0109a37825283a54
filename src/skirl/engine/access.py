"""Rows by id, outside of a step: read and set."""

from collections.abc import Mapping

import numpy as np
import torch

from skirl.core.half import expanded, packed
from skirl.core.initial import fill
from skirl.core.keys import ROW_BITS, table_of
from skirl.engine.engine import Engine
from skirl.tools.hash_index import distinct
from skirl.tools.threads import run

PIECE = 1 << 16
"""Rows moved at a time."""


def bank_of(engine: Engine, table: int) -> int:
    """Return the bank that a table is in."""
    return next(i for i, bank in enumerate(engine.schema.banks) if table in bank.tables)


def peek(engine: Engine, keys: np.ndarray, bank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows among `keys`, with their state, as the last executed step left them, and each key's
    index among them. This changes nothing.
    """
    rows, place = distinct(keys)
    return peek_distinct(engine, rows, bank), place


def peek_distinct(engine: Engine, keys: np.ndarray, bank: int) -> np.ndarray:
    """Return the same for rows that are distinct already, in their order."""
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
    """Return rows as `peek_distinct` does, whichever trainer owns them. With several trainers, all must call this at
    the same time, and only weights are returned.
    """
    dim = engine.schema.banks[bank].dim
    return engine.rows.look_up(keys, dim, lambda keys: peek_distinct(engine, keys, bank))


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
    """Replace the records of these rows, as far as this trainer owns them. Call this only between steps."""
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
    """Replace the weights of these rows. Call this only between steps. What `values` lacks starts anew.

    `values` maps `weight` and the names of the optimizer's state to arrays; `all` stands for whole records.
    """
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
    """Unpack rows from their records."""
    return expanded(records, engine.widths[bank], engine.half) if engine.half else records
