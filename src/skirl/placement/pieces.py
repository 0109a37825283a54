"""Parts of tables, which are rectangles of rows and columns, and a check that they cover every table exactly once."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from skirl.placement.spec import MULTIPLE, TableSpec


class Piece(NamedTuple):
    """Rows `row` to `row_end` and columns `col` to `col_end`, ends excluded, of the table with the number `table`."""

    table: int
    row: int
    row_end: int
    col: int
    col_end: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.row_end - self.row

    @property
    def dim(self) -> int:
        """Number of columns."""
        return self.col_end - self.col


def whole(table: int, spec: TableSpec) -> Piece:
    """Return a table as one piece."""
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


def check_cover(specs: Sequence[TableSpec], pieces: Iterable[Piece]) -> None:
    """Raise unless the pieces contain every row and column of every table exactly once."""
    of_table: dict[int, list[Piece]] = {}
    for piece in pieces:
        of_table.setdefault(piece.table, []).append(piece)
    for number, spec in enumerate(specs):
        who, parts = f"table {spec.name!r}", sorted(of_table.get(number, []))
        if not parts:
            raise ValueError(f"{who} is at no rank: place each table")
        for p in parts:
            if not (0 <= p.row < p.row_end <= spec.rows and 0 <= p.col < p.col_end <= spec.dim):
                raise ValueError(
                    f"{who} has a piece of rows {p.row:,} to {p.row_end:,} and columns {p.col} to {p.col_end}: it has "
                    f"{spec.rows:,} rows and {spec.dim} columns"
                )
            if any(at % MULTIPLE for at in (p.col, p.col_end) if at != spec.dim):
                raise ValueError(
                    f"{who} has a piece of columns {p.col} to {p.col_end}: cut columns at multiples of {MULTIPLE}"
                )
        by_rows = all(p.dim == spec.dim for p in parts)
        if not by_rows and any(p.rows < spec.rows for p in parts):
            raise ValueError(f"{who} is cut by rows and columns: cut it one way, and cover each once")
        what, size = ("rows", spec.rows) if by_rows else ("columns", spec.dim)
        ends = sorted((p.row, p.row_end) if by_rows else (p.col, p.col_end) for p in parts)
        for (_, end), (begin, _) in pairwise([(0, 0), *ends, (size, size)]):
            if begin != end:
                how, low, high = ("no piece has", end, begin) if begin > end else ("two pieces have", begin, end)
                raise ValueError(f"{who}: {how} {what} {low:,} to {high:,}: cover each once")
