"""Keys: int64 names of rows, with the table in the upper 16 bits and the row in the lower 48."""

from typing import Any

ROW_BITS = 48
MAX_ROWS = 1 << ROW_BITS
MAX_TABLES = 1 << 15  # keys stay non-negative


def table_of(keys: Any) -> Any:
    """Return the table of a key, or of each key of an array.

    >>> table_of(key_of(3, 7)), row_of(key_of(3, 7))
    (3, 7)
    """
    return keys >> ROW_BITS


def row_of(keys: Any) -> Any:
    """Return the row of a key inside its table, or of each key of an array."""
    return keys & (MAX_ROWS - 1)


def key_of(table: Any, rows: Any) -> Any:
    """Return the key of a row of a table, or the keys of arrays of rows and tables."""
    return table << ROW_BITS | rows
