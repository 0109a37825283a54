"""Estimates how much of the movement hides behind computation: reading, computing and writing as three clocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skirl.store.link import Link


@dataclass(frozen=True)
class Overlap:
    """Estimated seconds of a run."""

    together: float
    """Time with movement in parallel to computation."""
    serial: float
    """Time with movement and computation in sequence."""
    roof: float
    """Time that no overlap could beat: computation alone, or the link alone."""

    @property
    def hidden(self) -> float:
        """Share of the hideable time that is hidden, at most 1.

        >>> Overlap(together=1.25, serial=2.0, roof=1.0).hidden
        0.75
        """
        room = self.serial - self.roof
        return 1.0 if room <= 0 else (self.serial - self.together) / room


def overlap(
    read: Sequence[float] | np.ndarray, written: Sequence[float] | np.ndarray, step: float, link: Link, prefetch: int
) -> Overlap:
    """Estimate a run whose steps read and write these bytes and compute for `step` seconds each.

    >>> overlap([0, 100, 100], [0, 0, 100], step=1.0, link=Link(rate=100.0), prefetch=2)
    Overlap(together=3.0, serial=6.0, roof=3.0)
    """
    steps = len(read)
    ends = np.zeros(steps + 1)  # when each step's computation ends, after the start of the run
    arrived = wrote = 0.0
    takes_read, takes_write = ([link.seconds(int(n)) if n else 0.0 for n in bytes_] for bytes_ in (read, written))
    for t in range(steps):
        asked = ends[max(0, t - prefetch)]  # its rows are asked for when the step `prefetch` before it begins
        arrived = max(arrived, asked) + takes_read[t]
        ends[t + 1] = max(ends[t], arrived) + step
        wrote = max(wrote, ends[t]) + takes_write[t]
    computing = steps * step
    serial = computing + sum(takes_read) + sum(takes_write)
    busiest = max(sum(map(float, read)), sum(map(float, written))) / link.rate
    return Overlap(float(max(ends[-1], wrote)), serial, max(computing, busiest))


def step_that_hides(read: np.ndarray, written: np.ndarray, link: Link) -> float:
    """Return the seconds that a step must take for the link to keep up, on average over the run's second half."""
    half = len(read) // 2
    return max((link.seconds(int(part[half:].mean())) for part in (read, written) if len(part[half:])), default=0.0)
