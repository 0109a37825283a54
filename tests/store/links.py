"""A store whose calls take as long as over a link of some rate and delay, for tests and benchmarks."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.engine import engine
from skirl.store.base import Facts, Frozen, Rows, SavedRows, Store
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


class LinkStore(Store):
    """Any store, whose rows read and written take the time of a link. Keys and checkpoints cross it for free."""

    def __init__(self, inner: Store, link: Link) -> None:
        super().__init__(inner.layout)
        self.inner, self.link = inner, link
        self.received, self.sent = _Pipe(link), _Pipe(link)
        self.about, self.durable = inner.about, inner.durable
        self._same()

    def _same(self) -> None:
        self.identity, self.generation = self.inner.identity, self.inner.generation

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        began = time.perf_counter()
        self.inner._read(kind, keys, out, found)
        self.received.wait(int(np.count_nonzero(found)) * out.itemsize * out.shape[1], began)

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        began = time.perf_counter()
        self.inner._write(kind, keys, rows)
        self.sent.wait(rows.nbytes, began)

    def held(self) -> Iterator[NDArray[np.int64]]:
        return self.inner.held()

    def describe(self, about: Mapping[str, Any] | None = None) -> int:
        rows = self.inner.describe(about)
        self.about = self.inner.about
        self._same()
        return rows

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        frozen = self.inner.freeze(folder, since)
        self._same()
        return frozen

    def thaw(self, saved: SavedRows, ready: Callable[[], Any] = lambda: None) -> None:
        self.inner.thaw(saved, ready)
        self._same()

    def close(self, *, flush: bool = True) -> None:
        self.inner.close(flush=flush)
        super().close()


@contextmanager
def behind_a_link(text: str) -> Iterator[None]:
    """Let each engine that is made in this block reach its store over this link."""
    opened = engine.open_store

    def open_store(*given: Any, **options: Any) -> LinkStore:
        return LinkStore(opened(*given, **options), Link.parse(text))

    engine.open_store = open_store
    try:
        yield
    finally:
        engine.open_store = opened
