"""Import and compile what every part of a node needs, once, in the process from which parts are forked."""

import tempfile
from pathlib import Path

import numpy as np
import torch.distributed.rpc  # noqa: F401

from skirl.store.base import FrozenPart, Layout, SavedRows
from skirl.store.disk.store import DiskStore
from skirl.store.memory import MemoryStore
from skirl.store.remote import part  # noqa: F401


def warm(dtype: str = "float32") -> int:
    """Write, read, freeze and thaw a row, in memory and on disk, so that no owner waits for the compiler.

    >>> warm()
    3
    """
    read, key, row = 0, np.zeros(1, np.int64), np.zeros((1, 1), dtype)
    layout = Layout.from_facts([[0, 1, dtype]])
    with tempfile.TemporaryDirectory(prefix="skirl-warm-") as folder:
        there = Path(folder)
        on_disk = [DiskStore(there / str(n), layout, rows=rows) for n, rows in enumerate((None, {0: 1}))]
        for n, store in enumerate([MemoryStore(layout), *on_disk]):
            with store:
                for _ in range(2):
                    store.write(key, row)
                store.flush()
                read += int(store.read(key, row).sum())
                saved = there / f"saved-{n}"
                saved.mkdir()
                frozen = store.freeze(saved, None)
                facts = frozen.write()
                frozen.release()
                store.thaw(SavedRows(saved, [FrozenPart(facts)], store.identity, store.generation))
    return read


warm()
