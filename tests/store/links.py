"""Stores whose calls take as long as over a link of some rate and delay, for tests and benchmarks."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.engine import engine
from skirl.store.base import Rows, Store
from skirl.tools.units import Link


class _Pipe:
    """One direction of a link, with the bytes it has carried."""

    def __init__(self, link: Link) -> None:
        self.nbytes = 0
        self._link, self._free, self._lock = link, 0.0, threading.Lock()

    def wait(self, nbytes: int, began: float) -> None:
        """Sleep until `nbytes` bytes are through. They start at `began`, or once all earlier bytes are through."""
        with self._lock:
            self.nbytes += nbytes
            self._free = max(self._free, began) + nbytes / self._link.rate
            due = self._free + self._link.delay
        while (left := due - time.perf_counter()) > 0:
            time.sleep(left)


class SlowRows:
    """Has the rows that a store reads and writes take the time of a link. Keys and checkpoints cross it for free."""

    def __init__(self, store: Store, link: Link) -> None:
        self.received, self.sent = _Pipe(link), _Pipe(link)
        self._quick_read, self._quick_write = store._read, store._write
        store._read, store._write = self._read, self._write

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        began = time.perf_counter()
        self._quick_read(kind, keys, out, found)
        self.received.wait(int(np.count_nonzero(found)) * out.itemsize * out.shape[1], began)

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        began = time.perf_counter()
        self._quick_write(kind, keys, rows)
        self.sent.wait(rows.nbytes, began)


@contextmanager
def behind_a_link(text: str) -> Iterator[None]:
    """Let each engine that is made in this block reach its store over this link."""
    opened = engine.open_store

    def open_store(*given: Any, **options: Any) -> Store:
        store = opened(*given, **options)
        SlowRows(store, Link.parse(text))
        return store

    engine.open_store = open_store
    try:
        yield
    finally:
        engine.open_store = opened
