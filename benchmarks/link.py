"""A slow link between trainers, and how well skirl hides it: step time against what compute, bytes and cores allow."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skirl.measure.bench.helpers import WAYS, at_least_one, result
from skirl.measure.bench.namespaces import trained, two_namespaces, why_not
from skirl.tools.machine import machine
from skirl.train.report.plot import Chart, svg

if TYPE_CHECKING:
    from skirl.measure.bench.limited import Job
    from skirl.store.link import Link

LOOPBACK = "loopback"
RATIOS = {
    "vs_roof": "the time of a step relative to its roof, the least that compute, wire and cores allow",
    "critical_share": "share of a step that waits for critical rows",
    "vs_all_critical": "the same run with nothing sent early or late, relative to this one",
}
"""The ratios reported for each link and dense size."""


@dataclass(frozen=True)
class LinkSpeed:
    """Flags of `skirl bench link`."""

    links: tuple[str, ...] = ("1Gbit,0us", "10Gbit,0us")
    """Rate and delay of each link to measure, such as 1Gbit,100us; loopback sets no limit."""
    dense: tuple[int, ...] = (100_000, 400_000, 1_600_000)
    """Numbers of dense weights in the model, one measurement for each."""
    batch: int = 4096
    """Samples in a step, over both trainers."""
    dim: int = 64
    """Numbers in a row."""
    steps: int = 16
    """Steps in a turn."""
    rounds: int = 3
    """Timed turns of each way."""
    ways: tuple[str, ...] = WAYS
    """hidden: as skirl trains; all_critical: nothing travels early or late."""
    seed: int = 0
    """Seed of ids and weights."""
    plot: Path | None = None
    """An .svg file to write charts to: the ratios, with a line for each link, and the time of a step, by dense size."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        from skirl.store.link import Link

        at_least_one(self, "batch", "dim", "steps", "rounds")
        for link in self.links:
            if link != LOOPBACK:
                Link.parse(link)
        if not self.dense or min(self.dense) < 1:
            raise ValueError(f"dense is {self.dense}: set it to numbers of 1 or more")
        if not self.ways or any(way not in WAYS for way in self.ways):
            raise ValueError(f"ways is {self.ways}: set it to some of {', '.join(WAYS)}")
        if self.plot is not None and self.plot.suffix != ".svg":
            raise ValueError(f"plot is {str(self.plot)!r}: set it to a file that ends with .svg")

    def run(self) -> dict[str, Any]:
        """Measure each link with each dense size in sequence and return the figures."""
        if any(link != LOOPBACK for link in self.links) and (why := why_not()):
            raise OSError(f"links is {self.links}, and {why}: set it to {LOOPBACK}, which needs none")
        points = [point for link in self.links for point in self._points(link)]
        if self.plot is not None:
            self.plot.write_text(drawn(points))
        worst = max(point["vs_roof"] for point in points)
        return result(
            "link",
            self,
            "links dense batch dim steps rounds ways seed",
            vs_roof=worst,
            critical_share=max(point["critical_share"] for point in points),
            vs_all_critical=[point["vs_all_critical"] for point in points],
            points=points,
        )

    def _points(self, link: str) -> list[dict[str, Any]]:
        """Measure one link and return a point for each dense size."""
        from skirl.measure.bench.limited import Job
        from skirl.store.link import Link

        emulated = Link() if link == LOOPBACK else Link.parse(link)
        jobs = [
            Job(dense, self.batch, self.dim, steps=self.steps, rounds=self.rounds, delay=emulated.delay, seed=self.seed)
            for dense in self.dense
        ]
        with nullcontext([]) if link == LOOPBACK else two_namespaces(emulated.rate) as names:
            ranks = measured(2, jobs, self.ways, names)
        return [
            {"link": link, "dense": dense, **judged(of_all, self.ways, emulated)}
            for dense, of_all in zip(self.dense, ranks)
        ]

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        lines = {}
        for point in result["points"]:
            ways = "".join(
                f"\n{way}: {1e3 * facts['seconds']:.1f} ms, {facts['vs_roof']:.2f} of the roof; "
                f"{100 * facts['critical_share']:.0f}% for critical rows, {100 * facts['dense_share']:.0f}% for dense"
                for way, facts in point["ways"].items()
            )
            roof = point["ways"][self.ways[0]]["roof"]
            ratios = ", ".join(f"{name} {point[name]:.2f}" for name in RATIOS if point[name] is not None)
            lines[f"{point['link']}, {point['dense']:,} dense"] = (
                f"{ratios}\nroof {1e3 * max(roof.values()):.1f} ms: compute {1e3 * roof['compute']:.1f}, wire "
                f"{1e3 * roof['wire']:.1f}, cores {1e3 * roof['cores']:.1f}{ways}"
            )
        return lines


def measured(size: int, jobs: "Sequence[Job]", ways: Sequence[str], namespaces: Sequence[str] = ()) -> list[Any]:
    """Run the jobs in a process per trainer. Return, for each job, what each trainer measured.

    **Arguments**

    - `size`: the number of trainers.
    - `jobs`: the jobs, done in sequence.
    - `ways`: as for `judged`.
    - `namespaces`: as for `trained`.
    """
    words = [json.dumps([asdict(job) for job in jobs]), ",".join(ways)]
    return list(zip(*trained(size, "skirl.measure.bench.limited", words, namespaces)))


def judged(ranks: Sequence[dict[str, Any]], ways: Sequence[str], link: "Link", cores: int = 0) -> dict[str, Any]:
    """Compare the time of a step with its roof, the least that compute, wire and cores allow.

    **Arguments**

    - `ranks`: what each trainer measured.
    - `ways`: the ways that were measured; the headline ratios are those of the first.
    - `link`: the link between each trainer and the others.
    - `cores`: the cores that all trainers share; 0 for all of this machine's.
    """
    local = max(rank["local"]["seconds"] for rank in ranks)
    out = {way: _judged(local, [rank[way] for rank in ranks], link, cores or machine()["cores"]) for way in ways}
    first = out[ways[0]]
    both = all(way in out for way in WAYS)
    return {
        "vs_roof": first["vs_roof"],
        "bound": first["bound"],
        "critical_share": first["critical_share"],
        "vs_all_critical": out["all_critical"]["seconds"] / out["hidden"]["seconds"] if both else None,
        "ways": out,
    }


def _judged(local: float, together: Sequence[dict[str, Any]], link: "Link", cores: int) -> dict[str, Any]:
    busiest = max(sum(rank[way].values()) for rank in together for way in ("sent", "received"))
    roof = {
        "compute": local,
        "wire": busiest / link.rate,
        "cores": sum(rank["cpu"] for rank in together) / cores,
    }
    seconds = max(rank["seconds"] for rank in together)
    shares = {name: max(rank["waited"][name] for rank in together) / seconds for name in together[0]["waited"]}
    return {
        "seconds": seconds,
        "roof": roof,
        "bound": max(roof, key=lambda name: roof[name]),
        "vs_roof": seconds / max(roof.values()),
        "critical_share": shares["rows"],
        "dense_share": shares["dense"],
        "waited_share": shares,
        "bytes": {name: sum(rank["sent"][name] for rank in together) for name in together[0]["sent"]},
    }


def drawn(points: Sequence[dict[str, Any]]) -> str:
    """Return charts over dense sizes: each ratio with a line per link, then for each link the step time of each way and
    the roof."""
    links, charts = list(dict.fromkeys(point["link"] for point in points)), []
    for name, what in RATIOS.items():
        lines = {
            link: [
                (point["dense"], point[name]) for point in points if point["link"] == link and point[name] is not None
            ]
            for link in links
        }
        if any(lines.values()):
            charts.append(Chart(f"{name}: {what}", "dense numbers", lines, log=(True, False)))
    for link in links:
        mine = [point for point in points if point["link"] == link]
        lines = {
            way.replace("_", " "): [(point["dense"], 1e3 * point["ways"][way]["seconds"]) for point in mine]
            for way in mine[0]["ways"]
        }
        roofs = [
            (point["dense"], 1e3 * max(point["ways"][next(iter(point["ways"]))]["roof"].values())) for point in mine
        ]
        charts.append(Chart(link, "dense numbers", {**lines, "~roof": roofs}, y="ms a step"))
    return svg(charts)
