"""Learning rates of rows and dense weights, which change over a run by one schedule."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["constant", "linear", "cosine", "step"]


@dataclass(frozen=True)
class Schedule:
    """The factor of each step's learning rates."""

    kind: Kind = "constant"
    warmup: int = 0
    """Steps over which it rises to 1, in equal parts."""
    total: int | None = None
    """Steps in the whole run, after which the factor keeps its final value."""

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup}: set it to 0 steps or more")
        if self.kind != "constant" and self.total is None:
            raise ValueError(f"schedule is {self.kind}, which has to know the number of steps in advance: set steps")

    def factor(self, step: int) -> float:
        """In the step that follows `step` others."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        assert self.total is not None
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        if self.kind == "linear":
            return 1.0 - done
        if self.kind == "cosine":
            return (1.0 + math.cos(math.pi * done)) / 2
        return 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01


class Rates:
    """Both learning rates of a run, which follow one schedule. Part of its checkpoint."""

    def __init__(self, schedule: Schedule, *, rows: torch.optim.Optimizer, dense: torch.optim.Optimizer) -> None:
        self.schedule, self._steps = schedule, 0
        self._optimizers = {"rows": rows, "dense": dense}
        self._peaks = {name: [of["lr"] for of in each.param_groups] for name, each in self._optimizers.items()}
        self._set()

    @property
    def now(self) -> dict[str, float]:
        return {name: float(each.param_groups[0]["lr"]) for name, each in self._optimizers.items()}

    def step(self) -> None:
        self._steps += 1
        self._set()

    def _set(self) -> None:
        factor = self.schedule.factor(self._steps)
        for name, each in self._optimizers.items():
            for group, peak in zip(each.param_groups, self._peaks[name], strict=True):
                group["lr"] = peak * factor

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.schedule.kind, "warmup": self.schedule.warmup, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Kind and warm-up must be the same; the peak rates and the number of steps stay as they are here."""
        for flag, name in (("schedule", "kind"), ("warmup", "warmup")):
            here = getattr(self.schedule, name)
            if state[name] != here:
                raise ValueError(f"--{flag} is {here}, the run was saved with {state[name]}: set it to that")
        self._steps = state["steps"]
        self._set()
