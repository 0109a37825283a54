"""A measurement of how fast one store moves rows."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from skirl.store import Record, open_store
from skirl.store.own_folder import inside

_FOLDER = "skirl-calibrate"
_MOST_BYTES, _MOST_ROWS = 1 << 30, 1 << 22
"""Most bytes and rows that the store holds; beyond that, the same keys are written again."""


def calibrated(spec: str, width: int, rows: int, seconds: float) -> dict[str, Any]:
    """Return the bytes per second that a store takes and gives, in calls of `rows` rows, read in random order.

    **Arguments**

    - `spec`: the store's spec.
    - `width`: numbers in a record.
    - `rows`: rows in a call.
    - `seconds`: how long to write, and then how long to read.
    """
    _, disk, path = spec.partition("disk:")
    folder = Path(path) / _FOLDER
    if disk and folder.exists():
        raise ValueError(f"{folder} exists: remove it, a calibration that was killed has left it")
    new = not disk or not Path(path).exists()
    rng = np.random.default_rng(0)
    values = rng.random((rows, width), np.float32)
    calls = max(1, min(_MOST_BYTES // values.nbytes, _MOST_ROWS // rows))
    keys = np.arange(calls * rows).reshape(calls, rows)
    try:
        with open_store(inside(spec, _FOLDER), {0: Record(width)}) as store:
            store.write(keys[0], values)  # compiles the loops before the clock starts
            store.read(keys[0], values)
            began = time.perf_counter()
            wrote = _called(lambda some: store.write(some, values), keys, seconds)
            store.flush()
            written = wrote * values.nbytes / (time.perf_counter() - began)
            held = rng.permutation(min(wrote, calls) * rows).reshape(-1, rows)
            began = time.perf_counter()
            asked = _called(lambda some: store.read(some, values), held, seconds)
            read = asked * values.nbytes / (time.perf_counter() - began)
    finally:
        if disk:
            shutil.rmtree(folder, ignore_errors=True)
            if new:
                shutil.rmtree(path, ignore_errors=True)
    slower = min(read, written)
    return {
        "command": "place calibrate",
        "store": spec,
        "read": read,
        "written": written,
        "bytes_a_second": slower,
        "rate": f"{slower * 8 / 1e6:.0f}Mbit",
    }


def _called(call: Callable[[np.ndarray], Any], keys: np.ndarray, seconds: float) -> int:
    """Call until the time is up, at least once, and return the number of calls. The keys are drawn beforehand."""
    calls, began = 0, time.perf_counter()
    while not calls or time.perf_counter() - began < seconds:
        call(keys[calls % len(keys)])
        calls += 1
    return calls
