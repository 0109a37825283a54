"""The share of each table for each of several unequal sites: the least time of the busiest one, within memory limits."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_CLOSE = 1e-12


class NoRoom(ValueError):
    """Raised when the rows do not fit; the text says by how much."""


def least_busy(
    moved: Sequence[float] | Floats,
    held: Sequence[float] | Floats,
    rates: Sequence[float] | Floats,
    caps: Sequence[float] | Floats,
) -> tuple[Floats, float]:
    """Return the share of each table at each site, float [tables, sites], and the seconds of the busiest site.

    **Arguments**

    - `moved`, `held`: bytes of each table that move, and that are held.
    - `rates`: bytes per second of each site.
    - `caps`: bytes that each site can hold; infinite for no limit.

    >>> least_busy([6, 6], [1, 1], [2, 1], [9, 9])[0].round(3).tolist(), least_busy([6, 6], [1, 1], [2, 1], [1, 9])[1]
    ([[0.667, 0.333], [0.667, 0.333]], 6.0)
    """
    load, mass = np.asarray(moved, np.float64), np.asarray(held, np.float64)
    rate, cap = np.asarray(rates, np.float64), np.asarray(caps, np.float64)
    if mass.sum() > cap.sum():
        raise NoRoom(f"rows take {mass.sum():,.0f} bytes, all sites together hold {cap.sum():,.0f}")
    mass = np.where((mass == 0) & (load > 0), _CLOSE, mass)  # what moves takes some room
    shares = np.zeros((len(load), len(rate)))
    _fill(shares, load, mass, rate, cap, (mass > 0).astype(np.float64), np.arange(len(rate)))
    shares[mass == 0] = rate / rate.sum()
    shares = np.clip(shares, 0, None)
    shares /= shares.sum(axis=1, keepdims=True)
    return shares, float((load @ shares / rate).max())


def _fill(shares: Floats, load: Floats, mass: Floats, rate: Floats, cap: Floats, left: Floats, sites: NDArray) -> None:
    """Divide what is left of each table among some sites, which have room for it."""
    total, size = float(load @ left), float(mass @ left)
    sites = sites[np.argsort(-rate[sites] / cap[sites], kind="stable")]
    least, first = total / rate[sites].sum(), 0
    for count in range(1, len(sites)):
        room = cap[sites[:count]].sum()
        if room >= size:
            break
        seconds = (total - load @ _densest(load, mass, left, 0, room)) / rate[sites[count:]].sum()
        if seconds > least * (1 + _CLOSE):
            least, first = seconds, count
    if first:  # these are full of the densest rows and have time to spare: they can take no load off the others
        dense = _densest(load, mass, left, 0, cap[sites[:first]].sum())
        _fill(shares, load, mass, rate, cap, dense, sites[:first])
        _fill(shares, load, mass, rate, cap, left - dense, sites[first:])
        return
    room = _rooms(size, rate[sites], cap[sites])
    full = room >= cap[sites] * (1 - _CLOSE)
    if full.all():
        full[-1] = False  # the last one takes what the others leave
    for site, mine in zip(sites[full], room[full], strict=True):
        taken = _window(load, mass, left, mine, least * rate[site])
        shares[:, site] += taken
        left = np.clip(left - taken, 0, None)
    others = sites[~full]
    shares[:, others] += np.outer(left, rate[others] / rate[others].sum())


def _rooms(size: float, rate: Floats, cap: Floats) -> Floats:
    """Return the memory that each site uses: in proportion to its rate, up to its cap."""
    room, open_ = np.zeros(len(rate)), np.ones(len(rate), np.bool_)
    while open_.any():
        each = (size - room[~open_].sum()) * rate / rate[open_].sum()
        over = open_ & (each >= cap)
        if not over.any():
            room[open_] = each[open_]
            break
        room[over] = cap[over]
        open_ &= ~over
    return room


def _densest(load: Floats, mass: Floats, left: Floats, begin: float, end: float) -> Floats:
    """Return the part of each table from `begin` to `end` in the memory of what is left, densest rows first."""
    density = np.divide(load, mass, out=np.zeros_like(load), where=mass > 0)
    order = np.argsort(-density, kind="stable")
    ends = np.cumsum((mass * left)[order])
    inside = np.clip(np.minimum(ends, end) - np.maximum(ends - (mass * left)[order], begin), 0, None)
    taken = np.zeros_like(load)
    np.divide(inside, mass[order], out=inside, where=mass[order] > 0)
    taken[order] = inside
    return np.minimum(taken, left)


def _window(load: Floats, mass: Floats, left: Floats, room: float, moved: float) -> Floats:
    """Return a range of densities that fills `room` and moves `moved` bytes: the further back, the fewer it moves."""
    low, high = 0.0, max(0.0, float(mass @ left) - room)
    for _ in range(100):
        begin = (low + high) / 2
        if load @ _densest(load, mass, left, begin, begin + room) > moved:
            low = begin
        else:
            high = begin
    return _densest(load, mass, left, high, high + room)
