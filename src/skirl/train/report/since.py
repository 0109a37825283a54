"""A line of metrics: what happened in a run since the previous line."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from skirl.pipeline.lookahead import Lookahead
from skirl.train.meter import Meter


class Since:
    """Makes lines of what happened since the previous one. Part of a checkpoint, which may lie between two lines."""

    def __init__(self) -> None:
        self.step = 0
        """The step of the previous line; 0 if there is none."""
        self._of: tuple[Lookahead, Meter] | None = None
        self._held: dict[str, Any] = {}
        """A checkpoint's part of the next line."""
        self._seconds: dict[tuple[str, str], float] = {}
        self._steps = self._samples = 0
        self._losses = 0.0
        self._repeats = (0, 0)
        self._at = 0.0

    def begin(self, batches: Lookahead, meter: Meter) -> None:
        """Count the next line from here, or from where the loaded run began to count it."""
        self._of = batches, meter
        self._seconds = _seconds_of(batches)
        self._steps, self._samples, self._losses = meter.steps, meter.samples, meter.losses
        self._repeats = meter.repeats.counted
        self._at = meter.seconds
        if held := self._held:
            self.step, self._steps, self._samples = held["step"], held["steps"], held["samples"]
            self._losses, self._repeats = held["losses"], held["repeats"]
            self._at -= held["seconds"]
            for name, spent in held["spent"].items():
                self._seconds[name] = self._seconds.get(name, 0.0) - spent
            self._held = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: where the next line begins, and the seconds in it so far."""
        if self._of is None:
            return {}
        batches, meter = self._of
        spent = [[*name, now - self._seconds.get(name, 0.0)] for name, now in _seconds_of(batches).items()]
        return {
            "step": self.step, "steps": self._steps, "samples": self._samples, "losses": self._losses,
            "repeats": list(self._repeats), "seconds": meter.seconds - self._at, "spent": spent,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the line during which the checkpoint was saved, or with a new one if the state is empty."""
        if not state:
            self._held = {}
            return
        ids, distinct = state["repeats"]
        self._held = {name: int(state[name]) for name in ("step", "steps", "samples")} | {
            "losses": float(state["losses"]),
            "repeats": (int(ids), int(distinct)),
            "seconds": float(state["seconds"]),
            "spent": {(str(kind), str(stage)): float(seconds) for kind, stage, seconds in state["spent"]},
        }

    def line(self, batches: Lookahead, meter: Meter) -> dict[str, Any]:
        """Return the next line."""
        engine, now, moved = batches.engine, _seconds_of(batches), batches.engine.counters
        spent = {name: seconds - self._seconds.get(name, 0.0) for name, seconds in now.items()}
        steps, samples = meter.steps - self._steps, meter.samples - self._samples
        seconds = meter.seconds - self._at
        loss = (meter.losses - self._losses) / max(1, steps)
        factor = meter.repeats.factor(self._repeats)
        self.begin(batches, meter)
        self.step = batches.step
        busy, blame = ({stage: spent[kind, stage] for stage in times} for kind, times in _stages(batches).items())
        total = sum(busy.values())
        scores = asdict(meter.metrics.scores())
        del scores["samples"]
        return {
            "kind": "train",
            "step": batches.step,
            "samples": meter.samples,
            "seconds": seconds,
            "samples_per_second": samples / max(seconds, 1e-9),
            "loss": loss,
            **scores,
            **{name: getattr(moved, name) for name in ("fetched", "new", "written", "forwarded")},
            "touched": len(engine.seen),
            "filled": sum(c.filled for c in engine.caches) / max(1, sum(len(c) for c in engine.caches)),
            "hidden": max(0.0, 1.0 - (spent["loop", "stall"] + busy["load"]) / total) if total else 1.0,
            "stall": spent["loop", "stall"],
            "read": spent["loop", "read"],
            "busy": busy,
            "blame": blame,
            "window": batches.window,
            **({} if factor is None else {"factor": factor}),
        }


def _stages(batches: Lookahead) -> dict[str, dict[str, float]]:
    return {"busy": batches.times.busy, "blame": batches.times.blame}


def _seconds_of(batches: Lookahead) -> dict[tuple[str, str], float]:
    """Return all times by kind and stage."""
    times = batches.times
    loop = {("loop", "stall"): times.stall, ("loop", "read"): times.read}
    return loop | {(kind, stage): s for kind, stages in _stages(batches).items() for stage, s in stages.items()}
