"""The standing of a sweep while it goes on."""

import time
from collections.abc import Callable, Mapping, Sequence

from skirl.sweep.race import VariantPlace
from skirl.tools.progress import Facts, Speed
from skirl.tools.units import figure

AUCS_EVERY = 2.0
"""Seconds between two computations of the AUCs, which take a millisecond per variant."""


def difference(place: VariantPlace) -> str:
    """Return how much higher its loss is than that of rank 1, with the standard error, as text.

    >>> difference(VariantPlace(1, "lr=0.1", 0.5, 0.0, 0.0, "leads", leading=True))
    ''
    >>> difference(VariantPlace(2, "lr=0.1,seed=1", 0.5, 0.0, 0.0, "races", leading=True))
    'seed of rank 1'
    """
    if place.rank == 1 or place.difference is None:
        return ""
    if place.leading:
        return "seed of rank 1"
    return f"{place.difference:+.5f}" + ("" if place.error is None else f" ± {place.error:.5f}")


def facts_of(places: Sequence[VariantPlace], aucs: Mapping[str, float | None], rate: float) -> Facts:
    """Return the standing as the facts of one line.

    >>> places = [VariantPlace(1, "a", 0.5, 0.0, None, "leads"), VariantPlace(2, "b", 0.6, 0.1, 0.01, "races")]
    >>> list(facts_of(places, {"a": 0.7}, 1000.0).values())
    ['a', '0.50000', '0.7000', 'b +0.10000 ± 0.01000', '2 of 2', '1,000']
    """
    first, *others = [place for place in places if place.rank == 1 or place.state in ("leads", "races")]
    numbers = {"held out": (first.held_out, 5), "loss": (first.loss, 5), "AUC": (aucs.get(first.variant), 4)}
    return {
        "leader": first.variant,
        **{name: figure(value, digits) for name, (value, digits) in numbers.items() if value is not None},
        **({"next": f"{others[0].variant} {difference(others[0])}"} if others else {}),
        "racing": f"{sum(place.state in ('leads', 'races') for place in places)} of {len(places)}",
        "samples/s": f"{rate:,.0f}",
    }


class Shown:
    """The standing of all variants, and the speed."""

    def __init__(self, standing: Callable[[], list[VariantPlace]], aucs: Callable[[], dict[str, float | None]]) -> None:
        self._standing, self._compute = standing, aucs
        self._aucs: dict[str, float | None] = {}
        self._due = 0.0
        self.speed = Speed()
        """Of the stream: each sample counts once, for all variants."""
        self._samples = 0

    def aucs(self, *, now: bool = False) -> dict[str, float | None]:
        """Return the AUCs, at most some seconds old."""
        if now or time.monotonic() >= self._due:
            self._aucs = self._compute()
            self._due = time.monotonic() + AUCS_EVERY
        return self._aucs

    def read(self, samples: int) -> None:
        self._samples = samples
        self.speed.reached(samples)

    def rate(self) -> float:
        """Samples of the stream per second since the first step."""
        return self.speed.rate(self._samples)

    def facts(self) -> Facts:
        """Return the facts for one line."""
        return facts_of(self._standing(), self.aucs(), self.rate())
