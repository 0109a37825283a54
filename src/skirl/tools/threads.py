"""Running a kernel over 0..n in several threads, with the same bits for any number of them; and a lock of a store."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _part(kernel: Callable[..., Any], args: tuple[Any, ...], lo: int, hi: int, ended: SimpleQueue[Any]) -> None:
    error: BaseException | None = None
    try:
        if lo < hi:
            kernel(*args, lo, hi)
    except BaseException as caught:
        error = caught
    finally:
        ended.put(error)


class Threads:
    """Daemon threads and the queue that they share. They are started when first needed, and again in a forked child.

    A kernel that waits for a disk uses threads of its own: on the shared ones, a training step would wait behind it.
    """

    def __init__(self) -> None:
        self._begin()
        # A child has not its parent's threads, and locks may be held for ever there.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self.queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.lock = threading.Lock()
        self.count = 0

    def ensure(self, count: int) -> None:
        with self.lock:
            while self.count < count:
                thread = threading.Thread(
                    target=_work, args=(self.queue,), name=f"skirl-kernel-{self.count}", daemon=True
                )
                thread.start()
                self.count += 1


def _work(queue: "SimpleQueue[Callable[[], None]]") -> None:
    while True:
        queue.get()()


_threads = Threads()


def run(
    kernel: Callable[..., Any],
    n: int,
    *args: Any,
    threads: int = 1,
    work: NDArray[Any] | None = None,
    pool: Threads | None = None,
) -> None:
    """Call kernel(*args, lo, hi) on ranges that cover 0..n, in up to `threads` threads, including this one.

    Return when all parts have ended. An exception of any part is raised here, with its traceback.

    - `work`: [n + 1], ascending: the cost of all items before each, such as the group starts of rows. None: all items cost
      the same.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}, set it to 1 or more")
    parts = max(1, min(threads, n))
    if parts == 1:
        if n > 0:
            kernel(*args, 0, n)
        return
    if work is None:
        borders = [n * p // parts for p in range(parts + 1)]
    else:
        first, last = int(work[0]), int(work[n])
        aims = [first + (last - first) * p // parts for p in range(1, parts)]
        borders = [0, *np.searchsorted(work[: n + 1], aims).tolist(), n]
    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    workers = pool or _threads
    workers.ensure(parts - 1)
    for p in range(1, parts):
        workers.queue.put(partial(_part, kernel, args, borders[p], borders[p + 1], ended))
    _part(kernel, args, borders[0], borders[1], ended)
    error: BaseException | None = None
    while parts:  # even after Ctrl-C: a part that runs still writes into the caller's arrays
        try:
            error = ended.get() or error
            parts -= 1
        except KeyboardInterrupt as interrupt:
            error = interrupt
    if error is not None:
        raise error


class Gate:
    """A lock for look-ups and copies: `with gate:` around a block `with gate.lookup():` and the copy that follows it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a look-up may find that it must run alone
        # Always enter `_lock`, not `_changed`: a Ctrl-C in Condition.__enter__ would leave the lock taken for good.
        self._changed = threading.Condition(self._lock)
        self._copying: set[int] = set()
        self._alone: int | None = None

    @contextmanager
    def lookup(self) -> Iterator[None]:
        """Hold the lock during the block. After it, this thread counts as copying until it leaves the gate."""
        me = threading.get_ident()
        with self._lock:
            self._changed.wait_for(lambda: self._alone in (None, me))
            yield
            self._copying.add(me)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        """Note that this thread has finished copying. Harmless if it never started."""
        with self._lock:
            self._copying.discard(threading.get_ident())
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for copies in progress, then run the block alone. Inside a look-up it keeps the lock.

        A look-up that gets here has held the lock since it saw that no thread ran alone, so two never wait for each other.
        """
        me = threading.get_ident()
        try:
            with self._lock:
                self._changed.wait_for(lambda: self._alone in (None, me))
                self._alone = me
                self._changed.wait_for(lambda: self._copying <= {me})
            yield
        finally:
            with self._lock:
                if self._alone == me:
                    self._alone = None
                self._changed.notify_all()
