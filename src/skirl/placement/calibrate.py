"""How fast one store moves rows."""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from skirl.store import Record, open_store
from skirl.store.own_folder import inside

_FOLDER = "skirl-calibrate"


def calibrated(spec: str, width: int, rows: int, seconds: float) -> dict[str, Any]:
    """Bytes a second that a store takes and gives in calls of so many rows, drawn at random.

    **Arguments**

    - `spec`: the store.
    - `width`: numbers of a record.
    - `rows`: of a call.
    - `seconds`: how long to write, and how long to read.
    """
    _, disk, path = spec.partition("disk:")
    folder = Path(path) / _FOLDER
    if disk and folder.exists():
        raise ValueError(f"{folder} exists: remove it, a calibration that was killed has left it")
    new = not disk or not Path(path).exists()
    rng = np.random.default_rng(0)
    values = rng.random((rows, width), np.float32)
    try:
        with open_store(inside(spec, _FOLDER), {0: Record(width)}) as store:
            calls, began = 0, time.perf_counter()
            while not calls or time.perf_counter() - began < seconds:
                store.write(np.arange(calls * rows, (calls + 1) * rows), values)
                calls += 1
            store.flush()
            wrote = calls * values.nbytes / (time.perf_counter() - began)
            asked, began = 0, time.perf_counter()
            while not asked or time.perf_counter() - began < seconds:
                store.read(rng.permutation(calls * rows)[:rows], values)
                asked += 1
            read = asked * values.nbytes / (time.perf_counter() - began)
    finally:
        if disk:
            shutil.rmtree(folder, ignore_errors=True)
            if new:
                shutil.rmtree(path, ignore_errors=True)
    slower = min(read, wrote)
    return {
        "command": "place calibrate",
        "store": spec,
        "read": read,
        "written": wrote,
        "bytes_a_second": slower,
        "rate": f"{slower * 8 / 1e6:.0f}Mbit",
    }
