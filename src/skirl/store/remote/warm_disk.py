"""Import and compile what parts with rows on disk need in addition: the disk store's kernels."""

import tempfile
from pathlib import Path

import numpy as np

from skirl.store.base import FrozenPart, Layout
from skirl.store.disk.store import DiskStore
from skirl.store.remote import warm  # noqa: F401


def warm_disk(dtype: str = "float32") -> int:
    """Write, read, freeze and thaw a row, with and without a known number of rows of its table.

    >>> warm_disk()
    2
    """
    read, key, row = 0, np.zeros(1, np.int64), np.zeros((1, 1), dtype)
    for n, rows in enumerate((None, {0: 1})):
        with tempfile.TemporaryDirectory(prefix="skirl-warm-") as folder:
            there = Path(folder)
            with DiskStore(there / str(n), Layout.from_facts([[0, 1, dtype]]), rows=rows) as store:
                for _ in range(2):
                    store.write(key, row)
                store.flush()
                read += int(store.read(key, row).sum())
                saved = there / "saved"
                saved.mkdir()
                frozen = store.freeze(saved, None)
                facts = frozen.write()
                frozen.release()
                store.thaw_parts(saved, [FrozenPart(facts, ())], store.identity, store.generation)
    return read


warm_disk()
