"""Simulate many races of random losses at once, to see how often the rule drops the best variant."""

from dataclasses import dataclass

import numpy as np

from skirl.sweep.paired import Course

KINDS = ("normal", "heavy", "skewed", "drifting")
"""Kinds of noise."""


@dataclass(frozen=True)
class Simulated:
    """Result of many simulated races."""

    wrong: float
    """Share of the races in which the best was ever dropped."""
    left: float
    """Share of all others that left."""
    cost: float
    """Steps that variants trained, as a share of those without a race."""


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
    """Race variants whose mean losses rise by `gap` from one to the next; the first is the best.

    **Arguments**

    - `races`, `variants`, `batches`: numbers of each.
    - `alpha`: the rule's probability of an error.
    - `gap`: in standard deviations of a difference; 0: all are equally good, and mistakes are likeliest.
    - `kind`: kind of noise: normal, heavy (heavy-tailed), skewed, or drifting, which falls as training goes on and has a
      part that all variants share.
    - `first`: batches of the first stretch.
    - `seed`: seed of the noise.
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
    """Return the share of races that drop the best, by kind of noise: the larger of two, for equal and for close variants.

    **Arguments**

    - `races`: number of races for each kind and gap.
    - `alpha`: the rule's probability of an error.
    - `variants`, `batches`: numbers of each in a race.
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
