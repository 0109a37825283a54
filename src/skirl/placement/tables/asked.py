"""What a measurement of costs is asked for, checked before anything is imported or prepared."""

from pathlib import Path

LEAST = 10
"""Combinations from which costs can be fitted."""


def check_asked(minutes: float, combinations: int, seed: int, out: Path | None) -> None:
    """Raise if costs cannot be measured as asked.

    **Arguments**

    - `minutes`: time for all rounds together.
    - `combinations`: number of combinations to learn from.
    - `seed`: the random seed.
    - `out`: the file to write; None: none.
    """
    if not 0 < minutes < float("inf"):
        raise ValueError(f"minutes is {minutes}: set it above 0")
    if combinations < LEAST:
        raise ValueError(f"combinations is {combinations}: set it to {LEAST} or more")
    if seed < 0:
        raise ValueError(f"seed is {seed}: set it to 0 or more")
    if out is not None and out.suffix != ".json":
        raise ValueError(f"out is {str(out)!r}: name a file that ends in .json")
