"""A net that predicts computing times: a small net per part of a table, their sum, and a head over it. Plain numpy."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import Any

import numpy as np

from skirl.core.optim import ROW_OPTIMIZERS
from skirl.placement.spec import BINS, TableSpec

PLAIN = (
    "log rows", "log dim", "log batch", "log ids", "log distinct", "log pooling", "no multiple of 16", "no multiple of 8",
)  # fmt: skip
FEATURES = (*PLAIN, *(f"reuse {n}" for n in range(BINS)), *(f"is {name}" for name in ROW_OPTIMIZERS))
"""Features of a part of a table; unknown ones count as the mean of the training data."""
HIDDEN, SUMS, HEAD = 32, 4, 16
"""Units of a part's net, number of sums that a set of parts has, and units of the head."""
FARTHEST = 4.0
"""Deviations from the mean at which a feature is cut off, so that an unusual table gets no wild answer."""
MOST = log(4.0)
"""The logarithm of a net's factor lies between this and its negative."""


def features_of(spec: TableSpec, rows: int, dim: int) -> np.ndarray:
    """Return a net's features for this many rows and columns of a table, whose lookups are spread over its rows.

    >>> features_of(TableSpec("a", rows=1024, dim=8, batch=4, ids=8.0, distinct=8.0), 512, 8)[[3, 6, 7]].round(3).tolist()
    [1.386, 1.0, 0.0]
    """
    share, found = rows / spec.rows, _shared(spec).copy()
    ids = max(spec.ids * share, 1e-3)
    found[0], found[1], found[3] = log(rows), log(dim), log(ids)
    found[4], found[5] = log(max(spec.distinct * share, 1e-3)), log(ids / spec.batch)
    found[6], found[7] = dim % 16 != 0, dim % 8 != 0
    return found


@lru_cache(4096)
def _shared(spec: TableSpec) -> np.ndarray:
    """Return the features that all parts of a table share."""
    found = np.zeros(len(FEATURES))
    found[2] = log(spec.batch)
    found[len(PLAIN) : len(PLAIN) + BINS] = spec.reuse or np.nan
    found[len(PLAIN) + BINS :] = [spec.optimizer == name for name in ROW_OPTIMIZERS]
    return found


@dataclass(frozen=True)
class Mlp:
    """Two linear layers with a ReLU between them: [units, inputs], [units], [outputs, units], [outputs]."""

    first: np.ndarray
    first_bias: np.ndarray
    last: np.ndarray
    last_bias: np.ndarray

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return outputs for inputs, [n, inputs] to [n, outputs]."""
        return np.maximum(x @ self.first.T + self.first_bias, 0.0) @ self.last.T + self.last_bias


@dataclass(frozen=True)
class ComputeNet:
    """Corrections to sums of terms: a factor for the time of each part, and one for that of a whole set of parts.

    `mean` and `deviation` are those of each of `FEATURES`. `each` tells the logarithm of a part's factor, and what it adds
    to `SUMS` sums; `head`, for these sums, the logarithm of the factor of the whole set.
    """

    mean: np.ndarray
    deviation: np.ndarray
    each: Mlp
    head: Mlp

    def parts(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the factor of each part, [n], and what it adds to the sums of its set, [n, SUMS]."""
        found = self.each(scaled(features, self.mean, self.deviation))
        return np.exp(bounded(found[:, 0])), np.logaddexp(0.0, found[:, 1:])

    def factors(self, sums: np.ndarray) -> np.ndarray:
        """Return the factor of each set, [n], from sums over its parts, [n, SUMS]."""
        return np.exp(bounded(self.head(np.log1p(sums))[:, 0]))

    def body(self) -> dict[str, Any]:
        """Return it as a file stores it."""
        layers = {name: [packed(of) for of in vars(getattr(self, name)).values()] for name in ("each", "head")}
        moments = {"mean": packed(self.mean), "deviation": packed(self.deviation)}
        return {"features": list(FEATURES), **moments, **layers}

    @classmethod
    def parsed(cls, body: Mapping[str, Any]) -> "ComputeNet":
        """Return the net that a sealed file stores. Raise a ValueError if it has other features."""
        if body["features"] != list(FEATURES):
            raise ValueError("its net has other features than those of this skirl: measure again")
        layers = [Mlp(*map(unpacked, body[name])) for name in ("each", "head")]
        return cls(unpacked(body["mean"]), unpacked(body["deviation"]), *layers)


def scaled(features: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Return features in deviations from their means, cut off far away, and 0 for unknown ones."""
    of = (features - mean) / deviation
    return np.minimum(
        np.maximum(np.where(np.isnan(of), 0.0, of), -FARTHEST), FARTHEST
    )  # np.clip and np.nan_to_num take 25 us


def bounded(x: np.ndarray) -> np.ndarray:
    """Squash values smoothly to between `MOST` and its negative.

    >>> bounded(np.array([0.0, 99.0])).round(3).tolist()
    [0.0, 1.386]
    """
    return MOST * np.tanh(x / MOST)


def packed(of: np.ndarray) -> dict[str, Any]:
    """Return an array as a file stores it: its shape, and its numbers as text."""
    data = np.ascontiguousarray(of, "<f4")
    return {"shape": list(of.shape), "float32": base64.b64encode(data.tobytes()).decode()}


def unpacked(body: Mapping[str, Any]) -> np.ndarray:
    """Return the array that a sealed file stores."""
    return np.frombuffer(base64.b64decode(body["float32"]), "<f4").astype(float).reshape(body["shape"])
