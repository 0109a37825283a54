"""Which rows of a checkpoint a trainer takes: all or some of each part that may have rows of its own."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from skirl.checkpoint import parts, whole
from skirl.checkpoint.cached_rows import overlay
from skirl.core.placement import AtSite, Placement
from skirl.store.base import DISK_ROWS, Facts, FrozenPart, Mine, Store
from skirl.tools.sealed_json import COUNT, TEXT, CheckpointError, misfit


class OwnRows(NamedTuple):
    """The rows of one collection that a trainer takes."""

    parts: list[tuple[dict[str, Any], Mine | None]]
    """For each part, the entries `store` and `cache` of the header, and a choice of the keys to take. None: all."""
    named: Facts
    """Facts of the first trainer's store, whose identity and generation the rows get on every trainer."""

    def check(self, files: Path) -> None:
        """Raise a CheckpointError if a file of these parts is not as it was written."""
        for rows, _ in self.parts:
            whole.check(files, rows["store"])
            whole.check(files, rows["cache"])

    def thaw(self, store: Store, files: Path) -> None:
        """Have a store take all of them, or nothing."""
        taken = [
            FrozenPart(rows["store"], overlay(files, rows["cache"], store.layout), mine) for rows, mine in self.parts
        ]
        if len(taken) == 1 and taken[0].mine is None and taken[0].facts is self.named:  # any kind of store can do that
            store.thaw(files, taken[0].facts, taken[0].over)
            return
        if (wrong := misfit(self.named, {"identity": TEXT, "generation": COUNT})) is not None:
            raise CheckpointError(f"{files} does not describe rows ({wrong}): use another checkpoint")
        store.thaw_parts(files, taken, self.named["identity"], self.named["generation"])

    @property
    def written(self) -> dict[str, Any]:
        """The part on which the next checkpoint may build: the only one, if taken whole and not from disk; else nothing."""
        [*others, (rows, mine)] = self.parts or [({}, None)]
        return rows if rows and not others and mine is None and rows["store"]["kind"] != DISK_ROWS else {}


def own_rows(body: parts.Body, here: Placement, rank: int) -> dict[str, OwnRows]:
    """Return the rows that a trainer takes, by collection."""
    saved, there = parts.placement(body), parts.of(body)
    chosen = [
        (there[of], None if saved.meets(of, here) == [rank] else mine_of(here, rank)) for of in here.meets(rank, saved)
    ]
    return {
        name: OwnRows([(part["rows"][name], mine) for part, mine in chosen], first["store"])
        for name, first in there[0]["rows"].items()
    }


def mine_of(here: Placement, rank: int) -> Mine:
    """Return the function that tells a trainer's own keys."""
    return AtSite(here, rank)


def counters_of(body: parts.Body, name: str, first: dict[str, int], rank: int, size: int) -> dict[str, int]:
    """Return the counters with which a trainer continues. Each part's go to exactly one trainer: the sum stays."""
    each = [part["counters"][name] for part in body["parts"]] if "trainers" in body else [first]
    return dict.fromkeys(first, 0) | _sums(each[rank::size]) | {"steps": first["steps"]}


def split_of(body: parts.Body, name: str, first: Any, here: Placement, rank: int) -> Any:
    """Return how the cache was split if rows are placed as in the run that saved. Else None: it is split anew."""
    if parts.placement(body).digest != here.digest:
        return None
    return body["parts"][rank]["split"][name] if "trainers" in body else first


def _sums(counters: Iterable[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in counters:
        found = {name: found.get(name, 0) + n for name, n in one.items()}
    return found
