"""Rows that the oracle takes to exist, and the store has not: they come in as fetched rows do, and begin here. Such are rows
of tables that begin from an array or a file, and where several engines have one plan, rows that others have had.
"""

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from skirl.core.given import Given
from skirl.core.initial import Constant
from skirl.core.keys import row_of, table_of
from skirl.core.tables import Schema
from skirl.oracle.seen import MOST_IN_BITS, Seen
from skirl.store import Store


class Begun:
    """The tables of one engine that begin from an array, and where that matters, which rows the store has had.

    **Arguments**

    - `schema`: the tables.
    - `dtype`: of rows, as torch names it.
    - `seed`: of the first values of all other rows.
    """

    def __init__(self, schema: Schema, dtype: str, seed: int) -> None:
        self.of: dict[int, Given] = {t: i.initial for t, i in enumerate(schema.tables) if isinstance(i.initial, Given)}
        """By the table's number."""
        self._tables = schema.tables
        self._seed = seed
        self._written = Seen(schema) if self.of else None
        """Rows that the store took: if it has lost one, that is damage and no first use."""
        self._among_others = False
        """Whether rows of any table may exist for whoever plans that this store has never had."""
        self._lock = threading.Lock()
        """Rows are written by other threads than those that read."""
        for t, given in self.of.items():
            table = schema.tables[t]
            given.check_dtype(table.name, dtype)
            if table.rows > MOST_IN_BITS:
                raise ValueError(f"table {table.name!r}: init is an array, which tables of at most 2**33 rows can have")

    def begin(self, seen: Seen, held: Iterable[np.ndarray | tuple[int, np.ndarray]]) -> None:
        """The store holds these rows, and every row of these tables exists, for whoever plans."""
        if self._written is not None:
            self._written.rebuild(held)
        if not self._among_others:  # what others have stays
            seen.rebuild(held if self._written is None else ())
        self.tell(seen)

    def tell(self, seen: Seen) -> None:
        """Whoever plans takes these rows to exist: those that the store has had, and all of these tables."""
        if self._written is not None:
            seen.include(self._written)
        for t in self.of:
            seen.add_all(t)

    def among_others(self, own: Seen) -> None:
        """Several engines have one plan: a row exists for it if any of them has had it, and begins here when it first comes.

        **Arguments**

        - `own`: what exists here; kept.
        """
        self._written, self._among_others = own if self._written is None else self._written, True

    def wrote(self, keys: np.ndarray) -> None:
        """The store took these rows."""
        if self._written is not None:
            with self._lock:
                self._written.note(keys)

    def first(self, keys: np.ndarray, into: np.ndarray) -> np.ndarray:
        """Which of these rows the store has never had and may lack; of those from an array the weights, to into[i, :dim]."""
        new, table = np.zeros(len(keys), np.bool_), table_of(keys)
        if self._written is None:
            return new
        with self._lock:
            new = ~self._written.has(keys)
        for t, given in self.of.items():
            places = np.flatnonzero(new & (table == t))
            if len(places):
                into[places, : given.shape[1]] = given.take(row_of(keys[places]))
        return new if self._among_others else new & np.isin(table, list(self.of))

    def check_store(self, store: Store) -> None:
        """Tell an empty store what its rows begin from, and refuse one whose rows began from something else."""
        here: dict[str, Any] = {t.name: _drawn(t.initial, self._seed) for t in self._tables}
        here |= {self._tables[t].name: given for t, given in self.of.items()}
        if not len(store):
            store.remember(here)
            return
        for name in sorted(here.keys() | store.about.keys()):
            there, now = (None if name not in of else _digest(of[name]) for of in (store.about, here))
            if there == now or (there is None and _is_drawn(now)) or (now is None and _is_drawn(there)):
                continue  # a store from before seeds were kept; a table that has another name now
            (was, _, seed), (init, _, ours) = (str(text).partition(_OF_SEED) for text in (there, now))
            if was == init:
                raise ValueError(
                    f"the rows in {store!r} were begun with seed {seed}, and seed is {ours}: rows that were never used "
                    f"would begin otherwise, set seed to {seed}, or name an empty store"
                )
            raise ValueError(
                f"table {name!r}: the rows in {store!r} began from {_shown(there)}, and init is {_shown(now)}: set "
                "it to what the rows began from, or name an empty store"
            )


def _digest(of: Any) -> str:
    return of if isinstance(of, str) else of.digest


_OF_SEED = ", seed "


def _drawn(initial: Any, seed: int) -> str:
    """What the rows of a table without an array begin from."""
    return repr(initial) if isinstance(initial, Constant) else f"{initial!r}{_OF_SEED}{seed}"


def _is_drawn(of: str | None) -> bool:
    return of is not None and "(" in of


def _shown(of: str | None) -> str:
    if of is None:
        return "no array"
    return of.partition(_OF_SEED)[0] if _is_drawn(of) else f"the array with digest {of}"
