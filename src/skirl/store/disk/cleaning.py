"""Keep a disk store within its limit: by default at most 1.5 times the payload of its rows, garbage included. The live
rows of the segment with the most garbage are appended again, until its files can be removed. Once the store is full,
every write does part of this work."""

from collections.abc import Callable, Iterator

from skirl.store.disk.log import Log
from skirl.store.disk.segment import Segment

SLACK = 4 << 20
"""Bytes that a store of any size may use beyond its share."""
_LEAST_SHARE = 1.28  # of the bytes of rows with key and checksum: for rows so small that the share leaves no room
_PACE = 4  # records cleaned for each one written, once garbage must be removed
_WORTH = 0.92  # a segment fuller than this is not cleaned


class Cleaner:
    """Cleans the logs of a store. Only the thread that writes may call it."""

    def __init__(self, logs: list[Log], share: float, point: Callable[[], None]) -> None:
        self._logs = logs
        self._share = share
        self._point = point
        self._cleaning: tuple[Segment, Iterator[int]] | None = None

    @property
    def held(self) -> int:
        """Bytes of the files of all logs, garbage included."""
        return sum(log.bytes() for log in self._logs)

    @property
    def limit(self) -> float:
        """Most bytes on disk that the store may use for the rows it holds."""
        payload = sum(log.index.count * (log.stride - 4) for log in self._logs)
        stored = sum(log.index.count * log.footprint for log in self._logs)
        return max(self._share * payload, _LEAST_SHARE * stored) + SLACK

    def make_room(self, log: Log, n: int) -> None:
        """Clean so that `n` more rows of a log stay within the limit: a little at a time while that is enough."""
        coming = n * log.footprint
        limit = self.limit
        segment = max(log.capacity * log.footprint for log in self._logs)
        start = limit - min(3 * segment, 0.1 * limit)  # two segments may be dead, and one half cleaned
        budget = _PACE * n
        while (held := self.held + coming) > start:
            dead = sum(int(log.ends[s.slot]) * log.footprint for log in self._logs for s in log.dead())
            pressed = held > limit - segment
            if dead >= 2 * segment or (dead and pressed):
                self._point()
            elif held - dead <= start or not (budget > 0 or pressed):
                return
            elif (done := self._clean_some()) is not None:
                budget -= done
            else:
                return

    def forget(self, gone: list[Segment]) -> None:
        """Stop cleaning a segment that is about to be dropped."""
        if self._cleaning is not None and any(segment is self._cleaning[0] for segment in gone):
            self._cleaning = None

    def _clean_some(self) -> int | None:
        """Clean a piece of a segment. Return how many records it had, or None if no segment is worth cleaning."""
        if self._cleaning is None:
            victims = [
                (log.used(s), s.ordinal, s, log)
                for log in self._logs
                for s in log.segments.values()
                if s is not log.active and log.live[s.slot]
            ]
            used, _, segment, log = min(victims, default=(1.0, 0, None, None), key=lambda v: v[:2])
            if segment is None or log is None or used > _WORTH:
                return None
            self._cleaning = segment, log.rewrite(segment)
        try:
            done = next(self._cleaning[1], None)
        except BaseException:
            self._cleaning = None
            raise
        if done is None:
            self._cleaning = None
        return done or 0
