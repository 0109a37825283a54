"""Import and compile what every part of a node needs, once, in the process from which parts are forked."""

import tempfile
from pathlib import Path

import numpy as np
import torch.distributed.rpc  # noqa: F401

from skirl.store.base import FrozenPart, Layout, SavedRows
from skirl.store.disk.store import DiskStore
from skirl.store.memory import MemoryStore
from skirl.store.remote import part  # noqa: F401

_key, _row = np.zeros(1, np.int64), np.zeros((1, 1), np.float32)
_layout = Layout.from_facts([[0, 1, "float32"]])
with tempfile.TemporaryDirectory(prefix="skirl-warm-") as _name:
    for _n, _store in enumerate(
        [
            MemoryStore(_layout),
            *(DiskStore(Path(_name, str(n)), _layout, rows=of) for n, of in ((1, None), (2, {0: 1}))),
        ]
    ):
        with _store:
            for _ in range(2):
                _store.write(_key, _row)
            _store.read(_key, _row)
            _saved = Path(_name, f"saved-{_n}")
            _saved.mkdir()
            _frozen = _store.freeze(_saved, None)
            _facts = _frozen.write()
            _frozen.release()
            _store.thaw(SavedRows(_saved, [FrozenPart(_facts)], _store.identity, _store.generation))
