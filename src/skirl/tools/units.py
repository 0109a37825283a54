"""Sizes in bytes, lengths of time, links and numbers, as people write them."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "4GiB" or "500 MB"."""
    match = re.fullmatch(r"\s*([0-9]{0,18}\.?[0-9]{1,18})\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write it like 512MiB, 4GiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_seconds(text: str) -> float:
    """Return the seconds of a length of time such as "30m" or "1.5h"."""
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhdw])\s*", text)
    if not match or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a length of time: write it like 90s, 30m, 2h or 1d")
    return float(match[1]) * _SECONDS[match[2]]


def timeout_of(environment: Mapping[str, str], otherwise: float = 600.0) -> float:
    """Return the seconds that SKIRL_TIMEOUT sets in an environment."""
    text = environment.get("SKIRL_TIMEOUT", str(otherwise))
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise ValueError(f"SKIRL_TIMEOUT is {text!r} in the environment: set it to seconds above 0")


_RATE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kMG]?)(bit|b|B)(?:/s|ps)?")
_DELAY = re.compile(r"([0-9]*\.?[0-9]+)\s*(us|ms|s)")
_BITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_DELAYS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    rate: float = math.inf
    """Bytes a second, in each direction."""
    delay: float = 0.0
    """Seconds that a call takes in addition to the transfer of its bytes."""

    @classmethod
    def parse(cls, text: str) -> "Link":
        """Return the link that a flag describes as RATE or RATE,DELAY.

        >>> Link.parse("10Gbit/s") == Link.parse("1.25 GB/s"), Link.parse("1Gbit,100us").delay
        (True, 0.0001)
        """
        rate, delayed, delay = text.partition(",")
        found, wait = _RATE.fullmatch(rate.strip()), _DELAY.fullmatch(delay.strip() if delayed else "0s")
        if not found or not wait or float(found[1]) == 0:
            raise ValueError(
                f"link is {text!r}: set it to the rate in bits or bytes a second, such as 10Gbit/s or 1.25GB/s, and, if "
                "known, the delay of a call: 1Gbit/s,100us"
            )
        bits = 8 if found[3] == "B" else 1
        return cls(bits * float(found[1]) * _BITS[found[2]] / 8, round(float(wait[1]) * _DELAYS[wait[2]], 12))

    def seconds(self, nbytes: int) -> float:
        """Return how many seconds one call takes when the link is idle."""
        return self.delay + nbytes / self.rate


def clock(seconds: float) -> str:
    """Return seconds as people write them.

    >>> clock(75.2), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"


def figure(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.{digits}g}"


def size(count: float) -> str:
    """Return bytes as people write them.

    >>> size(512), size(3 * 2**20), size(5.5 * 2**30)
    ('512 B', '3.0 MiB', '5.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
