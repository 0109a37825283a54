"""Where batches come from: readers of click logs, and synthetic ones."""

from skirl.data.flags import DataFlags
from skirl.data.source import Source
from skirl.data.synthetic import Synthetic

__all__ = ["DataFlags", "Source", "Synthetic"]
