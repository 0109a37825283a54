"""The rows of a checkpoint, those of the cache included: frozen and written by one trainer, and taken by another."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from skirl.checkpoint.folder import ROWS
from skirl.checkpoint.votes import Votes
from skirl.core.keys import table_of
from skirl.core.placement import Placement, Shard, cuts_of, sites_of
from skirl.engine.access import bank_of
from skirl.engine.engine import Engine
from skirl.nn.collection import Collection
from skirl.store.base import Facts, Frozen, FrozenPart, Layout, Pairs, Record, SavedRows
from skirl.store.checkpoint_rows import folder_beside
from skirl.store.disk.frozen import (
    check_files,
    check_rows,
    keys_of,
    manifest_of,
    named,
    rows_of,
    worth_keeping,
    write_frozen,
)
from skirl.store.disk.manifest import Manifest, take_over
from skirl.store.disk.os_files import OsFiles
from skirl.tools.sealed_json import COUNT, TEXT, CheckpointError, misfit

log = logging.getLogger("skirl")


class FrozenCollection:
    """Rows of a collection as they are when this is made. `before` is what the last checkpoint wrote of them.

    Release it before making the next one.
    """

    def __init__(self, engine: Engine, path: Path, before: dict[str, Any]) -> None:
        self._folder, self._caches = path / ROWS, list(engine.caches)
        self._changes = [cache.changes for cache in self._caches]
        self._records = [Record(cache.records.shape[1], cache.records.dtype.name) for cache in self._caches]
        same = before.get("changes") == self._changes
        written = manifest_of(self._folder, before["cache"]).segments if same else []
        counts = [cache.filled for cache in self._caches]
        written = worth_keeping(written, zip(self._records, counts, strict=True))
        self._manifest = Manifest(engine.store.identity, engine.store.generation, engine.store.layout, written)
        self._resident = np.concatenate([np.empty(0, np.int64), *(c.key_of[c.key_of >= 0] for c in self._caches)])
        for cache in self._caches:
            cache.changes.freeze(cache.flags, cache.key_of, everything=not written)
        try:
            self._store = engine.store.freeze(self._folder, before.get("store"))
        except BaseException:
            self._forget()
            raise

    def write(self) -> dict[str, Any]:
        """Write all rows to disk. Those in the cache come first: they change most often, and are set aside when they do."""
        taken = [
            (record, iter(partial(cache.changes.take, cache.flags, cache.key_of, cache.records), None))
            for record, cache in zip(self._records, self._caches, strict=True)
        ]
        cached = write_frozen(self._folder, self._manifest, taken, self._resident)
        return {"store": self._store.write(), "cache": cached, "changes": self._changes}

    def release(self) -> None:
        self._forget()
        self._store.release()

    def _forget(self) -> None:
        for cache in self._caches:
            cache.changes.forget(cache.flags)


def freeze_all(collections: Mapping[str, Collection], path: Path, since: dict[str, Any]) -> Frozen:
    try:
        for before in since.values():
            check_files(path / ROWS, before["store"])
            check_files(path / ROWS, before["cache"])
    except CheckpointError:
        log.warning("%s has lost files that its last checkpoint wrote: all rows are written again", path)
        since = {}
    parts: dict[str, Any] = {}
    with ExitStack() as frozen:
        for name, collection in collections.items():
            part = FrozenCollection if collection.frozen_rows is None else collection.frozen_rows
            parts[name] = part(collection.engine, path, since.get(name, {}))
            frozen.callback(parts[name].release)
        return Frozen(lambda: {name: part.write() for name, part in parts.items()}, frozen.pop_all().close)


class OwnRows(NamedTuple):
    parts: list[tuple[dict[str, Any], Shard | None]]
    """For each part, the entries `store` and `cache` of the header, and the keys to take. None: all."""
    named: Facts
    """Facts of the first trainer's store, whose identity and generation the rows get on every trainer."""
    moved: Sequence["Moved"] = ()

    def check(self, files: Path) -> None:
        """Raise a CheckpointError if a file of these parts is missing, or a cached row is not as it was written."""
        for rows, _ in (*self.parts, *(source for moved in self.moved for source in moved.sources)):
            check_files(files, rows["store"])
            check_rows(files, rows["cache"])

    @property
    def taken(self) -> list[FrozenPart]:
        return [FrozenPart(rows[of], shard) for rows, shard in self.parts for of in ("store", "cache")]

    def each(self, layout: Layout, files: Path) -> Pairs:
        """Yield keys and records of a layout. Later records of a key replace earlier ones."""
        for part in self.taken:
            yield from rows_of(OsFiles(), part, layout, files)

    def thaw(self, engine: Engine, files: Path) -> None:
        if (wrong := misfit(self.named, {"identity": TEXT, "generation": COUNT})) is not None:
            raise CheckpointError(f"{files} does not describe rows ({wrong}): use another checkpoint")
        store, parts, there = engine.store, self.taken, files
        with ExitStack() as read:
            if self.moved or not parts:  # in a folder of their own, from which a save of the run itself removes nothing
                there = folder_beside(files.parent)
                read.callback(shutil.rmtree, there, ignore_errors=True)
                there.chmod(0o755)  # for memory nodes of other users
                read.enter_context(named(files, there))
                for part in parts:
                    manifest = manifest_of(files, part.facts)
                    take_over(OsFiles(), [*manifest.segments, *(manifest.resident or [])], files, there, [])
                kinds = [moved.of(engine, files) for moved in self.moved]
                manifest = Manifest(store.identity, store.generation, store.layout, [])
                parts.append(FrozenPart(write_frozen(there, manifest, kinds)))
            try:
                store.thaw(SavedRows(there, parts, self.named["identity"], self.named["generation"]))
            except CheckpointError as error:
                if there == files:
                    raise
                raise CheckpointError(str(error).replace(str(there), str(files))) from error

    @property
    def written(self) -> dict[str, Any]:
        """The part on which the next checkpoint may build: the only one, if taken whole; else nothing."""
        [*others, (rows, shard)] = self.parts or [({}, None)]
        columns = rows and "columns" in rows["store"]
        return rows if rows and not others and shard is None and not columns else {}


class Moved(NamedTuple):
    """A table that trainers have cut by columns, in the checkpoint or here, in another way there than here."""

    table: int
    sources: Sequence[tuple[dict[str, Any], slice | None]]
    """Entries `store` and `cache` of the header, with the columns of the table that are there. None: all."""
    shard: Shard | None
    """The keys to take. None: all."""

    def of(self, engine: Engine, files: Path) -> tuple[Record, Pairs]:
        """Return what a record is here, and keys and records."""
        bank, pack = bank_of(engine, self.table), engine.packs[0]
        return Record(pack.held[bank], engine.dtype.name), self._joined(engine, files, pack.columns[bank].of_table)

    def _joined(self, engine: Engine, files: Path, columns: slice) -> Pairs:
        rule, dim = engine.packs[0].optimizers[self.table], engine.packs[0].tables[self.table].dim
        here = rule.numbers_of(dim, columns)
        entries = [(rows[of], at) for rows, at in self.sources for of in ("store", "cache")]
        keys = np.unique(np.concatenate([key for facts, _ in entries for key in keys_of(files, facts)] or [NONE]))
        keys = keys[table_of(keys) == self.table]
        keys = keys if self.shard is None else keys[self.shard(keys)]
        for piece in np.array_split(keys, -(-len(keys) // PIECE) or 1):  # the files are read again for each
            records = np.zeros((len(piece), len(here)), engine.dtype)
            for facts, at in entries if len(piece) else ():
                _, mine, theirs = np.intersect1d(here, rule.numbers_of(dim, at or slice(0, dim)), return_indices=True)
                for found, rows in rows_of(OsFiles(), FrozenPart(facts), manifest_of(files, facts).layout, files):
                    place = np.minimum(np.searchsorted(piece, found), len(piece) - 1)
                    hit = np.flatnonzero(piece[place] == found)
                    if hit.size:
                        records[place[hit][:, None], mine] = rows[hit][:, theirs]
            yield piece, records


NONE = np.empty(0, np.int64)
PIECE = 1 << 20
"""Most rows of a moved table that are put together at once."""


def rows_for(body: Mapping[str, Any], votes: Votes, engines: Mapping[str, Engine] | None = None) -> dict[str, OwnRows]:
    """Return the rows of a checkpoint that a trainer takes, by collection. `engines`: those that take them, if any is
    here."""
    parts, rank, found = body["parts"], votes.rank, {}
    for name, first in parts[0]["rows"].items():
        whole = {} if engines is None or name not in engines else engines[name].rows.whole
        saved = Placement.even(len(parts), whole=parts[0]["whole"][name])
        here = Placement.even(votes.size, whole=whole.items())
        cut = (
            set() if saved == here else {t for p in (saved, here) for t, owner in p.whole if not isinstance(owner, int)}
        )
        own = replace(here, whole=(*(pair for pair in here.whole if pair[0] not in cut), *((t, -1) for t in cut)))
        chosen = [
            (
                _without(parts[of]["rows"][name], cut),
                None if not cut and saved.meets(of, here) == [rank] else Shard.at(own, rank),
            )
            for of in here.meets(rank, saved)
            if len(cut) < len(body["definition"][name]["tables"])
        ]
        moved = []
        for table in cut:
            owner, there = dict(here.whole).get(table), dict(saved.whole).get(table)
            sources = (
                [(part["rows"][name], None) for part in parts]
                if there is None or isinstance(there, int)
                else [(parts[site]["rows"][name], at) for site, at in cuts_of(there, 0)]
            )
            if owner is None or rank in sites_of(owner):
                moved.append(Moved(table, sources, Shard.at(here, rank) if owner is None else None))
        found[name] = OwnRows(chosen, first["store"], moved)
    return found


def _without(rows: dict[str, Any], cut: set[int]) -> dict[str, Any]:
    return rows | {of: rows[of] | {"without": sorted(cut)} for of in ("store", "cache")} if cut else rows
