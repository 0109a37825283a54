"""The race: who leaves and when, compared with plain counting; seeds, rungs, divergence, checkpoints."""

import json
import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.sweep.race import Race, difference
from skirl.sweep.variants import RaceFlags
from tests.cases import cases


def noisy(step: int, means: list[float], spread: float = 0.01) -> list[float]:
    """Return the losses of one batch: a part that all share, plus one for each."""
    random = np.random.default_rng(step)
    return (np.array(means) + random.normal(0, 1) + random.normal(0, spread, len(means))).tolist()


def test_what_is_shown_of_a_place_is_the_paired_difference_written_out():
    race = Race(["a", "b"])
    seen = []
    for step in range(1, 41):
        seen.append(noisy(step, [0.6, 0.5]))
        race.see(seen[-1])
    recent = seen[10:]
    first, second = race.standing()
    assert (first.variant, first.state, first.difference) == ("b", "leads", 0.0)
    differences = [a - b for a, b in recent]
    assert second.difference == pytest.approx(statistics.mean(differences))
    assert second.error == pytest.approx(statistics.stdev(differences) / math.sqrt(len(differences)))
    assert second.loss == pytest.approx(statistics.mean(a for a, _ in recent))


def test_seeds_of_a_configuration_are_averaged_and_leave_together():
    race = Race(["a0", "a1", "b0", "b1", "c"], [0, 0, 1, 1, 2], rungs=(20, 40))
    alone = Race(["a", "b", "c"], rungs=(20, 40))
    for step in range(1, 100):
        losses = noisy(step, [0.5, 0.54, 0.6, 0.61, 0.7])
        gone = race.see(losses)
        pooled = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2, losses[4]]
        assert {left.variant[0] for left in gone} == {left.variant for left in alone.see(pooled)}
        if any(left.variant[0] == "b" for left in gone):
            assert [left.variant for left in gone if left.variant[0] == "b"] == ["b0", "b1"]
        apart = {place.variant: (place.difference, place.error) for place in alone.standing()}
        for place in race.standing() if 1 < step < 20 else ():
            assert (place.difference, place.error) == pytest.approx(apart[place.variant[0]], abs=1e-12)
    assert race.racing == ["a0", "a1"]
    assert race.standing()[0].variant == "a0"
    assert race.seed_noise() == pytest.approx(math.sqrt((0.04**2 + 0.01**2) / 4), rel=0.2)


def test_equal_losses_are_not_those_of_one_configuration():
    race = Race(["a0", "a1", "b"], [0, 0, 1])
    race.see([0.5, 0.5, 0.5])
    assert [difference(place) for place in race.standing()] == ["", "+0.00000", "+0.00000"]
    race.see([0.4, 0.6, 0.7])
    assert [difference(place) for place in race.standing()] == ["", "seed of rank 1", "+0.10000 ± 0.10000"]


def test_a_longer_race_keeps_its_rungs():
    means, names = [0.5, 0.51, 0.55, 0.6, 0.52], ["a", "b", "c", "d", "e"]
    of = [0, 0, 1, 2, 3]
    whole, part = (Race(names, of, rungs=[10, 40]) for _ in range(2))
    for step in range(1, 60):
        if step == 15:
            longer = Race(names, of, rungs=[20, 80])
            longer.load_state_dict(json.loads(json.dumps(part.state_dict())))
            part = longer
        assert part.see(noisy(step, means)) == whole.see(noisy(step, means))
    of_steps = RaceFlags(rungs="500,80%").at(1000), RaceFlags(rungs="14").at(15, 2, 8)
    assert of_steps == ([500, 800], [16])  # the second waits for an evaluation
    (race := Race([*"abcd"], rungs=(1,), again=True)).see([0.1, 0.2, 0.3, 0.4])
    race.judge(dict(zip("abcd", (0.1, 0.2, 0.4, 0.3))), last=False)
    assert [place.variant for place in race.standing()] == ["a", "b", "d", "c"]
    assert part.state_dict() == whole.state_dict() and part.standing() == whole.standing()


def test_wrong_rules_are_refused():
    with pytest.raises(ValueError, match="keep is 0"):
        RaceFlags(keep=0)


class Written:
    """The rule of rungs written out, for a race of one epoch or of several."""

    def __init__(self, of: list[int], rungs: tuple[int, ...], keep: int) -> None:
        self.of, self.rungs, self.keep = of, rungs, keep
        self.state = ["races"] * len(of)
        self.losses: list[list[float]] = [[] for _ in of]
        self.held_out = [math.inf] * len(of)

    def mean(self, c: int, judged: bool) -> float:
        """The mean of the seeds of a configuration that may still win; infinite if none may."""
        own = [k for k, state in enumerate(self.state) if self.of[k] == c and state == "races"]
        losses = [self.held_out[k] if judged else statistics.mean(self.losses[k]) for k in own]
        return statistics.mean(losses) if losses else math.inf

    def rung(self, step: int, judged: bool) -> None:
        on = {c for c, state in zip(self.of, self.state) if state == "races"}
        half = max(self.of) + 1
        for _ in [rung for rung in self.rungs if rung <= step]:
            half = half / 2
        for c in sorted(on, key=lambda c: self.mean(c, judged))[max(self.keep, math.ceil(half)) :]:
            for k, state in enumerate(self.state):
                if self.of[k] == c and state == "races":
                    self.state[k] = "beaten"

    def ranks(self) -> list[int]:
        """Those that may win by held-out losses, the best first."""
        found = [k for k, state in enumerate(self.state) if state == "races" and self.mean(self.of[k], True) < math.inf]
        return sorted(found, key=lambda k: (self.mean(self.of[k], True), self.held_out[k]))


@cases(300)
@given(st.integers(0, 2**32))
def test_rungs_and_ranks_are_those_of_the_rule_written_out(number: int):
    draw = random.Random(number)
    of = [c for c in range(draw.randint(2, 6)) for _ in range(draw.randint(1, 3))]
    again, steps = draw.random() < 0.5, 16
    rungs, keep = tuple(sorted(draw.sample(range(1, steps), 3))), draw.randint(1, 2)
    race = Race([f"v{k}" for k in range(len(of))], of, rungs=rungs, keep=keep, again=again)
    rule = Written(of, rungs, keep)

    def some(share: float) -> list[int]:
        """Variants that leave: never all that race."""
        racing = [k for k, state in enumerate(rule.state) if state == "races"]
        return [k for k in racing[1:] if draw.random() < share]

    for step in range(1, steps):
        losses = [draw.random() for _ in of]
        for k in some(0.03):
            losses[k], rule.state[k] = math.nan, "diverged"
        for k, loss in enumerate(losses):
            rule.losses[k].append(loss)
        race.see(losses)
        if not again and step in rungs:
            rule.rung(step, judged=False)
        if draw.random() < 0.5:
            for k, state in enumerate(rule.state):
                if state == "races":
                    rule.held_out[k] = min(rule.held_out[k], draw.random())
            found: dict[str, float | None] = {f"v{k}": loss for k, loss in enumerate(rule.held_out) if loss < math.inf}
            for k in some(0.1):
                rule.state[k], found[f"v{k}"] = "diverged", None
            race.judge({name: one for name, one in found.items() if name in race.racing}, last=False)
            if again:
                rule.rung(step, judged=True)
                ranks = [f"v{k}" for k in rule.ranks()]
                assert [place.variant for place in race.standing()[: len(ranks)]] == ranks
        assert race.racing == [f"v{k}" for k, state in enumerate(rule.state) if state == "races"]
