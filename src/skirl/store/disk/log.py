"""The log of a store on disk: segments that are appended to, cleaned and reopened."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from skirl.store.base import Layout, Record, Rows
from skirl.store.disk import records
from skirl.store.disk.key_index import MOST_PLACED, KeyIndex, named
from skirl.store.disk.manifest import Manifest, Segment, SegmentEntry, begin, check_header, stride, undo
from skirl.store.disk.os_files import Handle, OsFiles, Unusable
from skirl.store.disk.records import HEADER, INDEX_BITS, Keys, Words
from skirl.tools.threads import Gate, Threads, run

SLOTS = (1 << (32 - INDEX_BITS)) - 1  # positions are held plus 1, in 32 bits
SMALLEST = 4096
_SHARE = 32  # a segment holds one part in this many of the rows, and that is how much is freed at a time
_PIECE = 4096  # records read at a time when all are read
_BUFFER = 256 << 10  # bytes of records that are written in one call
_MANY = 8  # number of small segments that are worth merging into one
_readers = Threads()


class Log:
    """The log of one kind of records. `rows_at` may run while `append` does; all else needs the store's lock."""

    def __init__(
        self,
        folder: Path,
        record: Record,
        files: OsFiles,
        gate: Gate,
        layout: Layout,
        rows: Mapping[int, int] | None = None,
    ) -> None:
        self.folder, self.record = folder, record
        self._files, self._gate = files, gate
        self.index = KeyIndex(layout.rows_of(record, rows))
        self.stride = stride(record)
        self._words = self.stride // 4 - 1
        self.segments: dict[int, Segment] = {}  # by slot, in order of the log
        self.active: Segment | None = None
        self.ends = np.zeros(SLOTS, np.int64)
        self.live = np.zeros(SLOTS, np.int64)
        self._sums = np.zeros(SLOTS, np.uint64)
        self._ids = np.zeros(SLOTS, np.uint64)
        self._handles = np.full(SLOTS, -1, np.int32)
        self._buffer = np.empty(max(_BUFFER, self.stride) // 4, np.uint32)
        self._capacity = 0
        self._begun = 0

    # Contents

    @property
    def footprint(self) -> int:
        return self.stride + 8

    @property
    def capacity(self) -> int:
        """Number of records that a segment begun now would hold."""
        return min(1 << INDEX_BITS, max(SMALLEST, self.index.count // _SHARE))

    def bytes(self) -> int:
        behind = sum(2 * HEADER + segment.behind for segment in self.segments.values())
        return behind + int(self.ends.sum()) * self.footprint

    def dead(self) -> list[Segment]:
        return [s for s in self.segments.values() if not self.live[s.slot] and s is not self.active]

    def entries(self) -> list[SegmentEntry]:
        """Return what a manifest says about this log: its present content, without dead segments."""
        out: list[SegmentEntry] = []
        for segment in self.segments.values():
            if self.live[segment.slot]:
                count, state = int(self.ends[segment.slot]), int(self._sums[segment.slot])
                out.append(SegmentEntry(segment.name, self.record, count, state))
        return out

    # Reading

    def rows_at(self, positions: np.ndarray, keys: Keys, out: Rows | Words) -> None:
        """Copy the rows at `positions` to `out`, skipping positions of -1. Raise an Unusable if one cannot be read."""
        order = np.flatnonzero(positions >= 0)
        order = order[np.argsort(positions[order])]
        trouble, flat = np.zeros(1, np.int64), out.reshape(-1).view(np.uint32)
        arrays = self._handles, self._ids, self._words, order, positions, keys, flat, trouble
        threads = max(1, min(records.READERS, order.size // records.FEW))
        run(records.gather, order.size, *arrays, threads=threads, pool=_readers)
        if not trouble[0]:
            return
        row = int(trouble[0]) - 1
        segment, index = self.segments[positions[row] >> INDEX_BITS], int(positions[row]) & records.INDEX_MASK
        what = f"{segment.rows_path}: record {index}, {named(keys[row])},"
        at = HEADER + index * self.stride
        try:
            size = len(self._files.read(segment.rows.number, self.stride, at))
        except OSError as error:
            raise Unusable(f"{what} cannot be read ({error})") from error
        if size < self.stride:
            raise Unusable(f"{what} is missing: the file was cut short at {at + size:,} bytes")
        raise Unusable(f"{what} is damaged: bytes {at:,} to {at + self.stride:,} are not those that were written")

    def keys_from(self, segment: Segment, start: int) -> tuple[Keys, int]:
        stop = min(start + MOST_PLACED, int(self.ends[segment.slot]))
        keys = self._keys(segment, start, stop)
        keys = keys[self.index.standing(keys, segment.slot << INDEX_BITS | start)]
        return keys, stop if stop < self.ends[segment.slot] else 0

    def _keys(self, segment: Segment, start: int, stop: int) -> Keys:
        with self._files.opened(segment.keys_path) as file:
            data = self._files.read(file.number, 8 * (stop - start), HEADER + 8 * start)
        if len(data) < 8 * (stop - start):
            raise Unusable(f"{segment.keys_path} was cut short at {HEADER + 8 * start + len(data):,} bytes")
        return np.frombuffer(data, np.int64)

    def _all_keys(self, segment: Segment, count: int, keys_hash: int) -> Keys:
        """Read the keys of a segment that this process may not have written. Raise an Unusable that names any damage."""
        with self._files.opened(segment.keys_path) as file:
            check_header(self._files, file.number, segment.keys_path, self.record, int(segment.name, 16))
        keys = self._keys(segment, 0, count)
        if int(records.hash_keys(keys, np.uint64(0))) != keys_hash:
            raise Unusable(f"{segment.keys_path} is damaged: its keys are not those that were written")
        return keys

    def _rows(self, segment: Segment, indices: np.ndarray, keys: Keys) -> Words:
        rows = np.empty(keys.size * self._words, np.uint32)
        self.rows_at(segment.slot << INDEX_BITS | indices, keys, rows)
        return rows

    def records_of(self, segment: Segment) -> Iterator[tuple[Keys, Words]]:
        """Yield keys and flat rows of all records, garbage included, in order. Raise an Unusable that names any damage."""
        check_header(self._files, segment.rows.number, segment.rows_path, self.record, int(segment.name, 16))
        keys = self._all_keys(segment, int(self.ends[segment.slot]), int(self._sums[segment.slot]))
        for start in range(0, keys.size, _PIECE):
            some = keys[start : start + _PIECE]
            yield some, self._rows(segment, start + np.arange(some.size), some)

    # Writing

    def append(self, keys: Keys, rows: Words) -> None:
        if (beyond := self.index.beyond(keys)) is not None:
            raise ValueError(f"{beyond}: open the store with as many rows as there are")
        done = 0
        while done < keys.size:
            segment = self.active or self._begin()
            end = int(self.ends[segment.slot])
            some = keys[done : done + min(MOST_PLACED, self._capacity - end)]
            self._write_records(segment, some, rows[done * self._words : (done + some.size) * self._words], end)
            self._files.write(segment.keys.number, np.ascontiguousarray(some).data, HEADER + end * 8)
            with self._gate, self._gate.lookup():
                self.index.reserve(some.size)
                first = segment.slot << INDEX_BITS | end
                self.index.place(some, first, self.ends, self.live, self._sums)
            done += some.size
            if self.ends[segment.slot] >= self._capacity:
                self.seal()

    def _write_records(self, segment: Segment, keys: Keys, rows: Words, end: int) -> None:
        """Write records piece by piece through one buffer, which stays in the processor's cache."""
        each = max(1, self._buffer.size // (self._words + 1))
        for start in range(0, keys.size, each):
            some = keys[start : start + each]
            out = self._buffer[: some.size * (self._words + 1)]
            part = rows[start * self._words : (start + some.size) * self._words]
            records.encode(part, self._words, some, self._ids[segment.slot], end + start, out)
            self._files.write(segment.rows.number, out.data, HEADER + (end + start) * self.stride)

    def seal(self) -> None:
        self.active = None

    def _begin(self) -> Segment:
        """Begin a new segment to append to, and merge small ones into it."""
        slot = next((slot for slot in range(SLOTS) if slot not in self.segments), None)
        if slot is None:
            raise ValueError(
                f"{self.folder} has {SLOTS} segments, the maximum for records of one size: give some of the tables another "
                "dim"
            )
        added: list[Path] = []
        try:
            name, rows, keys = begin(self._files, self.folder, self.record, added)
        except BaseException:
            undo(self._files, added)
            raise
        self._capacity = self.capacity
        segment = Segment(name, slot, rows, keys, added[0], added[1])
        self._register(segment)
        self.active = segment
        small = [s for s in self.segments.values() if self.ends[s.slot] < self._capacity // 8 and s is not segment]
        rows_held = sum(int(self.live[s.slot]) for s in small)
        if rows_held <= SMALLEST // 2 or len(small) >= _MANY:
            for old in small:
                deque(self.rewrite(old), maxlen=0)
        return self.active or segment

    def _register(self, segment: Segment) -> None:
        slot = segment.slot
        self._ids[slot], self._handles[slot] = int(segment.name, 16), segment.rows.number
        self.ends[slot] = self.live[slot] = self._sums[slot] = 0
        self._begun += 1
        segment.ordinal = self._begun
        self.segments[slot] = segment

    def rewrite(self, segment: Segment) -> Iterator[int]:
        """Append a segment's live rows again, some at a time. Yield how many records each piece covered."""
        every = self._keys(segment, 0, int(self.ends[segment.slot]))
        for start in range(0, every.size, _PIECE):
            keys = every[start : start + _PIECE]
            picks = self.index.standing(keys, segment.slot << INDEX_BITS | start)
            if picks.size:
                self.append(keys[picks], self._rows(segment, start + picks, keys[picks]))
            yield keys.size

    def sync(self) -> None:
        """Wait until all records are durable. For the names of their files, the folder must be synced."""
        for segment in [s for s in self.segments.values() if s.suspect]:
            deque(self.rewrite(segment), maxlen=0)
        for segment in self.segments.values():
            end = int(self.ends[segment.slot])
            if segment.synced < end and self.live[segment.slot]:
                try:
                    # A new descriptor is not told of a lost write that another was told of.
                    if segment.keys.number >= 0:
                        self._files.sync(segment.keys.number)
                    else:
                        with self._files.opened(segment.keys_path) as file:
                            self._files.sync(file.number)
                    self._files.sync(segment.rows.number)
                except BaseException:
                    # After a failed fsync, the system may drop the bytes and report success the next time.
                    segment.suspect = True
                    if segment is self.active:
                        self.seal()
                    raise
                segment.synced = end
            if segment is not self.active:
                segment.keys.close()

    def drop(self, segments: list[Segment]) -> None:
        for segment in segments:
            del self.segments[segment.slot]
            self.ends[segment.slot] = 0
            self._release(segment)

    def _release(self, segment: Segment) -> None:
        self._handles[segment.slot] = -1
        segment.rows.close()
        segment.keys.close()

    def close(self) -> None:
        for segment in self.segments.values():
            self._release(segment)
        self.segments, self.active = {}, None

    # Opening

    def _registered(self, entry: SegmentEntry) -> Segment:
        """Open a segment that an earlier process wrote, without its keys."""
        sizes, behind = {self.folder / name: size for name, size in entry.files().items()}, 0
        for path, size in sizes.items():
            if (found := _size(path)) < size:
                raise Unusable(f"{path} has {found:,} bytes, {size:,} were written")
            behind += found - size
        slot = next(slot for slot in range(SLOTS) if slot not in self.segments)
        rows_path, keys_path = sizes
        rows, keys = self._files.opened(rows_path), Handle(self._files)
        segment = Segment(entry.name, slot, rows, keys, rows_path, keys_path, synced=-1, behind=behind)
        self._register(segment)
        check_header(self._files, segment.rows.number, segment.rows_path, self.record, entry.id)
        return segment

    def scan(self, entry: SegmentEntry) -> Iterator[tuple[Keys, Words]]:
        """Do as `records_of`, for a segment of an earlier process, and without an index."""
        segment = self._registered(entry)
        self.ends[segment.slot], self._sums[segment.slot] = entry.count, entry.keys_hash
        yield from self.records_of(segment)

    def load(self, entry: SegmentEntry) -> None:
        """Load a segment that an earlier process wrote. Call it in the order of the log."""
        segment = self._registered(entry)
        keys = self._all_keys(segment, entry.count, entry.keys_hash)
        if (beyond := self.index.beyond(keys)) is not None:
            raise Unusable(f"{segment.keys_path} is damaged, or {beyond}", "give the table as many rows as it had")
        for start in range(0, entry.count, MOST_PLACED):
            some = keys[start : start + MOST_PLACED]
            self.index.reserve(some.size)
            self.index.place(some, segment.slot << INDEX_BITS | start, self.ends, self.live, self._sums)

    def trim(self) -> None:
        """Cut off what an earlier process left after the last records, unless a newer frozen state shares the file."""
        for segment in self.segments.values():
            if segment.behind and not (_shared(segment.rows_path) or _shared(segment.keys_path)):
                for path, size in ((segment.rows_path, self.stride), (segment.keys_path, 8)):
                    with self._files.opened(path, writable=True) as file:
                        self._files.truncate(file.number, HEADER + int(self.ends[segment.slot]) * size)
                segment.behind = 0


def _shared(path: Path) -> bool:
    return path.stat().st_nlink > 1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise Unusable(f"{path} is missing") from None


def load(logs: list[Log], manifest: Manifest) -> None:
    by_record = {log.record: log for log in logs}
    for entry in manifest.segments:
        by_record[entry.record].load(entry)


def paths(logs: list[Log]) -> list[Path]:
    return [path for log in logs for s in log.segments.values() for path in (s.rows_path, s.keys_path)]


def sync(logs: list[Log], files: OsFiles) -> None:
    """Wait until rows and the names of their files are durable."""
    for log in logs:
        log.sync()
    files.sync_folder(logs[0].folder)


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
        if self._cleaning is not None and any(segment is self._cleaning[0] for segment in gone):
            self._cleaning = None

    def _clean_some(self) -> int | None:
        if self._cleaning is None:
            victims = [
                (log.live[s.slot] / log.ends[s.slot], s.ordinal, s, log)
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
