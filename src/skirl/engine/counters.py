"""What an engine has moved."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Rows moved since the engine was made.

    Fetched and written rows are counted where they move: what the store had and took.
    """

    steps: int = 0
    fetched: int = 0
    """Rows brought in again, out of the store or out of a pending write-back."""
    forwarded: int = 0
    """Those of them out of a pending write-back."""
    new: int = 0
    written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
