"""The time that one process waits for another, as the user sets it."""

from collections.abc import Mapping
from contextlib import suppress


def patience_of(environment: Mapping[str, str], otherwise: float = 600.0) -> float:
    """Return the seconds that SKIRL_PATIENCE sets in the environment.

    >>> patience_of({}), patience_of({"SKIRL_PATIENCE": "90"})
    (600.0, 90.0)
    >>> patience_of({"SKIRL_PATIENCE": "long"})
    Traceback (most recent call last):
    ValueError: SKIRL_PATIENCE is 'long' in the environment: set it to seconds above 0
    """
    text = environment.get("SKIRL_PATIENCE", str(otherwise))
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise ValueError(f"SKIRL_PATIENCE is {text!r} in the environment: set it to seconds above 0")
