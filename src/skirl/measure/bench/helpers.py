"""Helpers that the benchmarks share: checks of flags, a stopwatch, child processes, and the parts of a result."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from skirl.tools.machine import machine
from skirl.tools.os_errors import writing

WAYS = ("hidden", "all_critical")
"""How trainers over a link take turns: as skirl trains, and with nothing that travels early or late."""


def at_least_one(flags: Any, *names: str) -> None:
    """Raise if one of these flags is below 1."""
    for name in names:
        if getattr(flags, name) < 1:
            raise ValueError(f"{name} is {getattr(flags, name)}: set it to 1 or more")


def made_folder(folder: Path | None) -> Path | None:
    """Make the folder that a flag names, if it is not there, and return it. Raise if it cannot be made.

    >>> made_folder(None)
    """
    if folder is not None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    return folder


def result(bench: str, flags: Any, names: str, **figures: Any) -> dict[str, Any]:
    """Return a benchmark's result: its name, the flags in `names` (separated by spaces), the figures, the machine."""
    return {
        "bench": bench, **{name: getattr(flags, name) for name in names.split()}, **figures, "machine": machine(),
    }  # fmt: skip


def check_trace(path: Path) -> None:
    """Raise unless the path is an existing .npy file."""
    if path.suffix != ".npy":
        raise ValueError(f"trace is {str(path)!r}: set it to a .npy file; benchmarks/make_trace.py writes them")
    if not path.is_file():
        raise ValueError(f"trace is {str(path)!r}, which is not a file: set it to one that exists")


def read_trace(path: Path) -> np.ndarray:
    """Return the ids of a trace, an integer array of one dimension."""
    ids = np.load(path, allow_pickle=False)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"trace {path.name} has shape {list(ids.shape)} of {ids.dtype}: save one dimension of integer ids"
        )
    return ids


class Stopwatch:
    """A stopwatch for a block.

    >>> with Stopwatch() as watch:
    ...     total = sum(range(1000))
    >>> watch.seconds > 0 and watch.cpu >= 0
    True
    """

    seconds: float
    """Wall clock time."""
    cpu: float
    """CPU time, over all threads of this process."""

    def __enter__(self) -> Self:
        self._began, self._used = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.cpu = time.perf_counter() - self._began, time.process_time() - self._used


def seconds(call: Callable[..., Any], *args: Any) -> float:
    """Return the wall clock time of a call."""
    with Stopwatch() as watch:
        call(*args)
    return watch.seconds


def processes(count: int, arguments: Sequence[str]) -> list[Any]:
    """Run the trainers of one job, a Python process each, and return the last line that each prints, parsed as JSON."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | {k: str(v) for k, v in (names | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"one of {count} measuring processes failed; it said why above")
    return [json.loads(lines.splitlines()[-1]) for lines in said]


def child(arguments: Sequence[str], env: Mapping[str, str]) -> Any:
    """Run another Python process and return the last line that it prints, parsed as JSON."""
    ran = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=False
    )
    if ran.returncode:
        raise RuntimeError(f"the measuring process ended with exit code {ran.returncode}; it said why above")
    return json.loads(ran.stdout.splitlines()[-1])
