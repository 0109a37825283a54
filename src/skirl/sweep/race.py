"""The race: successive halving by the losses of all on the same batches. It knows no model and no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST, MOST = 16, 768
"""Fewest and most batches whose losses are compared: the last three quarters of those so far."""


def difference(place: "VariantPlace") -> str:
    """Return how much higher its loss is than that of rank 1, with the standard error, as text."""
    if place.rank == 1 or place.difference is None or place.diverged:
        return ""
    if place.difference == place.error == 0.0:
        return "seed of rank 1"
    return f"{place.difference:+.5f}" + ("" if place.error is None else f" ± {place.error:.5f}")


@dataclass(frozen=True)
class VariantPlace:
    rank: int
    variant: str
    loss: float | None
    """Mean over the recent batches that nobody had trained on; if it has left, over those before it left."""
    difference: float | None
    """Mean loss of its configuration minus that of rank 1, on the same batches; if it has left, as it was then."""
    error: float | None
    state: str
    """leads, races, or why it has left."""
    held_out: float | None = None
    """Its lowest log loss on the samples held out, while ranks are by that."""
    left: int | None = None
    """The step after which it left; None while it races."""

    @property
    def diverged(self) -> bool:
        return self.state.startswith("diverged")


class Race:
    """A race of variants, compared by their losses on the same batches, taken before anybody trains on their samples.

    Where samples come again, and at the end, `judge` takes losses on samples held out, and ranks and rungs are by these.

    Variants that differ only in the seed are one configuration: their losses are averaged, and they are dropped together.
    If a seed diverges, those that are left stand for the configuration.

    - `rungs`: steps after which only half as many configurations as before may go on.
    - `keep`: configurations that stay to the end, unless they diverge.
    - `again`: whether samples come again: then losses on samples held out decide, not those of training.
    """

    def __init__(
        self,
        names: Sequence[str],
        configurations: Sequence[int] | None = None,
        *,
        rungs: Sequence[int] = (),
        keep: int = 1,
        again: bool = False,
    ) -> None:
        self.names = tuple(names)
        self.rungs, self._keep, self._again = rungs, keep, again
        self.step = 0
        self._of = np.array(range(len(names)) if configurations is None else configurations)
        self._losses: NDArray[np.float64] = np.zeros((0, len(names)))
        """[batches, variants]: of the recent batches, each before anybody trained on it."""
        self._held_out: dict[int, float] = {}
        """By variant: its lowest log loss on the samples held out."""
        self._judged = False
        """Whether ranks are by these."""
        self._gone: dict[int, VariantPlace] = {}
        """By variant that has left, in this order: its place before."""

    @property
    def racing(self) -> list[str]:
        return [name for k, name in enumerate(self.names) if k not in self._gone]

    @property
    def left(self) -> list[VariantPlace]:
        return [*self._gone.values()]

    def see(self, losses: Sequence[float]) -> list[VariantPlace]:
        """Take the losses on one more batch, and return those that leave after it."""
        self.step += 1
        broken = [k for k, loss in enumerate(losses) if k not in self._gone and not isfinite(loss)]
        gone = self._leave(broken, f"diverged at step {self.step:,}")
        values = [nan if k in self._gone else loss for k, loss in enumerate(losses)]
        self._judged &= self._again
        self._losses = np.vstack([self._losses, values])[-min(MOST, max(LEAST, 3 * self.step // 4)) :]
        return gone + (self._drop() if self.step in self.rungs and not self._again else [])

    def judge(self, found: Mapping[str, float | None], *, last: bool) -> list[VariantPlace]:
        """Take the lowest held-out log losses, None if predictions are not finite, and return who leaves or is dropped.
        Ranks are by them if samples come again, and at the end."""
        broken = [self.names.index(name) for name, one in found.items() if one is None]
        why = f"diverged at step {self.step:,}: predictions for the samples held out are not finite"
        gone = self._leave(broken, why)
        self._held_out |= {
            self.names.index(n): loss for n, loss in found.items() if loss is not None and isfinite(loss)
        }
        if self.racing and (last or self._again):
            self._judged = any(k not in self._gone for k in self._held_out)
            gone += self._drop() if self._judged and not last else []
        return gone

    def standing(self) -> list[VariantPlace]:
        """Return the places of all variants, best first. Those that left follow, the last to leave and the best first."""
        values = self._values()
        best = [k for c in self._order() for k in sorted(self._own(c), key=lambda k: values[k])]
        held_out = self._held_out if self._judged else {}
        by = {k: place.loss or 0.0 for k, place in self._gone.items()} | held_out
        rest = sorted(self._gone, key=lambda k: (-(self._gone[k].left or 0), by[k], k))
        places = [self._place(k, "races" if n else "leads") for n, k in enumerate(best)]
        places += [self._gone[k] for k in rest]
        return [
            replace(place, rank=rank, held_out=held_out.get(k))
            for rank, (k, place) in enumerate(zip([*best, *rest], places, strict=True), start=1)
        ]

    def seed_noise(self) -> float | None:
        """Return the standard deviation over seeds of what ranks are by, pooled over all configurations, those that left as
        they were then; None if none has several."""
        values = self._values()
        for k, place in self._gone.items():  # as it was then
            then = self._held_out.get(k) if self._judged else place.loss
            values[k] = np.nan if then is None or place.diverged else then
        seeds = [values[(self._of == c) & np.isfinite(values)] for c in range(self._of.max() + 1)]
        spreads = [(np.var(own, ddof=1), len(own) - 1) for own in seeds if len(own) > 1]
        free = sum(n for _, n in spreads)
        return float(np.sqrt(sum(v * n for v, n in spreads) / free)) if free else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "rungs": self.rungs,
            "step": self.step,
            "gone": {str(k): asdict(place) for k, place in self._gone.items()},
            "held_out": {str(k): loss for k, loss in self._held_out.items()},
            "by_held_out": self._judged,
            "losses": self._losses.tobytes().hex(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rungs = state["rungs"]  # also if the run is to be longer now
        self.step = state["step"]
        self._gone = {int(k): VariantPlace(**place) for k, place in state["gone"].items()}
        self._held_out = {int(k): loss for k, loss in state["held_out"].items()}
        self._judged = state["by_held_out"]
        self._losses = np.frombuffer(bytes.fromhex(state["losses"])).reshape(-1, len(self.names))

    def _values(self) -> np.ndarray:
        if self._judged:
            return np.array([self._held_out.get(k, np.inf) for k in range(len(self.names))])
        return self._losses.sum(0) / max(1, len(self._losses))

    def _own(self, c: int) -> list[int]:
        return [k for k in np.flatnonzero(self._of == c).tolist() if k not in self._gone]

    def _order(self) -> list[int]:
        """Return the configurations that race, best first."""
        values = self._values()
        means = {c: float(np.mean(values[own])) for c in range(self._of.max() + 1) if (own := self._own(c))}
        return sorted(means, key=lambda c: (means[c], c))

    def _drop(self) -> list[VariantPlace]:
        passed = sum(1 for rung in self.rungs if rung <= self.step)
        below = self._order()[max(self._keep, -(-(int(self._of.max()) + 1) // 2**passed)) :]
        gone = [k for c in reversed(below) for k in self._own(c)]
        by = "held-out loss" if self._judged else "loss"
        return self._leave(gone, f"dropped at step {self.step:,} by {by}")

    def _leave(self, numbers: Sequence[int], why: str) -> list[VariantPlace]:
        left = [replace(self._place(k, why), left=self.step) for k in numbers]
        self._gone |= zip(numbers, left, strict=True)
        return left

    def _place(self, k: int, state: str) -> VariantPlace:
        """Return the place of a variant that races, whose rank comes later: its own loss, its configuration's difference."""
        n, place = len(self._losses), VariantPlace(0, self.names[k], None, None, None, state)
        if not n:
            return place
        own, best = (self._losses[:, self._own(c)].mean(1) for c in (self._of[k], self._order()[0]))
        apart = own - best  # on the same batches: what makes one hard cancels out
        error = float(apart.std(ddof=1) / np.sqrt(n)) if n > 1 else None
        return replace(place, loss=float(self._losses[:, k].mean()), difference=float(apart.mean()), error=error)
