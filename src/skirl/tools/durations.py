"""Lengths of time, as people write them."""

import re

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_seconds(text: str) -> float:
    """Return the seconds of a length of time such as "30m" or "1.5h".

    >>> parse_seconds("30m"), parse_seconds("1d"), parse_seconds("1.5 h")
    (1800.0, 86400.0, 5400.0)
    """
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhdw])\s*", text)
    if not match or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a length of time: write it like 90s, 30m, 2h or 1d")
    return float(match[1]) * _UNITS[match[2]]
