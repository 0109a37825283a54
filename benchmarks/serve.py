"""Claim: rows over PyTorch RPC cost a few times a local gather and memcpy ("Memory nodes" in docs/benchmarks.md).

`--part calls`: whole calls to one node on this machine, in turns with a gather and a memcpy, over TCP and over torch's
default transports. It fails if the median call over TCP takes more than 4.5 times that floor.
`--part link`: training over links of limited rate to a node, against all rows resident and rows on demand; trainer and node
have a network namespace each. `--part large`: training on nodes with disks until many times the caches are touched, and the
memory that every process takes.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from common import Stopwatch, at_least_one, child, main, result
from link import ADDRESS, two_namespaces, why_not
from skirl.store import Record, Store, open_store
from skirl.store.remote import group, part
from skirl.store.remote.meeting import Meeting
from skirl.store.remote.node import TICK, Node
from skirl.store.remote.started import SERVE, StartedNodes, family, free_port
from skirl.store.remote.wire import Address
from skirl.tools.progress import size
from skirl.tools.units import Link, parse_bytes
from train import ModeSettings, TrainSpeed, cpu_of

BOUND = 4.5
"""The median call over TCP may take at most this many times the floor."""
FLIGHTS = (1, 4)
"""Numbers of calls in flight for which to measure calls per second."""
REST = 2.0
"""Seconds without calls, to measure what waiting costs."""
PATIENCE = 300.0
"""Seconds that a call may take; long, since no node is expected to fail here."""
LIMITS = {"trainer": 2 << 30, "node": 1 << 30}
"""The most private memory that a process may take in part large. Python and torch are 190 MB of it."""


@dataclass(frozen=True)
class ServeSpeed:
    """Calls to a memory node, and training over a link to one or with far more rows than caches hold."""

    part: Literal["calls", "link", "large"] = "calls"
    """What to measure."""
    rows: int = 20_000
    """Rows in a call."""
    dim: int | None = None
    """Numbers in a row; 64, and 256 for part large."""
    held: int = 1_000_000
    """Rows that the node holds."""
    calls: int = 300
    """Timed calls of each kind."""
    links: tuple[str, ...] = ("1Gbit", "10Gbit")
    """For part link: rates between trainer and node, in each direction."""
    batch: int | None = None
    """For parts link and large: samples in a step; 2048 and 4096."""
    cache: str | None = None
    """For parts link and large: the cache; touched:10% and 256MB."""
    rounds: int = 6
    """For part link: turns of each mode."""
    warm: int = 24
    """For part link: steps before the first turn."""
    slice: int = 8
    """For part link: steps in a turn."""
    trainers: int = 2
    """For part large: the number of trainers, a power of two."""
    nodes: int = 2
    """For part large: the number of memory nodes."""
    times: float = 10.0
    """For part large: minimum ratio of the bytes of touched rows to those of all caches."""
    steps: int = 600
    """For part large: steps in the run."""
    folder: Path = Path("skirl-bench-large")
    """For part large: where to keep the nodes' rows, in a new folder that is removed afterwards."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "rows", "calls", "rounds", "warm", "slice", "trainers", "nodes", "steps")
        if self.held < 4 * self.rows:
            raise ValueError(f"held is {self.held}: four calls at a time need {4 * self.rows} or more")

    def run(self) -> dict[str, Any]:
        """Measure the part."""
        return {"calls": self._calls, "link": self._link, "large": self._large}[self.part]()

    def _calls(self) -> dict[str, Any]:
        tcp, default = (self._calls_over(default) for default in (False, True))
        over_floor, cpu = {}, {}
        for name in ("get", "put"):
            over_floor[name] = _ratio(tcp[name]["p50_ms"], tcp["floor"]["p50_ms"])
            used = tcp[name]["owner_cpu_ms"] + tcp[name]["node_cpu_ms"]
            cpu[f"{name}_cpu_vs_floor"] = _ratio(used, tcp["floor"]["owner_cpu_ms"])
            cpu[f"{name}_default_vs_floor"] = _ratio(default[name]["p50_ms"], default["floor"]["p50_ms"])
        over = [f"{name} ({ratio})" for name, ratio in over_floor.items() if ratio > BOUND]
        return result(
            "serve", self, "part rows held calls", dim=self.dim or 64,
            **{f"{name}_vs_floor": ratio for name, ratio in over_floor.items()}, **cpu, tcp=tcp, default=default,
            failed=f"above {BOUND} times the floor: {', '.join(over)}" if over else None,
        )  # fmt: skip

    def _calls_over(self, default: bool) -> dict[str, Any]:
        """Measure a node with one core at each end if there are two."""
        cores = sorted(os.sched_getaffinity(0))
        words = (__file__, "node") if default else SERVE
        within = ("taskset", "-c", str(cores[-1])) if len(cores) > 1 else ()
        with StartedNodes(1, within=within, words=words) as nodes:
            task = (nodes.spec, nodes.processes[0].pid, self.rows, self.dim or 64, self.held, self.calls, default)
            return child([__file__, "calls", json.dumps(task)], {"TORCH_CPP_LOG_LEVEL": "FATAL"})

    def _link(self) -> dict[str, Any]:
        if why := why_not():
            raise OSError(f"links is {self.links}, and {why}: run it where they can be made")
        points = [self._point(link) for link in self.links]
        failed = [point["failed"] for point in points if point["failed"]]
        return result(
            "serve", self, "part links rounds",
            vs_roof=[point["vs_roof"] for point in points],
            on_demand_to_bytes=[point["on_demand_to_bytes"] for point in points],
            points=points, failed=failed[0] if failed else None,
        )  # fmt: skip

    def _point(self, link: str) -> dict[str, Any]:
        flags = {
            "dim": self.dim or 64, "batch": self.batch or 2048, "cache": self.cache or "touched:10%",
            "rounds": self.rounds, "warm": self.warm, "slice": self.slice,
        }  # fmt: skip
        with two_namespaces(Link.parse(f"{link},0us").rate) as (mine, other):
            within = ("ip", "netns", "exec", other)
            with StartedNodes(1, host=ADDRESS.format(2), within=within, patience=PATIENCE) as nodes:
                words = [json.dumps(flags), link, nodes.spec, str(nodes.processes[0].pid)]
                ran = subprocess.run(
                    ["ip", "netns", "exec", mine, sys.executable, __file__, "link", *words],
                    stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"SKIRL_PATIENCE": f"{PATIENCE:g}"},
                )  # fmt: skip
        return {"link": link, **json.loads(ran.stdout.splitlines()[-1])}

    def _large(self) -> dict[str, Any]:
        cache, most, began = self.cache or "256MB", dict[str, int](), time.monotonic()
        self.folder.mkdir(parents=True)
        try:
            rows = f"disk:{self.folder.absolute()}/{{}}"
            with StartedNodes(self.nodes, rows=rows, patience=PATIENCE, log=self.folder) as nodes:
                team = self._team(nodes.spec, cache)
                try:
                    while any(trainer.poll() is None for trainer in team):
                        pids = {f"trainer {rank}": trainer.pid for rank, trainer in enumerate(team)}
                        for node in range(self.nodes):
                            pids |= {f"node {node}, process {n}": pid for n, pid in enumerate(nodes.family(node))}
                        for name, pid in pids.items():
                            most[name] = max(most.get(name, 0), private_memory_of(pid))
                        time.sleep(0.25)
                finally:
                    for trainer in team:
                        trainer.kill()
                        trainer.wait()
                on_disk = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            if any(trainer.returncode for trainer in team):
                raise RuntimeError(f"a trainer failed: {(self.folder / 'trainer-0.log').read_text()[-2000:]}")
            found = json.loads((self.folder / "trainer-0.out").read_text().splitlines()[-1])
        finally:
            shutil.rmtree(self.folder)
        held = found["rows"]
        touched = held["touched"] * held["bytes_of_all"] // held["tables"]
        times = touched / (self.trainers * parse_bytes(cache))
        wrong = [f"{name} took {size(took)}" for name, took in most.items() if took > LIMITS[name.partition(" ")[0]]]
        wrong += [] if times >= self.times else [f"touched rows are {times:.1f} times the caches: raise steps"]
        return result(
            "serve", self, "part trainers nodes steps", cache=cache, touched=held["touched"], touched_bytes=touched,
            times_cache=round(times, 2), fetched=found["counters"]["fetched"], on_disk=on_disk, memory=most,
            limits=LIMITS, seconds=round(time.monotonic() - began, 1), failed="; ".join(wrong) or None,
        )  # fmt: skip

    def _team(self, spec: str, cache: str) -> list[Any]:
        words = {
            "data": "synthetic:criteo-kaggle", "model": "dlrm-tiny", "dim": self.dim or 256, "batch": self.batch or 4096,
            "steps": self.steps, "cache": cache, "optimizer": "adam", "shards": self.trainers, "threads": 1,
            "store": spec, "run": "none",
        }  # fmt: skip
        flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        job = {"WORLD_SIZE": self.trainers, "LOCAL_WORLD_SIZE": self.trainers, "MASTER_ADDR": "127.0.0.1"}
        job |= {"MASTER_PORT": free_port(), "SKIRL_PATIENCE": f"{PATIENCE:g}", "OMP_NUM_THREADS": 1}
        team = []
        for rank in range(self.trainers):
            env = os.environ | {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            out, log = (self.folder / f"trainer-{rank}.{name}" for name in ("out", "log"))
            with out.open("w") as to, log.open("w") as errors:
                command = [sys.executable, "-m", "skirl", "train", *flags, "--json", "--quiet"]
                team.append(subprocess.Popen(command, env=env, stdout=to, stderr=errors))
        return team


def measured(spec: str, node: int, rows: int, dim: int, held: int, calls: int, default: bool) -> dict[str, Any]:
    """Return times of calls in turns with the floor, calls per second, CPU time at both ends, and what waiting costs."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1] if len(cores) > 1 else cores)
    if default:
        group.TRANSPORTS.clear()
    rng = np.random.default_rng(0)
    table = rng.random((held, dim), np.float32)
    picks = rng.permutation(held)[: held // rows * rows].reshape(-1, rows)
    with open_store(spec, {0: Record(dim)}, rows={0: held}) as store:
        for pick in picks:
            store.write(pick, table[pick])
        out = np.empty((rows, dim), np.float32)
        if not store.read(picks[-1], out).all() or (out != table[picks[-1]]).any():
            raise AssertionError("rows came back with other bits: no ratio is given")
        facts = _in_turns(store, node, table, picks, calls, out)
        for name, call in (("get", store.read), ("put", store.write)):
            facts[name]["calls_s"] = {n: _rate(call, picks, dim, calls, n) for n in FLIGHTS}
        spent, own = cpu_of(family(node)), time.process_time()
        time.sleep(REST)
        rest = {"node": (cpu_of(family(node)) - spent) / REST, "owner": (time.process_time() - own) / REST}
        return facts | {"idle_cpu_share": {name: round(share, 4) for name, share in rest.items()}}


def _in_turns(store: Store, node: int, table: Any, picks: Any, calls: int, out: Any) -> dict[str, Any]:
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
    took: dict[str, list[tuple[float, float, float]]] = {name: [] for name in each}
    pids = family(node)
    for number in range(-3, calls):
        for name, call in each.items():
            before = cpu_of(pids)
            with Stopwatch() as watch:
                call(picks[number % len(picks)])
            if number >= 0:
                took[name].append((1e3 * watch.seconds, 1e3 * watch.cpu, 1e3 * (cpu_of(pids) - before)))
    facts = {}
    for name, times in took.items():
        ms, owner, at_node = zip(*times, strict=True)
        facts[name] = {
            "p50_ms": round(statistics.median(ms), 3),
            "p99_ms": round(sorted(ms)[min(len(ms) - 1, int(0.99 * len(ms)))], 3),
            "owner_cpu_ms": round(statistics.mean(owner), 3),
            "node_cpu_ms": round(statistics.mean(at_node), 3),
        }
    return facts


def _rate(call: Callable[..., Any], picks: Any, dim: int, calls: int, flights: int) -> float:
    """Return calls per second with `flights` in flight, each for rows of its own."""

    def some(first: int) -> None:
        mine = picks[first::flights]
        out = np.zeros((picks.shape[1], dim), np.float32)
        for number in range(first, calls, flights):
            call(mine[number % len(mine)], out)

    with ThreadPoolExecutor(flights) as threads, Stopwatch() as watch:
        list(threads.map(some, range(flights)))
    return round(calls / watch.seconds, 1)


def private_memory_of(pid: int) -> int:
    """Return the bytes of a process's memory that no file backs, or 0 if the process is gone."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) << 10
    return 0


def _ratio(above: float, below: float) -> float:
    return round(above / below, 3)


@dataclass(frozen=True)
class OverWire(TrainSpeed):
    """Training with rows that cross a network device to a node on this machine."""

    wire: Link | None = None
    """The network's rate, for the roof; nothing is emulated."""
    beside: int = 0
    """The node's process id, whose CPU time counts as well."""

    def _setting(self) -> tuple[ModeSettings, list[int]]:
        setting, rows = super()._setting()
        return replace(setting, wire=self.wire, beside=self.beside), rows


def over_link(flags: str, link: str, spec: str, node: str) -> dict[str, Any]:
    """Train over the link and return the figures."""
    more = {"store": spec, "modes": "skirl,resident,on_demand", "threads": 1}
    found = OverWire(**json.loads(flags), **more, wire=Link.parse(f"{link},0us"), beside=int(node)).run()
    names = ("vs_on_demand", "byte_ratio_on_demand", "roof", "losses_agree", "failed")
    return {name: found[name] for name in names} | {
        "vs_roof": round(1 / found["vs_roof"], 4),
        "bound": max(found["roof"], key=lambda name: found["roof"][name]),
        "on_demand_to_bytes": round(found["vs_on_demand"] / found["byte_ratio_on_demand"], 4),
        "ms": {name: facts["ms_per_step"] for name, facts in found["modes"].items()},
    }


def with_defaults(pipe: Any, numbers: Any, task: part.PartFacts) -> None:
    """Run a part of a node that talks over torch's default transports."""
    group.TRANSPORTS.clear()
    part.run(pipe, numbers, task)


def serve(words: list[str]) -> None:
    """Do what `skirl serve` does with these words, over torch's default transports, until killed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    address, given = Address.meeting(words[0]), dict(zip(words[1::2], words[2::2]))
    patience, number = float(given["--patience"]), int(given["--node"])
    meeting = Meeting(address, keep=number == 0, seconds=patience)
    node = Node(meeting, number, int(given["--nodes"]), rows=given["--rows"], patience=patience, body=with_defaults)
    try:
        while True:
            node.tick()
            time.sleep(TICK)
    finally:
        node.kill()


if __name__ == "__main__":
    match sys.argv[1:2]:
        case ["node"]:
            serve(sys.argv[2:])
        case ["calls"]:
            print(json.dumps(measured(*json.loads(sys.argv[2]))))
        case ["link"]:
            print(json.dumps(over_link(*sys.argv[2:])))
        case _:
            main(ServeSpeed)
