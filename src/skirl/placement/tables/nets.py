"""A net that predicts computing times: a small net per part of a table, their sum, and a head over it. Plain numpy."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import Any

import numpy as np

from skirl.core.optim import ROW_OPTIMIZERS
from skirl.placement.tables.spec import BINS, TableSpec

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

    **Arguments**

    - `spec`: the table.
    - `rows`, `dim`: size of the part.

    >>> features_of(TableSpec("a", rows=1024, dim=8, batch=4, ids=8.0, distinct=8.0), 512, 8)[[3, 6, 7]].round(3).tolist()
    [1.386, 1.0, 0.0]
    """
    part, found = rows / spec.rows, _shared(spec).copy()
    ids = max(spec.ids * part, 1e-3)
    found[0], found[1], found[3] = log(rows), log(dim), log(ids)
    found[4], found[5] = log(max(spec.distinct * part, 1e-3)), log(ids / spec.batch)
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
    """Two linear layers with a ReLU between them.

    **Arguments**

    - `first`, `first_bias`, `last`, `last_bias`: of shapes [units, inputs], [units], [outputs, units], [outputs].
    """

    first: np.ndarray
    first_bias: np.ndarray
    last: np.ndarray
    last_bias: np.ndarray

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return outputs for inputs, [n, inputs] to [n, outputs]."""
        return np.maximum(x @ self.first.T + self.first_bias, 0.0) @ self.last.T + self.last_bias

    def body(self) -> dict[str, Any]:
        """Return it as a file stores it."""
        return {name: packed(of) for name, of in vars(self).items()}

    @classmethod
    def parsed(cls, said: Any, inputs: int, units: int, outputs: int) -> "Mlp":
        """Parse what a file stores. Raise a ValueError if it does not have these sizes.

        **Arguments**

        - `said`: what the file stores.
        - `inputs`, `units`, `outputs`: the sizes that it has to have.
        """
        shapes = {"first": (units, inputs), "first_bias": (units,), "last": (outputs, units), "last_bias": (outputs,)}
        return cls(**unpacked(said, shapes))


@dataclass(frozen=True)
class ComputeNet:
    """Corrections to sums of terms: a factor for the time of each part, and one for that of a whole set of parts.

    **Arguments**

    - `mean`, `deviation`: those of each of `FEATURES`.
    - `each`: for a part: the logarithm of its factor, and what it adds to `SUMS` sums.
    - `head`: for these sums: the logarithm of the factor of the whole set.
    """

    mean: np.ndarray
    deviation: np.ndarray
    each: Mlp
    head: Mlp

    def parts(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the factor of each part, [n], and what it adds to the sums of its set, [n, SUMS].

        **Arguments**

        - `features`: [n, FEATURES].
        """
        found = self.each(scaled(features, self.mean, self.deviation))
        return np.exp(bounded(found[:, 0])), np.logaddexp(0.0, found[:, 1:])

    def factors(self, sums: np.ndarray) -> np.ndarray:
        """Return the factor of each set, [n].

        **Arguments**

        - `sums`: sums over its parts, [n, SUMS].
        """
        return np.exp(bounded(self.head(np.log1p(sums))[:, 0]))

    def body(self) -> dict[str, Any]:
        """Return it as a file stores it."""
        of_features = {"mean": packed(self.mean), "deviation": packed(self.deviation)}
        return {"features": list(FEATURES), **of_features, "each": self.each.body(), "head": self.head.body()}

    @classmethod
    def parsed(cls, said: Any) -> "ComputeNet":
        """Parse what a file stores. Raise a ValueError if it is wrong.

        **Arguments**

        - `said`: what the file stores.
        """
        if not isinstance(said, Mapping):
            raise ValueError("its net is not an object")
        if said.get("features") != list(FEATURES):
            raise ValueError(f"its net has features {_some(said.get('features'))}, skirl has {_some(FEATURES)}")
        size = (len(FEATURES),)
        plain = unpacked({k: said.get(k) for k in ("mean", "deviation")}, {"mean": size, "deviation": size})
        if not (plain["deviation"] > 0).all():
            raise ValueError("its net has a deviation of 0 or less")
        each = Mlp.parsed(said.get("each"), len(FEATURES), HIDDEN, 1 + SUMS)
        return cls(plain["mean"], plain["deviation"], each, Mlp.parsed(said.get("head"), SUMS, HEAD, 1))


def scaled(features: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Return features in deviations from their means, cut off far away, and 0 for unknown ones.

    **Arguments**

    - `features`: [n, features].
    - `mean`, `deviation`: those of the training data.
    """
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
    """Return an array as a file stores it: its shape, and its numbers as text.

    **Arguments**

    - `of`: the array.
    """
    data = np.ascontiguousarray(of, "<f4")
    return {"shape": list(of.shape), "float32": base64.b64encode(data.tobytes()).decode()}


def unpacked(said: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return the arrays that a file stores. Raise a ValueError unless they have these shapes and are finite.

    Their sizes are checked before anything is decoded.

    **Arguments**

    - `said`: what the file stores.
    - `shapes`: shape of each array.
    """
    found = {}
    for name, shape in shapes.items():
        of = said.get(name) if isinstance(said, Mapping) else None
        text = of.get("float32") if isinstance(of, Mapping) else None
        if not isinstance(of, Mapping) or not isinstance(text, str):
            raise ValueError(f"its net has no {name}")
        nbytes = 4 * int(np.prod(shape))
        if of.get("shape") != list(shape) or len(text) != 4 * -(-nbytes // 3):
            raise ValueError(f"the size of its net's {name} is not {' x '.join(map(str, shape))}")
        try:
            array = np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(float).reshape(shape)
        except (binascii.Error, ValueError):
            raise ValueError(f"its net's {name} does not hold its numbers in base64") from None
        if not np.isfinite(array).all():
            raise ValueError(f"its net has a {name} that is not finite")
        found[name] = array
    return found


def _some(names: Any) -> str:
    if not isinstance(names, Sequence) or isinstance(names, str):
        return repr(names)[:40]
    return f"{', '.join(map(str, names[:3]))[:60]}, ... ({len(names)})"
