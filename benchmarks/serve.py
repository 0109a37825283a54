"""Claim: rows over PyTorch RPC cost a few times a local gather and memcpy ("Memory nodes" in docs/benchmarks.md).

Whole calls to one node on this machine, in turns with a gather and a memcpy.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from common import Bench, free_port, in_turns, main, measured, result, started
from skirl.store import Record, Store, open_store

REST = 2.0
"""Seconds without calls, to measure what waiting costs."""


@dataclass(frozen=True)
class ServeSpeed(Bench):
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
            tcp = measured(__file__, task, {"TORCH_CPP_LOG_LEVEL": "FATAL"})
        ratios = {name: round(tcp[name]["p50_ms"] / tcp["floor"]["p50_ms"], 3) for name in ("get", "put")}
        return result(
            "serve", self, "rows held calls dim", **{f"{name}_vs_floor": ratio for name, ratio in ratios.items()},
            tcp=tcp,
        )  # fmt: skip


@contextmanager
def node(within: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Start a memory node. Yield what a trainer's `store` is, and the node's process id."""
    address = f"127.0.0.1:{free_port()}"
    words = ["-m", "skirl", "serve", address, "--store", "memory"]
    process = started(words, {"SKIRL_TIMEOUT": 300}, within, start_new_session=True)
    try:
        yield f"rpc://{address}", process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_of(pid: int) -> float:
    """Return the CPU time that all threads of a process and its descendants have used, in seconds."""
    total, pids = 0, [pid]
    for each in pids:
        for task in Path(f"/proc/{each}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
            pids += map(int, (task / "children").read_text().split())
    return total / 1e9


def calls_of(spec: str, pid: int, rows: int, dim: int, held: int, calls: int) -> dict[str, Any]:
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
        spent, own = cpu_of(pid), time.process_time()
        time.sleep(REST)
        rest = {"node": (cpu_of(pid) - spent) / REST, "owner": (time.process_time() - own) / REST}
        return facts | {"idle_cpu_share": {name: round(share, 4) for name, share in rest.items()}}


def _in_turns(store: Store, table: Any, picks: Any, calls: int, out: Any) -> dict[str, Any]:
    """Time one call of each kind in turn, so that what disturbs one kind disturbs all."""
    copy, gathered, rows = np.empty_like(out), torch.from_numpy(out), table[picks[0]]
    turns = {name: cycle(picks) for name in ("floor", "get", "put")}

    def floor() -> None:
        torch.index_select(torch.from_numpy(table), 0, torch.from_numpy(next(turns["floor"])), out=gathered)
        np.copyto(copy, out)

    sides = {
        "floor": floor,
        "get": lambda: store.read(next(turns["get"]), out),
        "put": lambda: store.write(next(turns["put"]), rows),
    }
    took = in_turns(sides, calls, untimed=3)
    return {name: {"p50_ms": round(1e3 * median(one.seconds for one in of), 3)} for name, of in took.items()}


if __name__ == "__main__":
    main(ServeSpeed, calls_of)
