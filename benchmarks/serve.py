"""Rows over PyTorch RPC: whole calls to a memory node against a gather and a memcpy, over TCP and torch's default."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from skirl.measure.bench.helpers import at_least_one, child, result

DEFAULT = ("-m", "skirl.measure.bench.serve_node")
"""Command that runs a node with torch's default transports."""
BOUND = 4.5
"""The median call over TCP may take at most this many times the floor."""


@dataclass(frozen=True)
class ServeSpeed:
    """Calls to one memory node on this machine, with one core at each end if there are two.

    Fails if the median call over TCP takes more than 4.5 times the floor.
    """

    rows: int = 20_000
    """Rows in a call."""
    dim: int = 64
    """Numbers in a row."""
    held: int = 1_000_000
    """Rows that the node holds."""
    calls: int = 300
    """Timed calls of each kind."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "rows", "dim", "calls")
        if self.held < 4 * self.rows:
            raise ValueError(f"held is {self.held}: four calls at a time need {4 * self.rows} or more")

    def run(self) -> dict[str, Any]:
        """Measure over TCP, then over torch's default transports."""
        tcp, default = self._measured(default=False), self._measured(default=True)
        floor = tcp["floor"]
        over_floor = {name: _ratio(tcp[name]["p50_ms"], floor["p50_ms"]) for name in ("get", "put")}
        return result(
            "serve",
            self,
            "rows dim held calls",
            cores=self._cores(),
            **{f"{name}_vs_floor": ratio for name, ratio in over_floor.items()},
            **{f"{name}_cpu_vs_floor": _ratio(_cpu(tcp[name]), floor["owner_cpu_ms"]) for name in ("get", "put")},
            **{
                f"{name}_default_vs_floor": _ratio(default[name]["p50_ms"], default["floor"]["p50_ms"])
                for name in ("get", "put")
            },
            tcp=tcp,
            default=default,
            failed=too_slow(over_floor),
        )

    def _cores(self) -> list[int]:
        """Return the cores of the owner and of the node; -1 for any."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        return [cores[0], cores[-1]] if len(cores) > 1 else [-1, -1]

    def _measured(self, *, default: bool) -> dict[str, Any]:
        from skirl.measure.bench.serve_calls import Calls

        from skirl.store.remote.started import SERVE, StartedNodes

        owner, core = self._cores()
        within = () if core < 0 else ("taskset", "-c", str(core))
        with StartedNodes(1, within=within, words=DEFAULT if default else SERVE) as nodes:
            calls = Calls(
                nodes.spec, nodes.processes[0].pid, self.rows, self.dim, self.held, self.calls, default, owner
            )
            quiet = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
            return child(["-m", "skirl.measure.bench.serve_calls", json.dumps(asdict(calls))], quiet)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        lines = {
            "calls": f"{self.rows:,} rows of {4 * self.dim} bytes, of {self.held:,} that the node holds",
            "floor": f"{result['tcp']['floor']['p50_ms']:.2f} ms, a gather and a memcpy",
        }
        for name, over in (("tcp", "TCP"), ("default", "torch's default transports")):
            found = result[name]
            for call in ("get", "put"):
                facts = found[call]
                rates = ", ".join(f"{rate:.0f} with {n} in flight" for n, rate in facts["calls_s"].items())
                lines[f"{call} over {over}"] = (
                    f"{facts['p50_ms']:.2f} ms, {_ratio(facts['p50_ms'], found['floor']['p50_ms'])} times the floor; 99% in "
                    f"{facts['p99_ms']:.2f} ms; CPU {facts['owner_cpu_ms']:.2f} ms here and {facts['node_cpu_ms']:.2f} "
                    f"at the node; {rates} a second"
                )
            idle = found["idle_cpu_share"]
            lines[f"idle over {over}"] = (
                f"{100 * idle['owner']:.1f}% of a core here, {100 * idle['node']:.1f}% at the node"
            )
        return lines


def too_slow(over_floor: Mapping[str, float]) -> str | None:
    """Return which calls take too many times the floor, in a sentence, or None.

    >>> too_slow({"get": 2.9, "put": 4.6})
    'above 4.5 times the floor: put (4.6)'
    >>> too_slow({"get": 2.9, "put": 2.6})
    """
    over = [f"{name} ({ratio})" for name, ratio in over_floor.items() if ratio > BOUND]
    return f"above {BOUND} times the floor: {', '.join(over)}" if over else None


def _cpu(facts: dict[str, Any]) -> float:
    return facts["owner_cpu_ms"] + facts["node_cpu_ms"]


def _ratio(above: float, below: float) -> float:
    return round(above / below, 3)
