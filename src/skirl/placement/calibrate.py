"""A measurement of how fast one store moves rows."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from skirl.store import Record, open_store
from skirl.store.link import without_links
from skirl.store.own_folder import inside
from skirl.store.remote.wire import Address
from skirl.tools.processes import patience_of
from skirl.tools.progress import size

_FOLDER = "skirl-calibrate"
_MOST_BYTES, _MOST_ROWS = 1 << 30, 1 << 22
"""Most bytes and rows that the store holds; beyond that, the same keys are written again."""
_ON_NODES = 64 << 20
"""The same on memory nodes: bytes of theirs are taken from those who train."""
_FLOAT = 4
_SILENT = 2.0
"""Seconds that it waits for memory nodes before it says so."""
_NOBODY = "rank-999999999"
"""The trainer whose rows they are on memory nodes: no job has so many, so none of its rows is touched."""


def calibrated(spec: str, width: int, rows: int, seconds: float) -> dict[str, Any]:
    """Return the bytes per second that a store takes and gives, in calls of `rows` rows, read in random order.

    **Arguments**

    - `spec`: the store's spec.
    - `width`: numbers in a record.
    - `rows`: rows in a call.
    - `seconds`: how long to write, and then how long to read.
    """
    inner = without_links(spec)
    nodes, disk, path = inner.startswith("rpc:"), inner.startswith("disk:"), inner.removeprefix("disk:")
    most = min(_MOST_BYTES, _ON_NODES) if nodes else _MOST_BYTES
    _check_size(rows, width, most, "on memory nodes" if nodes else "in a store")
    if nodes:
        _check_nodes(inner)
    folder = Path(path) / _FOLDER
    if disk and folder.exists():
        raise ValueError(f"{folder} exists: remove it, a calibration that was killed has left it")
    new = not disk or not Path(path).exists()
    rng = np.random.default_rng(0)
    values = rng.random((rows, width), np.float32)
    calls = max(1, min(most // values.nbytes, _MOST_ROWS // rows))
    keys = np.arange(calls * rows).reshape(calls, rows)
    try:
        with open_store(inside(spec, _NOBODY if nodes else _FOLDER), {0: Record(width)}) as store:
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


def _check_size(rows: int, width: int, most: int, where: str) -> None:
    """Raise if a single call has more bytes than a measurement may hold."""
    if (nbytes := rows * width * _FLOAT) > most:
        held = f"a call has {size(nbytes)}, and a measurement holds at most {size(most)} {where}"
        if width * _FLOAT > most:
            raise ValueError(f"width is {width}: {held}: set it to at most {most // _FLOAT}")
        raise ValueError(f"rows is {rows}: {held}: set it to at most {most // (width * _FLOAT)}")


def _check_nodes(spec: str) -> None:
    """Raise if memory nodes keep rows on disk: what a measurement writes would stay there."""
    from skirl.store.remote.connection import PATIENCE
    from skirl.store.remote.meeting import Meeting

    address = Address.parse(spec)
    patience = patience_of(os.environ, PATIENCE)
    said = f"waiting for memory nodes at {address}, for at most {patience:g} s"
    waiting = threading.Timer(_SILENT, lambda: print(said, file=sys.stderr, flush=True))
    waiting.start()
    try:
        meeting, began = Meeting(address, seconds=patience), time.monotonic()
        while (about := meeting.note("node/0")) is None and time.monotonic() - began < patience:
            time.sleep(0.02)  # it has just been started
    finally:
        waiting.cancel()
        waiting.join()
    if about is not None and about["rows"] != "memory":
        raise ValueError(
            f"the nodes at {address} keep rows on disk, where those of a measurement would stay: measure disk:FOLDER on the "
            "machine of a node, or nodes with rows in memory"
        )


def _called(call: Callable[[np.ndarray], Any], keys: np.ndarray, seconds: float) -> int:
    """Call until the time is up, at least once, and return the number of calls. The keys are drawn beforehand."""
    calls, began = 0, time.perf_counter()
    while not calls or time.perf_counter() - began < seconds:
        call(keys[calls % len(keys)])
        calls += 1
    return calls
