"""`skirl simulate`: predict the time of a step with many trainers from counted traffic and measured or given costs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from skirl.measure.bench.helpers import at_least_one, result


@dataclass(frozen=True)
class Simulate:
    """Flags of `skirl simulate`."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "machine": ("message_us", "cores"),
        "output": ("json",),
    }

    trainers: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)
    """Numbers of trainers to simulate a step for."""
    samples: int = 2048
    """Samples per trainer in a step: the batch grows with the number of trainers."""
    link: str = "10Gbit,50us"
    """Rate and delay of each trainer's link to the others."""
    dim: int = 48
    """Numbers in a row."""
    dense: int = 2_400_000
    """Dense weights of the model."""
    compute_ms: float = 0.0
    """Milliseconds that one trainer with all rows takes for a step; 0 measures it here, on one thread."""
    message_us: float = 0.0
    """Microseconds of CPU time to send one message and receive one; 0 measures it here, over loopback."""
    cores: float = 0.0
    """Cores of each trainer; 0: as many as this machine has."""
    executed: tuple[int, ...] = ()
    """Numbers of trainers, powers of two, with which to really train on this machine and compare with the prediction."""
    seed: int = 0
    """Seed of the ids, whose skew is that of Criteo Kaggle."""
    plot: Path | None = None
    """An .svg file to write the curve to."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        from skirl.store.link import Link

        at_least_one(self, "samples", "dim", "dense")
        if not self.trainers or list(self.trainers) != sorted(set(self.trainers)) or self.trainers[0] < 1:
            raise ValueError(f"trainers is {self.trainers}: set it to rising numbers of 1 or more")
        if min(self.compute_ms, self.message_us, self.cores) < 0:
            raise ValueError("compute_ms, message_us or cores is below 0: set it to 0, to measure it, or to more")
        if any(count < 2 or count & (count - 1) for count in self.executed):
            raise ValueError(f"executed is {self.executed}: set it to powers of two, from 2 on")
        if self.plot is not None and self.plot.suffix != ".svg":
            raise ValueError(f"plot is {str(self.plot)!r}: set it to a file that ends with .svg")
        Link.parse(self.link)

    def run(self) -> dict[str, Any]:
        """Count the traffic, measure the costs, and return the predictions."""
        from skirl.measure.scaling import machine_costs, traffic
        from skirl.measure.scaling.iteration import StepCosts, bends, changes, shares, step_of
        from skirl.measure.scaling.picture import drawn
        from skirl.store.link import Link
        from skirl.tools.machine import machine

        traffic.compiled()
        compute = cpu = self.compute_ms / 1e3
        if not compute:
            compute, cpu = machine_costs.computed(self.samples, self.dim, self.dense, self.seed)
        message, byte = (self.message_us / 1e6, 0.0) if self.message_us else machine_costs.talked()
        costs = StepCosts(compute, cpu, message, byte, self.cores or machine()["cores"])
        link = Link.parse(self.link)
        counted = [traffic.traffic_of(n, self.samples, self.dim, self.dense, self.seed) for n in self.trainers]
        steps = [step_of(one, costs, link) for one in counted]
        waiting = [step_of(traffic.all_critical(one), costs, link) for one in counted]
        if self.plot is not None:
            self.plot.write_text(drawn(counted, steps, waiting, self.link))
        return result(
            "simulate",
            self,
            "trainers samples link dim dense seed",
            costs=asdict(costs),
            step_ms={str(s.trainers): 1e3 * s.seconds for s in steps},
            all_critical_ms={str(s.trainers): 1e3 * s.seconds for s in waiting},
            bound={str(s.trainers): s.bound for s in steps},
            parts_ms={str(s.trainers): {name: 1e3 * part for name, part in s.parts.items()} for s in steps},
            bytes=traffic.table(counted),
            shares={str(one.trainers): shares(one) for one in counted},
            vectors={str(one.trainers): one.vectors for one in counted},
            plan_ms={str(one.trainers): one.plan_ms for one in counted},
            busiest={str(one.trainers): one.busiest for one in counted},
            bends=bends(steps),
            changes=changes(steps),
            executed=[self._executed(n, costs) for n in self.executed],
        )

    def _executed(self, count: int, costs: Any) -> dict[str, Any]:
        """Train with `count` processes on this machine and compare with the prediction for its cores."""
        from dataclasses import replace

        from skirl.measure.bench.limited import Job
        from skirl.measure.bench.link import judged, measured
        from skirl.measure.scaling.iteration import step_of
        from skirl.measure.scaling.traffic import traffic_of
        from skirl.store.link import Link
        from skirl.tools.machine import machine

        # Predict what is measured: fewer rows, and cores that all trainers share.
        job = Job(self.dense, count * self.samples, self.dim, read=8, steps=8, rounds=3, seed=self.seed)
        [ranks] = measured(count, [job], ("hidden",))
        seen = judged(ranks, ("hidden",), Link())["ways"]["hidden"]
        traffic = traffic_of(count, self.samples, self.dim, self.dense, self.seed, job.rows_scale)
        alone = [rank["local"] for rank in ranks]
        shared = replace(
            costs,
            compute=max(one["seconds"] for one in alone),
            cpu=sum(one["cpu"] for one in alone) / count,
            cores=machine()["cores"] / count,
        )
        predicted = step_of(traffic, shared, Link())
        moved = seen["bytes"]
        return {
            "trainers": count,
            "predicted_ms": 1e3 * predicted.seconds,
            "measured_ms": 1e3 * seen["seconds"],
            "predicted_cpu_ms": 1e3 * predicted.parts["cores"] * shared.cores,
            "measured_cpu_ms": 1e3 * seen["roof"]["cores"] * shared.cores,
            "predicted_row_bytes": sum(traffic.bytes[kind] for kind in traffic.bytes if kind[:4] in ("valu", "grad")),
            "measured_row_bytes": sum(moved.get(name, 0) for name in ("rows", "moves")) / count,
            "predicted_dense_bytes": traffic.bytes["dense"],
            "measured_dense_bytes": moved["dense"] / count,
            "bound": predicted.bound,
        }

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        lines = {}
        for count, ms in result["step_ms"].items():
            size, parts = result["bytes"][count], result["parts_ms"][count]
            lines[f"{count} trainers"] = (
                f"{ms:.1f} ms a step, bound by {result['bound'][count]}; {result['all_critical_ms'][count]:.1f} ms if "
                f"all rows were critical\n{sum(size.values()) / 1e6:.1f} MB from each, "
                f"{100 * result['shares'][count]['waited_for']:.0f}% waited for; planning {parts['planning']:.1f} ms"
            )
        lines["it bends"] = result["bends"]
        return lines | {f"{facts['trainers']} executed": _beside(facts) for facts in result["executed"]}


def _beside(facts: dict[str, Any]) -> str:
    pairs: Sequence[tuple[str, str, float]] = (
        ("ms a step", "ms", 1.0), ("ms of CPU", "cpu_ms", 1.0), ("MB of rows", "row_bytes", 1e6),
        ("MB of dense", "dense_bytes", 1e6),
    )  # fmt: skip
    return "; ".join(
        f"{facts[f'predicted_{name}'] / unit:.2f} {what} predicted, {facts[f'measured_{name}'] / unit:.2f} measured"
        for what, name, unit in pairs
    )
