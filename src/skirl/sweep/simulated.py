"""Races of made-up losses, many at once: how often the rule drops the best of all."""

from dataclasses import dataclass

import numpy as np

from skirl.sweep.paired import Course

KINDS = ("normal", "heavy", "skewed", "drifting")
"""Of noise."""


@dataclass(frozen=True)
class Simulated:
    """What came of many races."""

    wrong: float
    """The share of races in which the best was ever dropped,"""
    left: float
    """the share of all others that left,"""
    cost: float
    """and the batches that variants were trained on, for each that they would have been without a race."""


def simulate(
    races: int,
    variants: int,
    batches: int,
    *,
    alpha: float,
    gap: float = 0.0,
    kind: str = "normal",
    first: int = 8,
    seed: int = 0,
) -> Simulated:
    """Race variants whose mean losses differ by `gap` a place; the first is the best.

    **Arguments**

    - `races`, `variants`, `batches`: how many.
    - `alpha`: of the rule.
    - `gap`: in standard deviations of a difference; 0: all are as good, which is where mistakes are likeliest.
    - `kind`: of noise: normal, heavy (few large ones), skewed, or drifting, which falls as training goes on and has a part
      that all variants share.
    - `first`: batches of the first stretch.
    - `seed`: of the noise.
    """
    random = np.random.default_rng(seed)
    draws = {
        "normal": lambda shape: random.standard_normal(shape),
        "heavy": lambda shape: random.standard_t(3, shape),
        "skewed": lambda shape: random.standard_exponential(shape) - 1.0,
        "drifting": lambda shape: random.standard_normal(shape),
    }
    means = gap * np.arange(variants)
    racing = np.ones((races, variants), bool)
    course = Course.begin(first, races, variants)
    wrong, spent = np.zeros(races, bool), 0
    for batch in range(batches):
        spent += int(racing.sum())
        losses = draws[kind]((races, variants)) / np.sqrt(2.0)
        if kind == "drifting":
            losses = losses / np.sqrt(1 + 9 * batch / batches) + 3.0 * random.standard_normal((races, 1))
        course = course.after(np.where(racing, losses + means, np.nan))
        racing &= ~course.out(racing, alpha)
        wrong |= ~racing[:, 0]
    return Simulated(float(wrong.mean()), float((~racing[:, 1:]).mean()), spent / (races * variants * batches))


def worst(races: int, *, alpha: float, variants: int = 6, batches: int = 500) -> dict[str, float]:
    """By kind of noise: the larger share of races that drop the best, where all are as good and where they differ a little.

    **Arguments**

    - `races`: of each.
    - `alpha`: of the rule.
    - `variants`, `batches`: of each race.
    """
    parts = [min(1000, races - begin) for begin in range(0, races, 1000)]
    found = {}
    for kind in KINDS:
        wrong = []
        for gap in (0.0, 0.1):
            each = [
                simulate(n, variants, batches, alpha=alpha, gap=gap, kind=kind, seed=seed)
                for seed, n in enumerate(parts)
            ]
            wrong.append(sum(one.wrong * n for one, n in zip(each, parts, strict=True)) / races)
        found[kind] = max(wrong)
    return found
