"""The file of a plan of tables: every table's pieces and their ranks, checked to cover it once when it is read."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from skirl.placement.problem import Placed, Problem
from skirl.placement.spec import Piece, TableSpec, check_cover, check_names
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import COUNT, TEXT, misfit, put_whole

FORMAT, VERSION = "skirl-table-plan", 1
_HEAD = {"format": FORMAT, "format_version": VERSION}
_PIECE = {"rank": COUNT, "rows": [COUNT], "columns": [COUNT]}
_FORM = {
    "ranks": COUNT,
    "tables": [{"name": TEXT, "rows": COUNT, "dim": COUNT, "optimizer": TEXT, "pieces": [_PIECE]}],
}
_MOST = 256 << 20  # bytes of a file


@dataclass(frozen=True)
class TablePlan:
    """A plan of where every row and column of some tables is to be."""

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
    def of(cls, specs: Sequence[TableSpec], order: Sequence[int], placed: Placed) -> "TablePlan":
        """Make a plan of what a search found for the specs in this order."""
        pieces: list[list[tuple[Piece, int]]] = [[] for _ in specs]
        for piece, rank in zip(placed.items, placed.at.tolist(), strict=True):
            number = order[piece.table]
            pieces[number].append((piece._replace(table=number), rank))
        return cls(len(placed.caps), tuple(map(_facts, specs)), tuple(tuple(sorted(of)) for of in pieces))

    def save(self, path: Path) -> None:
        tables = [
            {
                "name": name, "rows": rows, "dim": dim, "optimizer": optimizer,
                "pieces": [
                    {"rank": rank, "rows": [p.row, p.row_end], "columns": [p.col, p.col_end]} for p, rank in pieces
                ],
            }
            for (name, rows, dim, optimizer), pieces in zip(self.tables, self.pieces, strict=True)
        ]  # fmt: skip
        text = json.dumps(_HEAD | {"ranks": self.ranks, "tables": tables}, indent=1) + "\n"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            put_whole(path, text.encode(), secrets.token_hex(8))

    @classmethod
    def load(cls, path: Path) -> "TablePlan":
        """Read a file. Raise a ValueError that names it if it is wrong."""
        if not path.is_file() or path.stat().st_size > _MOST:
            raise ValueError(f"{path} is no plan of tables: name a file that `skirl place` wrote")
        try:
            return cls.parsed(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def parsed(cls, text: str) -> "TablePlan":
        """Raise a ValueError if the text is no plan, or a wrong one."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON ({error}): make the plan again") from None
        if not isinstance(body, dict) or any(body.get(name) != value for name, value in _HEAD.items()):
            raise ValueError(f"it is not a plan of tables in format {VERSION}: name a file that `skirl place` wrote")
        if (wrong := misfit(body, _FORM)) is not None:
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

    def placed(self, problem: Problem) -> Placed:
        """The plan as a placement of a problem's tables, in the problem's order."""
        numbers = {name: number for number, (name, *_) in enumerate(self.tables)}
        items, at = [], []
        for table, spec in enumerate(problem.specs):
            for piece, rank in self.pieces[numbers[spec.name]]:
                items.append(piece._replace(table=table))
                at.append(rank)
        return problem.at(tuple(items), np.array(at, np.int64))

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
