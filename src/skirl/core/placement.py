"""Which trainer, node or store has a row: by a hash of its key, and their weights."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from skirl.core.initial import mix
from skirl.core.keys import ROW_BITS
from skirl.tools.jit import kernel, read_only

Use = Literal["ranks", "sites"]
Owner = tuple[tuple[int, int], ...]
"""The sites of a table that is not spread by rows, and how many of its columns each has, in order: one, or it is cut."""

SALTS: dict[Use, int] = {"ranks": 0, "sites": 2}
"""Each use has its own hash: with a common one, all rows of a rank would fall into one part of its store. The hash of a
key is output number `salt`, counted from 0, of a splitmix64 generator whose initial state is the key."""

_GOLDEN = 0x9E3779B97F4A7C15
_WHOLE = 1 << 64
_MOST = 1 << 32
"""Most that weights may add up to, so that no range is empty."""


@dataclass(frozen=True)
class Placement:
    """The site of every row. Each site has a range of the hash, as wide as its share of all weights. Tables in `whole` are
    at one site each, or cut by columns; rows of cut ones are at no site, -1."""

    weights: tuple[int, ...]
    use: Use = "ranks"
    whole: tuple[tuple[int, Owner], ...] = ()
    """Number of a table and its owner."""

    def __post_init__(self) -> None:
        weights = tuple(self.weights)
        if not weights or any(type(weight) is not int or weight < 1 for weight in weights) or sum(weights) > _MOST:
            raise ValueError(f"weights are {list(weights)}: set each to 1 or more, and all together to 2**32 at most")
        object.__setattr__(self, "weights", tuple(weight // gcd(*weights) for weight in weights))
        whole = sorted((table, tuple(map(tuple, owner))) for table, owner in self.whole)
        object.__setattr__(self, "whole", tuple(whole))

    @classmethod
    def even(cls, sites: int, use: Use = "ranks", whole: Iterable[Any] = ()) -> "Placement":
        """With twice as many sites, each range is split in two."""
        return cls((1,) * sites, use, tuple(whole))

    @property
    def facts(self) -> dict[str, Any]:
        """Its fields, for JSON, which makes lists of them."""
        return {"use": self.use, "weights": list(self.weights)} | ({"whole": self.whole} if self.whole else {})

    @property
    def digest(self) -> str:
        return blake2b(json.dumps(self.facts, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def sites(self) -> int:
        return len(self.weights)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        total = sum(self.weights)
        return list(pairwise(-(-before * _WHOLE // total) for before in accumulate(self.weights, initial=0)))

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """What is added to a key before it is mixed, and the last hash of each site's range."""
        salt = np.uint64((SALTS[self.use] + 1) * _GOLDEN % _WHOLE)
        return salt, np.array([end - 1 for _, end in self.ranges], np.uint64)

    def site_of(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        out = np.empty(len(keys), np.int32)
        args: Any = (read_only(keys), *self.arrays, out)
        _sites(*args)
        tables = keys >> ROW_BITS
        for table, owner in self.whole:
            out[tables == table] = owner[0][0] if len(owner) == 1 else -1
        return out

    def meets(self, site: int, other: "Placement") -> list[int]:
        """Return the sites of another placement that may have rows of this one's `site`."""
        if self.use != other.use or self.whole != other.whole or (self.whole and self.sites != other.sites):
            return list(range(other.sites))
        low, high = self.ranges[site]
        return [of for of, (begin, end) in enumerate(other.ranges) if begin < high and low < end]


def sites_of(owner: Owner) -> tuple[int, ...]:
    return tuple(site for site, _ in owner)


def cuts_of(owner: Owner) -> list[tuple[int, slice]]:
    """Return the sites of a table that is not spread by rows, each with its columns."""
    ends = accumulate(columns for _, columns in owner)
    return [(site, slice(end - columns, end)) for (site, columns), end in zip(owner, ends)]


@dataclass(frozen=True)
class Shard:
    """A predicate on keys, for other processes too: whether they are at one site of each of several placements."""

    sites: tuple[tuple[Placement, int], ...]

    @classmethod
    def at(cls, placement: Placement, site: int) -> "Shard":
        return cls(((placement, site),))

    @classmethod
    def of(cls, facts: Sequence[tuple[Mapping[str, Any], int]]) -> "Shard | None":
        """Build from what `facts` returns. None, which means all keys, if that is empty."""
        return cls(tuple((Placement(**placement), site) for placement, site in facts)) if facts else None

    @property
    def facts(self) -> list[tuple[dict[str, Any], int]]:
        return [(placement.facts, site) for placement, site in self.sites]

    def within(self, placement: Placement, site: int) -> "Shard":
        """Return those of its rows that are at a site of one more placement."""
        return Shard((*self.sites, (placement, site)))

    def __call__(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.logical_and.reduce([placement.site_of(keys) == site for placement, site in self.sites])


@kernel
def site_in(key, salt, lasts):
    """Return, in a kernel, the site of a key; the last two are `Placement.arrays`."""
    hashed = mix(np.uint64(key) + salt)
    site = np.uint32(0)
    while lasts[site] < hashed:  # the last range ends with the last hash
        site += np.uint32(1)
    return np.int64(site)


@kernel
def _sites(keys, salt, lasts, out):
    for i in range(len(keys)):
        out[i] = site_in(keys[i], salt, lasts)
