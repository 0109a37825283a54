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


def facts_line(places: Sequence[VariantPlace], aucs: Mapping[str, float | None], rate: float) -> Facts:
    """Return the standing as the facts of one line.

    >>> places = [VariantPlace(1, "a", 0.5, 0.0, None, "leads"), VariantPlace(2, "b", 0.6, 0.1, 0.01, "races")]
    >>> list(facts_line(places, {"a": 0.7}, 1000.0).values())
    ['a', '0.50000', '0.7000', 'b +0.10000 ± 0.01000', '2 of 2', '1,000']
    """
    first = places[0]
    racing = [place for place in places if place.state in ("leads", "races")]
    second = next((place for place in racing if place.rank > 1), None)
    auc = aucs.get(first.variant)
    return {
        "leader": first.variant,
        **({} if first.held_out is None else {"held out": figure(first.held_out, 5)}),
        "loss": "none yet" if first.loss is None else figure(first.loss, 5),
        **({} if auc is None else {"AUC": f"{auc:.4f}"}),
        **({} if second is None else {"next": f"{second.variant} {difference(second)}"}),
        "racing": f"{len(racing)} of {len(places)}",
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
        """Take note of a step."""
        self._samples = samples
        self.speed.reached(samples)

    def rate(self) -> float:
        """Samples of the stream per second since the first step."""
        return self.speed.rate(self._samples)

    def facts(self) -> Facts:
        """Return the facts for one line."""
        return facts_line(self._standing(), self.aucs(), self.rate())
