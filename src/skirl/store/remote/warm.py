"""Import and compile what every part of a node needs, once, in the process from which parts are forked."""

import numpy as np
import torch.distributed.rpc  # noqa: F401

from skirl.store.base import Layout
from skirl.store.memory.store import MemoryStore
from skirl.store.remote import part  # noqa: F401


def warm(dtype: str = "float32") -> int:
    """Write and read a row, so that no owner waits for the compiler.

    >>> warm()
    1
    """
    store = MemoryStore(Layout.from_facts([[0, 1, dtype]]))
    rows = np.zeros((1, 1), dtype)
    store.write(np.zeros(1, np.int64), rows)
    return int(store.read(np.zeros(1, np.int64), rows).sum())


warm()
