"""The race: decides who leaves, and when, by the losses of all on the same batches. It knows no model and no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from skirl.sweep.paired import Course, PairSums, errors, pooled

FIRST = 8
"""Least number of batches in the first stretch, in which nobody leaves for a deficit."""


@dataclass(frozen=True)
class Rules:
    """When variants leave.

    >>> Rules(keep=0)
    Traceback (most recent call last):
    ValueError: keep is 0: set it to 1 or more
    """

    alpha: float = 0.05
    """Highest probability that the best is ever dropped for a deficit that looks sure; 0: nobody leaves for a deficit."""
    keep: int = 1
    """Configurations that stay to the end, unless others than the race make them leave."""
    rungs: tuple[int, ...] = ()
    """Steps after which only half as many configurations as before may go on."""
    first: int = FIRST
    """Batches of the first stretch, in which nobody leaves for a deficit."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}: set it to a probability, 0 or more and below 1")
        for name in ("keep", "first"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to 1 or more")
        if any(step < 1 for step in self.rungs) or list(self.rungs) != sorted(set(self.rungs)):
            raise ValueError(f"rungs are {', '.join(map(str, self.rungs))}: set them to steps that rise, from 1 on")

    def without_rungs(self) -> "Rules":
        """Return the same rules without rungs: variants leave only for a deficit."""
        return replace(self, rungs=())

    def going_on(self, was: "Rules", step: int) -> "Rules":
        """Return these rules for a race that ran by `was` up to a step: its stretches stay, and the rungs that it passed.

        >>> Rules(rungs=(20, 40, 80), first=20).going_on(Rules(rungs=(10, 20, 40), first=10), step=15)
        Rules(alpha=0.05, keep=1, rungs=(10, 40, 80), first=10)
        """
        passed = [rung for rung in was.rungs if rung <= step]
        coming = {max(rung, step + 1) for rung in self.rungs[len(passed) :]}
        return replace(self, rungs=(*passed, *sorted(coming)), first=was.first)

    def most(self, configurations: int, step: int) -> int:
        """Return how many configurations may go on after a step.

        >>> [Rules(rungs=(10, 20, 30), keep=2).most(9, step) for step in (9, 10, 20, 30)]
        [9, 5, 3, 2]
        """
        passed = sum(1 for rung in self.rungs if rung <= step)
        return max(self.keep, -(-configurations // 2**passed))


@dataclass(frozen=True)
class Left:
    """A variant that has left the race, and why."""

    step: int
    variant: str
    why: str
    """The reason, in words."""
    kind: str
    """diverged, sure, rung or patience."""
    leader: str | None = None
    """The first variant of the leading configuration at that time; None if that is its own, or not known."""
    difference: float | None = None
    """Mean loss of its configuration minus that of the leader's at that time, over the recent batches."""
    error: float | None = None
    """Standard error of that difference."""


@dataclass(frozen=True)
class VariantPlace:
    """A variant's place in the standing."""

    rank: int
    variant: str
    loss: float | None
    """Mean over the recent batches; if it has left, over those before it left."""
    difference: float | None
    """Mean loss of its configuration minus that of the leading one, on the same batches; if it has left, as of then, and
    None if it was leading."""
    error: float | None
    """Standard error of that difference."""
    state: str
    """leads, races, or why it left."""
    leading: bool = False
    """Whether its configuration is the leading one."""


class Race:
    """A race of variants, compared by their losses on the same batches, taken before they train on them.

    Variants that differ only in the seed are one configuration: their losses are averaged, and they leave together for
    these. If others make a seed leave, those that are left are compared anew.

    **Arguments**

    - `names`: names of the variants.
    - `configurations`: the configuration number of each variant, from 0; by default each is its own configuration.
    - `rules`: when they leave.

    >>> race = Race(["a", "b"], rules=Rules(first=4))
    >>> for step in range(1, 40):
    ...     left = race.see([0.5 + 0.01 * (step % 3), 0.6 + 0.01 * (step % 3) + 0.001 * (step % 2)])
    ...     if left:
    ...         print(left[0].step, left[0].variant, left[0].kind)
    24 b sure
    """

    def __init__(
        self, names: Sequence[str], configurations: Sequence[int] | None = None, rules: Rules | None = None
    ) -> None:
        if not names:
            raise ValueError("a race has no variant: name one or more")
        numbers = list(range(len(names))) if configurations is None else list(configurations)
        if len(numbers) != len(names) or set(numbers) != set(range(max(numbers) + 1)):
            raise ValueError(f"configurations are {numbers}: number them from 0, one for each of {len(names)} variants")
        self.names = tuple(names)
        self.rules = rules or Rules()
        self.step = 0
        self.left: list[Left] = []
        self._of = np.array(numbers)
        self._racing = np.ones(len(names), bool)
        """By variant: whether it is still in the race."""
        self._course = Course.begin(self.rules.first, max(numbers) + 1)
        """Losses by configuration, which decide who leaves."""
        self._single = Course.begin(self.rules.first, len(names))
        """Losses by variant, for the noise of seeds and for display."""
        self._gone: dict[int, VariantPlace] = {}

    @property
    def racing(self) -> list[str]:
        """The variants that have not left, in their order."""
        return [name for name, on in zip(self.names, self._racing) if on]

    @property
    def configurations(self) -> list[int]:
        """The configuration number of each variant."""
        return self._of.tolist()

    def see(self, losses: Sequence[float]) -> list[Left]:
        """Take the losses on one more batch, and return those that leave after it.

        **Arguments**

        - `losses`: the mean loss of every variant over the batch; entries of variants that have left are ignored.
        """
        self.step += 1
        values = np.where(self._racing, np.asarray(losses, np.float64), np.nan)
        broken = np.flatnonzero(self._racing & ~np.isfinite(values))
        gone = self._leave(dict.fromkeys(broken.tolist(), (f"diverged at step {self.step:,}", "diverged")))
        self._compare_anew(gone, self.step - 1)
        if not self._racing.any():
            raise ValueError(
                f"all variants have diverged, the last at step {self.step:,} ({', '.join(left.variant for left in gone)}): "
                "set lr and dense_lr lower, or warmup higher"
            )
        values[broken] = np.nan
        self._single = self._single.after(values)
        self._course = self._course.after(self._pooled(values))
        return gone + self._behind()

    def retire(self, names: Sequence[str], why: str, kind: str) -> list[Left]:
        """Let variants leave for what others found of them, and return them. No race goes on without any.

        **Arguments**

        - `names`: variants that race.
        - `why`: the reason, in words.
        - `kind`: the reason, in a word.

        >>> race = Race(["a", "b"])
        >>> [(left.variant, left.kind, race.racing) for left in race.retire(["a"], "stopped at step 0", "patience")]
        [('a', 'patience', ['b'])]
        """
        gone = self._leave({self.names.index(name): (why, kind) for name in names})
        self._compare_anew(gone, self.step)
        return gone

    def leader(self) -> int:
        """Return the number of the configuration with the lowest recent loss."""
        return self._order()[0]

    def winner(self) -> str:
        """Return the best variant of the leading configuration."""
        own = [k for k in np.flatnonzero(self._of == self.leader()) if self._racing[k]]
        return self.names[min(own, key=lambda k: self._single.recent().losses[k])]

    def standing(self) -> list[VariantPlace]:
        """Return the places of all variants, best first. Those that left follow, the last to leave and nearest first."""
        configurations, places = self._order(), []
        for c in configurations:
            own = [int(k) for k in np.flatnonzero(self._of == c) if self._racing[k]]
            for k in sorted(own, key=lambda k: self._single.recent().losses[k]):
                places.append(self._place(k, len(places) + 1, "leads" if not places else "races"))
        step = {left.variant: left.step for left in self.left}
        for k in sorted(self._gone, key=lambda k: (-step[self.names[k]], self._gone[k].difference or 0.0, k)):
            gone = self._gone[k]
            places.append(
                VariantPlace(len(places) + 1, gone.variant, gone.loss, gone.difference, gone.error, gone.state)
            )
        return places

    def seed_noise(self) -> float | None:
        """Return the standard deviation of the recent mean loss over seeds; None if no configuration has several."""
        means = self._single.recent().losses / max(1, self._single.recent().batches)
        spreads = [
            (np.var(means[own], ddof=1), own.sum() - 1)
            for c in range(self._of.max() + 1)
            if (own := (self._of == c) & self._racing).sum() > 1
        ]
        free = sum(n for _, n in spreads)
        return float(np.sqrt(sum(v * n for v, n in spreads) / free)) if free else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "names": list(self.names),
            "of": self._of.tolist(),
            "rules": asdict(self.rules),
            "step": self.step,
            "racing": self._racing.tolist(),
            "left": [asdict(left) for left in self.left],
            "gone": {str(k): asdict(place) for k, place in self._gone.items()},
            "course": _written(self._course),
            "single": _written(self._single),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint of the same race. Its end and its coming rungs may have changed since."""
        was = Rules(**state["rules"] | {"rungs": tuple(state["rules"]["rungs"])})
        for what, theirs, own in (
            ("variants", state["names"], list(self.names)),
            ("configurations", state["of"], self._of.tolist()),
            ("alpha", was.alpha, self.rules.alpha),
            ("keep", was.keep, self.rules.keep),
        ):
            if theirs != own:
                raise ValueError(
                    f"the checkpoint is of a sweep with other {what} ({theirs}) than this one ({own}): "
                    "go on with the same, or begin another sweep in another folder"
                )
        self.step = state["step"]
        self.rules = self.rules.going_on(was, self.step)
        self._racing = np.array(state["racing"])
        self.left = [Left(**left) for left in state["left"]]
        self._gone = {int(k): VariantPlace(**place) for k, place in state["gone"].items()}
        self._course, self._single = _read(state["course"]), _read(state["single"])

    def _compare_anew(self, gone: Sequence[Left], seen: int) -> None:
        """Begin a new stretch if only some seeds of a configuration have left: its mean loss is not what it was.

        **Arguments**

        - `gone`: those that left, whose losses of this step do not count.
        - `seen`: batches so far.
        """
        of = {int(self._of[self.names.index(one.variant)]) for one in gone}
        split = np.isin(np.arange(len(self._on())), [c for c in of if self._on()[c]])
        if not split.any() or not seen:
            return
        own = (self._of[None, :] == np.arange(len(split))[:, None]) & self._racing[None, :]
        single, whole = self._single.recent(), self._course.recent()
        left = pooled(single, own / np.maximum(own.sum(1, keepdims=True), 1))
        pairs = split[:, None] | split[None, :]
        before = PairSums(
            whole.batches,
            np.where(split, left.losses, whole.losses),
            np.where(pairs, left.differences, whole.differences),
            np.where(pairs, left.squares, whole.squares),
        )
        self._course, self._single = self._course.anew(before, seen), self._single.anew(single, seen)

    def _pooled(self, values: np.ndarray) -> np.ndarray:
        """Return the mean loss over the seeds of each configuration; nan if none of them races."""
        seen = np.isfinite(values)
        many = np.bincount(self._of, seen)
        total = np.bincount(self._of, np.where(seen, values, 0.0))
        return np.where(many > 0, total / np.maximum(many, 1), np.nan)

    def _on(self) -> np.ndarray:
        """Return, for each configuration, whether any of its variants races."""
        return np.bincount(self._of, self._racing) > 0

    def _order(self) -> list[int]:
        """Return the configurations that race, best first."""
        losses = self._course.recent().losses
        return sorted(np.flatnonzero(self._on()).tolist(), key=lambda c: (losses[c], c))

    def _behind(self) -> list[Left]:
        """Remove the variants that leave for their losses, and return them."""
        order, rules = self._order(), self.rules
        room = len(order) - rules.keep
        gone: dict[int, tuple[str, str]] = {}
        sure = self._course.out(self._on(), rules.alpha) if rules.alpha > 0 else np.zeros(len(self._on()), bool)
        most = rules.most(len(self._on()), self.step) if self.step in rules.rungs else len(order)
        leader = order[0]
        for c in reversed(order):  # the worst first
            if len(order) <= rules.keep or room <= 0:
                break
            kind = "sure" if sure[c] and c != leader else "rung" if len(order) > most else None
            if kind is None:
                continue
            order.remove(c)
            room -= 1
            why = f"surely behind at step {self.step:,}" if kind == "sure" else f"below the rung at step {self.step:,}"
            gone |= {int(k): (why, kind) for k in np.flatnonzero((self._of == c) & self._racing)}
        return self._leave(gone)

    def _leave(self, why: Mapping[int, tuple[str, str]]) -> list[Left]:
        """Let variants leave, all of which are compared with the same leader. why: in words and in a word, by variant."""
        if not why:
            return []
        places = {k: self._place(k, 0, words) for k, (words, _) in why.items()}
        leader = self.names[int(np.flatnonzero((self._of == self.leader()) & self._racing)[0])]
        for k, place in places.items():
            if place.leading:
                places[k] = replace(place, difference=None, error=None)
        left = [
            Left(
                self.step, self.names[k], place.state, why[k][1], None if place.difference is None else leader,
                place.difference, place.error,
            )
            for k, place in places.items()
        ]  # fmt: skip
        self._racing[list(why)] = False
        self._gone |= places
        self.left += left
        return left

    def _place(self, k: int, rank: int, state: str) -> VariantPlace:
        """Return the place of a variant: its own loss, and its configuration's difference to the leading one."""
        own, whole = self._single.recent(), self._course.recent()
        n = whole.batches
        if not n:
            return VariantPlace(rank, self.names[k], None, None, None, state)
        c, first = int(self._of[k]), self.leader()
        error = float(errors(whole)[c, first]) if n > 1 else None
        loss, difference = float(own.losses[k] / n), float(whole.differences[c, first] / n)
        return VariantPlace(rank, self.names[k], loss, difference, error, state, leading=c == first)


def _written(course: Course) -> dict[str, Any]:
    return {"first": course.first, "stretch": course.stretch, "part": course.part} | {
        name: {"batches": sums.batches, "losses": sums.losses.tolist(), "differences": sums.differences.tolist(),
               "squares": sums.squares.tolist()}
        for name, sums in (("now", course.now), ("before", course.before))
    }  # fmt: skip


def _read(state: Mapping[str, Any]) -> Course:
    now, before = (
        PairSums(of["batches"], *(np.array(of[name]) for name in ("losses", "differences", "squares")))
        for of in (state["now"], state["before"])
    )
    stretch = state["stretch"]
    return Course(state["first"], stretch, now, before, state.get("part", stretch))
