"""A micro-batch as it was read, on its way from the reader to the loop."""

from dataclasses import dataclass
from typing import Any

from skirl.core.ids import Captured


@dataclass(slots=True)
class Item:
    """One micro-batch of the user's loader."""

    batch: Any
    """What the loop gets."""
    captured: Captured
    """Its ids."""
    nbytes: int = 0
    """What the user's batch takes in memory."""
    loader_state: Any = None
    """The loader's own state after this batch, where it has one."""
