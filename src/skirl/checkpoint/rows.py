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
from skirl.core.keys import table_of
from skirl.core.placement import Owner, Placement, Shard, cuts_of, sites_of
from skirl.engine.access import bank_of
from skirl.engine.engine import Engine
from skirl.nn.collection import Collection
from skirl.peers.base import Peers
from skirl.store.base import Facts, Frozen, FrozenPart, Layout, Pairs, Record, SavedRows
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
from skirl.store.disk.store import folder_beside
from skirl.tools.sealed_json import CheckpointError

log = logging.getLogger("skirl")


class FrozenCollection:
    """Rows of a collection as they are when this is made. `before` is what the last checkpoint wrote of them. Release it
    before making the next one."""

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
    moved: "Moved | None" = None

    def check(self, files: Path) -> None:
        """Raise a CheckpointError if a file of these parts is missing, or a cached row is not as it was written."""
        for rows in self._read:
            check_files(files, rows["store"])
            check_rows(files, rows["cache"])

    @property
    def _read(self) -> list[dict[str, Any]]:
        return [rows for rows, _ in (self.moved.sources if self.moved else self.parts)]

    @property
    def taken(self) -> list[FrozenPart]:
        return [FrozenPart(rows[of], shard) for rows, shard in self.parts for of in ("store", "cache")]

    def each(self, layout: Layout, files: Path) -> Pairs:
        """Yield keys and records of a layout. Later records of a key replace earlier ones."""
        for part in self.taken:
            yield from rows_of(part, files, layout)

    def thaw(self, engine: Engine, files: Path) -> None:
        store, parts, there = engine.store, self.taken, files
        with ExitStack() as read:
            if self.moved or not parts:  # in a folder of their own, from which a save of the run itself removes nothing
                there = folder_beside(files.parent)
                read.callback(shutil.rmtree, there, ignore_errors=True)
                there.chmod(0o755)  # for memory nodes of other users
                read.enter_context(named(files, there))
                for facts in (rows[of] for rows in self._read for of in ("store", "cache")):
                    manifest = manifest_of(files, facts)
                    take_over(OsFiles(), [*manifest.segments, *(manifest.resident or [])], files, there, [])
                manifest = Manifest(store.identity, store.generation, store.layout, [])
                kinds = self.moved.kinds(engine, there) if self.moved else []
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
    """Tables that trainers have cut by columns, in the checkpoint or here, in another way there than here."""

    tables: Mapping[int, Shard | None]
    """Those to take, and which of their keys. None: all."""
    sources: list[tuple[dict[str, Any], dict[int, slice | None]]]
    """Entries `store` and `cache` of the header, with the tables that are there and which of their columns. None: all."""

    def kinds(self, engine: Engine, files: Path) -> list[tuple[Record, Pairs]]:
        """Return what records are here, each with keys and records of its tables."""
        widths: dict[int, list[int]] = {}
        for table in self.tables:
            widths.setdefault(engine.packs[0].held[bank_of(engine, table)], []).append(table)
        return [(Record(n, engine.dtype.name), self._joined(engine, files, n, of)) for n, of in widths.items()]

    def _joined(self, engine: Engine, files: Path, width: int, tables: Sequence[int]) -> Pairs:
        pack, numbers = engine.packs[0], dict[tuple[int, int], Any]()
        entries = [(rows[of], at) for rows, at in self.sources if at.keys() & set(tables) for of in ("store", "cache")]
        for number, (_, there) in enumerate(entries):
            for table in there.keys() & set(tables):
                rule, dim = pack.optimizers[table], pack.tables[table].dim
                here = rule.numbers_of(dim, pack.columns[bank_of(engine, table)].of_table)
                found = rule.numbers_of(dim, there[table] or slice(0, dim))
                numbers[number, table] = np.intersect1d(here, found, return_indices=True)[1:]
        keys = np.unique(np.concatenate([NONE, *(part for facts, _ in entries for part in keys_of(files, facts))]))
        own = [keys[table_of(keys) == table] for table in sorted(tables)]
        shards = [self.tables[table] for table in sorted(tables)]
        keys = np.concatenate([part if shard is None else part[shard(part)] for part, shard in zip(own, shards)])
        at_once = max(1, MOST // (width * engine.dtype.itemsize))
        for piece in np.array_split(keys, -(-len(keys) // at_once)) if len(keys) else ():  # all is read again for each
            records = np.zeros((len(piece), width), engine.dtype)
            for number, (facts, _) in enumerate(entries):
                for found, rows in rows_of(FrozenPart(facts), files):
                    place = np.minimum(np.searchsorted(piece, found), len(piece) - 1)
                    hit = np.flatnonzero(piece[place] == found)
                    for table in np.unique(table_of(found[hit])).tolist():
                        of, (mine, theirs) = hit[table_of(found[hit]) == table], numbers[number, table]
                        records[place[of][:, None], mine] = rows[of][:, theirs]
            yield piece, records


NONE = np.empty(0, np.int64)
MOST = 1 << 30
"""Most bytes of records that are put together at once."""


def rows_for(body: Mapping[str, Any], peers: Peers, engines: Mapping[str, Engine]) -> dict[str, OwnRows]:
    """Return the rows of a checkpoint that a trainer takes into its engines, by collection; without one, all of them."""
    parts, rank, found = body["parts"], peers.rank, {}
    for name, first in parts[0]["rows"].items():
        whole = engines[name].rows.whole if name in engines else {}
        saved = Placement.even(len(parts), whole=parts[0]["whole"][name])
        here = Placement.even(peers.size, whole=whole.items())
        cut = set() if saved == here else {t for p in (saved, here) for t, owner in p.whole if len(owner) > 1}
        own = replace(here, whole=(*(pair for pair in here.whole if pair[0] not in cut), *((t, ()) for t in cut)))
        chosen = [
            (
                _without(parts[of]["rows"][name], cut),
                None if not cut and saved.meets(of, here) == [rank] else Shard.at(own, rank),
            )
            for of in here.meets(rank, saved)
            if len(cut) < len(body["definition"][name]["tables"])
        ]
        owners, before = dict(here.whole), dict(saved.whole)
        sources = [
            (part["rows"][name], {table: at for table in cut for at in _at(before.get(table), site)})
            for site, part in enumerate(parts)
        ]
        tables = {
            table: None if table in owners else Shard.at(here, rank)
            for table in cut
            if table not in owners or rank in sites_of(owners[table])
        }
        moved = Moved(tables, sources) if tables else None
        found[name] = OwnRows(chosen, first["store"], moved)
    return found


def _at(owner: Owner | None, site: int) -> list[slice | None]:
    """Return the columns of a table that are at a site, None for all, if any are."""
    return [None] if owner is None else [columns for of, columns in cuts_of(owner) if of == site]


def _without(rows: dict[str, Any], cut: set[int]) -> dict[str, Any]:
    return rows | {of: rows[of] | {"without": sorted(cut)} for of in ("store", "cache")} if cut else rows
