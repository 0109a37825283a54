"""The timeline of a run: what every thread did when, as a file for https://ui.perfetto.dev or chrome://tracing.

A fetch under the compute of earlier steps is hidden; a `wait` shows what was not hidden."""

import errno
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skirl.tools.os_errors import why

log = logging.getLogger("skirl")

_MISTAKEN = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""Errors of a path that was mistyped: no file can be there, whatever the state of the disk. These are raised at once."""
LOOP = "loop"
LANES = ("plan", "fetch", LOOP, "write", "write 2")
"""From top to bottom, in the order that a batch passes them."""
FLUSH_BYTES = 32 << 10
FLUSH_SECONDS = 1.0


class Timeline:
    """Writes events to a file as they end. Any thread may add one. Opening it replaces the file.

    Events `read`, `wait`, `load` and `compute` are in the lane of the training loop; `enter` and `plan`, `fetch`, and
    `write` each in that of a thread of the pipeline. An event names its step and the rows it moved, and arrows join those
    of one step.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     timeline = Timeline(Path(folder) / "run.json")
    ...     with timeline.span("compute", 0):
    ...         timeline.add("fetch", "fetch", 1, time.monotonic(), time.monotonic(), {"rows": 12})
    ...     timeline.close()
    ...     [(event["name"], event["args"]) for event in read(timeline.path)]
    [('fetch', {'step': 2, 'rows': 12}), ('compute', {'step': 1})]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.first = 0
        """Steps before the pass whose events are added: in a pass they count from 0, in the file from 1."""
        self.ended: str | None = None
        """Why it ended before its run, if it did."""
        self._lock = threading.Lock()
        self._began = self._flushed = time.monotonic()
        self._lanes: dict[str, int] = {}
        self._lines: list[str] = ["["]
        self._bytes = 0
        self._open = False
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            if error.errno in _MISTAKEN:
                raise
            self._give_up(error)
            return
        self._open = True
        with self._lock:
            self._put('{"name":"process_name","ph":"M","pid":1,"args":{"name":"skirl"}}')
            for lane in LANES:
                self._lane(lane)
            self._write()

    def add(
        self, lane: str, what: str, step: int, began: float, ended: float, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Add an event: `what` was done in `lane` for a step of this pass, between two times of `time.monotonic`."""
        step += self.first + 1
        args = json.dumps({"step": step, **(facts or {})}, separators=(",", ":"))
        with self._lock:
            if not self._open:
                return
            self._put(
                f'{{"name":{json.dumps(what)},"ph":"X","pid":1,"tid":{self._lane(lane)},'
                f'"ts":{1e6 * (began - self._began):.1f},"dur":{1e6 * (ended - began):.1f},'
                f'"bind_id":"{step}","flow_in":true,"flow_out":true,"args":{args}}}'
            )
            if self._bytes >= FLUSH_BYTES or ended - self._flushed >= FLUSH_SECONDS:
                self._flushed = ended
                self._write()

    @contextmanager
    def span(self, what: str, step: int) -> Iterator[None]:
        """Add what the training loop does in this block as one event."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(LOOP, what, step, began, time.monotonic())

    def close(self) -> None:
        """Write what is left. Events after this are dropped."""
        with self._lock:
            if self._open:
                # The comma of the last line needs one more event.
                self._lines.append('{"name":"process_sort_index","ph":"M","pid":1,"args":{"sort_index":0}}\n]')
                self._write()
                if self._open:
                    self._open = False
                    self._file.close()

    # Under the lock.

    def _lane(self, name: str) -> int:
        """Return the number of a lane. A new one is named first."""
        if name not in self._lanes:
            number = self._lanes[name] = len(self._lanes) + 1
            lane = f'"ph":"M","pid":1,"tid":{number}'
            self._put(f'{{"name":"thread_name",{lane},"args":{{"name":{json.dumps(name)}}}}}')
            self._put(f'{{"name":"thread_sort_index",{lane},"args":{{"sort_index":{number}}}}}')
        return self._lanes[name]

    def _put(self, event: str) -> None:
        self._lines.append(event + ",")
        self._bytes += len(event) + 2

    def _write(self) -> None:
        """Write the lines. If that fails, end the timeline: it must not end the run."""
        rest = memoryview(("\n".join(self._lines) + "\n").encode())
        self._lines.clear()
        self._bytes = 0
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._open = False
            self._give_up(error)
            self._file.close()

    def _give_up(self, error: OSError) -> None:
        self.ended = why(error, self.path)
        log.warning("the timeline %s ends here: %s. Training goes on without it", self.path, self.ended)


def read(path: str | Path) -> list[dict[str, Any]]:
    """Return the events of a file, each with the name of its `lane`. If the run was killed, all up to its last second."""
    lines = Path(path).read_text().split("\n")[:-1]  # a last line without an end is incomplete
    found = [json.loads(line.removesuffix(",")) for line in lines if line.startswith("{")]
    lanes = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    return [{**event, "lane": lanes[event["tid"]]} for event in found if event["ph"] == "X"]
