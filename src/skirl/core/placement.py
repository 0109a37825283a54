"""The site of a row, as a pure function of its key. A table is cut into ranges, of the hash of a key or of its row, and
each range has a site: a rank among several trainers, one part of a store, or one of several stores.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from skirl.core.initial import mix
from skirl.core.keys import ROW_BITS
from skirl.tools.jit import kernel, read_only

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
