"""Whole calls to a memory node, against a local gather and memcpy. `skirl bench serve` runs this in its own process."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skirl.measure.bench.helpers import Stopwatch
from skirl.store import Record, Store, open_store
from skirl.store.remote import group
from skirl.store.remote.started import cpu_of, family

FLIGHTS = (1, 4)
"""Numbers of calls in flight for which to measure calls per second."""
REST = 2.0
"""Seconds without calls, to measure what waiting costs."""


@dataclass(frozen=True)
class Calls:
    """The calls to measure.

    **Arguments**

    - `spec`: the node, as a store.
    - `node`: its process id.
    - `rows`: rows in a call.
    - `dim`: numbers in a row.
    - `held`: rows that the node holds.
    - `calls`: timed calls of each kind.
    - `default`: use torch's default transports.
    - `core`: the core to run this process on; -1 for any.
    """

    spec: str
    node: int
    rows: int
    dim: int
    held: int
    calls: int
    default: bool
    core: int

    def measure(self) -> dict[str, Any]:
        """Return times of calls, alternating with the floor, calls per second, CPU time at both ends, and the idle cost."""
        torch.set_num_threads(1)
        if self.core >= 0:
            os.sched_setaffinity(0, {self.core})
        if self.default:
            group.TRANSPORTS.clear()
        rng = np.random.default_rng(0)
        table = rng.random((self.held, self.dim), np.float32)
        picks = rng.permutation(self.held)[: self.held // self.rows * self.rows].reshape(-1, self.rows)
        rows, out = table[picks[0]], np.empty((self.rows, self.dim), np.float32)
        with open_store(self.spec, {0: Record(self.dim)}, rows={0: self.held}) as store:
            for pick in picks:
                store.write(pick, table[pick])
            _check(store, table, picks[-1], out)
            facts = self._in_turns(store, table, picks, rows, out)
            for name, call in (("get", store.read), ("put", store.write)):
                facts[name]["calls_s"] = {n: self._rate(call, picks, n) for n in FLIGHTS}
            spent, own = cpu_of(family(self.node)), time.process_time()
            time.sleep(REST)
            rest = {"node": (cpu_of(family(self.node)) - spent) / REST, "owner": (time.process_time() - own) / REST}
            return facts | {"idle_cpu_share": {name: round(share, 4) for name, share in rest.items()}}

    def _in_turns(self, store: Store, table: Any, picks: Any, rows: Any, out: Any) -> dict[str, Any]:
        """Time one call of each kind in turn, so that what disturbs one kind disturbs all."""
        copy = np.empty_like(out)
        gathered = torch.from_numpy(out)

        def floor(pick: Any) -> None:
            torch.index_select(torch.from_numpy(table), 0, torch.from_numpy(pick), out=gathered)
            np.copyto(copy, out)

        each: dict[str, Callable[[Any], Any]] = {
            "floor": floor,
            "get": lambda pick: store.read(pick, out),
            "put": lambda pick: store.write(pick, rows),
        }
        took: dict[str, list[Stopwatch]] = {name: [] for name in each}
        at_node: dict[str, list[float]] = {name: [] for name in each}
        pids = family(self.node)
        for number in range(-3, self.calls):
            pick = picks[number % len(picks)]
            for name, call in each.items():
                before = cpu_of(pids)
                with Stopwatch() as watch:
                    call(pick)
                if number >= 0:
                    at_node[name].append(cpu_of(pids) - before)
                    took[name].append(watch)
        return {name: _facts(took[name], at_node[name]) for name in each}

    def _rate(self, call: Callable[..., Any], picks: Any, flights: int) -> float:
        """Return calls per second with `flights` in flight, each for rows of its own."""

        def some(first: int) -> None:
            out, mine = np.zeros((self.rows, self.dim), np.float32), picks[first::flights]
            for number in range(first, self.calls, flights):
                call(mine[number % len(mine)], out)

        with ThreadPoolExecutor(flights) as threads, Stopwatch() as watch:
            list(threads.map(some, range(flights)))
        return round(self.calls / watch.seconds, 1)


def _check(store: Store, table: Any, pick: Any, out: Any) -> None:
    if not store.read(pick, out).all() or (out != table[pick]).any():
        raise AssertionError("rows came back with other bits: no ratio is given")


def _facts(took: list[Stopwatch], at_node: list[float]) -> dict[str, Any]:
    ms = sorted(1e3 * watch.seconds for watch in took)
    return {
        "p50_ms": round(statistics.median(ms), 3),
        "p99_ms": round(ms[min(len(ms) - 1, int(0.99 * len(ms)))], 3),
        "least_ms": round(ms[0], 3),
        "owner_cpu_ms": round(1e3 * statistics.mean(watch.cpu for watch in took), 3),
        "node_cpu_ms": round(1e3 * statistics.mean(at_node), 3),
    }


if __name__ == "__main__":
    print(json.dumps(Calls(**json.loads(sys.argv[1])).measure()))
