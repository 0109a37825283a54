"""Numbers of puts: a part takes each once, and none older than those that its owner knows to be done."""

import threading


class NumberedCalls:
    """The owner's side: it tracks which puts have begun and which are acknowledged.

    >>> puts = NumberedCalls()
    >>> a, b = puts.begin(), puts.begin()
    >>> puts.done(b[0])
    >>> a, b, puts.begin()
    ((1, 1), (2, 1), (3, 1))
    >>> puts.done(1), puts.begin()
    (None, (4, 3))
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: set[int] = set()

    def begin(self) -> tuple[int, int]:
        """Return a new number, and the smallest one that is not acknowledged."""
        with self._lock:
            self._last += 1
            self._open.add(self._last)
            return self._last, min(self._open)

    def done(self, number: int) -> None:
        """Note that a put is acknowledged."""
        with self._lock:
            self._open.discard(number)


class Taken:
    """The part's side: it takes each put once. Those in flight may come in any order.

    >>> taken = Taken(run=7)
    >>> taken.take(7, 2, 1), taken.take(7, 1, 1), taken.take(7, 3, 3)
    (None, None, None)
    >>> taken.take(7, 2, 1)
    Traceback (most recent call last):
    ValueError: put 2 of run 7 comes late: it was taken before, and newer rows may stand in its place
    >>> taken.take(6, 9, 9)
    Traceback (most recent call last):
    ValueError: put 9 is of run 6, and this part belongs to run 7: end the older one
    """

    def __init__(self, run: int) -> None:
        self._lock = threading.Lock()
        self._run = run
        self._settled = 1
        self._begun: set[int] = set()

    def take(self, run: int, number: int, settled: int) -> None:
        """Accept a put, or raise a ValueError if it must not change anything."""
        with self._lock:
            if run != self._run:
                raise ValueError(
                    f"put {number} is of run {run}, and this part belongs to run {self._run}: end the older one"
                )
            if number < self._settled or number in self._begun:
                raise ValueError(
                    f"put {number} of run {run} comes late: it was taken before, and newer rows may stand in its place"
                )
            if settled > self._settled:
                self._settled = settled
                self._begun = {begun for begun in self._begun if begun >= settled}
            self._begun.add(number)
