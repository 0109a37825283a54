"""Claim: rows over PyTorch RPC cost a few times a local gather and memcpy ("Memory nodes" in docs/benchmarks.md).

`--part calls`: whole calls to one node on this machine, in turns with a gather and a memcpy. It fails if the median call
takes more than 4.5 times that floor. `--part link`: train.py over links of limited rate to a node, against rows on demand;
trainer and node have a network namespace each.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from common import child, main, result, seconds
from link import ADDRESS, two_namespaces
from skirl.store import Record, Store, open_store
from skirl.store.remote.started import StartedNodes, family
from skirl.tools.units import Link

BOUND = 4.5
"""The median call over TCP may take at most this many times the floor."""
REST = 2.0
"""Seconds without calls, to measure what waiting costs."""
PATIENCE = 300.0
"""Seconds that a call may take; long, since no node is expected to fail here."""


@dataclass(frozen=True)
class ServeSpeed:
    """Calls to a memory node, and training over a link to one."""

    part: Literal["calls", "link"] = "calls"
    """What to measure."""
    rows: int = 20_000
    """Rows in a call."""
    dim: int = 64
    """Numbers in a row."""
    held: int = 1_000_000
    """Rows that the node holds."""
    calls: int = 300
    """Timed calls of each kind."""
    links: tuple[str, ...] = ("1Gbit", "10Gbit")
    """For part link: rates between trainer and node, in each direction."""
    batch: int = 2048
    """For part link: samples in a step."""
    cache: str = "touched:10%"
    """For part link: the cache."""
    rounds: int = 6
    """For part link: turns of each mode."""
    warm: int = 24
    """For part link: steps before the first turn."""
    slice: int = 8
    """For part link: steps in a turn."""

    def run(self) -> dict[str, Any]:
        """Measure the part."""
        return self._calls() if self.part == "calls" else self._link()

    def _calls(self) -> dict[str, Any]:
        """Measure a node with one core at each end if there are two."""
        cores = sorted(os.sched_getaffinity(0))
        with StartedNodes(1, within=("taskset", "-c", str(cores[-1])) if len(cores) > 1 else ()) as nodes:
            task = (nodes.spec, nodes.processes[0].pid, self.rows, self.dim, self.held, self.calls)
            tcp = child([__file__, "calls", json.dumps(task)], {"TORCH_CPP_LOG_LEVEL": "FATAL"})
        ratios = {name: round(tcp[name]["p50_ms"] / tcp["floor"]["p50_ms"], 3) for name in ("get", "put")}
        over = [f"{name} ({ratio})" for name, ratio in ratios.items() if ratio > BOUND]
        return result(
            "serve", self, "part rows held calls dim", **{f"{name}_vs_floor": ratio for name, ratio in ratios.items()},
            tcp=tcp, failed=f"above {BOUND} times the floor: {', '.join(over)}" if over else None,
        )  # fmt: skip

    def _link(self) -> dict[str, Any]:
        points = [self._point(link) for link in self.links]
        failed = [point["failed"] for point in points if point["failed"]]
        return result(
            "serve", self, "part links rounds", vs_on_demand=[point["vs_on_demand"] for point in points],
            points=points, failed=failed[0] if failed else None,
        )  # fmt: skip

    def _point(self, link: str) -> dict[str, Any]:
        flags = {name: getattr(self, name) for name in ("dim", "batch", "cache", "rounds", "warm", "slice")}
        flags |= {"modes": "skirl,on_demand", "threads": 1}
        with two_namespaces(Link.parse(f"{link},0us").rate) as (mine, other):
            within = ("ip", "netns", "exec", other)
            with StartedNodes(1, host=ADDRESS.format(2), within=within, patience=PATIENCE) as nodes:
                words = [f"--{name}={value}" for name, value in flags.items()]
                train = [sys.executable, str(Path(__file__).with_name("train.py")), *words, "--json"]
                ran = subprocess.run(
                    ["ip", "netns", "exec", mine, *train, f"--store={nodes.spec}"],
                    stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"SKIRL_PATIENCE": f"{PATIENCE:g}"},
                )  # fmt: skip
        found = json.loads(ran.stdout.splitlines()[-1])
        names = ("vs_on_demand", "byte_ratio_on_demand", "losses_agree", "failed", "modes")
        return {"link": link, **{name: found[name] for name in names}}


def cpu_of(pids: Sequence[int]) -> float:
    """Return the CPU time that all threads of some processes have used, in seconds."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError, ValueError):
                    total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total / 1e9


def measured(spec: str, node: int, rows: int, dim: int, held: int, calls: int) -> dict[str, Any]:
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
        spent, own = cpu_of(family(node)), time.process_time()
        time.sleep(REST)
        rest = {"node": (cpu_of(family(node)) - spent) / REST, "owner": (time.process_time() - own) / REST}
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
