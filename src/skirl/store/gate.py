"""A store's lock: look-ups run one at a time, copies run in parallel, and now and then one thread runs alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
