"""Where batches come from: readers of click logs, and synthetic ones."""

from typing import TYPE_CHECKING

from skirl.data.flags import DataFlags
from skirl.tools import lazily

if TYPE_CHECKING:
    from skirl.data.encodings import encodings_of
    from skirl.data.source import Source
    from skirl.data.synthetic import Synthetic

__all__ = ["DataFlags", "Source", "Synthetic", "encodings_of"]

__getattr__ = lazily(__name__)
