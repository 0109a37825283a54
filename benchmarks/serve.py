"""Claim: rows over PyTorch RPC cost a few times a local gather and memcpy ("Memory nodes" in docs/benchmarks.md).

Whole calls to one node on this machine, in turns with a gather and a memcpy. It fails if the median call takes more than
4.5 times that floor.
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import child, main, result, seconds
from skirl.store import Record, Store, open_store

BOUND = 4.5
"""The median call over TCP may take at most this many times the floor."""
REST = 2.0
"""Seconds without calls, to measure what waiting costs."""
TIMEOUT = 300.0
"""Seconds that a call may take; long, since no node is expected to fail here."""


@dataclass(frozen=True)
class ServeSpeed:
    """Calls to a memory node."""

    rows: int = 20_000
    """Rows in a call."""
    dim: int = 64
    """Numbers in a row."""
    held: int = 1_000_000
    """Rows that the node holds."""
    calls: int = 300
    """Timed calls of each kind."""

    def run(self) -> dict[str, Any]:
        """Measure a node with one core at each end if there are two."""
        cores = sorted(os.sched_getaffinity(0))
        with node(("taskset", "-c", str(cores[-1])) if len(cores) > 1 else ()) as (spec, pid):
            task = (spec, pid, self.rows, self.dim, self.held, self.calls)
            tcp = child([__file__, "calls", json.dumps(task)], {"TORCH_CPP_LOG_LEVEL": "FATAL"})
        ratios = {name: round(tcp[name]["p50_ms"] / tcp["floor"]["p50_ms"], 3) for name in ("get", "put")}
        over = [f"{name} ({ratio})" for name, ratio in ratios.items() if ratio > BOUND]
        return result(
            "serve", self, "rows held calls dim", **{f"{name}_vs_floor": ratio for name, ratio in ratios.items()},
            tcp=tcp, failed=f"above {BOUND} times the floor: {', '.join(over)}" if over else None,
        )  # fmt: skip


@contextmanager
def node(within: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Start a memory node. Yield what a trainer's `store` is, and the node's process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["serve", address, "--store", "memory"]
    environment = os.environ | {"SKIRL_TIMEOUT": f"{TIMEOUT:g}"}
    process = subprocess.Popen(
        [*within, sys.executable, "-m", "skirl", *words], stdout=2, start_new_session=True, env=environment
    )
    try:
        yield f"rpc://{address}", process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def family(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    found = [pid]
    for each in found:
        for path in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def cpu_of(pids: Sequence[int]) -> float:
    """Return the CPU time that all threads of some processes have used, in seconds."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError, ValueError):
                    total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total / 1e9


def measured(spec: str, pid: int, rows: int, dim: int, held: int, calls: int) -> dict[str, Any]:
    """Return times of calls in turns with the floor, and what waiting costs."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1] if len(cores) > 1 else cores)
    rng = np.random.default_rng(0)
    table = rng.random((held, dim), np.float32)
    picks = rng.permutation(held)[: held // rows * rows].reshape(-1, rows)
    with open_store(spec, {0: Record(dim)}, rows={0: held}) as store:
        for pick in picks:
            store.write(pick, table[pick])
        out = np.empty((rows, dim), np.float32)
        if not store.read(picks[-1], out).all() or (out != table[picks[-1]]).any():
            raise AssertionError("rows came back with other bits: no ratio is given")
        facts = _in_turns(store, table, picks, calls, out)
        spent, own = cpu_of(family(pid)), time.process_time()
        time.sleep(REST)
        rest = {"node": (cpu_of(family(pid)) - spent) / REST, "owner": (time.process_time() - own) / REST}
        return facts | {"idle_cpu_share": {name: round(share, 4) for name, share in rest.items()}}


def _in_turns(store: Store, table: Any, picks: Any, calls: int, out: Any) -> dict[str, Any]:
    """Time one call of each kind in turn, so that what disturbs one kind disturbs all."""
    copy, gathered, rows = np.empty_like(out), torch.from_numpy(out), table[picks[0]]

    def floor(pick: Any) -> None:
        torch.index_select(torch.from_numpy(table), 0, torch.from_numpy(pick), out=gathered)
        np.copyto(copy, out)

    each: dict[str, Callable[[Any], Any]] = {
        "floor": floor,
        "get": lambda pick: store.read(pick, out),
        "put": lambda pick: store.write(pick, rows),
    }
    took: dict[str, list[float]] = {name: [] for name in each}
    for number in range(-3, calls):
        for name, call in each.items():
            took[name] += [1e3 * seconds(call, picks[number % len(picks)])] if number >= 0 else []
    return {name: {"p50_ms": round(statistics.median(ms), 3)} for name, ms in took.items()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["calls"]:
        print(json.dumps(measured(*json.loads(sys.argv[2]))))
    else:
        main(ServeSpeed)
