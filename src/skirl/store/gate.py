"""A lock of a store: look-ups one at a time, copies side by side, and now and then one thread alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """A thread calls `with gate.lookup(): ...`, then copies, then calls `gate.copied()` in a `finally`.

    >>> gate = Gate()
    >>> with gate.lookup():
    ...     pass  # find out where the rows are
    >>> gate.copied()
    >>> with gate.alone():
    ...     pass  # nobody copies, nobody looks up
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a look-up may find that it has to go alone
        # Entered by its lock, never by itself: in Condition.__enter__ a Ctrl-C would leave the lock taken for good.
        self._changed = threading.Condition(self._lock)
        self._copying: set[int] = set()
        self._alone: int | None = None

    @contextmanager
    def lookup(self) -> Iterator[None]:
        """Hold the lock; at the end of the block this thread counts as copying, until `copied`."""
        me = threading.get_ident()
        with self._lock:
            self._changed.wait_for(lambda: self._alone in (None, me))
            yield
            self._copying.add(me)

    def copied(self) -> None:
        """This thread copies no more, or never did."""
        with self._lock:
            self._copying.discard(threading.get_ident())
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for the copies in progress and let nobody in meanwhile. Inside a look-up it keeps the lock.

        A look-up that comes here has held the lock since it saw nobody alone, so two can never wait for each other.
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
