"""The files that a user names, and errors that say where in them."""

import difflib
import glob
import re
from collections.abc import Sequence
from pathlib import Path

from skirl.tools.flags import WrongFlags

MOST_NAMES = 40  # columns of a file that an error lists
LONGEST = 60  # characters of a found value that an error shows


class BadFile(ValueError):
    """A file cannot be read in the format that it should have: file, what was found, what to do. Workers send it."""

    def __str__(self) -> str:
        file, found, then = self.args
        return f"{file}{' ' if found.startswith('is ') else ': '}{found}: {then}"


class BadRow(ValueError):
    """A value in a row is not what its column should hold: file, where in it, what was found, what was expected."""

    def __str__(self) -> str:
        file, where, found, expected = self.args
        return f"{file}, {where}: {found}, expected {expected}: fix it, or skip such rows with --bad-rows skip"


class BadSchema(ValueError):
    """A schema is invalid, or does not fit the data."""


class WrongTime(BadSchema, WrongFlags):
    """The time to hold out from is a number and the time column holds dates, or the other way round."""


def no_column(name: str, there: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, there, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    more = f" and {len(there) - MOST_NAMES:,} more" if len(there) > MOST_NAMES else ""
    names = ", ".join(name[:LONGEST].encode("unicode_escape").decode() for name in there[:MOST_NAMES])
    return f"no column {name!r}{hint} (there are {names}{more})"


def shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bytes | bytearray):
        value = bytes(value).decode("utf-8", "backslashreplace").replace("\\\\x", "\\x")
        text = "'" + value.encode("unicode_escape").decode().replace("\\\\x", "\\x") + "'"
    else:
        text = repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."


ENDINGS = {"", ".tsv", ".csv", ".txt", ".gz", ".parquet", ".pq"}
"""Suffixes of the files to take from a folder. A file that is named, or matches a pattern, may have any suffix."""
HEAD = 4096


def find(paths: str) -> list[str]:
    """The files that PATH,PATH,... means. Each path is a file, a folder or a pattern."""
    files: list[str] = []
    for path in map(str.strip, paths.split(",")):
        if not path:
            raise ValueError(f"data names {paths!r}: write a path before and after each comma")
        place = Path(path)
        if place.is_dir():
            matches = [str(p) for p in place.iterdir() if p.is_file() and p.suffix in ENDINGS and p.name[0] not in "._"]
            wrong = "the folder holds no data files", f"set data to another, or to a pattern like {path}/*/*.parquet"
        elif place.exists():
            matches, wrong = [path], None
        elif glob.has_magic(path):
            matches = [p for p in glob.glob(path, recursive=True) if Path(p).is_file()]
            wrong = "no file matches this pattern", "set data to one that does"
        else:
            here = "" if place.is_absolute() else f" in {Path.cwd()}"
            matches, wrong = [], (f"there is no such file or folder{here}", "set data to one that exists")
        if not matches and wrong:
            raise BadFile(path, *wrong)
        files += sorted(matches, key=natural)
    return files


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that orders numbers in names as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def kind_of(path: str) -> str:
    """Return parquet, gzip or text, as the first bytes say."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise BadFile(path, f"cannot be read ({error.strerror})", "set data to a file that can") from None
    if not head:
        raise BadFile(path, "is empty", "remove it, or get it again")
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    check_text(path, head)
    return "text"


def check_text(path: str, head: bytes) -> None:
    if b"\0" in head:
        found = f"is not text: there is a zero byte at {head.index(0)}"
        raise BadFile(path, found, "set data to Parquet files, or to text in UTF-8, plain or packed with gzip")
