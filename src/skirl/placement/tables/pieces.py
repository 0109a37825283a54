"""Parts of tables, which are rectangles of rows and columns, and a check that they cover every table exactly once."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from skirl.placement.tables.spec import MULTIPLE, TableSpec


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

    def cut_rows(self, first: int) -> "tuple[Piece, Piece]":
        """Cut it in two; the first part has `first` rows."""
        at = self.row + first
        return self._replace(row_end=at), self._replace(row=at)

    def cut_columns(self, first: int) -> "tuple[Piece, Piece]":
        """Cut it in two; the first part has `first` columns."""
        at = self.col + first
        return self._replace(col_end=at), self._replace(col=at)


def whole(table: int, spec: TableSpec) -> Piece:
    """Return a table as one piece."""
    return Piece(table, 0, spec.rows, 0, spec.dim)


def halves(piece: Piece, way: str) -> tuple[Piece, Piece] | None:
    """Halve a piece by "rows" or by "columns", these at a multiple of 4. Return None if that cannot be.

    >>> halves(Piece(0, 0, 5, 0, 12), "columns")
    (Piece(table=0, row=0, row_end=5, col=0, col_end=8), Piece(table=0, row=0, row_end=5, col=8, col_end=12))
    """
    if way == "rows":
        return piece.cut_rows(piece.rows - piece.rows // 2) if piece.rows > 1 else None
    first = -(-piece.dim // (2 * MULTIPLE)) * MULTIPLE
    return piece.cut_columns(first) if first < piece.dim else None


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the same rows and columns in fewer pieces, by joining neighbours.

    >>> joined([Piece(0, 5, 9, 0, 4), Piece(0, 0, 5, 0, 4)])
    [Piece(table=0, row=0, row_end=9, col=0, col_end=4)]
    """
    rest = sorted(pieces)
    while True:
        for n, one in enumerate(rest):
            for other in rest[n + 1 :]:
                if one.table != other.table:
                    break
                if one[3:] == other[3:] and one.row_end == other.row:
                    made = one._replace(row_end=other.row_end)
                elif one[1:3] == other[1:3] and one.col_end == other.col:
                    made = one._replace(col_end=other.col_end)
                elif one[1:3] == other[1:3] and other.col_end == one.col:
                    made = one._replace(col=other.col)
                else:
                    continue
                rest.remove(one)
                rest.remove(other)
                rest = sorted([*rest, made])
                break
            else:
                continue
            break
        else:
            return rest


def check_cover(specs: Sequence[TableSpec], pieces: Iterable[Piece]) -> None:
    """Raise unless the pieces contain every row and column of every table exactly once.

    **Arguments**

    - `specs`: the tables.
    - `pieces`: pieces of all ranks.
    """
    of: dict[int, list[Piece]] = {}
    for piece in pieces:
        of.setdefault(piece.table, []).append(piece)
    for number, spec in enumerate(specs):
        who, mine = f"table {spec.name!r}", sorted(of.get(number, []))
        if not mine:
            raise ValueError(f"{who} is at no rank: place each table")
        for p in mine:
            if not (0 <= p.row < p.row_end <= spec.rows and 0 <= p.col < p.col_end <= spec.dim):
                raise ValueError(
                    f"{who} has a piece of rows {p.row:,} to {p.row_end:,} and columns {p.col} to {p.col_end}: it has "
                    f"{spec.rows:,} rows and {spec.dim} columns"
                )
            if any(at % MULTIPLE for at in (p.col, p.col_end) if at != spec.dim):
                raise ValueError(
                    f"{who} has a piece of columns {p.col} to {p.col_end}: cut columns at multiples of {MULTIPLE}"
                )
        if all(p.dim == spec.dim for p in mine) and [p.row for p in mine] + [spec.rows] == [0] + [
            p.row_end for p in mine
        ]:
            continue  # cut by rows alone, one after the other
        # Between two row ends, the columns of the pieces that have these rows must follow one another without gaps.
        ends = sorted({end for p in mine for end in (p.row, p.row_end)} | {0, spec.rows})
        for begin, end in pairwise(ends):
            at = 0
            for p in sorted((p for p in mine if p.row <= begin and end <= p.row_end), key=lambda p: p.col):
                if p.col != at:
                    how, low, high = ("no piece has", at, p.col) if p.col > at else ("two pieces have", p.col, at)
                    raise ValueError(
                        f"{who}: {how} columns {low} to {high} of rows {begin:,} to {end:,}: cover each once"
                    )
                at = p.col_end
            if at != spec.dim:
                raise ValueError(
                    f"{who}: no piece has columns {at} to {spec.dim} of rows {begin:,} to {end:,}: cover each once"
                )
