"""Tables to place: the size of each and what a batch looks up in it; their parts; plans of them; and the files of both."""

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from skirl.core.optim import ROW_OPTIMIZERS, row_optimizer
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import AMOUNT, ANY, COUNT, TEXT, misfit, put_whole
from skirl.train.placed import Bytes

if TYPE_CHECKING:
    from skirl.placement.problem import Placed

FORMAT, VERSION = "skirl-tables", 1
BINS = 17
"""Bins of reuse: rows that a batch looks up once, twice, up to 4, 8, ... 32,768 times, and more often."""
MULTIPLE = 4  # columns are cut at multiples of it
_MOST = 256 << 20  # bytes of a file
_FLOAT = 4
Split = Literal["any", "rows", "columns", "no"]
T = TypeVar("T")


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


def check_names(names: Sequence[str]) -> None:
    if not names:
        raise ValueError("there is no table: name at least one")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise ValueError(f"table {name!r} is listed twice: remove one of them")


def read_specs(path: Path, optimizer: str = TableSpec.optimizer) -> list[TableSpec]:
    """`optimizer`: of tables that name none."""
    return _read(
        path, partial(_parsed, optimizer=optimizer), "list of tables: name a file as docs/howto/placing.md shows it"
    )


def _read(path: Path, parsed: Callable[[str], T], what: str) -> T:
    if not path.exists():
        raise ValueError(f"there is no file {path}")
    if not path.is_file() or path.stat().st_size > _MOST:
        raise ValueError(f"{path} is no {what}")
    try:
        return parsed(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def _parsed(text: str, optimizer: str) -> list[TableSpec]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({error})") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(f'it is no list of tables in JSON: begin it with {{"format": "{FORMAT}"')
    if body.get("format_version") != VERSION:
        raise ValueError(
            f"its format_version is {body.get('format_version')!r}: set it to {VERSION}, which skirl reads"
        )
    form = {"batch": ANY, "tables": [{"name": TEXT, "rows": ANY, "dim": ANY, "ids": AMOUNT, "distinct": AMOUNT}]}
    if (wrong := misfit(body, form)) is not None:
        raise ValueError(f"{wrong}: correct it")
    specs = []
    for table in body["tables"]:
        fields = {"batch": body["batch"], "optimizer": optimizer, **table}
        if unknown := fields.keys() - TableSpec.__dataclass_fields__.keys():
            raise ValueError(f"table {table['name']!r} has {min(unknown)!r}, which skirl does not know: leave it out")
        reuse = fields.get("reuse", [])
        if not isinstance(reuse, list) or any(not AMOUNT.fits(share) for share in reuse):
            raise ValueError(f"table {table['name']!r} has a reuse that is no list of numbers: leave it out")
        specs.append(TableSpec(**{**fields, "reuse": tuple(reuse)}))
    check_names([spec.name for spec in specs])
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


def check_cover(name: str, rows: int, dim: int, pieces: Iterable[Piece]) -> None:
    """Raise unless the pieces contain every row and column of a table exactly once."""
    who, parts = f"table {name!r}", sorted(pieces)
    if not parts:
        raise ValueError(f"{who} is at no rank: place each table")
    for p in parts:
        if not (0 <= p.row < p.row_end <= rows and 0 <= p.col < p.col_end <= dim):
            raise ValueError(
                f"{who} has a piece of rows {p.row:,} to {p.row_end:,} and columns {p.col} to {p.col_end}: it has "
                f"{rows:,} rows and {dim} columns"
            )
        if any(at % MULTIPLE for at in (p.col, p.col_end) if at != dim):
            raise ValueError(f"{who} has columns {p.col} to {p.col_end}: cut columns at multiples of {MULTIPLE}")
    by_rows = all(p.dim == dim for p in parts)
    if not by_rows and any(p.rows < rows for p in parts):
        raise ValueError(f"{who} is cut by rows and columns: cut it one way, and cover each once")
    what, size = ("rows", rows) if by_rows else ("columns", dim)
    ends = sorted((p.row, p.row_end) if by_rows else (p.col, p.col_end) for p in parts)
    for (_, end), (begin, _) in pairwise([(0, 0), *ends, (size, size)]):
        if begin != end:
            how, low, high = ("no piece has", end, begin) if begin > end else ("two pieces have", begin, end)
            raise ValueError(f"{who}: {how} {what} {low:,} to {high:,}: cover each once")


# Plans

PLAN_VERSION = 1
_HEAD = {"format": "skirl-table-plan", "format_version": PLAN_VERSION}
_PIECE = {"rank": COUNT, "rows": [COUNT], "columns": [COUNT]}
_PLAN = {
    "ranks": COUNT,
    "tables": [{"name": TEXT, "rows": COUNT, "dim": COUNT, "optimizer": TEXT, "pieces": [_PIECE]}],
}


@dataclass(frozen=True)
class TablePlan:
    ranks: int
    tables: tuple[tuple[str, int, int, str], ...]
    """Name, rows, dim and row optimizer of each."""
    pieces: tuple[tuple[tuple[Piece, int], ...], ...]
    """Of each table, with the rank of each piece."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"the plan has {self.ranks} ranks: set it to 1 or more")
        check_names([name for name, *_ in self.tables])
        for (name, rows, dim, optimizer), pieces in zip(self.tables, self.pieces, strict=True):
            TableSpec(name, rows, dim, 1, 1.0, 1.0, optimizer=optimizer)
            for _, rank in pieces:
                if not 0 <= rank < self.ranks:
                    raise ValueError(
                        f"table {name!r} has a piece at rank {rank}: there are ranks 0 to {self.ranks - 1}"
                    )
            check_cover(name, rows, dim, [piece for piece, _ in pieces])

    @classmethod
    def of(cls, specs: Sequence[TableSpec], order: Sequence[int], placed: "Placed") -> "TablePlan":
        """Make a plan of what a search found for the specs in this order."""
        pieces: list[list[tuple[Piece, int]]] = [[] for _ in specs]
        for piece, rank in zip(placed.items, placed.at.tolist(), strict=True):
            number = order[piece.table]
            pieces[number].append((piece._replace(table=number), rank))
        return cls(len(placed.caps), tuple(map(_facts, specs)), tuple(tuple(sorted(of)) for of in pieces))

    def save(self, path: Path) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            put_whole(path, self.text().encode(), secrets.token_hex(8))

    def text(self) -> str:
        tables = [
            {
                "name": name, "rows": rows, "dim": dim, "optimizer": optimizer,
                "pieces": [
                    {"rank": rank, "rows": [p.row, p.row_end], "columns": [p.col, p.col_end]} for p, rank in pieces
                ],
            }
            for (name, rows, dim, optimizer), pieces in zip(self.tables, self.pieces, strict=True)
        ]  # fmt: skip
        return json.dumps(_HEAD | {"ranks": self.ranks, "tables": tables}, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> "TablePlan":
        return _read(path, cls.parsed, "plan of tables: name a file that `skirl place` wrote")

    @classmethod
    def parsed(cls, text: str) -> "TablePlan":
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON ({error}): make the plan again") from None
        if isinstance(body, dict) and body.get("format") == "skirl-placement":
            raise ValueError("it is a plan for skirl's trainers: make one for TorchRec by skirl place --ranks")
        if not isinstance(body, dict) or any(body.get(name) != value for name, value in _HEAD.items()):
            raise ValueError(
                f"it is not a plan of tables in format {PLAN_VERSION}: name a file that `skirl place` wrote"
            )
        if (wrong := misfit(body, _PLAN)) is not None:
            raise ValueError(f"{wrong}: make the plan again")
        tables, pieces = [], []
        for number, table in enumerate(body["tables"]):
            tables.append((table["name"], table["rows"], table["dim"], table["optimizer"]))
            pieces.append(tuple(_piece(number, table["name"], piece) for piece in table["pieces"]))
        return cls(body["ranks"], tuple(tables), tuple(pieces))

    def check(self, specs: Sequence[TableSpec]) -> None:
        known, found = ({name: of for name, *of in tables} for tables in (self.tables, map(_facts, specs)))
        if other := [name for name in {**known, **found} if name not in known or name not in found]:
            where = "the plan has no" if other[0] in found else "the plan has a table that is not there:"
            raise ValueError(f"{where} table {other[0]!r}: make the plan again")
        for name, of in found.items():
            for what, planned, now in zip(("rows", "dim", "optimizer"), known[name], of, strict=True):
                if planned != now:
                    raise ValueError(
                        f"table {name!r} has {what} {planned} in the plan and {now} now: make the plan again"
                    )

    def at(self, rank: int) -> list[str]:
        """The tables of a rank, each with how it is cut."""
        found = []
        for (name, _, dim, _), pieces in zip(self.tables, self.pieces, strict=True):
            if any(at == rank for _, at in pieces):
                how = "columns" if pieces[0][0].dim < dim else "rows"
                found.append(name if len(pieces) == 1 else f"{name} ({len(pieces)} parts by {how})")
        return found


def _facts(spec: TableSpec) -> tuple[str, int, int, str]:
    return spec.name, spec.rows, spec.dim, spec.optimizer


def _piece(number: int, name: str, body: Mapping[str, Any]) -> tuple[Piece, int]:
    if len(body["rows"]) != 2 or len(body["columns"]) != 2:
        raise ValueError(f"table {name!r} has a piece that is not of two ends of rows and of columns: correct it")
    return Piece(number, *body["rows"], *body["columns"]), body["rank"]
