"""The race: decides who leaves, and when, by the losses of all on the same batches. It knows no model and no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from skirl.sweep.paired import Course, PairSums, errors, pooled
from skirl.sweep.rules import Rules


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
    """Mean over the recent batches that nobody had trained on; if it has left, over those before it left."""
    difference: float | None
    """Mean loss of its configuration minus that of rank 1, on the same batches: the recent ones before either left."""
    error: float | None
    """Standard error of that difference."""
    state: str
    """leads, races, or why it left."""
    leading: bool = False
    """Whether its configuration is that of rank 1."""
    held_out: float | None = None
    """Its lowest log loss on the samples held out, while ranks are by that."""


@dataclass(frozen=True)
class _Gone:
    """What was known of a variant when it left."""

    step: int
    state: str
    loss: float | None
    differences: list[float]
    """Mean loss of its configuration minus that of each; nan if not known."""
    errors: list[float]


class Race:
    """A race of variants, compared by their losses on the same batches, taken before anybody trains on their samples.

    Where samples come again, `judge` takes losses on samples held out, and ranks and rungs are by these.

    Variants that differ only in the seed are one configuration: their losses are averaged, and they leave together for
    these. If others make a seed leave, those that are left are compared anew; one that left for want of patience counts
    on by its losses on samples held out.

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
        self.step = self.unseen = 0
        """Batches so far, and those that nobody had trained on."""
        self.left: list[Left] = []
        self._of = np.array(numbers)
        self._racing = np.ones(len(names), bool)
        """By variant: whether it is still in the race."""
        self._course = Course.begin(self.rules.first, max(numbers) + 1)
        """Losses by configuration, which decide who leaves."""
        self._single = Course.begin(self.rules.first, len(names))
        """Losses by variant, for the noise of seeds and for display."""
        self._held_out: dict[int, float] = {}
        """By variant: its lowest log loss on the samples held out."""
        self._judged = False
        """Whether ranks are by these."""
        self._gone: dict[int, _Gone] = {}

    @property
    def racing(self) -> list[str]:
        """The variants that have not left, in their order."""
        return [name for name, on in zip(self.names, self._racing) if on]

    @property
    def configurations(self) -> list[int]:
        """The configuration number of each variant."""
        return self._of.tolist()

    @property
    def measure(self) -> str:
        """What ranks are by: "unseen", losses on samples that nobody had trained on, or "held out"."""
        return "held out" if self._judged else "unseen"

    def see(self, losses: Sequence[float], *, unseen: bool = True) -> list[Left]:
        """Take the losses on one more batch, and return those that leave after it.

        **Arguments**

        - `losses`: the mean loss of every variant over the batch; entries of variants that have left are ignored.
        - `unseen`: whether nobody has trained on its samples, as in a first epoch. Otherwise losses only tell who has
          diverged: the lowest may be that of who has learnt the samples by heart.
        """
        self.step += 1
        self.unseen += unseen
        values = np.where(self._racing, np.asarray(losses, np.float64), np.nan)
        broken = np.flatnonzero(self._racing & ~np.isfinite(values))
        gone = self._leave(dict.fromkeys(broken.tolist(), (f"diverged at step {self.step:,}", "diverged")))
        self._compare_anew(gone, self.unseen - unseen)
        if not self._racing.any():
            raise ValueError(
                f"all variants have diverged, the last at step {self.step:,} ({', '.join(left.variant for left in gone)}): "
                "set lr and dense_lr lower, or warmup higher"
            )
        if not unseen:
            return gone
        values[broken] = np.nan
        self._judged = False
        self._single = self._single.after(values)
        self._course = self._course.after(self._pooled(values))
        on, alpha = self._on(), self.rules.alpha
        sure = self._course.out(on, alpha) if alpha > 0 else np.zeros(len(on), bool)
        return gone + self._behind(sure, at_rung=self.step in self.rules.rungs)

    def judge(self, held_out: Mapping[str, float | None], *, last: bool) -> list[Left]:
        """Rank by log losses on samples held out until a batch of unseen ones comes, and return who is below a rung.

        **Arguments**

        - `held_out`: by variant, the lowest of its evaluations; those that left for want of patience are ranked, too.
        - `last`: whether the race ends here, so that nobody leaves.

        >>> race = Race(["a", "b"], rules=Rules(rungs=(2,)))
        >>> race.see([0.5, 0.6]), race.see([0.1, 0.5], unseen=False), race.winner()
        ([], [], 'a')
        >>> [left.variant for left in race.judge({"a": 0.9, "b": 0.7}, last=False)], race.winner(), race.measure
        (['a'], 'b', 'held out')
        """
        found = {self.names.index(name): loss for name, loss in held_out.items()}
        self._held_out = {k: loss for k, loss in found.items() if loss is not None}
        self._judged = any(self._racing[k] for k in self._held_out)
        if last or not self._judged:
            return []
        return self._behind(np.zeros(len(self._on()), bool), at_rung=True)

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
        self._compare_anew(gone, self.unseen)
        return gone

    def leader(self) -> int:
        """Return the number of the leading configuration."""
        return self._order(self._ranked())[0]

    def winner(self) -> str:
        """Return the best variant of the leading configuration."""
        return self.standing()[0].variant

    def standing(self) -> list[VariantPlace]:
        """Return the places of all variants, best first. Those that left follow, the last to leave and nearest first.

        Who left for want of patience was not beaten, and is ranked by its log loss on the samples held out, unless others
        beat its configuration.
        """
        ranked = self._ranked()
        order, values = self._order(ranked), self._values()
        best = [k for c in order for k in sorted(self._own(c, ranked), key=lambda k: values[k])]
        apart = {self.names.index(one.variant): one.difference or 0.0 for one in self.left}
        rest = [k for k in range(len(self.names)) if k not in best]
        rest.sort(key=lambda k: (-self._gone[k].step, apart[k], k))
        return [self._place(k, rank, order) for rank, k in enumerate([*best, *rest], start=1)]

    def seed_noise(self) -> float | None:
        """Return the standard deviation over seeds of what ranks are by; None if no configuration has several."""
        values, ranked = self._values(), self._ranked()
        spreads = [
            (np.var(values[own], ddof=1), len(own) - 1)
            for c in range(self._of.max() + 1)
            if len(own := self._own(c, ranked)) > 1
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
            "unseen": self.unseen,
            "racing": self._racing.tolist(),
            "left": [asdict(left) for left in self.left],
            "gone": {str(k): asdict(gone) for k, gone in self._gone.items()},
            "held_out": {str(k): loss for k, loss in self._held_out.items()},
            "judged": self._judged,
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
        self.step, self.unseen = state["step"], state["unseen"]
        self.rules = self.rules.going_on(was, self.step)
        self._racing = np.array(state["racing"])
        self.left = [Left(**left) for left in state["left"]]
        self._gone = {int(k): _Gone(**gone) for k, gone in state["gone"].items()}
        self._held_out = {int(k): loss for k, loss in state["held_out"].items()}
        self._judged = state["judged"]
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

    def _ranked(self) -> np.ndarray:
        """Return, for each variant, whether it may win: it races, or it stopped and its configuration was not beaten."""
        ranked, numbers = self._racing.copy(), {one.variant: self.names.index(one.variant) for one in self.left}
        beaten = {self._of[numbers[one.variant]] for one in self.left if one.kind in ("sure", "rung")}
        stopped = [numbers[one.variant] for one in self.left if one.kind == "patience" and self._judged]
        ranked[[k for k in stopped if k in self._held_out and self._of[k] not in beaten]] = True
        return ranked

    def _values(self) -> np.ndarray:
        """Return, for each variant, what ranks are by."""
        if self._judged:
            return np.array([self._held_out.get(k, np.inf) for k in range(len(self.names))])
        return self._single.recent().losses / max(1, self._single.recent().batches)

    def _own(self, c: int, among: np.ndarray) -> list[int]:
        """Return the variants of a configuration, of those in `among`."""
        return np.flatnonzero((self._of == c) & among).tolist()

    def _order(self, among: np.ndarray) -> list[int]:
        """Return the configurations of the variants in `among`, best first."""
        values, losses = self._values(), self._course.recent().losses
        means = {
            c: float(np.mean(values[own])) if self._judged else float(losses[c])
            for c in range(len(losses))
            if (own := self._own(c, among))
        }
        return sorted(means, key=lambda c: (means[c], c))

    def _behind(self, sure: np.ndarray, *, at_rung: bool) -> list[Left]:
        """Remove the variants that leave for their losses, and return them."""
        on, rules = self._on(), self.rules
        order = [c for c in self._order(self._ranked()) if on[c]]
        room = len(order) - rules.keep
        gone: dict[int, tuple[str, str]] = {}
        most = rules.most(len(on), self.step) if at_rung else len(order)
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
        first, ranked = self.leader(), self._ranked()
        leader = self.names[self._own(first, ranked)[0]]
        gone = {k: self._now(k, words) for k, (words, _) in why.items()}
        left = []
        for k, of in gone.items():
            led = int(self._of[k]) == first
            difference, error = (None, None) if led else (_known(of.differences[first]), _known(of.errors[first]))
            to = None if difference is None else leader
            left.append(Left(self.step, self.names[k], of.state, why[k][1], to, difference, error))
        self._racing[list(why)] = False
        self._gone |= gone
        self.left += left
        return left

    def _now(self, k: int, state: str) -> _Gone:
        """Return what is known of a variant that races: its own loss, and its configuration's differences."""
        own, whole, c = self._single.recent(), self._course.recent(), int(self._of[k])
        n = whole.batches
        if not n:
            unknown = [np.nan] * len(whole.losses)
            return _Gone(self.step, state, None, unknown, unknown)
        apart = (whole.differences[c] / n).tolist()
        return _Gone(self.step, state, float(own.losses[k] / n), apart, errors(whole)[c].tolist())

    def _place(self, k: int, rank: int, order: Sequence[int]) -> VariantPlace:
        """Return the place of a variant, whose difference is to the first configuration of `order`."""
        of = self._gone.get(k) or self._now(k, "leads" if rank == 1 else "races")
        held_out = self._held_out.get(k) if self._judged else None
        place = VariantPlace(rank, self.names[k], of.loss, None, None, of.state, held_out=held_out)
        if not order:  # all have diverged
            return place
        c, first = int(self._of[k]), order[0]
        difference, error = of.differences[first], of.errors[first]
        other = max(self._own(first, self._of >= 0), key=self._end)
        if self._end(other) < self._end(k):  # rank 1 left before, and was compared then
            difference, error = -self._gone[other].differences[c], self._gone[other].errors[c]
        return replace(place, difference=_known(difference), error=_known(error), leading=c == first)

    def _end(self, k: int) -> float:
        """Return the step at which a variant left."""
        return self._gone[k].step if k in self._gone else np.inf


def _known(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)


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
    return Course(state["first"], state["stretch"], now, before, state["part"])
