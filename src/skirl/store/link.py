"""A store behind an emulated link: every call takes delay + bytes / rate, and never less than the store itself needs.

Only the bytes of records count. Keys and checkpoints cross the link for free.
"""

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import Facts, Frozen, FrozenPart, Rows, Store, at_once

_RATE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kMG]?)bit(?:/s)?")
_DELAY = re.compile(r"([0-9]*\.?[0-9]+)\s*(us|ms|s)")
_BITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """Rate and delay of a link. By default it is infinitely fast, so that a test can set one of the two.

    >>> Link.parse("1Gbit,100us")
    Link(rate=125000000.0, delay=0.0001)
    >>> f"{Link.parse('10Gbit,100us').seconds(2_000_000):.4f}"
    '0.0017'
    """

    rate: float = math.inf
    """Bytes a second, in each direction; unlimited by default, to emulate the delay alone."""
    delay: float = 0.0
    """Seconds that a call takes in addition to the transfer of its bytes; 0 emulates the rate alone."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"the rate of the link is {self.rate} bytes a second: set it above 0")
        if not 0 <= self.delay < math.inf:
            raise ValueError(f"the delay of the link is {self.delay} s: set it to 0 or more seconds")

    @classmethod
    def parse(cls, text: str) -> "Link":
        """Return the link that a flag describes.

        **Arguments**

        - `text`: RATE,DELAY, such as 1Gbit,100us.
        """
        rate, _, delay = text.partition(",")
        bits, wait = _RATE.fullmatch(rate.strip()), _DELAY.fullmatch(delay.strip())
        if not bits or not wait or float(bits[1]) == 0:
            raise ValueError(f"link is {text!r}: write it RATE,DELAY, such as 1Gbit,100us")
        return cls(float(bits[1]) * _BITS[bits[2]] / 8, round(float(wait[1]) * _SECONDS[wait[2]], 12))

    def seconds(self, nbytes: int) -> float:
        """Return how many seconds one call takes when the link is idle.

        **Arguments**

        - `nbytes`: bytes of the call.
        """
        return self.delay + nbytes / self.rate


class _Pipe:
    """One direction of a link: when it is free again, and the calls and bytes it has carried."""

    def __init__(self, link: Link) -> None:
        self.calls = self.nbytes = 0
        self._link = link
        self._free = 0.0
        self._lock = threading.Lock()

    def wait(self, nbytes: int, began: float) -> None:
        """Sleep until `nbytes` bytes are through. They start at `began`, or once all earlier bytes are through."""
        with self._lock:
            self.calls += 1
            self.nbytes += nbytes
            self._free = max(self._free, began) + nbytes / self._link.rate
            due = self._free + self._link.delay
        while (left := due - time.perf_counter()) > 0:
            time.sleep(left)


class LinkStore(Store):
    """Any store behind an emulated link.

    **Arguments**

    - `inner`: the store.
    - `link`: rate and delay.

    >>> from skirl.store import MemoryStore, Record
    >>> store = LinkStore(MemoryStore({0: Record(2)}), Link.parse("1Gbit,1ms"))
    >>> _ = store.write(np.array([5]), np.array([[1, 2]], np.float32))
    >>> store.sent.nbytes, store.sent.calls, len(store)
    (8, 1, 1)
    """

    def __init__(self, inner: Store, link: Link) -> None:
        super().__init__(inner.layout)
        self.inner = inner
        self.link = link
        self.received, self.sent = _Pipe(link), _Pipe(link)
        """Traffic of each direction: rows read, and rows written."""
        self._same()
        self.about, self.frozen_kind = inner.about, inner.frozen_kind

    @property
    def ready(self) -> bool:
        """True if the inner store has the rows that it is to serve."""
        return self.inner.ready

    @property
    def read_only(self) -> bool:
        """True if rows of the inner store can be looked up but not trained."""
        return self.inner.read_only

    def __repr__(self) -> str:
        return f"LinkStore({self.inner!r}, {self.link})"

    def remember(self, about: Mapping[str, Any]) -> None:
        self.inner.remember(about)
        self.about = self.inner.about

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

    def __len__(self) -> int:
        return len(self.inner)

    def keys(self) -> Iterator[NDArray[np.int64]]:
        return self.inner.keys()

    def held(self) -> Iterator[NDArray[np.int64] | tuple[int, NDArray[np.uint64]]]:
        return self.inner.held()

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        frozen = self.inner.freeze(folder, since)
        self._same()
        return frozen

    def thaw(self, folder: Path, facts: Facts, over: Iterable[tuple[NDArray[np.int64], Rows]]) -> None:
        self.inner.thaw(folder, facts, over)
        self._same()

    def thaw_parts(
        self,
        folder: Path,
        parts: Sequence[FrozenPart],
        identity: str,
        generation: int,
        ready: Callable[[], Any] = at_once,
    ) -> None:
        self.inner.thaw_parts(folder, parts, identity, generation, ready)
        self._same()

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()
        super().close()


def split_spec(spec: str) -> tuple[Link, str]:
    """Split "link:RATE,DELAY:STORE" into the link and the inner store's spec.

    >>> split_spec("link:1Gbit,100us:disk:rows/")
    (Link(rate=125000000.0, delay=0.0001), 'disk:rows/')
    """
    link, colon, store = spec.removeprefix("link:").partition(":")
    if not colon or not store:
        raise ValueError(f"store is {spec!r}: write it link:RATE,DELAY:STORE, such as link:1Gbit,100us:memory")
    return Link.parse(link), store


def without_links(spec: str) -> str:
    """Return the spec of the store behind all links of a spec.

    >>> without_links("link:1Gbit,100us:link:8Gbit,0us:disk:/data/a:rpc:b"), without_links("memory")
    ('disk:/data/a:rpc:b', 'memory')
    """
    while spec.startswith("link:"):
        spec = split_spec(spec)[1]
    return spec
