"""Frozen rows in a folder under a header: a minimal checkpoint for tests."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skirl.store import Record, Store
from skirl.store.base import Facts, Frozen, FrozenPart, SavedRows
from skirl.store.disk.frozen import check_files, write_frozen
from skirl.store.disk.manifest import Manifest
from skirl.tools.sealed_json import put_whole, read_sealed, seal

HEADER = "frozen.json"


def body_of(facts: Facts) -> dict[str, Any]:
    return {"format": "frozen", "format_version": 1, "skirl": "test", "facts": facts}


def facts_in(folder: Path) -> Facts:
    return read_sealed(folder / HEADER, format="frozen", version=1, what="frozen state")["facts"]


def files_of(facts: Facts) -> set[str]:
    return {f"{text.split(' ')[0]}.{suffix}" for text in facts["segments"] for suffix in ("rows", "keys")}


def finish(frozen: Frozen, folder: Path) -> Facts:
    """Write a frozen state and its header. Whatever fails, the folder then holds this state or the one before."""
    try:
        try:
            facts = frozen.write()
        finally:
            frozen.release()
        put_whole(folder / HEADER, seal(body_of(facts)), secrets.token_hex(8))
    finally:
        known = {HEADER} | (files_of(facts_in(folder)) if (folder / HEADER).exists() else set())
        for path in folder.iterdir():
            if path.name not in known:
                path.unlink()
    return facts


def save(store: Store, folder: Path, since: Facts | None = None) -> Facts:
    """Save the rows of a store to a folder. since: what the last call for this store and folder returned."""
    folder.mkdir(parents=True, exist_ok=True)
    return finish(store.freeze(folder, since), folder)


Over = Sequence[tuple[np.ndarray, Any]]
"""Rows of a cache that replace those of the store."""


def load(store: Store, folder: Path, over: Over = ()) -> None:
    """Load the rows of a folder into a store, after checking them as for a checkpoint."""
    facts = facts_in(folder)
    check_files(folder, facts)
    thaw(store, folder, facts, over)


def thaw(store: Store, folder: Path, facts: Facts, over: Over = ()) -> None:
    """Have a store take all of a frozen state, with its identity and generation."""
    parts = [FrozenPart(facts)]
    if over:
        kinds = [(Record(rows.shape[1], rows.dtype.name), iter([(keys, rows)])) for keys, rows in over]
        keys = np.concatenate([keys for keys, _ in over])
        parts.append(FrozenPart(write_frozen(folder, Manifest("", 0, store.layout, []), kinds, keys)))
    store.thaw(SavedRows(folder, parts, facts.get("identity", ""), facts.get("generation", 0)))
