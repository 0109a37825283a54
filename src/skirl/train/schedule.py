"""Learning rates of rows and dense weights, which change over a run by one schedule."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR

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
        self.schedule = schedule
        # A lambda has no state to save. LambdaLR would save the state of a schedule, and load it over another one's.
        self._torch = {
            name: LambdaLR(optimizer, lambda step: schedule.factor(step))
            for name, optimizer in (("rows", rows), ("dense", dense))
        }
        self._bases = {name: list(each.base_lrs) for name, each in self._torch.items()}

    @property
    def now(self) -> dict[str, float]:
        return {name: float(each.optimizer.param_groups[0]["lr"]) for name, each in self._torch.items()}

    def step(self) -> None:
        for each in self._torch.values():
            each.step()

    def state_dict(self) -> dict[str, Any]:
        kept = {name: each.state_dict() for name, each in self._torch.items()}
        return {"kind": self.schedule.kind, "warmup": self.schedule.warmup, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Kind and warm-up must be the same; the peak rates and the number of steps stay as they are here."""
        for flag, name in (("schedule", "kind"), ("warmup", "warmup")):
            here = getattr(self.schedule, name)
            if state[name] != here:
                raise ValueError(f"--{flag} is {here}, the run was saved with {state[name]}: set it to that")
        for name, each in self._torch.items():
            each.load_state_dict(state[name])
            each.base_lrs = list(self._bases[name])
            last = each.last_epoch
            for group, base in zip(each.optimizer.param_groups, each.base_lrs, strict=True):
                group["initial_lr"], group["lr"] = base, base * self.schedule.factor(last)
