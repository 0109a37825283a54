"""Checks of the form of what was read from a file, before it is used. A form is a `Kind`, a dict of forms by name (all are
needed, others are allowed), `[form]` for a list, or `{...: form}` for a dict with any names."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A requirement for a value: in words, and as a test."""

    words: str
    fits: Callable[[Any], bool]


COUNT = Kind("a whole number from 0 on", lambda v: type(v) is int and 0 <= v < 1 << 63)
AMOUNT = Kind("a finite number", lambda v: type(v) in (int, float) and abs(v) < 1e18)
NUMBER = Kind("a number", lambda v: type(v) is float or (type(v) is int and abs(v) < 1 << 63))
SCORE = Kind("a number or null", lambda v: v is None or NUMBER.fits(v))
TEXT = Kind("a text", lambda v: isinstance(v, str))
ANY = Kind("anything", lambda v: True)


def misfit(value: Any, form: Any, where: str = "") -> str | None:
    """Return in words the first place where a value does not have the form, or None.

    >>> misfit({"step": -1}, {"step": COUNT})
    'step is -1, not a whole number from 0 on'
    >>> misfit({"busy": {"plan": 0.5}}, {"busy": {...: NUMBER}, "lr": NUMBER})
    'lr is missing'
    """
    if isinstance(form, Kind):
        return None if form.fits(value) else f"{where or 'it'} is {_shown(value)}, not {form.words}"
    inner = f"{where}." if where else ""
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{where or 'it'} is {_shown(value)}, not a list"
        return next(filter(None, (misfit(item, form[0], f"{inner}{i}") for i, item in enumerate(value))), None)
    if not isinstance(value, Mapping):
        return f"{where or 'it'} is {_shown(value)}, not a table of names"
    if ... in form:
        return next(filter(None, (misfit(item, form[...], f"{inner}{name}") for name, item in value.items())), None)
    for name, one in form.items():
        if name not in value:
            return f"{inner}{name} is missing"
        if (found := misfit(value[name], one, f"{inner}{name}")) is not None:
            return found
    return None


def finite(value: float | None) -> bool:
    """Return whether a score is a number that can be plotted.

    >>> finite(None), finite(float("nan")), finite(0.5)
    (False, False, True)
    """
    return value is not None and math.isfinite(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + " ..."
