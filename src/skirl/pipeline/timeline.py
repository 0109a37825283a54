"""The timeline of a run: what every thread did when, as a file for https://ui.perfetto.dev or chrome://tracing.

A fetch under the compute of earlier steps is hidden; a `wait` shows what was not hidden."""

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skirl.tools.os_errors import why

log = logging.getLogger("skirl")

LOOP = "loop"
LANES = ("plan", "fetch", LOOP, "write", "write 2")
"""From top to bottom, in the order that a batch passes them."""
FLUSH_BYTES = 32 << 10
FLUSH_SECONDS = 1.0


class Timeline:
    """Writes events to a file as they end. Any thread may add one. Opening it replaces the file.

    Events `read`, `wait`, `load` and `compute` are in the lane of the training loop; `enter` and `plan`, `fetch`, and
    `write` each in that of a thread of the pipeline. Arrows join those of one step.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.first = 0
        """Steps before the pass whose events are added: in a pass they count from 0, in the file from 1."""
        self._lock = threading.Lock()
        self._began = self._flushed = time.monotonic()
        self._text = "["
        self._file = self.path.open("wb", buffering=0)
        self._open = True
        with self._lock:
            self._put(name="process_name", ph="M", args={"name": "skirl"})
            for number, lane in enumerate(LANES):
                self._put(name="thread_name", ph="M", tid=number, args={"name": lane})
                self._put(name="thread_sort_index", ph="M", tid=number, args={"sort_index": number})
            self._write()

    def add(
        self, lane: str, what: str, step: int, began: float, ended: float, facts: Mapping[str, Any] | None = None
    ) -> None:
        step += self.first + 1
        with self._lock:
            if not self._open:
                return
            when = {"ts": round(1e6 * (began - self._began), 1), "dur": round(1e6 * (ended - began), 1)}
            flow = {"bind_id": str(step), "flow_in": True, "flow_out": True}
            self._put(name=what, ph="X", tid=LANES.index(lane), **when, **flow, args={"step": step, **(facts or {})})
            if len(self._text) >= FLUSH_BYTES or ended - self._flushed >= FLUSH_SECONDS:
                self._flushed = ended
                self._write()

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._text += '{"name":"process_sort_index","ph":"M","pid":1,"args":{"sort_index":0}}]'  # no comma
                self._write()
                if self._open:
                    self._open = False
                    self._file.close()

    # Under the lock.

    def _put(self, **event: Any) -> None:
        self._text += json.dumps({"pid": 1, **event}, separators=(",", ":")) + ",\n"

    def _write(self) -> None:
        """Write what there is. If that fails, end the timeline: it must not end the run."""
        rest, self._text = memoryview(self._text.encode()), ""
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._open = False
            log.warning("the timeline %s ends here: %s. Training goes on without it", self.path, why(error))
            self._file.close()
