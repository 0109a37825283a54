"""A variant of a sweep: a name, and what it has otherwise than the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One of the models that share a stream.

    **Arguments**

    - `name`: tells it from the others.
    - `overrides`: what it has otherwise, by name. `skirl.Sweep` takes `lr` and `optimizer` of its rows, `seed` and `dim`;
      all others are for who makes its model.

    >>> Variant("small", {"dim": 8}).overrides["dim"]
    8
    """

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
