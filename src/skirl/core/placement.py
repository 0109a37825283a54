"""Which owner or site has a row: by hash, by weight, or by a plan of ranges."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from skirl.core.initial import mix
from skirl.core.keys import MAX_ROWS, MAX_TABLES, ROW_BITS
from skirl.tools.jit import kernel, read_only
from skirl.tools.sealed_json import ANY, TEXT, Readable

Use = Literal["ranks", "store", "sites"]
By = Literal["hash", "rows"]

SALTS: dict[Use, int] = {"ranks": 0, "store": 1, "sites": 2}
"""Each use has its own hash: with a common one, all rows of a rank would fall into one part of its store. The hash of a
key is output number `salt`, counted from 0, of a splitmix64 generator whose initial state is the key."""

_GOLDEN = 0x9E3779B97F4A7C15
_WHOLE = 1 << 64
_BUCKET_BITS = 8
_BUCKETS = 1 << _BUCKET_BITS
"""Equal parts of the hash. A bucket within one range is stored as ~site, any other as the index of its first range."""
_TO_BUCKET = np.uint64(64 - _BUCKET_BITS)
ROWS = 1 << ROW_BITS
"""The end of the last range of rows, in every table."""
_TABLE_BITS = 64 - ROW_BITS
_ROW_TO_TOP, _TO_TABLE = np.uint64(_TABLE_BITS), np.uint64(ROW_BITS)


@dataclass(frozen=True)
class Cut:
    """Contiguous ranges of the hash or of rows, and the site of each.

    >>> Cut.even([0, 1, 2, 3]).starts == tuple(i << 62 for i in range(4))
    True
    """

    starts: tuple[int, ...]
    sites: tuple[int, ...]
    by: By = "hash"

    def __post_init__(self) -> None:
        of = "the hash" if self.by == "hash" else "rows"
        if self.by not in ("hash", "rows"):
            raise ValueError(f"by is {self.by!r}: set it to 'hash' or 'rows'")
        if not self.starts or len(self.starts) != len(self.sites):
            raise ValueError(f"{len(self.starts)} ranges of {of} and {len(self.sites)} sites: give each range its site")
        if self.starts[0] != 0 or any(a >= b for a, b in pairwise((*self.starts, self.end))):
            raise ValueError(
                f"ranges of {of} begin at {list(self.starts)}: let them rise from 0 to less than "
                f"{'2**64' if self.by == 'hash' else '2**48'}"
            )

    @classmethod
    def even(cls, sites: Sequence[int]) -> "Cut":
        """Cut into equal ranges, one per site, in order. With twice as many sites, each range is split in two."""
        return cls(tuple(-(-i * _WHOLE // len(sites)) for i in range(len(sites))), tuple(sites))

    @classmethod
    def weighted(cls, weights: Sequence[float]) -> "Cut":
        """Give each site with a weight above 0 a range of the hash, as wide as its share of all weights.

        >>> Cut.weighted([3, 0, 1])
        Cut(starts=(0, 13835058055282163712), sites=(0, 2), by='hash')
        """
        total, starts, sites, before = sum(weights), list[int](), list[int](), 0.0
        if not total > 0 or any(weight < 0 for weight in weights):
            raise ValueError(f"weights are {list(weights)}: set them to 0 or more, not all to 0")
        for site, weight in enumerate(weights):
            start = min(int(before / total * _WHOLE), _WHOLE)
            if starts and start == starts[-1] and weight > 0:
                sites[-1] = site  # the previous range would be empty
            elif weight > 0 and start < _WHOLE:
                starts.append(start)
                sites.append(site)
            before += weight
        return cls(tuple(starts), tuple(sites))

    @property
    def end(self) -> int:
        """The end of the last range."""
        return _WHOLE if self.by == "hash" else ROWS

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """Begin, end and site of each range."""
        return list(zip(self.starts, (*self.starts[1:], self.end), self.sites, strict=True))

    @property
    def facts(self) -> dict[str, Any]:
        """The whole cut as a JSON object."""
        by = {} if self.by == "hash" else {"by": self.by}  # left out, as before "rows" was added
        return {"starts": list(self.starts), "sites": list(self.sites), **by}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Cut":
        """Build from the object that `facts` returns."""
        return cls(tuple(facts["starts"]), tuple(facts["sites"]), facts.get("by", "hash"))


@dataclass(frozen=True)
class Placement:
    """The site of every row.

    >>> Placement.even(4).site_of(np.array([0, 1, 2, 3, 1 << 48])).tolist()
    [3, 2, 2, 0, 2]
    >>> Placement.even(2).site_of(np.array([0, 1, 2, 3, 1 << 48])).tolist()
    [1, 1, 1, 0, 1]
    """

    sites: int
    cut: Cut
    tables: Mapping[int, Cut] = field(default_factory=dict)
    use: Use = "ranks"

    def __post_init__(self) -> None:
        if self.sites < 1:
            raise ValueError(f"sites is {self.sites}: set it to 1 or more")
        if self.use not in SALTS:
            raise ValueError(f"use is {self.use!r}: set it to {' or '.join(map(repr, SALTS))}")
        for cut in (self.cut, *self.tables.values()):
            for site in cut.sites:
                if not 0 <= site < self.sites:
                    raise ValueError(f"a range is placed at site {site}: there are sites 0 to {self.sites - 1}")
        object.__setattr__(self, "_arrays", self._as_arrays())

    @classmethod
    def even(cls, sites: int, use: Use = "ranks") -> "Placement":
        """Spread every table over all sites, in equal ranges."""
        if sites < 1:
            raise ValueError(f"sites is {sites}: set it to 1 or more")
        return cls(sites, Cut.even(range(sites)), use=use)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Placement":
        """Build from the object that `facts` returns."""
        cuts = {int(table): Cut.of(cut) for table, cut in facts["tables"].items()}
        return cls(facts["sites"], Cut.of(facts["cut"]), cuts, facts["use"])

    @property
    def facts(self) -> dict[str, Any]:
        """The whole placement as a JSON object."""
        tables = {str(table): self.tables[table].facts for table in sorted(self.tables)}
        return {"use": self.use, "sites": self.sites, "cut": self.cut.facts, "tables": tables}

    @property
    def digest(self) -> str:
        """A hash of the facts, 32 hexadecimal digits."""
        return blake2b(json.dumps(self.facts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def site_of(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the site of each key."""
        out = np.empty(len(keys), np.int32)
        args: Any = (read_only(keys), *self.arrays, out)
        _sites(*args)
        return out

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Arguments of kernels: the cut of each table, last that of all further tables, then those of `site_in`."""
        return self._arrays  # type: ignore[attr-defined]

    def ranges_of(self, site: int, table: int | None = None) -> list[tuple[int, int]]:
        """Return begin and end of a site's ranges in a table; with None, in the tables without a cut of their own."""
        cut = self.cut if table is None else self.tables.get(table, self.cut)
        return [(begin, end) for begin, end, of in cut.ranges if of == site]

    def meets(self, site: int, other: "Placement") -> list[int]:
        """Return the sites of another placement that may have rows of this one's `site`.

        >>> Placement.even(2).meets(1, Placement.even(4)), Placement.even(3).meets(1, Placement.even(2))
        ([2, 3], [0, 1])
        """
        if self.use != other.use:
            return list(range(other.sites))
        met = set[int]()
        for table in (None, *self.tables.keys() | other.tables.keys()):
            mine = self.cut if table is None else self.tables.get(table, self.cut)
            theirs = other.cut if table is None else other.tables.get(table, other.cut)
            if mine.by != theirs.by and site in mine.sites:
                met |= set(theirs.sites)
                continue
            for begin, end in self.ranges_of(site, table):
                met |= {of for their_begin, their_end, of in theirs.ranges if begin < their_end and their_begin < end}
        return sorted(met)

    def _as_arrays(self) -> tuple[Any, ...]:
        cuts = [self.cut, *(self.tables[table] for table in sorted(self.tables))]
        cut_of = np.zeros(max(self.tables, default=-1) + 2, np.int64)  # the last entry is for all further tables
        cut_of[sorted(self.tables)] = np.arange(1, len(cuts))
        first = np.cumsum([0, *(len(cut.starts) for cut in cuts)])
        shifts = [(cut, _TABLE_BITS * (cut.by == "rows")) for cut in cuts]
        starts = np.array([start << shift for cut, shift in shifts for start in cut.starts], np.uint64)
        ends = np.array([(end << shift) - 1 for cut, shift in shifts for _, end, _ in cut.ranges], np.uint64)
        sites = np.array([site for cut in cuts for site in cut.sites], np.int32)
        begins = np.arange(_BUCKETS, dtype=np.uint64) << _TO_BUCKET
        lasts = begins + np.uint64((1 << 64 - _BUCKET_BITS) - 1)
        found = []
        for begin, end in pairwise(first):
            at, last = (begin + np.searchsorted(starts[begin:end], of, "right") - 1 for of in (begins, lasts))
            found.append(np.where(at == last, ~sites[at].astype(np.int64), at))
        hashed = (SALTS[self.use] + 1) * _GOLDEN % _WHOLE
        salt = np.array([hashed if cut.by == "hash" else 0 for cut in cuts], np.uint64)  # 0 means by rows
        return cut_of, salt, np.stack(found).astype(np.int32), ends, sites


@dataclass(frozen=True)
class AtSite:
    """A predicate on keys: whether they are at a site. It can be sent to another process.

    >>> keys = np.array([0, 1, 2, 3, 1 << 48])
    >>> AtSite(Placement.even(2), 0)(keys).tolist()
    [False, False, False, True, False]
    >>> both = AtSite.all([AtSite(Placement.even(2), 1), AtSite(Placement.even(2, "store"), 1)])
    >>> keys[both(keys)].tolist()
    [1, 2]
    """

    placement: Placement
    site: int

    def __call__(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each key that is there."""
        return self.placement.site_of(keys) == self.site

    @staticmethod
    def all(at: "Sequence[AtSite]") -> "AtSite | AtSites | None":
        """Return the predicate that all of these hold. None for an empty list, which means all keys."""
        if len(at) <= 1:
            return at[0] if at else None
        return AtSites(tuple(at))


@dataclass(frozen=True)
class AtSites:
    """A predicate on keys: whether they are at each of several sites of different placements."""

    each: tuple[AtSite, ...]

    def __call__(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each key that is at all of the sites."""
        return np.logical_and.reduce([at(keys) for at in self.each])


@kernel
def site_in(cut, key, salt, guess, ends, sites):
    """Return, in a kernel, the site of a key whose table has this cut; the last four are from `Placement.arrays`."""
    hashed = mix(np.uint64(key) + salt[cut]) if salt[cut] else np.uint64(key) << _ROW_TO_TOP
    known = guess[cut, hashed >> _TO_BUCKET]
    if known < 0:
        return ~known
    i = np.uint32(known)
    while ends[i] < hashed:  # the last range ends with the last hash
        i += np.uint32(1)
    return sites[i]


@kernel
def _sites(keys, cut_of, salt, guess, ends, sites, out):
    """Fill out with sites, with `site_in` inlined for speed. Unsigned indices save a check for negative ones."""
    beyond = np.uint64(len(cut_of) - 1)
    for i in range(len(keys)):
        key = np.uint64(keys[i])
        cut = np.uint64(cut_of[min(key >> _TO_TABLE, beyond)])
        salted = salt[cut]
        hashed = mix(key + salted) if salted else key << _ROW_TO_TOP
        known = guess[cut, hashed >> _TO_BUCKET]
        if known < 0:
            out[i] = ~known
            continue
        at = np.uint32(known)
        while ends[at] < hashed:
            at += np.uint32(1)
        out[i] = sites[at]


FORMAT, VERSION = "skirl-placement", 1
_FORM = {
    "sites": [{"name": TEXT, "store": TEXT}],
    "tables": [{"name": TEXT, "rows": ANY, "dim": ANY, "by": TEXT, "pieces": [{"site": TEXT}]}],
}
_BY = ("hash", "rows", "whole")
_NO_SITE = re.compile(r"(checkpoint|placed:.*)")
"""Stores that no site can have: the rows of a checkpoint cannot be written, and a plan has sites of its own."""
PLANS = Readable(FORMAT, VERSION, "plan of a placement", "PlacementPlan.save", _FORM)
"""Reads and writes the files."""


@dataclass(frozen=True)
class Site:
    """One place where rows are stored."""

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
    """A table and its cut."""

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
        """Parse a plan. Raise a ValueError unless it places every row of every table exactly once."""
        body = PLANS.body(text)
        sites = tuple(Site(s["name"], s["store"], s.get("memory"), s.get("rate")) for s in body["sites"])
        _check_names("site", [site.name for site in sites])
        names = {site.name: number for number, site in enumerate(sites)}
        tables = tuple(_table(table, names) for table in body["tables"])
        return cls(sites, tables)

    # The tables of a run

    def check(self, tables: Sequence[tuple[str, int | None, int | None]], record_bytes: Sequence[int] = ()) -> None:
        """Raise a ValueError if the plan is not for these tables, or if a site's memory was planned for smaller rows."""
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
