"""Checks of flags that the commands of this folder share."""

from collections.abc import Callable
from typing import TypeVar

from skirl.tools.units import parse_seconds

PART = 1 << 18
"""Bytes of text to read at a time: the rows in it may be many times as large."""
MEMORY = "1GiB"
"""Default memory of `skirl convert --by session`."""
LENGTH = "a length of time such as 30m or 1d"

T = TypeVar("T")


def parsed(name: str, text: str, parse: Callable[[str], T], form: str) -> T:
    """Parse a flag's text. Raise a ValueError that says what to set the flag to if it cannot be parsed.

    **Arguments**

    - `name`: name of the flag.
    - `text`: its value.
    - `parse`: parses the value, or raises a ValueError.
    - `form`: what to set the flag to.

    >>> parsed("gap", "soon", parse_seconds, LENGTH)
    Traceback (most recent call last):
    ValueError: gap is 'soon': set it to a length of time such as 30m or 1d
    """
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: set it to {form}") from None


def check_sessions(session: str | None, user: str | None, gap: str | None) -> None:
    """Raise unless the flags together define what a session is.

    **Arguments**

    - `session`, `user`: names of columns.
    - `gap`: time without a row that ends a user's session.
    """
    if user is not None and session is not None:
        raise ValueError("session and user are both set: leave one of them out")
    if user is None and gap is not None:
        raise ValueError(f"gap is {gap!r}, and no user is named: set user to a column, or leave gap out")
    if user is not None and gap is None:
        raise ValueError(f"user is {user!r}, and no gap: set gap to a length of time such as 30m")
    if gap is not None:
        parsed("gap", gap, parse_seconds, LENGTH)
