"""What is shown while a race goes on: a table on a terminal, a line elsewhere."""

import time
from typing import Any

from skirl.sweep.entrant import Entrant
from skirl.sweep.race import Race
from skirl.sweep.table import as_facts, drawn

_AUCS_EVERY = 2.0
"""Seconds between two computations of the AUCs, which take a millisecond per variant."""


class Shown:
    """The standing of all variants, and the speed, as shown during the race.

    **Arguments**

    - `race`: the race of the variants.
    - `entrants`: the variants by name.
    """

    def __init__(self, race: Race, entrants: dict[str, Entrant]) -> None:
        self._race, self._entrants = race, entrants
        self._aucs: dict[str, float | None] = {}
        self._due, self._began = 0.0, time.monotonic()
        self._before: int | None = None

    def aucs(self, *, now: bool = False) -> dict[str, float | None]:
        """Return each variant's AUC over its predictions so far, at most two seconds old unless `now`."""
        if now or time.monotonic() >= self._due:
            for name, entrant in self._entrants.items():
                self._aucs[name] = entrant.auc if entrant.done else entrant.meter.metrics.scores().auc
            self._due = time.monotonic() + _AUCS_EVERY
        return self._aucs

    def rate(self) -> float:
        """Return samples per second since the first call. Each counts once, however many variants train on it."""
        samples = max(entrant.meter.samples for entrant in self._entrants.values())
        if self._before is None:
            self._before = samples
            self._began = time.monotonic()
            return 0.0
        return (samples - self._before) / max(time.monotonic() - self._began, 1e-9)

    def table(self) -> Any:
        """Return the table for a terminal."""
        return drawn(self._race.standing(), self.aucs(), self.rate())

    def facts(self) -> Any:
        """Return the facts for one line, shown where there is no terminal."""
        return as_facts(self._race.standing(), self.aucs(), self.rate())
