"""Where batches come from: readers of click logs, and synthetic ones."""

from skirl.data.synthetic import Synthetic

__all__ = ["Synthetic"]
