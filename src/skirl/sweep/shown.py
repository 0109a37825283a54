"""What is shown while a race goes on: a table on a terminal, a line elsewhere."""

import time
from collections.abc import Callable
from typing import Any

from skirl.sweep.race import VariantPlace
from skirl.sweep.table import Standing, as_facts
from skirl.tools.speed import Speed

_AUCS_EVERY = 2.0
"""Seconds between two computations of the AUCs, which take a millisecond per variant."""


class Shown:
    """The standing of all variants, and the speed.

    **Arguments**

    - `standing`: returns the places of the variants.
    - `aucs`: returns the AUC of each variant over all its predictions so far.
    """

    def __init__(self, standing: Callable[[], list[VariantPlace]], aucs: Callable[[], dict[str, float | None]]) -> None:
        self._standing, self._compute = standing, aucs
        self._aucs: dict[str, float | None] = {}
        self._due = 0.0
        self.speed = Speed()
        """Of the stream: each sample counts once, for all variants."""
        self._samples = 0

    def aucs(self, *, now: bool = False) -> dict[str, float | None]:
        """Return the AUCs, at most some seconds old.

        **Arguments**

        - `now`: compute them again in any case.
        """
        if now or time.monotonic() >= self._due:
            self._aucs = self._compute()
            self._due = time.monotonic() + _AUCS_EVERY
        return self._aucs

    def read(self, samples: int) -> None:
        """Take note of a step.

        **Arguments**

        - `samples`: samples of the stream read so far.
        """
        self._samples = samples
        self.speed.reached(samples)

    def rate(self) -> float:
        """Samples of the stream per second since the first step."""
        return self.speed.rate(self._samples)

    def table(self) -> Any:
        """Return the table for a terminal."""
        return Standing(self._standing(), self.aucs(), self.rate())

    def facts(self) -> Any:
        """Return the facts for one line, shown where there is no terminal."""
        return as_facts(self._standing(), self.aucs(), self.rate())
