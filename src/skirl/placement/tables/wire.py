"""The time of an exchange of pooled rows and their gradients: a latency and a rate, alone or corrected by two nets.

Nets are trained only if measuring again gives the same times, which gloo on a busy machine does not.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from skirl.placement.tables.nets import Mlp, bounded, packed, scaled, unpacked
from skirl.tools.sealed_json import AMOUNT, COUNT, misfit

UNITS = 32
MOST_NOISE = 0.25
"""Largest variation of repeats, as a share, with which nets are trained."""
MOST_RANKS = 64
_FLOAT = 4
_FORM = {"ranks": COUNT, "latency": AMOUNT, "per_byte": AMOUNT, "noise": AMOUNT, "error": AMOUNT}


@dataclass(frozen=True)
class WireNets:
    """Corrections to an exchange's time by latency and rate.

    **Arguments**

    - `mean`, `deviation`: those of the inputs: the logarithm of each rank's bytes, then when it starts.
    - `forward`: from bytes and starts, the logarithm of a factor for each rank.
    - `backward`: the same from bytes alone.
    """

    mean: np.ndarray
    deviation: np.ndarray
    forward: Mlp
    backward: Mlp

    def factors(self, nbytes: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the forward and the backward factor of each rank.

        **Arguments**

        - `nbytes`, `starts`: as for `Wire.told`.
        """
        x = scaled(inputs_of(nbytes, starts), self.mean, self.deviation)
        return np.exp(bounded(self.forward(x))), np.exp(bounded(self.backward(x[:, : nbytes.shape[1]])))


@dataclass(frozen=True)
class Wire:
    """The exchange speed of some ranks.

    **Arguments**

    - `ranks`: number of ranks.
    - `latency`: milliseconds of an empty exchange.
    - `per_byte`: milliseconds for each byte of the rank with the most.
    - `noise`: how much repeats vary: the median of deviation over mean.
    - `error`: the median error for exchanges that it was not fitted to.
    - `nets`: correct latency and rate; None if repeats vary too much, or if nets gained nothing.
    """

    ranks: int
    latency: float
    per_byte: float
    noise: float
    error: float
    nets: WireNets | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"its exchange is of {self.ranks} ranks, not 2 to {MOST_RANKS}")
        if not (self.latency >= 0 and self.per_byte > 0 and self.noise >= 0 and self.error >= 0):
            raise ValueError("its exchange has numbers below 0, or takes nothing for a byte")

    @property
    def validated(self) -> bool:
        """True if measuring again gives about the same."""
        return self.noise <= MOST_NOISE

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return 1e3 / self.per_byte

    def told(self, nbytes: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the milliseconds of each rank forward, from its start on, and backward, each [n, ranks].

        **Arguments**

        - `nbytes`: bytes that each rank sends forward, and gets back, [n, ranks].
        - `starts`: milliseconds after which each rank has its pooled rows, of the same shape.
        """
        moved = np.repeat(self.latency + self.per_byte * nbytes.max(axis=1, keepdims=True), self.ranks, axis=1)
        forward, backward = (1.0, 1.0) if self.nets is None else self.nets.factors(nbytes, starts)
        return waits(starts) + moved * forward, moved * backward

    def said(self) -> dict[str, Any]:
        """Return its kind and its figures, to be reported."""
        kind = "unvalidated" if not self.validated else "latency and rate" if self.nets is None else "nets"
        return {
            "kind": kind, "ranks": self.ranks, "noise": self.noise, "error": self.error, "latency_ms": self.latency,
            "bytes_a_second": self.rate,
        }  # fmt: skip

    def body(self) -> dict[str, Any]:
        """Return it as a file stores it."""
        plain = {name: getattr(self, name) for name in _FORM}
        if self.nets is None:
            return plain | {"nets": None}
        of = {name: packed(getattr(self.nets, name)) for name in ("mean", "deviation")}
        return plain | {"nets": of | {"forward": self.nets.forward.body(), "backward": self.nets.backward.body()}}

    @classmethod
    def parsed(cls, said: Any) -> "Wire":
        """Parse what a file stores. Raise a ValueError if it is wrong.

        **Arguments**

        - `said`: what the file stores.
        """
        if (wrong := misfit(said, _FORM)) is not None:
            raise ValueError(f"its exchange is wrong, {wrong}")
        ranks, nets = said["ranks"], said.get("nets")
        made = cls(**{name: said[name] for name in _FORM})
        if nets is None:
            return made
        plain = unpacked(nets, {"mean": (2 * ranks,), "deviation": (2 * ranks,)})
        if not (plain["deviation"] > 0).all():
            raise ValueError("its exchange has a deviation of 0 or less")
        forward = Mlp.parsed(nets.get("forward"), 2 * ranks, UNITS, ranks)
        backward = Mlp.parsed(nets.get("backward"), ranks, UNITS, ranks)
        return cls(**{name: said[name] for name in _FORM}, nets=WireNets(**plain, forward=forward, backward=backward))


def waits(starts: np.ndarray) -> np.ndarray:
    """Return the milliseconds that each rank waits for the last one.

    **Arguments**

    - `starts`: starts of all ranks, [n, ranks].

    >>> waits(np.array([[1.0, 4.0]])).tolist()
    [[3.0, 0.0]]
    """
    return starts.max(axis=1, keepdims=True) - starts


def inputs_of(nbytes: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the inputs of the nets: bytes, and how long after the first each rank starts.

    **Arguments**

    - `nbytes`, `starts`: those of all ranks, [n, ranks].
    """
    return np.concatenate([np.log1p(nbytes), starts - starts.min(axis=1, keepdims=True)], axis=1)


def sent(dims: np.ndarray, batch: int) -> np.ndarray:
    """Return the bytes that leave each rank forward.

    **Arguments**

    - `dims`: columns that each rank has, [n, ranks].
    - `batch`: samples of all ranks.

    >>> sent(np.array([[16, 48]]), 8).tolist()
    [[256.0, 768.0]]
    """
    ranks = dims.shape[1]
    return dims * (batch // ranks) * (ranks - 1.0) * _FLOAT
