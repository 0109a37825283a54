"""A command's result as people read it on a terminal. `--json` prints the result itself; page.py draws pages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from skirl.tools.units import clock, figure, size

MOST = 40
"""Most items of a list or a mapping that are named; of the others, only the count is given."""


@dataclass(frozen=True, kw_only=True)
class ShowFlags:
    """What a command prints."""

    group: ClassVar[str] = "output"

    json: bool = False
    """Print the results as one line of JSON; progress goes to standard error."""
    quiet: bool = False
    """Show no progress."""


def facts(result: Mapping[str, Any], *names: str) -> dict[str, str]:
    """Return values of a result as text, by title; all if none is named. What is not known or empty is left out.

    >>> facts({"samples": 1200, "spilled_bytes": 2048, "first_bad_row": None, "auc": 0.75}, "spilled_bytes", "samples")
    {'spilled': '2.0 KiB', 'samples': '1,200'}
    """
    kept = {name: result[name] for name in names or result if result.get(name) not in (None, "", [], {})}
    return {name.removesuffix("_bytes").replace("_", " "): text(value, name) for name, value in kept.items()}


def text(value: Any, name: str = "") -> str:
    """Return a value as text; its name says what a number counts.

    >>> print(text([{"name": "user", "rows": 1000}, {"name": "item", "rows": 20}]))
    user: rows 1,000
    item: rows 20
    >>> text(True), text(["c1", "c2"]), text(0.69315), text({"model": "dlrm", "dim": 16}), text(75, "seconds")
    ('yes', 'c1, c2', '0.6932', 'model dlrm, dim 16', '1:15')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name.endswith("bytes"):
            return size(value)
        if name == "seconds":
            return clock(value)
        return f"{value:,.0f}" if isinstance(value, int) or 1000 <= abs(value) < 1e9 else figure(value)
    if not isinstance(value, list | Mapping):
        return str(value)
    more = f" and {len(value) - MOST:,} more" if len(value) > MOST else ""
    if isinstance(value, Mapping):
        named = [
            f"{key} {text(one, name if name.endswith('bytes') else key)}"
            for key, one in value.items()
            if one is not None
        ]
        return ", ".join(named[:MOST]) + more
    tables = isinstance(value[0], Mapping)
    named = [f"{one['name']}: {text({k: v for k, v in one.items() if k != 'name'})}" if tables else text(one)
             for one in value[:MOST]]  # fmt: skip
    return ("\n" if tables else ", ").join(named) + more


def listed(facts: Mapping[str, str]) -> str:
    """Return facts as text, one on each line.

    >>> print(listed({"loss": "0.693", "rows": "10\\nof 100"}))
      loss  0.693
      rows  10
            of 100
    """
    width = max(map(len, facts))
    lines = [f"  {name:<{width}}  " + value.replace("\n", "\n" + " " * (width + 4)) for name, value in facts.items()]
    return "\n".join(lines)


def columns(lines: list[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> str:
    """Return lines of cells as a table; columns `left` are aligned to the left.

    >>> print(columns([("name", "rows"), ("user", "7")]))
    name  rows
    user     7
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n in left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def course(loss: Mapping[str, float]) -> str:
    """Return the losses of a run as text, from those of its first and last batch and their mean.

    >>> course({"first": 0.7, "last": 0.5, "mean": 0.6})
    '0.7000 for the first batch, 0.5000 for the last, 0.6000 on average'
    """
    first, last, mean = (figure(loss[name]) for name in ("first", "last", "mean"))
    return f"{first} for the first batch, {last} for the last, {mean} on average"


def hidden(share: float, moved: int) -> str:
    """Say how much of the movement of this many rows was hidden behind computing.

    >>> hidden(0.3, 10), hidden(0.3, 0)
    ('30% of the movement', 'no row was fetched or written: there was no movement to hide')
    """
    return f"{share:.0%} of the movement" if moved else "no row was fetched or written: there was no movement to hide"


def scores(result: Mapping[str, Any], prefix: str = "") -> str:
    """Return the metrics of a result as text.

    >>> scores({"auc": 0.75, "logloss": 0.5, "ne": None, "calibration": 1.0})
    'AUC 0.7500, log loss 0.5000, NE none yet, calibration 1.0000'
    """
    names = {"auc": "AUC", "logloss": "log loss", "ne": "NE", "calibration": "calibration"}
    found = {text: result[prefix + name] for name, text in names.items() if prefix + name in result}
    return ", ".join(f"{text} " + ("none yet" if value is None else figure(value)) for text, value in found.items())
