"""A slow link to a memory node, and how well skirl hides it: trainer and node have a network namespace each.

`python -m skirl.measure.bench.serve_link FLAGS LINK STORE PID` trains within the trainer's namespace.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from skirl.measure.bench.helpers import at_least_one, result
from skirl.measure.bench.namespaces import ADDRESS, two_namespaces, why_not
from skirl.measure.bench.train import TrainSpeed

if TYPE_CHECKING:
    from skirl.measure.bench.modes import ModeSettings
    from skirl.store.link import Link

PATIENCE = 300.0
"""Seconds that a call may take; long, since no node is expected to fail here."""
MODES = "skirl,resident,on_demand"
SAID = ("vs_roof", "vs_on_demand", "byte_ratio_on_demand", "roof", "losses_agree", "failed")


@dataclass(frozen=True)
class ServeLink:
    """Training over links of limited rate to one memory node, against all rows resident and rows on demand."""

    links: tuple[str, ...] = ("1Gbit", "10Gbit")
    """Rates of the link between trainer and node, in each direction."""
    model: str = "tiny"
    """The model: dlrm has the sizes of the paper, tiny a few thousand weights."""
    batch: int = 2048
    """Samples in a step."""
    dim: int = 64
    """Numbers in a row."""
    cache: str = "touched:10%"
    """Rows on the device: a number, or a share of the rows that the run touches."""
    rounds: int = 6
    """Turns of each mode."""
    warm: int = 24
    """Steps before the first turn."""
    slice: int = 8
    """Steps in a turn."""
    prefetch: int = 2
    """Number of steps ahead that rows are fetched."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "batch", "dim", "rounds", "warm", "slice")
        for link in self.links:
            _link(link)

    def run(self) -> dict[str, Any]:
        """Measure each link in sequence and return the figures."""
        if why := why_not():
            raise OSError(f"links is {self.links}, and {why}: run it where they can be made")
        points = [self._point(link) for link in self.links]
        failed = [point["failed"] for point in points if point["failed"]]
        return result(
            "serve-link",
            self,
            "links model batch dim cache rounds",
            vs_roof=[point["vs_roof"] for point in points],
            on_demand_to_bytes=[point["on_demand_to_bytes"] for point in points],
            points=points,
            failed=failed[0] if failed else None,
        )

    def _point(self, link: str) -> dict[str, Any]:
        from skirl.store.remote.started import StartedNodes

        flags = asdict(self)
        words = [
            json.dumps(
                {
                    name: flags[name]
                    for name in ("model", "batch", "dim", "cache", "rounds", "warm", "slice", "prefetch")
                }
            )
        ]
        with two_namespaces(_link(link).rate) as (mine, other):
            within = ("ip", "netns", "exec", other)
            with StartedNodes(1, host=ADDRESS.format(2), within=within, patience=PATIENCE) as nodes:
                words += [link, nodes.spec, str(nodes.processes[0].pid)]
                ran = subprocess.run(
                    ["ip", "netns", "exec", mine, sys.executable, "-m", "skirl.measure.bench.serve_link", *words],
                    stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"SKIRL_PATIENCE": f"{PATIENCE:g}"},
                )  # fmt: skip
        if ran.returncode:
            raise RuntimeError(f"the measuring process ended with exit code {ran.returncode}; it said why above")
        return {"link": link, **json.loads(ran.stdout.splitlines()[-1])}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        return {
            point[
                "link"
            ]: f"{point['vs_roof']:.3f} roofs ({point['bound']}); {point['vs_on_demand']:.2f} times on demand's speed, "
            f"which moves {point['byte_ratio_on_demand']:.2f} times the bytes; roof {json.dumps(point['roof'])} ms a step; "
            + ", ".join(f"{name} {ms:.1f} ms" for name, ms in point["ms"].items())
            for point in result["points"]
        }


@dataclass(frozen=True)
class OverWire(TrainSpeed):
    """The training benchmark with rows that cross a network device to a node on this machine."""

    wire: "Link | None" = None
    """The network's rate, for the roof; nothing is emulated."""
    beside: int = 0
    """The node's process id, whose CPU time counts as well."""

    def _setting(self) -> "tuple[ModeSettings, list[int]]":
        setting, rows = super()._setting()
        return replace(setting, wire=self.wire, beside=self.beside), rows


def _link(rate: str) -> "Link":
    from skirl.store.link import Link

    return Link.parse(f"{rate},0us")


def main(flags: str, link: str, spec: str, node: str) -> None:
    """Train over the link and print the figures as a line of JSON."""
    flagged = {**json.loads(flags), "store": spec, "modes": MODES, "threads": 1}
    found = OverWire(**flagged, wire=_link(link), beside=int(node)).run()
    said = {name: found[name] for name in SAID} | {"vs_roof": round(1 / found["vs_roof"], 4)}
    said["bound"] = max(found["roof"], key=lambda name: found["roof"][name])
    said["on_demand_to_bytes"] = round(found["vs_on_demand"] / found["byte_ratio_on_demand"], 4)
    print(json.dumps(said | {"ms": {name: facts["ms_per_step"] for name, facts in found["modes"].items()}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
