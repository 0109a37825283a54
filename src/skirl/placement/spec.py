"""Tables to place: the size of each and what a batch looks up in it, their file, and their parts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from skirl.core.optim import ROW_OPTIMIZERS, row_optimizer
from skirl.tools.sealed_json import AMOUNT, ANY, TEXT, Kind, misfit
from skirl.train.placed import Bytes, PlacedTable, Plan

if TYPE_CHECKING:
    from skirl.placement.search import Placed

FORMAT, VERSION = "skirl-tables", 1
BINS = 17
"""Bins of reuse: rows that a batch looks up once, twice, up to 4, 8, ... 32,768 times, and more often."""
MULTIPLE = 4  # columns are cut at multiples of it
_FORM = {
    "format": Kind(f'"{FORMAT}"', lambda v: v == FORMAT), "format_version": Kind(str(VERSION), lambda v: v == VERSION),
    "batch": ANY, "tables": [{"name": TEXT, "rows": ANY, "dim": ANY, "ids": AMOUNT, "distinct": AMOUNT}],
}  # fmt: skip
_FLOAT = 4
Split = Literal["any", "rows", "columns", "no"]


@dataclass(frozen=True)
class TableSpec:
    """A table, with all that its cost depends on.

    `batch` is the samples of a step over all ranks, `ids` and `distinct` the lookups and distinct rows of a batch on
    average, `reuse` the shares of these rows in each of `BINS` (() if not known).
    """

    name: str
    rows: int
    dim: int
    batch: int
    ids: float
    distinct: float
    reuse: tuple[float, ...] = ()
    optimizer: str = "rowwise-adagrad"
    split: Split = "any"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a table has no name: give it one")
        who = f"table {self.name!r}"
        for what in ("rows", "dim", "batch"):
            value = getattr(self, what)
            if type(value) is not int or not 0 < value < 1 << 48:
                raise ValueError(f"{who} has {what} {value!r}: set it to a whole number of 1 or more")
        if not (isfinite(self.ids) and self.ids > 0):
            raise ValueError(f"{who} has {self.ids:g} ids a batch: set it above 0, or leave the table out")
        if not 0 < self.distinct <= min(self.ids, self.rows):
            raise ValueError(
                f"{who} has {self.distinct:g} distinct rows a batch: set it above 0, to no more than its "
                f"{self.ids:g} ids and {self.rows:,} rows"
            )
        if self.reuse and (len(self.reuse) != BINS or min(self.reuse) < 0 or abs(sum(self.reuse) - 1) > 1e-3):
            raise ValueError(f"{who} has a reuse that is not {BINS} shares whose sum is 1: correct it, or leave it out")
        if not isinstance(self.optimizer, str) or self.optimizer not in ROW_OPTIMIZERS:
            raise ValueError(f"{who} has optimizer {self.optimizer!r}: set it to one of {', '.join(ROW_OPTIMIZERS)}")
        if self.split not in ("any", "rows", "columns", "no"):
            raise ValueError(f"{who} has split {self.split!r}: set it to any, rows, columns or no")

    def nbytes(self, rows: int, dim: int) -> int:
        return rows * _width(self.optimizer, dim) * _FLOAT

    def sent(self, trainers: int) -> Bytes:
        """Return what the table makes skirl's trainers send in a step, a share of the batch each."""
        found = self.distinct * min(trainers, self.ids / self.distinct)
        if self.reuse:  # of a row that a batch looks up k times, how many trainers look it up
            often = 2.0 ** np.arange(BINS)
            found = self.distinct * float(np.dot(self.reuse, trainers * (1 - (1 - 1 / trainers) ** often)))
        return Bytes.of(found, self.batch, self.ids, self.dim, trainers)

    @property
    def one_state(self) -> bool:
        """True if the row optimizer keeps one number per row, so that a table cut by columns trains another model."""
        return 2 * _width(self.optimizer, MULTIPLE) != _width(self.optimizer, 2 * MULTIPLE)


def _width(optimizer: str, dim: int) -> int:
    """Floats of a row with its state."""
    return row_optimizer(optimizer)().width(dim)


def reuse_of(counts: np.ndarray) -> tuple[float, ...]:
    """Return the share of rows in each bin of reuse, from the lookups of each distinct row, 1 or more."""
    at = np.minimum(np.ceil(np.log2(counts)).astype(int), BINS - 1)
    return tuple((np.bincount(at, minlength=BINS) / len(counts)).tolist())


def canonical(specs: Sequence[TableSpec]) -> list[int]:
    """Return the numbers of tables in an order that does not depend on how they are listed. Names break ties."""

    def key(n: int) -> tuple[Any, ...]:
        s = specs[n]
        return (-s.ids * s.dim, -s.rows, -s.dim, -s.ids, -s.distinct, s.batch, s.optimizer, s.split, s.reuse, s.name)

    return sorted(range(len(specs)), key=key)


def read_specs(path: Path, optimizer: str = TableSpec.optimizer) -> list[TableSpec]:
    """`optimizer`: of tables that name none."""
    try:
        body = json.loads(path.read_bytes())
        if (wrong := misfit(body, _FORM)) is not None:
            raise ValueError(wrong)
        tables = [{"batch": body["batch"], "optimizer": optimizer, **table} for table in body["tables"]]
        specs = [TableSpec(**{**fields, "reuse": tuple(fields.get("reuse", ()))}) for fields in tables]
        names = [spec.name for spec in specs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"table {twice[0]!r} is listed twice")
        if not specs:
            raise ValueError("it has no table")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no list of tables, {error}: write it as docs/howto/placing.md shows it") from None
    return specs


class Piece(NamedTuple):
    """Rows `row` to `row_end` and columns `col` to `col_end`, ends excluded, of the table with the number `table`."""

    table: int
    row: int
    row_end: int
    col: int
    col_end: int

    @property
    def rows(self) -> int:
        return self.row_end - self.row

    @property
    def dim(self) -> int:
        return self.col_end - self.col


def whole(table: int, spec: TableSpec) -> Piece:
    return Piece(table, 0, spec.rows, 0, spec.dim)


def halves(piece: Piece) -> tuple[Piece, Piece] | None:
    """Halve a piece by columns, at a multiple of 4. Return None if that cannot be.

    >>> halves(Piece(0, 0, 5, 0, 12))
    (Piece(table=0, row=0, row_end=5, col=0, col_end=8), Piece(table=0, row=0, row_end=5, col=8, col_end=12))
    """
    at = piece.col + -(-piece.dim // (2 * MULTIPLE)) * MULTIPLE
    return (piece._replace(col_end=at), piece._replace(col=at)) if at < piece.col_end else None


def blocks(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Return the rows of each rank under an even cut: equally many for all but the last that has some.

    >>> blocks(10, 4), blocks(5, 4)
    ([(0, 3), (3, 6), (6, 9), (9, 10)], [(0, 2), (2, 4), (4, 5), (5, 5)])
    """
    size = -(-rows // ranks)
    return [(min(rows, r * size), min(rows, (r + 1) * size)) for r in range(ranks)]


def pieces_of(number: int, table: PlacedTable, ranks: int) -> list[tuple[Piece, int]]:
    """Return the pieces of a placed table, each with its rank: of one cut by rows, one for each rank, even without rows."""
    name, rows, dim, at = table
    if at is None:
        return [(Piece(number, begin, end, 0, dim), rank) for rank, (begin, end) in enumerate(blocks(rows, ranks))]
    columns = {at: dim} if isinstance(at, int) else at
    ends = accumulate(columns.values())
    return [(Piece(number, 0, rows, end - width, end), rank) for (rank, width), end in zip(columns.items(), ends)]


def plan_of(specs: Sequence[TableSpec], placed: "Placed") -> Plan:
    """Make a plan of what a search found for these specs in canonical order."""
    found: list[list[tuple[Piece, int]]] = [[] for _ in specs]
    order = canonical(specs)
    for piece, rank in zip(placed.items, placed.at.tolist(), strict=True):
        found[order[piece.table]].append((piece, rank))
    tables = []
    for spec, pieces in zip(specs, map(sorted, found), strict=True):
        at = {rank: piece.dim for piece, rank in pieces} if pieces[0][0].dim < spec.dim else None
        tables.append(PlacedTable(spec.name, spec.rows, spec.dim, pieces[0][1] if len(pieces) == 1 else at))
    return Plan(len(placed.caps), tuple(tables))
