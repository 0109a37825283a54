"""Errors for malformed input: where it is, what was found, what was expected, what to do.

A `BadRow` can be left out (`--bad-rows skip`); a `BadFile` cannot, since the rest of its rows are not known.
"""

import difflib
from collections.abc import Sequence

from skirl.tools.flags import WrongFlags

MOST_NAMES = 40
"""Most columns of a file that an error lists."""
LONGEST = 60
"""Most characters of a found value that an error shows."""
MEND = "fix it, or skip such rows with --bad-rows skip"


class BadFile(ValueError):
    """Raised if a file cannot be read in the format that it should have."""

    def __init__(self, file: str, found: str, then: str) -> None:
        super().__init__(f"{file}{' ' if found.startswith('is ') else ': '}{found}: {then}")
        self.file, self.found, self.then = file, found, then

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.file, self.found, self.then)


class BadRow(ValueError):
    """Raised if a value in a row is not what its column should hold.

    >>> print(BadRow("day_0", "line 17", "column I3 is 'x'", "a number, or nothing"))
    day_0, line 17: column I3 is 'x', expected a number, or nothing: fix it, or skip such rows with --bad-rows skip
    """

    def __init__(self, file: str, where: str, found: str, expected: str) -> None:
        super().__init__(f"{file}, {where}: {found}, expected {expected}: {MEND}")
        self.file, self.where, self.found, self.expected = file, where, found, expected

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:  # worker processes send it
        return type(self), (self.file, self.where, self.found, self.expected)


class BadSchema(ValueError):
    """Raised if a schema is invalid, or does not fit the data."""


class OldLayout(BadSchema):
    """Raised if a file's schema names a layout of lists that cannot be read."""


class WrongTime(BadSchema, WrongFlags):
    """Raised if the time to hold out from is a number and the time column holds dates, or the other way round."""


def no_column(name: str, there: Sequence[str]) -> str:
    """Return a message with the column that a file lacks, a name that may have been meant, and the columns it has.

    >>> no_column("appid", ["app_id", "site_id"])
    "no column 'appid', did you mean 'app_id'? (there are app_id, site_id)"
    """
    near = difflib.get_close_matches(name, there, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    more = f" and {len(there) - MOST_NAMES:,} more" if len(there) > MOST_NAMES else ""
    names = ", ".join(name[:LONGEST].encode("unicode_escape").decode() for name in there[:MOST_NAMES])
    return f"no column {name!r}{hint} (there are {names}{more})"


def shown(value: object) -> str:
    """Return a value as an error shows it.

    >>> shown(b"a\\xff"), shown("x" * 100)[-5:], shown(None)
    ("'a\\\\xff'", 'x ...', 'nothing')
    """
    if value is None:
        return "nothing"
    if isinstance(value, bytes | bytearray):
        value = bytes(value).decode("utf-8", "backslashreplace").replace("\\\\x", "\\x")
        text = "'" + value.encode("unicode_escape").decode().replace("\\\\x", "\\x") + "'"
    else:
        text = repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."
