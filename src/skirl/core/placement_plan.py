"""The file of a placement: where each site is, and how the rows of every table are cut. It is checked when read.

The format leaves room for pieces that name columns; this version refuses them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skirl.core.keys import MAX_ROWS, MAX_TABLES, ROW_BITS
from skirl.core.placement import Cut, Placement
from skirl.tools.sealed_json import ANY, TEXT, Readable

FORMAT, VERSION = "skirl-placement", 1
_FORM = {
    "sites": [{"name": TEXT, "store": TEXT}],
    "tables": [{"name": TEXT, "rows": ANY, "dim": ANY, "by": TEXT, "pieces": [{"site": TEXT}]}],
}
_BY = ("hash", "rows", "whole")
_NO_SITE = re.compile(r"(link:[^:]*:)*(checkpoint|placed:.*)")
"""Stores that no site can have: the rows of a checkpoint cannot be written, and a plan has sites of its own."""
PLANS = Readable(FORMAT, VERSION, "plan of a placement", "PlacementPlan.save", _FORM)
"""Reads and writes the files."""


@dataclass(frozen=True)
class Site:
    """One place where rows are stored.

    **Arguments**

    - `name`: its name, chosen freely.
    - `store`: where it is, in the form that `store=` takes; in memory by default.
    - `memory`: bytes that its rows may take; None: no limit.
    - `rate`: bytes per second, in each direction; None: not known.
    """

    name: str
    store: str = "memory"
    memory: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a site has no name: give it one")
        if not self.store or _NO_SITE.fullmatch(self.store):
            raise ValueError(
                f"site {self.name!r} has store {self.store!r}: set it to memory, disk:FOLDER, rpc://HOST:PORT"
            )
        if self.memory is not None and not (type(self.memory) is int and 0 < self.memory < 1 << 63):
            raise ValueError(f"site {self.name!r} has memory {self.memory!r}: set it to bytes above 0, or leave it out")
        if self.rate is not None and not (type(self.rate) in (int, float) and 0 < self.rate < 1e18):
            raise ValueError(
                f"site {self.name!r} has rate {self.rate!r}: set it to bytes a second above 0, or leave it out"
            )


@dataclass(frozen=True)
class PlacedTable:
    """A table and its cut.

    **Arguments**

    - `name`, `rows`, `dim`: those of the table.
    - `cut`: where its rows are; its sites are indices into the plan's sites.
    - `record_bytes`: bytes of a row with its optimizer state in the run that was planned; None: not known.
    """

    name: str
    rows: int
    dim: int
    cut: Cut
    record_bytes: int | None = None

    def __post_init__(self) -> None:
        known = () if self.record_bytes is None else (("record_bytes", self.record_bytes),)
        for what, value in (("rows", self.rows), ("dim", self.dim), *known):
            if type(value) is not int or not 0 < value <= MAX_ROWS:
                raise ValueError(
                    f"table {self.name!r} has {what} {value!r}: set it to a whole number from 1 to 2**{ROW_BITS}"
                )


@dataclass(frozen=True)
class PlacementPlan:
    """The place of every row of some tables.

    **Arguments**

    - `sites`: the sites.
    - `tables`: the tables, in the order of the model.

    >>> sites = (Site("a", "disk:/fast/rows"), Site("b", "disk:/slow/rows"))
    >>> plan = PlacementPlan(sites, (PlacedTable("user", 1000, 16, Cut.weighted([3, 1])),))
    >>> PlacementPlan.parsed(plan.text()) == plan
    True
    """

    sites: tuple[Site, ...]
    tables: tuple[PlacedTable, ...]

    def __post_init__(self) -> None:
        _check_names("site", [site.name for site in self.sites])
        _check_names("table", [table.name for table in self.tables])
        if len(self.tables) > MAX_TABLES:
            raise ValueError(f"the plan has {len(self.tables):,} tables: a model has at most {MAX_TABLES:,}")
        for n, site in enumerate(self.sites):
            other = next((s.name for s in self.sites[:n] if s.store == site.store and _is_one_place(s.store)), None)
            if other is not None:
                raise ValueError(f"sites {other!r} and {site.name!r} have one store, {site.store}: give each its own")
        if len(self.sites) > (rows := sum(table.rows for table in self.tables)):
            raise ValueError(f"the plan has {len(self.sites)} sites for {rows} rows: set fewer sites than rows")

    @property
    def placement(self) -> Placement:
        """The site of every row, in the form that stores use."""
        cuts = {number: table.cut for number, table in enumerate(self.tables)}
        return Placement(len(self.sites), Cut.even(range(len(self.sites))), cuts, "sites")

    # The file

    def text(self) -> str:
        """Return the file's text."""
        return PLANS.text(self._body())

    def save(self, path: Path) -> None:
        """Write the file.

        **Arguments**

        - `path`: the file.
        """
        PLANS.write(path, self._body())

    def _body(self) -> dict[str, Any]:
        tables = (
            _without_none(vars(t) | {"by": _by(t.cut), "pieces": self._pieces(t), "cut": None}) for t in self.tables
        )
        return {"sites": [_without_none(vars(site)) for site in self.sites], "tables": list(tables)}

    def _pieces(self, table: PlacedTable) -> list[dict[str, Any]]:
        cut = table.cut
        if _by(cut) == "whole":
            return [{"site": self.sites[cut.sites[0]].name}]
        said = hex if cut.by == "hash" else int
        pieces = [{"site": self.sites[of].name, "begin": said(at), "end": said(end)} for at, end, of in cut.ranges]
        if cut.by == "rows" and cut.starts[-1] < table.rows:
            pieces[-1]["end"] = table.rows
        return pieces

    @classmethod
    def load(cls, path: str | Path) -> "PlacementPlan":
        """Read a file. Raise a ValueError that names it if its content is wrong.

        **Arguments**

        - `path`: the file.
        """
        return PLANS.load(Path(path), cls.parsed)

    @classmethod
    def parsed(cls, text: str) -> "PlacementPlan":
        """Parse a plan. Raise a ValueError unless it places every row of every table exactly once.

        **Arguments**

        - `text`: a plan as `text()` returns it. One without a digest may be written by hand.
        """
        body = PLANS.body(text)
        sites = tuple(Site(s["name"], s["store"], s.get("memory"), s.get("rate")) for s in body["sites"])
        _check_names("site", [site.name for site in sites])
        names = {site.name: number for number, site in enumerate(sites)}
        tables = tuple(_table(table, names) for table in body["tables"])
        return cls(sites, tables)

    # The tables of a run

    def check(self, tables: Sequence[tuple[str, int | None, int | None]], record_bytes: Sequence[int] = ()) -> None:
        """Raise a ValueError if the plan is not for these tables, or if a site's memory was planned for smaller rows.

        **Arguments**

        - `tables`: name, rows and dim of each, in order; None for rows or dim that are not known.
        - `record_bytes`: bytes of a row of each, with its optimizer state; empty if they are not known.
        """
        mine, names = [t.name for t in self.tables], [name for name, _, _ in tables]
        if missing := [name for name in names if name not in mine]:
            raise ValueError(
                f"the plan has no table {missing[0]!r}, it has {', '.join(mine[:5])}: make the plan for this model"
            )
        if over := [name for name in mine if name not in names]:
            raise ValueError(
                f"the plan has a table {over[0]!r}, which the model does not have: make the plan for this model"
            )
        for number, (table, (name, rows, dim)) in enumerate(zip(self.tables, tables, strict=True)):
            if table.name != name:
                raise ValueError(
                    f"table {number} is {table.name!r} in the plan but {name!r} in the model: put the tables in the same "
                    "order"
                )
            for what, planned, found in (("rows", table.rows, rows), ("dim", table.dim, dim)):
                if found is not None and planned != found:
                    raise ValueError(f"table {name!r} has {what} {planned:,} in the plan and {found:,} in the model: "
                                     "make the plan for this model")  # fmt: skip
        limited = [site.name for site in self.sites if site.memory is not None]
        for table, now in zip(self.tables, record_bytes if limited else ()):
            if table.record_bytes is not None and now > table.record_bytes:
                raise ValueError(
                    f"a row of table {table.name!r} takes {table.record_bytes:,} bytes with its optimizer state in the plan "
                    f"and {now:,} in this run, so its rows could exceed the memory of {limited[0]!r}: make the plan with "
                    "the optimizer of this run"
                )


def _check_names(what: str, names: Sequence[str]) -> None:
    if not names:
        raise ValueError(f"the plan has no {what}: name at least one")
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{what} {twice!r} is in the plan twice: remove one of them")


def _is_one_place(store: str) -> bool:
    return "disk:" in store or "rpc:" in store


def _without_none(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _by(cut: Cut) -> str:
    return "whole" if len(cut.starts) == 1 else cut.by


def _table(said: Mapping[str, Any], sites: Mapping[str, int]) -> PlacedTable:
    """Parse a table. Raise unless its pieces cover each row exactly once."""
    name, by, pieces = said["name"], said["by"], said["pieces"]
    table = PlacedTable(name, said["rows"], said["dim"], Cut((0,), (0,)), said.get("record_bytes"))
    if by not in _BY:
        raise ValueError(f"table {name!r} is cut by {by!r}: set it to {', '.join(_BY)}")
    for piece in pieces:
        if piece["site"] not in sites:
            raise ValueError(
                f"table {name!r} has rows at site {piece['site']!r}, but the sites are {', '.join(sites)}: name one of them"
            )
        if "columns" in piece:
            raise ValueError(f"table {name!r} is cut by columns, which no store can hold yet: cut its rows")
    if by == "whole":
        if len(pieces) != 1:
            raise ValueError(f"table {name!r} is whole and has {len(pieces)} pieces: give it one")
        return replace(table, cut=Cut((0,), (sites[pieces[0]["site"]],)))
    ends = [(_place(name, by, piece, "begin"), _place(name, by, piece, "end"), piece["site"]) for piece in pieces]
    end, cut = 0, Cut((0,), (0,), by)
    for begin, ends_at, _ in sorted(ends):
        if begin != end:
            how = "no piece has" if begin > end else "two pieces have"
            low, high = sorted((begin, end))
            raise ValueError(f"table {name!r}: {how} {_shown(by, low)} to {_shown(by, high)}: cover each row once")
        if ends_at <= begin:
            raise ValueError(f"table {name!r}: a piece ends at {_shown(by, ends_at)}, where it begins: remove it")
        end = ends_at
    if end != cut.end and not (by == "rows" and end == table.rows):
        if by == "rows" and end > table.rows:
            raise ValueError(
                f"table {name!r}: a piece ends at row {end:,}, and the table has {table.rows:,} rows: end it there"
            )
        raise ValueError(f"table {name!r}: no piece has {_shown(by, end)} to the end: cover each row once")
    ends.sort()
    return replace(table, cut=Cut(tuple(begin for begin, _, _ in ends), tuple(sites[of] for _, _, of in ends), by))


def _place(name: str, by: str, piece: Mapping[str, Any], what: str) -> int:
    value = piece.get(what)
    if by == "hash" and isinstance(value, str):
        with suppress(ValueError):
            value = int(value, 16)
    if type(value) is not int or not 0 <= value <= 1 << 64:
        raise ValueError(f"table {name!r}: {what} of a piece is {piece.get(what)!r}: set it to a place of {by}")
    return value


def _shown(by: str, place: int) -> str:
    return f"{place:#x}" if by == "hash" else f"row {place:,}"
