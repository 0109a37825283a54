"""The rows of a memory store at one moment, in files: all of them, or those changed since the previous frozen state."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import DISK_ROWS, MEMORY_ROWS, Facts, Frozen, Layout, Record, Rows
from skirl.store.changes import Taken
from skirl.tools.sealed_json import CheckpointError
from skirl.tools.tensor_file import TensorReader, TensorWriter

PIECE = 1 << 16
"""Number of keys handled at a time, which bounds the wait for the store's lock and the room reserved too early."""


class FrozenRows(Frozen):
    """Rows to be written. `write` adds one file to those of earlier frozen states."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        facts: Facts,
        counts: list[int],
        take: Callable[[int], Taken | None],
        release: Callable[[int | None], None],
    ) -> None:
        self._folder, self._layout, self._facts, self._counts = folder, layout, facts, counts
        self._take, self._release = take, release
        self._written = False

    def write(self) -> Facts:
        columns: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        for record, n in zip(self._layout.kinds, self._counts, strict=True):
            columns[f"keys-{name_of(record)}"] = np.dtype(np.int64), (n,)
            columns[f"rows-{name_of(record)}"] = np.dtype(record.dtype), (n, record.width)
        files = self._facts["files"]
        if any(self._counts):
            path = self._folder / f"store-{secrets.token_hex(8)}.safetensors"
            with TensorWriter(path, columns, {"format": "skirl-rows"}) as writer:
                for kind, record in enumerate(self._layout.kinds):
                    while (taken := self._take(kind)) is not None:
                        writer.write(f"keys-{name_of(record)}", taken[0])
                        writer.write(f"rows-{name_of(record)}", taken[1])
            files = [*files, writer.entry]
        self._written = True
        return {"kind": MEMORY_ROWS, **self._facts, "layout": self._layout.facts(), "files": files}

    def release(self) -> None:
        self._release(self._facts["generation"] if self._written else None)


def frozen_rows(folder: Path, facts: Facts, layout: Layout) -> Iterator[tuple[NDArray[np.int64], Rows]]:
    """Yield what `FrozenRows` wrote, in the order in which to write it to a store: later rows replace earlier ones."""
    identity_of(folder, facts, layout)
    for entry in facts["files"]:
        reader = TensorReader(folder, entry)
        for record in layout.kinds:
            yield from reader.pairs(f"keys-{name_of(record)}", f"rows-{name_of(record)}", layout, PIECE)


def identity_of(folder: Path, facts: Facts, layout: Layout) -> tuple[str, int]:
    """Return the identity and generation of frozen rows. Raise a CheckpointError if they do not fit the layout."""
    if facts.get("kind") == DISK_ROWS:
        raise CheckpointError(
            f"{folder} holds the rows of a disk store, which need not fit in memory: set store='disk:FOLDER', with a new or "
            "an empty folder"
        )
    try:
        found, identity, generation = Layout.from_facts(facts["layout"]), facts["identity"], facts["generation"]
        if facts["kind"] != MEMORY_ROWS or not isinstance(identity, str) or not isinstance(generation, int):
            raise ValueError(f"{facts['kind']!r} of {identity!r}, {generation!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} does not describe rows ({error}): use another checkpoint") from None
    if found != layout:
        has, need = found.against(layout)
        raise CheckpointError(f"{folder} has records {has}, this store {need}: open it with the same tables")
    return identity, generation


def name_of(record: Record) -> str:
    """Return what follows `keys-` and `rows-` in the names of a record's columns in a file."""
    return f"{record.width}-{record.dtype}"
