"""Rows that exist for the oracle and are not in the store, of tables that begin from an array or a file: they come in
as fetched rows do, and get their first values here."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from skirl.core.initial import Constant, Given
from skirl.core.keys import row_of, table_of
from skirl.core.tables import Schema
from skirl.engine.packs import Pack
from skirl.oracle.seen import MOST_IN_BITS, Seen
from skirl.store import Store


class FirstValues:
    """The tables of one engine that begin from an array and, if that matters, the rows that its store has had."""

    def __init__(self, schema: Schema, packs: Sequence[Pack], dtype: str) -> None:
        tables = set[int]()
        for pack in packs:
            for t, table in enumerate(pack.tables):
                if isinstance(table.initial, Given):
                    table.initial.check_dtype(table.name, dtype)
                    if table.rows > MOST_IN_BITS:
                        raise ValueError(f"table {table.name!r} has more than 2**33 rows: its init cannot be an array")
                    tables.add(t)
        self.tables = sorted(tables)
        """Numbers of those that begin from an array in any pack."""
        self._banks = schema.banks
        self._written = Seen(schema) if self.tables else None
        """Rows that the store took. If one of them is missing later, that is damage and not a first use."""
        self._lock = threading.Lock()

    def begin(self, seen: Seen, held: Iterable[np.ndarray]) -> None:
        """Start from a store that holds the rows `held`. Mark them in `seen`, and all rows of these tables."""
        both = [seen] if self._written is None else [seen, self._written]
        for each in both:
            each.clear()
        for keys in held:
            for each in both:
                each.add(keys)
        for t in self.tables:
            seen.add_all(t)

    def wrote(self, keys: np.ndarray) -> None:
        if self._written is not None:
            with self._lock:
                self._written.note(keys)

    def new(self, keys: np.ndarray) -> np.ndarray:
        """Return which of these rows the store has never had and may lack."""
        if self._written is None:
            return np.zeros(len(keys), np.bool_)
        with self._lock:
            new = ~self._written.has(keys)
        return new & np.isin(table_of(keys), self.tables)

    def give(self, pack: Pack, bank: int, keys: np.ndarray, into: np.ndarray) -> None:
        """Write a pack's weights of those rows of a bank that begin from an array to into[i, :dim]."""
        table, here = table_of(keys), pack.columns[bank]
        for t in self.tables:
            given = pack.tables[t].initial
            if isinstance(given, Given) and len(places := np.flatnonzero(table == t)):
                into[places, : here.dim] = given.take(row_of(keys[places]))[:, here.of_table]

    def check_store(self, store: Store, packs: Sequence[Pack]) -> None:
        """Tell an empty store what its rows begin from. Raise if a store's rows began from something else."""
        here: dict[str, Any] = {}
        for pack in packs:
            for bank, columns in zip(self._banks, pack.columns, strict=True):
                for table in [pack.tables[t] for t in bank.tables]:
                    begin, at = table.initial, columns.of_table
                    if not isinstance(begin, Given):
                        begin = repr(begin) if isinstance(begin, Constant) else f"{begin!r}, seed {pack.seed}"
                    if columns.dim < table.dim:  # other columns would fit as well
                        begin = f"{_text(begin)}, columns {at.start} to {at.stop}"
                    here[pack.name + table.name] = begin
        if not len(store):
            store.describe(here)
            return
        for name in sorted(here.keys() | store.about.keys()):
            there, now = (_text(of.get(name)) for of in (store.about, here))
            if there == now or (there is None and _is_drawn(now)) or (now is None and _is_drawn(there)):
                continue  # a table that was renamed
            what = "init, seed and placement" if "columns" in f"{there}{now}" else "init and seed"
            raise ValueError(
                f"table {name!r}: the rows in {store!r} were initialized from {_shown(there)}, and would now be from "
                f"{_shown(now)}: set {what} to what the rows were initialized from, or use an empty store"
            )


def _text(of: Any) -> str | None:
    return of if of is None or isinstance(of, str) else of.digest


def _is_drawn(of: str | None) -> bool:
    return of is not None and "(" in of


def _shown(of: str | None) -> str:
    return "no array" if of is None else of if _is_drawn(of) else f"the array with digest {of}"
