"""Sizes in bytes and lengths of time, as people write them."""

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "4GiB" or "500 MB".

    >>> parse_bytes("4GiB"), parse_bytes("1.5 kB")
    (4294967296, 1500)
    """
    match = re.fullmatch(r"\s*([0-9]{0,18}\.?[0-9]{1,18})\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write it like 512MiB, 4GiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_seconds(text: str) -> float:
    """Return the seconds of a length of time such as "30m" or "1.5h".

    >>> parse_seconds("30m"), parse_seconds("1d"), parse_seconds("1.5 h")
    (1800.0, 86400.0, 5400.0)
    """
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhdw])\s*", text)
    if not match or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a length of time: write it like 90s, 30m, 2h or 1d")
    return float(match[1]) * _SECONDS[match[2]]
