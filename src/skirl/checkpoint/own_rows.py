"""The rows of a checkpoint that one trainer takes, those of the cache included."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from skirl.checkpoint import parts
from skirl.core.placement import Placement, Shard
from skirl.engine.cache import Cache
from skirl.store.base import Facts, FrozenPart, Layout, Rows, SavedRows, Store
from skirl.store.disk.frozen import check_files
from skirl.tools.sealed_json import COUNT, TEXT, CheckpointError, misfit
from skirl.tools.tensor_file import Columns, TensorReader, TensorWriter

_WORTH = 2
_PIECE = 1 << 16


class FrozenCaches:
    """The caches as they are when this is made. Release it before making the next one."""

    def __init__(self, caches: Sequence[Cache], folder: Path, since: Facts | None) -> None:
        self._caches, self._folder = list(caches), folder
        held = sum(cache.filled * (cache.records.shape[1] * cache.records.itemsize + 8) for cache in caches)
        files = list(since["files"]) if since is not None else []
        everything = not files or sum(entry["bytes"] for entry in files) > _WORTH * held
        self._files: list[Facts] = [] if everything else files
        self._kept: list[np.ndarray] = []
        self._counts: list[int] = []
        for cache in self._caches:
            self._counts.append(cache.changes.freeze(cache.flags, cache.key_of, everything=everything))
            self._kept.append(cache.key_of[(cache.key_of >= 0) & (cache.flags == 0)])

    def write(self) -> Facts:
        """Write the rows, wait until they are durable, and return the facts for `overlay`."""
        columns: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        for i, (cache, n) in enumerate(zip(self._caches, self._counts, strict=True)):
            columns[f"keys-{i}"] = np.dtype(np.int64), (n,)
            columns[f"rows-{i}"] = cache.records.dtype, (n, cache.records.shape[1])
            columns[f"kept-{i}"] = np.dtype(np.int64), (len(self._kept[i]),)
        path = self._folder / f"cache-{secrets.token_hex(8)}.safetensors"
        with TensorWriter(path, columns, {"format": "skirl-rows"}) as writer:
            for i, cache in enumerate(self._caches):
                writer.write(f"kept-{i}", self._kept[i])
                while (taken := cache.changes.take(cache.flags, cache.key_of, cache.records)) is not None:
                    writer.write(f"keys-{i}", taken[0])
                    writer.write(f"rows-{i}", taken[1])
        return {"files": [*self._files, writer.entry]}

    def release(self) -> None:
        """Stop keeping old versions of rows, once they are written or given up."""
        for cache in self._caches:
            cache.changes.forget(cache.flags)


def overlay(folder: Path, facts: Facts, layout: Layout) -> Iterator[tuple[np.ndarray, Rows]]:
    """Yield the resident rows, which replace the store's, in order: later ones replace earlier ones."""
    readers = [TensorReader(folder, entry) for entry in facts["files"]]
    if not readers:
        return
    for i in range(_banks(readers[-1].columns)):
        last = readers[-1]
        resident = np.sort(np.concatenate([last.whole(f"keys-{i}"), last.whole(f"kept-{i}")]))
        for reader in readers:
            for keys, rows in reader.pairs(f"keys-{i}", f"rows-{i}", layout, _PIECE):
                place = np.minimum(np.searchsorted(resident, keys), max(0, len(resident) - 1))
                here = resident[place] == keys if len(resident) else np.zeros(len(keys), np.bool_)
                if here.any():
                    yield keys[here], rows[here]


def _banks(columns: Columns) -> int:
    return sum(name.startswith("kept-") for name in columns)


class OwnRows(NamedTuple):
    """The rows of one collection that a trainer takes."""

    parts: list[tuple[dict[str, Any], Shard | None]]
    """For each part, the entries `store` and `cache` of the header, and the keys to take. None: all."""
    named: Facts
    """Facts of the first trainer's store, whose identity and generation the rows get on every trainer."""

    def check(self, files: Path) -> None:
        """Raise a CheckpointError if a file of these parts is not as it was written."""
        for rows, _ in self.parts:
            check_files(files, rows["store"])
            for entry in rows["cache"]["files"]:
                TensorReader(files, entry).check()

    def thaw(self, store: Store, files: Path) -> None:
        """Have a store take all of them, or nothing."""
        taken = [
            FrozenPart(rows["store"], overlay(files, rows["cache"], store.layout), shard) for rows, shard in self.parts
        ]
        if (wrong := misfit(self.named, {"identity": TEXT, "generation": COUNT})) is not None:
            raise CheckpointError(f"{files} does not describe rows ({wrong}): use another checkpoint")
        store.thaw(SavedRows(files, taken, self.named["identity"], self.named["generation"]))

    @property
    def written(self) -> dict[str, Any]:
        """The part on which the next checkpoint may build: the only one, if taken whole; else nothing."""
        [*others, (rows, shard)] = self.parts or [({}, None)]
        return rows if rows and not others and shard is None else {}


def own_rows(body: parts.Body, here: Placement, rank: int) -> dict[str, OwnRows]:
    """Return the rows that a trainer takes, by collection."""
    saved, there = parts.placement(body), parts.of(body)
    chosen = [
        (there[of], None if saved.meets(of, here) == [rank] else Shard.at(here, rank)) for of in here.meets(rank, saved)
    ]
    return {
        name: OwnRows([(part["rows"][name], shard) for part, shard in chosen], first["store"])
        for name, first in there[0]["rows"].items()
    }


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
