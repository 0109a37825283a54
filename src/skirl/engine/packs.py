"""Packs: each is the columns of every record that belong to one variant of a model. A lone model has one."""

from collections.abc import Mapping, Sequence
from numbers import Integral

import numpy as np
import torch

from skirl.core.groups import Groups, RowOptimizers, Setting
from skirl.core.initial import as_arrays
from skirl.core.placement import Owner, cuts_of
from skirl.core.tables import Schema, Table
from skirl.engine.device import HALVES, Columns, words


class Pack:
    """The rows of one variant: tables, row optimizers, seed, and where they stand in the records of each bank."""

    def __init__(self, tables: Sequence[Table], optimizer: RowOptimizers, seed: int, name: str = "") -> None:
        if not isinstance(seed, Integral) or not 0 <= seed < 1 << 63:
            raise ValueError(f"seed is {seed!r}: set it to a whole number between 0 and 2**63 - 1")
        self.name = name
        self.seed = seed
        self.tables = Schema.of(tables).tables
        self.optimizers = Groups(self.tables, optimizer)
        self.frozen = np.zeros(len(self.tables), np.bool_)
        self.steps = np.zeros(len(self.tables), np.int64)
        """Updates that each table has had."""
        self.left = False
        """True for a variant that is not trained any more: its columns go when the caches are next dropped."""

    @property
    def kinds(self) -> list[tuple[object, ...]]:
        """What a record of each table is made of. Two tables share a bank if these are equal in every pack."""
        each = zip(self.tables, self.optimizers, strict=True)
        return [(table.dim, optimizer.rule, optimizer.initial_state) for table, optimizer in each]

    def place(
        self, number: int, schema: Schema, dtype: torch.dtype, begins: Sequence[int], cuts: Mapping[int, slice]
    ) -> None:
        """Take the columns of each bank's records from `begins` on. `cuts`: what is here of tables cut by columns."""
        self.number = number
        self.schema = schema
        self.half = dtype if dtype in HALVES else None
        self.dtype = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        self.begins = list(begins)
        firsts = [(self.optimizers[bank.tables[0]], bank) for bank in schema.banks]
        here = [cuts.get(bank.tables[0], slice(0, bank.dim)) for bank in schema.banks]
        self.widths = [rule.width(at.stop - at.start) for at, (rule, _) in zip(here, firsts)]
        """By bank: numbers of a row and its state."""
        self.held = [words(width) if self.half else width for width in self.widths]
        """By bank: numbers of these in a record, as the store has it."""
        initial = as_arrays([table.initial for table in self.tables], self.dtype)
        self.columns = [
            Columns(
                at=2 * begin if self.half else begin,
                dim=at.stop - at.start,
                width=width,
                rule=rule.rule,
                clips=any(self.optimizers[t].clip is not None for t in bank.tables),
                seed=self.seed,
                filling=(at.stop - at.start, width, self.seed, *initial, rule.initial_state),
                first=at.start,
            )
            for begin, width, at, (rule, bank) in zip(begins, self.widths, here, firsts, strict=True)
        ]
        """By bank."""
        self.table_of = [np.array([feature.table for feature in bank.features], np.int64) for bank in schema.banks]

    def trained(self, bank: int) -> np.ndarray:
        """Of each feature of a bank: whether its rows are trained."""
        return ~self.frozen[self.table_of[bank]]

    def banks_of(self, raised: np.ndarray) -> list[int]:
        return [bank for bank, members in enumerate(self.schema.banks) if raised[list(members.tables)].any()]

    def scalars(self, bank: int, settings: Sequence[Setting]) -> np.ndarray:
        return self.optimizers.scalars(self.schema.banks[bank].tables, settings, self.steps, self.dtype)

    def own(self, bank: int) -> slice:
        return slice(self.begins[bank], self.begins[bank] + self.held[bank])


def placed(
    packs: Sequence[Pack],
    dtype: torch.dtype,
    like: Schema | None = None,
    whole: Mapping[int, Owner] | None = None,
    rank: int = 0,
) -> Schema:
    """Give each pack its columns, one after the other, and return the schema of the plan, with banks `like` another's.
    Tables in `whole`, each with its owner, share no bank with those of others."""
    cuts = {t: at for t, owner in (whole or {}).items() for site, at in cuts_of(owner) if site == rank}
    kinds = [(*kind, (whole or {}).get(t)) for t, kind in enumerate(zip(*(pack.kinds for pack in packs), strict=True))]
    schema = Schema.of(packs[0].tables, kinds, None if like is None else [bank.tables for bank in like.banks])
    members, begins = [bank.tables for bank in schema.banks], [0 for _ in schema.banks]
    for number, pack in enumerate(packs):
        pack.place(number, schema if number == 0 else Schema.of(pack.tables, None, members), dtype, begins, cuts)
        begins = [begin + held for begin, held in zip(begins, pack.held, strict=True)]
    return schema
