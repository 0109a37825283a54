"""Keys: int64 names of rows, with the table in the upper 16 bits and the row in the lower 48."""

from typing import Any

ROW_BITS = 48
MAX_ROWS = 1 << ROW_BITS
MAX_TABLES = 1 << 15  # keys stay non-negative


def table_of(keys: Any) -> Any:
    return keys >> ROW_BITS


def row_of(keys: Any) -> Any:
    return keys & (MAX_ROWS - 1)


def key_of(table: Any, rows: Any) -> Any:
    return table << ROW_BITS | rows
