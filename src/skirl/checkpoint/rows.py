"""The rows of a checkpoint, those of the cache included: frozen and written by one trainer, and taken by another."""

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from skirl.checkpoint.folder import ROWS
from skirl.checkpoint.votes import Votes
from skirl.core.placement import Placement, Shard
from skirl.engine.cache import Cache
from skirl.engine.engine import Engine
from skirl.store.base import Facts, FrozenPart, Layout, Rows, SavedRows, Store
from skirl.store.disk.frozen import check_files
from skirl.store.disk.manifest import check_sizes
from skirl.tools.sealed_json import COUNT, TEXT, CheckpointError, misfit
from skirl.tools.tensor_file import Columns, TensorReader, TensorWriter

log = logging.getLogger("skirl")

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


class FrozenCollection:
    """The rows of one collection at the moment this is made. `before` is what the last checkpoint wrote of them."""

    def __init__(self, engine: Engine, path: Path, before: dict[str, Any]) -> None:
        rows = path / ROWS
        self._changes = [cache.changes for cache in engine.caches]
        same = before.get("changes") == self._changes
        self._caches = FrozenCaches(engine.caches, rows, before["cache"] if same else None)
        try:
            self._store = engine.store.freeze(rows, before.get("store"))
        except BaseException:
            self._caches.release()
            raise

    def write(self) -> dict[str, Any]:
        """Write all rows to disk. Those in the cache come first: they change most often, and are set aside when they do."""
        cache = self._caches.write()
        return {"store": self._store.write(), "cache": cache, "changes": self._changes}

    def release(self) -> None:
        """Release the rows, once they are written or given up."""
        self._caches.release()
        self._store.release()


class AllFrozen:
    """The frozen rows of all collections of a model, by their names in it."""

    def __init__(self, engines: Mapping[str, Engine], path: Path, since: dict[str, Any]) -> None:
        if not _are_there(path / ROWS, since):
            log.warning("%s has lost files that its last checkpoint wrote: all rows are written again", path)
            since = {}
        self._parts: dict[str, FrozenCollection] = {}
        try:
            for name, engine in engines.items():
                self._parts[name] = FrozenCollection(engine, path, since.get(name, {}))
        except BaseException:
            self.release()
            raise

    def write(self) -> dict[str, Any]:
        """Write all rows. Return what the header says about them, by collection."""
        return {name: part.write() for name, part in self._parts.items()}

    def release(self) -> None:
        """Release the rows, once they are written or given up."""
        for part in self._parts.values():
            part.release()


def _are_there(rows: Path, since: dict[str, Any]) -> bool:
    """Return whether the files on which the next checkpoint would build are still there."""
    try:
        for part in since.values():
            check_files(rows, part["store"])
            check_sizes(rows, {entry["file"]: entry["bytes"] for entry in part["cache"]["files"]})
    except CheckpointError:
        return False
    return True


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


def rows_for(body: Mapping[str, Any], votes: Votes) -> dict[str, OwnRows]:
    """Return the rows of a checkpoint that a trainer takes, by collection."""
    parts = body["parts"]
    saved, here, rank = Placement.even(len(parts)), Placement.even(votes.size), votes.rank
    chosen = [
        (parts[of], None if saved.meets(of, here) == [rank] else Shard.at(here, rank)) for of in here.meets(rank, saved)
    ]
    return {
        name: OwnRows([(part["rows"][name], shard) for part, shard in chosen], first["store"])
        for name, first in parts[0]["rows"].items()
    }
