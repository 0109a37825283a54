"""Measure what a race saves: train all variants to the end once for the truth, then replay races over their losses."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.measure.bench.helpers import Stopwatch
from skirl.sweep.crew import sweep_of
from skirl.sweep.race import Race
from skirl.sweep.rules import Rules
from skirl.sweep.variants import Varied, checked_variants, text_of
from skirl.train.recipe import Recipe

ROW_RATES = (0.003, 0.006, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2)
"""Learning rates of rows for 32 variants; 16 variants use every second one."""
DENSE_RATES = (0.0003, 0.001, 0.003, 0.01)
TWICE = 4
"""Configurations that are trained with a second seed too, to see what the seed alone changes."""
RUNGS = {16: (0.05, 0.1, 0.2, 0.3), 32: (0.04, 0.08, 0.13, 0.2, 0.3)}
"""By the number of variants: the rungs, as shares of the stream."""
LAST = 0.2
"""The last share of the stream, whose mean loss counts as the truth about a variant."""


@dataclass(frozen=True)
class Truth:
    """The losses of all variants on all batches, each taken before the variant trained on the batch."""

    names: list[str]
    losses: NDArray[np.float64]
    """[variants, batches]."""
    seconds: float
    """Wall-clock time of one sweep of all variants without a race."""

    def of(self, names: Sequence[str]) -> "Truth":
        """Return the truth about some of the variants."""
        return Truth(list(names), self.losses[[self.names.index(name) for name in names]], self.seconds)

    @property
    def final(self) -> NDArray[np.float64]:
        """[variants]: the mean loss at the end of the stream."""
        return self.losses[:, -max(1, int(self.losses.shape[1] * LAST)) :].mean(1)


def grid(recipe: Recipe, count: int) -> list[Varied]:
    """Return 16 or 32 configurations, followed by a second seed of some of them.

    **Arguments**

    - `recipe`: what the variants have in common.
    - `count`: number of configurations, 16 or 32.
    """
    rows = ROW_RATES[:: 32 // count]
    named = [(lr, dense, 0) for lr in rows for dense in DENSE_RATES]
    named += [(lr, dense, 1) for lr, dense, _ in named[1 :: count // TWICE]]
    overrides = [{"lr": lr, "dense_lr": dense, "seed": seed} for lr, dense, seed in named]
    return checked_variants(recipe, [(text_of(each), each) for each in overrides])


def truth(recipe: Recipe, variants: Sequence[Varied]) -> Truth:
    """Train all variants to the end and return their losses.

    **Arguments**

    - `recipe`: what the variants have in common.
    - `variants`: the variants to train.
    """
    from skirl.pipeline.lookahead import lookahead

    sweep = sweep_of(recipe, variants)
    losses = []
    with Stopwatch() as watch, sweep, lookahead(recipe.stream(), sweep, depth=recipe.cache.depth) as batches:
        for batch in batches:
            found = sweep.step(batch)
            losses.append([found.get(variant.name, np.inf) for variant in variants])
    return Truth([variant.name for variant in variants], np.array(losses).T, watch.seconds)


def kept(path: Path | None, recipe: Recipe, variants: Sequence[Varied]) -> Truth:
    """Return the truth from a file; if there is none, train for it and save it there.

    **Arguments**

    - `path`: the file; None: train, and save nothing.
    - `recipe`: what the variants have in common.
    - `variants`: the variants to train.
    """
    names = [variant.name for variant in variants]
    if path is not None and path.is_file():
        with np.load(path, allow_pickle=False) as read:
            found = Truth([str(name) for name in read["names"]], read["losses"], float(read["seconds"]))
        if set(names) - set(found.names):
            raise ValueError(
                f"losses is {str(path)!r}, which holds other variants: set it to a file that does not exist yet"
            )
        return found
    found = truth(recipe, variants)
    if path is not None:
        np.savez(path, names=np.array(found.names), losses=found.losses, seconds=found.seconds)
    return found


def replayed(found: Truth, rules: Rules, configurations: Sequence[int] | None = None) -> dict[str, Any]:
    """Replay a race over known losses. Return its cost, its winner and how much worse that is than the best.

    **Arguments**

    - `found`: the losses of all variants.
    - `rules`: when variants leave.
    - `configurations`: the configuration number of each variant; by default each variant is its own configuration.
    """
    race, spent = Race(found.names, configurations, rules), 0
    for losses in found.losses.T:
        spent += len(race.racing)
        race.see(losses.tolist())
    winner, final = race.winner(), found.final
    return {
        "cost": spent / found.losses.size,
        "winner": winner,
        "regret": float(final[found.names.index(winner)] / final.min() - 1.0),
    }


def rules_of(variants: int, batches: int, alpha: float) -> Rules:
    """Return the rules that are measured: sure deficits, and rungs at shares of the stream.

    **Arguments**

    - `variants`: 16 or 32, which picks the rungs.
    - `batches`: batches in the stream.
    - `alpha`: the probability of dropping the best for a deficit.
    """
    rungs = tuple(max(1, int(batches * share)) for share in RUNGS[variants])
    return Rules(alpha=alpha, rungs=tuple(sorted(set(rungs))), first=max(8, batches // 50))


def seed_noise(found: Truth) -> float:
    """Return how far apart two seeds of a configuration end, on average over those with two, as a share of the best loss."""
    final, at = found.final, {name: k for k, name in enumerate(found.names)}
    pairs = [(at[name.replace("seed=1", "seed=0")], k) for name, k in at.items() if name.endswith("seed=1")]
    return float(np.mean([abs(final[i] - final[j]) for i, j in pairs]) / final.min())


def paired_gain(found: Truth) -> float:
    """Return how many times more batches an unpaired test of two variants needs: the median over pairs.

    It is a ratio of variances: of a difference between losses on different samples, to one between losses on the same
    samples. The first tenth of the batches is left out.

    **Arguments**

    - `found`: the losses of all variants.
    """
    losses = found.losses[:, found.losses.shape[1] // 10 :]
    alone = losses.var(axis=1, ddof=1)
    ratios = [(alone[i] + alone[j]) / (losses[i] - losses[j]).var(ddof=1) for i in range(len(losses)) for j in range(i)]
    return float(np.median(ratios))
