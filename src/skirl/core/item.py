"""A micro-batch on its way from the reader to the loop."""

from dataclasses import dataclass
from typing import Any

from skirl.core.ids import Captured


@dataclass(slots=True)
class Item:
    """One micro-batch of the user's loader."""

    batch: Any
    """The batch that the loop gets."""
    captured: Captured
    """Its ids."""
    nbytes: int = 0
    """Number of bytes that the user's batch takes."""
    loader_state: Any = None
    """The loader's own state after this batch, if it has one."""
