"""Counters of the rows that an engine has moved."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Rows moved since the engine was made.

    Fetched and written rows are counted when they move, and only those that the store had or took.
    """

    steps: int = 0
    fetched: int = 0
    """Rows brought in again, from the store or from a pending write-back."""
    forwarded: int = 0
    """Those of them that came from a pending write-back."""
    new: int = 0
    written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
