"""Compare losses of several models on the same batches in pairs: sums, errors, and when a deficit is sure.

Every array may have leading dimensions before those that are named: then as many comparisons run side by side.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PairSums:
    """Sums of losses over batches, each loss taken before the model was trained on the batch.

    >>> sums = added(added(no_sums(2), np.array([1.0, 3.0])), np.array([2.0, 3.0]))
    >>> sums.batches, sums.losses.tolist(), sums.differences[1, 0].item(), sums.squares[1, 0].item()
    (2, [3.0, 6.0], 3.0, 5.0)
    """

    batches: int
    losses: Floats
    """[models]."""
    differences: Floats
    """[models, models]: the loss of the first minus that of the second."""
    squares: Floats
    """[models, models]: the squares of these differences, batch by batch."""


def no_sums(*shape: int) -> PairSums:
    """Return sums over no batches. The last number of `shape` is the number of models."""
    pairs = np.zeros((*shape, shape[-1]))
    return PairSums(0, np.zeros(shape), pairs, pairs)


def added(sums: PairSums, losses: Floats) -> PairSums:
    """Return the sums with one more batch. Where a loss is nan, that model and its pairs keep their sums.

    **Arguments**

    - `sums`: sums over the batches before.
    - `losses`: [models], the mean loss over the samples of this batch; nan if the model has not seen it.
    """
    seen = np.isfinite(losses)
    one = np.where(seen, losses, 0.0)
    pairs = np.where(seen[..., :, None] & seen[..., None, :], one[..., :, None] - one[..., None, :], 0.0)
    return PairSums(sums.batches + 1, sums.losses + one, sums.differences + pairs, sums.squares + pairs**2)


def together(first: PairSums, then: PairSums) -> PairSums:
    """Return sums over the batches of both."""
    return PairSums(
        first.batches + then.batches,
        first.losses + then.losses,
        first.differences + then.differences,
        first.squares + then.squares,
    )


def pooled(sums: PairSums, shares: Floats) -> PairSums:
    """Return the sums of models that are averages of others, as if each loss had been averaged batch by batch.

    >>> sums = added(added(no_sums(3), np.array([1.0, 3.0, 5.0])), np.array([2.0, 4.0, 0.0]))
    >>> two = pooled(sums, np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    >>> two.losses.tolist(), two.differences[0, 1].item(), two.squares[0, 1].item()  # 2 - 5 and 3 - 0
    ([5.0, 5.0], 0.0, 18.0)

    **Arguments**

    - `sums`: sums of the others, all over the same batches.
    - `shares`: [averages, models]; those of an average sum up to 1, or are all 0 if it is of none.
    """
    differences = shares @ sums.differences @ shares.T
    across = shares @ sums.squares @ shares.T
    within = np.diagonal(across) / 2  # squares of all pairs tell the square of any sum whose weights cancel out
    squares = np.maximum(across - within[:, None] - within[None, :], 0.0)
    return PairSums(sums.batches, shares @ sums.losses, differences, squares)


def errors(sums: PairSums) -> Floats:
    """Return [models, models]: the standard error of each pair's mean difference; nan with fewer than two batches."""
    n = sums.batches
    if n < 2:
        return np.full_like(sums.differences, np.nan)
    spread = np.maximum(sums.squares - sums.differences**2 / n, 0.0) / (n - 1)
    return np.sqrt(spread / n)


def bound(squares: Floats, before: Floats, alpha: float) -> Floats:
    """Return the value that a sum of differences ever exceeds with probability `alpha` at most, if their mean is 0 or less.

    It holds over all numbers of batches at once, so one may look after each batch. It assumes differences that are
    symmetric around their mean, whatever their spread and however that changes. Proof: for d of that kind and h above 0,
    exp(h d - h^2 d^2 / 2) is 1 or less on average, so products over batches are no more than 1 on average; so is their
    mixture over h, half-normal of variance r, which is 2 Phi(x) exp(x^2 / 2) / sqrt(1 + r squares) with x = sum
    sqrt(r / (1 + r squares)); by Ville's inequality it ever exceeds 1 / alpha with a probability of alpha at most.

    **Arguments**

    - `squares`: the sum of the squared differences so far.
    - `before`: a guess, made beforehand, of how large that sum will be when it matters; 0: nothing is ever sure.
    - `alpha`: the probability.
    """
    tuned = -2.0 * np.log(alpha)
    with np.errstate(divide="ignore", invalid="ignore"):
        r = (tuned + np.log1p(tuned)) / before
        whole = 1.0 + r * squares
        x = np.sqrt(2.0 * np.log((1.0 + np.sqrt(whole) / alpha) / 2.0))  # 2 Phi(x) exp(x^2 / 2) > 2 exp(x^2 / 2) - 1
        least = x * np.sqrt(whole / r)
    return np.where(before > 0, least, np.inf)


def surely_behind(sums: PairSums, before: PairSums, racing: NDArray[np.bool_], alpha: float) -> NDArray[np.bool_]:
    """Return bool [models]: those whose mean loss is surely higher than that of another model still in the race.

    The probability that the best model is ever among them is `alpha` at most: it would have to exceed the bound against
    one of the others, and each of these gets an equal part of alpha.

    **Arguments**

    - `sums`: sums over the batches that count.
    - `before`: sums over earlier batches, which tell how large differences are.
    - `racing`: bool [models]: those that have not left.
    - `alpha`: the probability of an error.
    """
    others = max(1, racing.shape[-1] - 1)
    behind = sums.differences > bound(sums.squares, before.squares, alpha / others)
    return np.any(behind & racing[..., None, :] & racing[..., :, None], axis=-1)


def share_of_alpha(part: int) -> float:
    """Return the share of alpha for the n-th comparison, counted from 1. All shares, however many, sum up to at most 1.

    >>> [round(share_of_alpha(n), 4) for n in (1, 2, 3)]
    [0.5, 0.1667, 0.0833]
    """
    return 1.0 / (part * (part + 1))


@dataclass(frozen=True)
class Course:
    """The stretch of batches over which models are compared. Each stretch has twice as many batches as the one before.

    The first stretch measures how large differences are, and nobody leaves in it. Each later one starts its comparison
    from scratch, because a model that learns slowly at first may be the best in the end.
    """

    first: int
    """Batches of the first stretch."""
    stretch: int
    """Index of the current stretch, from 0."""
    now: PairSums
    """Sums over the current stretch."""
    before: PairSums
    """Sums over the stretch before it."""
    part: int = 0
    """Number of this comparison, from 1 on; each has its own share of alpha. 0 in the first stretch."""

    @classmethod
    def begin(cls, first: int, *shape: int) -> "Course":
        """Return the state before the first batch.

        **Arguments**

        - `first`: batches of the first stretch.
        - `shape`: leading dimensions, and last the number of models.
        """
        return cls(first, 0, no_sums(*shape), no_sums(*shape))

    def after(self, losses: Floats) -> "Course":
        """Return the state after one more batch."""
        if self.now.batches < self.first << self.stretch:
            return replace(self, now=added(self.now, losses))
        now = added(no_sums(*losses.shape), losses)
        return replace(self, stretch=self.stretch + 1, now=now, before=self.now, part=self.part + 1)

    def anew(self, before: PairSums, seen: int) -> "Course":
        """Return the state with a new stretch: a model is not what it was, so no sum over it says anything more.

        **Arguments**

        - `before`: what takes the place of the sums over recent batches.
        - `seen`: number of all batches so far; the new stretch has more than these.
        """
        stretch = self.stretch
        while self.first << stretch <= seen:
            stretch += 1
        now, part = no_sums(*before.losses.shape), self.part + (stretch > 0)
        return replace(self, stretch=stretch, now=now, before=before, part=part)

    def recent(self) -> PairSums:
        """Return sums over this stretch and the one before: the last half of all batches, or more."""
        return together(self.before, self.now)

    def out(self, racing: NDArray[np.bool_], alpha: float) -> NDArray[np.bool_]:
        """Return bool [models]: those that are surely behind now."""
        if not self.stretch:
            return np.zeros_like(racing)
        return surely_behind(self.now, self.before, racing, alpha * share_of_alpha(self.part))
