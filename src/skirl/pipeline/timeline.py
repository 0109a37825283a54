"""The timeline of a run: what every thread did when, as a file for https://ui.perfetto.dev or chrome://tracing. A fetch
under the compute of earlier steps is hidden; a `wait` shows what was not hidden."""

import json
import logging
import threading
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from skirl.tools.os_errors import why

log = logging.getLogger("skirl")

LOOP = "loop"
LANES = ("plan", "fetch", LOOP, "write", "write 2")
"""From top to bottom, in the order that a batch passes them."""


class Timeline:
    """Writes events to a file as they end, `read`, `wait`, `load` and `compute` in the lane of the training loop, the
    others in that of a thread of the pipeline. Arrows join those of one step. Any thread may add one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.first = 0
        """Steps before the pass whose events are added: in a pass they count from 0, in the file from 1."""
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._file: FileIO | None = self.path.open("wb", buffering=0)
        """None once it has ended."""
        self._write("[")
        self._put(name="process_name", ph="M", args={"name": "skirl"})
        for number, lane in enumerate(LANES):
            self._put(name="thread_name", ph="M", tid=number, args={"name": lane})
            self._put(name="thread_sort_index", ph="M", tid=number, args={"sort_index": number})

    def add(
        self, lane: str, what: str, step: int, began: float, ended: float, facts: Mapping[str, Any] | None = None
    ) -> None:
        step += self.first + 1
        with self._lock:
            when = {"ts": round(1e6 * (began - self._began), 1), "dur": round(1e6 * (ended - began), 1)}
            flow = {"bind_id": str(step), "flow_in": True, "flow_out": True}
            self._put(name=what, ph="X", tid=LANES.index(lane), **when, **flow, args={"step": step, **(facts or {})})

    def close(self) -> None:
        with self._lock:
            self._write('{"name":"process_sort_index","ph":"M","pid":1,"args":{"sort_index":0}}]')  # no comma
            if self._file is not None:
                self._file.close()
                self._file = None

    # Under the lock.

    def _put(self, **event: Any) -> None:
        self._write(json.dumps({"pid": 1, **event}, separators=(",", ":")) + ",\n")

    def _write(self, text: str) -> None:
        """Write to the file. If that fails, end the timeline: it must not end the run."""
        if self._file is None:
            return
        rest, file = memoryview(text.encode()), self._file
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            log.warning("the timeline %s ends here: %s. Training goes on without it", self.path, why(error))
            file.close()
            self._file = None
