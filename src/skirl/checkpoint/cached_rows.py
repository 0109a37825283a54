"""The cache's part of a checkpoint: resident rows, which are newer than the store's versions of them.

A checkpoint names a chain of files: those in them whose keys are resident at the end replace the store's rows."""

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from skirl.engine.cache import Cache
from skirl.store.base import Facts, Layout, Rows
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
