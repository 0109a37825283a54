"""Compares two data sets by counts and sums of row hashes: do they hold the same rows, in any order and layout?"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from skirl.data.convert import converted, keeping
from skirl.data.files.encode import Fingerprints
from skirl.data.files.encoded import Encoded
from skirl.data.files.errors import BadSchema
from skirl.data.files.workers import Range, pieces
from skirl.dedup.row_hash import row_hashes
from skirl.tools.jit import kernel
from skirl.tools.progress import Progress

if TYPE_CHECKING:
    from skirl.data.files.dataset import FilePart
    from skirl.data.files.stream import Files

BUCKETS = 1 << 16
LOOKED_AT = 8
"""Most buckets whose rows are compared if data sets differ."""
NAMED = 10
"""Most differing rows that the result names."""
_SHIFT = np.uint64(64 - 16)


@dataclass
class RowSums:
    """The number of rows of a data set, and the sum of their hashes, by bucket."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(BUCKETS, np.int64))
    high: np.ndarray = field(default_factory=lambda: np.zeros(BUCKETS, np.uint64))
    low: np.ndarray = field(default_factory=lambda: np.zeros(BUCKETS, np.uint64))

    def add(self, hashes: np.ndarray) -> None:
        """Add rows by their hashes (uint64 [n, 2])."""
        _add(hashes, self.counts, self.high, self.low)

    def other_than(self, other: "RowSums") -> np.ndarray:
        """Return the buckets that differ."""
        differ = (self.counts != other.counts) | (self.high != other.high) | (self.low != other.low)
        return np.flatnonzero(differ)


class ComparedData:
    """One of the two data sets.

    **Arguments**

    - `flag`: what messages call it.
    - `files`: its rows; ids are compared as fingerprints.
    - `session`: the column that says which rows belong together; None for the schema's.
    """

    def __init__(self, flag: str, files: "Files", session: str | None = None) -> None:
        schema = files.encoder.schema if session is None else replace(files.encoder.schema, session=session)
        self.flag = flag
        shape, _ = converted(schema, None)
        self.labels = [label.name for label in shape.labels]
        self.dense = [column.name for column in shape.dense]
        self.ids = [column.name for column in shape.ids]
        self.kinds = {c.name: (c.list, "rows" if c.encode == "row" else c.kind) for c in schema.ids}
        self.roles = {"session": schema.session, "time": schema.time}
        self.called = {"session": shape.session, "time": shape.time}
        """Names of these columns in a converted file, and so in this one if it is converted."""
        self.files = replace(files, encoder=replace(files.encoder, rows_of=Fingerprints()))

    def keep(self, roles: list[str]) -> None:
        """Also compare the columns with these roles, of "session" and "time"."""
        columns = tuple(self.roles[role] or "" for role in roles)
        self.files = keeping(self.files, columns)

    def hashed(self) -> Iterator[tuple[Encoded, "FilePart", np.ndarray]]:
        """Yield all rows in pieces, with the part they are from and their hashes."""
        files = self.files
        with closing(pieces(files.dataset, files.encoder, [Range(files.begin, files.end)], files.workers)) as source:
            for piece, part in iter(lambda: next(source), None):
                if len(piece):
                    yield piece, part, row_hashes(piece, self.labels, self.dense, self.ids)

    def place(self, part: "FilePart", row: int) -> str:
        """Return the location of a row, for people to read."""
        dataset = self.files.dataset.anew()
        try:
            return f"{dataset.read(part).where(row)} of {dataset.paths[part.file]}"
        finally:
            dataset.close()


def same(data: "Files", other: "Files", *, session: str | None = None, json: bool, quiet: bool) -> dict[str, Any]:
    """Compare two data sets, and name rows that one of them has more often than the other.

    **Arguments**

    - `data`, `other`: the two data sets.
    - `session`: the session column of `data`, if `other` was converted with one; None for the schema's.
    - `json`: show progress on stderr, since the result goes to stdout.
    - `quiet`: show no progress.
    """
    import sys

    sides = ComparedData("--data", data, session), ComparedData("--as", other)
    roles, others = _comparable(*sides)
    for side in sides:
        side.keep(roles)
    sums = RowSums(), RowSums()
    counts = [0, 0]
    with Progress("same", steps=None, to=sys.stderr if json else sys.stdout, quiet=quiet) as progress:
        number = 0
        for k, side in enumerate(sides):
            for piece, _, hashes in side.hashed():
                sums[k].add(hashes)
                counts[k] += len(piece)
                number += 1
                progress(number, lambda: {"--data": f"{counts[0]:,} rows", "--as": f"{counts[1]:,} rows"})
    buckets = sums[0].other_than(sums[1])
    rows = _differing(sides, buckets[:LOOKED_AT]) if len(buckets) else []
    return {
        "same": not len(buckets),
        "samples": counts[0],
        "samples_as": counts[1],
        "hash": f"{_total(sums[0]):032x}",
        "hash_as": f"{_total(sums[1]):032x}",
        "compared": [*sides[0].labels, *sides[0].dense, *sides[0].ids, *roles],
        "not_compared": others,
        "buckets": BUCKETS,
        "buckets_that_differ": len(buckets),
        "rows_that_differ": rows,
        "failed": _why(counts, len(buckets), rows) if len(buckets) else None,
    }


def _comparable(one: ComparedData, other: ComparedData) -> tuple[list[str], list[str]]:
    """Return the roles (session, time) that can be compared, and the columns of those that cannot. Raise if columns differ.

    A session column that `skirl convert` was given, or made from users, is not the schema's, so it cannot be compared.
    """
    for what in ("labels", "dense", "ids"):
        mine, theirs = getattr(one, what), getattr(other, what)
        if missing := [name for name in (*mine, *theirs) if (name in mine) != (name in theirs)]:
            has, lacks = (one, other) if missing[0] in mine else (other, one)
            raise BadSchema(
                f"{has.flag} has a column {missing[0]!r} and {lacks.flag} has none: give both a schema that names the same "
                "columns"
            )
    for name in one.ids:
        for part, (mine, theirs) in enumerate(zip(one.kinds[name], other.kinds[name])):
            if mine != theirs and "" not in (mine, theirs):  # a converted file may not say what it was made from
                texts = [
                    ("lists" if k else "single ids") if part == 0 else k or "unknown values" for k in (mine, theirs)
                ]
                raise BadSchema(
                    f"column {name!r} holds {texts[0]} in {one.flag} and {texts[1]} in {other.flag}: convert both alike, or "
                    "give a schema that reads them alike"
                )
    both = [role for role in ("session", "time") if one.roles[role] and other.roles[role]]
    alike = [role for role in both if one.called[role] == other.called[role]]
    texts = [f"{of.roles[role]} of {of.flag}" for role in both if role not in alike for of in (one, other)]
    return alike, texts


def _differing(sides: tuple[ComparedData, ComparedData], buckets: np.ndarray) -> list[dict[str, Any]]:
    """Return rows of these buckets that one side has more often than the other."""
    looked = np.zeros(BUCKETS, bool)
    looked[buckets] = True
    found: dict[tuple[int, int], list[int]] = {}
    where: dict[tuple[int, int], tuple[int, Any, int]] = {}
    for k, side in enumerate(sides):
        for piece, part, hashes in side.hashed():
            for row in np.flatnonzero(looked[(hashes[:, 0] >> _SHIFT).astype(np.int64)]):
                key = int(hashes[row, 0]), int(hashes[row, 1])
                found.setdefault(key, [0, 0])[k] += 1
                times = found[key]
                if key not in where or times[k] > times[1 - k]:  # name a row of the side that has more
                    where[key] = k, part, int(piece.places[row])
    rows = []
    for key, times in sorted(found.items()):
        if times[0] == times[1] or len(rows) == NAMED:
            continue
        k, part, row = where[key]
        named = {"bucket": key[0] >> 48, "row": sides[k].place(part, row), "of": sides[k].flag}
        rows.append(named | {"times": times[0], "times_as": times[1]})
    return rows


def _why(counts: list[int], buckets: int, rows: list[dict[str, Any]]) -> str:
    total = f"{counts[0]:,} rows" if counts[0] == counts[1] else f"{counts[0]:,} rows and {counts[1]:,}"
    text = f"the data sets differ ({total}; {buckets:,} of {BUCKETS:,} buckets)"
    each = [
        f"bucket {r['bucket']}, {r['row']} ({r['of']}): {_times(r['times'])} in --data, {_times(r['times_as'])} in --as"
        for r in rows[:3]
    ]
    return f"{text}: {'; '.join(each)}" if each else text


def _times(count: int) -> str:
    return {0: "not", 1: "once"}.get(count, f"{count:,} times")


def _total(sums: RowSums) -> int:
    pairs = zip(sums.high.tolist(), sums.low.tolist())
    return sum((high << 64) + low for high, low in pairs) & ((1 << 128) - 1)


@kernel
def _add(hashes, counts, high, low):
    """Add 128-bit hashes to the sums of their buckets."""
    for i in range(hashes.shape[0]):
        bucket = np.int64(hashes[i, 0] >> _SHIFT)
        counts[bucket] += 1
        before = low[bucket]
        low[bucket] = before + hashes[i, 1]
        carry = np.uint64(1) if low[bucket] < before else np.uint64(0)
        high[bucket] += hashes[i, 0] + carry
