"""Search spaces: the range, logarithmic range or choices that a flag's value is drawn from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skirl.sweep.variants import axis, refuse_shared, varying
from skirl.tools.flags import Flag, expected, is_list, read_text

LOG, TO = "log:", ".."


@dataclass(frozen=True)
class Space:
    """The search space of one flag: a range, or else choices."""

    name: str
    text: str
    """The text that was given."""
    low: float | None = None
    high: float | None = None
    log: bool = False
    whole: bool = False
    """True if the flag takes only whole numbers."""
    choices: tuple[Any, ...] = ()


def spaces_of(texts: Sequence[str]) -> list[Space]:
    """Parse the values given to --search.

    **Arguments**

    - `texts`: such as "lr=log:1e-3..1", "dim=4..64" or "optimizer=sgd,adam".

    >>> [lr, dim] = spaces_of(["lr=log:1e-3..1", "dim=4..64"])
    >>> lr.low, lr.high, lr.log, lr.whole, dim.whole
    (0.001, 1.0, True, False, True)
    """
    can, found = varying(), []
    for text in texts:
        name, equals, of = text.partition("=")
        name = name.strip().replace("-", "_")
        if not name or not equals or not of.strip():
            raise ValueError(f"search is {text!r}: set it to a flag and a range, such as lr=log:1e-3..1, or to values")
        refuse_shared({name: None})
        if name in (space.name for space in found):
            raise ValueError(f"search has {name} twice: give one range for it")
        found.append(_range(text, name, of.strip(), can) if TO in of else _choices(text, name))
    return found


def combinations(spaces: Sequence[Space]) -> int | None:
    """Return how many different variants can be drawn; None if unlimited.

    >>> combinations(spaces_of(["dim=4..7", "optimizer=sgd,adam"]))
    8
    """
    many = 1
    for space in spaces:
        if space.choices:
            many *= len(space.choices)
        elif space.whole and space.low is not None and space.high is not None:
            many *= int(space.high - space.low) + 1
        else:
            return None
    return many


def _choices(text: str, name: str) -> Space:
    return Space(name, text, choices=tuple(axis(text, varying(), "search")[1]))


def _range(text: str, name: str, of: str, can: Mapping[str, Flag]) -> Space:
    log = of.startswith(LOG)
    ends = [word.strip() for word in of.removeprefix(LOG).split(TO)]
    kind = can[name].type
    if is_list(kind) or (not (whole := _takes(kind, "1")) and not _takes(kind, "0.5")):
        raise ValueError(
            f"search {text!r}: {name} takes {expected(kind)}, not a range: list values with commas between"
        )
    whole = not _takes(kind, "0.5")
    try:
        low, high = (int(end) if whole else float(end) for end in ends)
    except ValueError:
        raise ValueError(
            f"search {text!r}: set it to {'whole numbers' if whole else 'numbers'} with two dots between, such as "
            f"{name}={'4..64' if whole else 'log:1e-3..1'}"
        ) from None
    if not low < high:
        raise ValueError(f"search {text!r}: the range ends at {high:g}, not above {low:g}: set its end higher")
    if log and low <= 0:
        raise ValueError(f"search {text!r}: logarithms need numbers above 0: begin the range there, or leave log: out")
    return Space(name, text, low, high, log, whole)


def _takes(kind: Any, word: str) -> bool:
    try:
        return not isinstance(read_text(kind, word), str)
    except ValueError:
        return False
