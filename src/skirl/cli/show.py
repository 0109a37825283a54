"""A command's progress and result as people read them: text, or one HTML file that opens offline, with pictures.

`--json` prints the result itself."""

import io
import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from typing import Any, ClassVar, TextIO

from skirl.peers.processes import COMMAND_LINE
from skirl.tools.os_errors import why, writing
from skirl.tools.progress import Facts
from skirl.tools.units import clock, figure, size

log = logging.getLogger("skirl")
MOST = 40
"""Items of a list or a mapping that are named; of the others, only the count is given."""


@dataclass(frozen=True, kw_only=True)
class ShowFlags:
    group: ClassVar[str] = "output"

    json: bool = False
    """Print the results as one line of JSON; progress goes to standard error."""
    quiet: bool = False
    """Show no progress."""


def facts(result: Mapping[str, Any], *names: str) -> dict[str, str]:
    """Return values of a result as text, by title; all if none is named. What is not known or empty is left out."""
    kept = {name: result[name] for name in names or result if result.get(name) not in (None, "", [], {})}
    return {name.removesuffix("_bytes").replace("_", " "): text(value, name) for name, value in kept.items()}


def text(value: Any, name: str = "") -> str:
    """Return a value as text; its name says what a number counts."""
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
        known = {key: one for key, one in value.items() if one is not None}
        named = [f"{key} {text(one, name if name.endswith('bytes') else key)}" for key, one in known.items()]
        return ", ".join(named[:MOST]) + more
    if not value:
        return "none"
    tables = isinstance(value[0], Mapping)
    named = [f"{one['name']}: {text({k: v for k, v in one.items() if k != 'name'})}" if tables else text(one)
             for one in value[:MOST]]  # fmt: skip
    return ("\n" if tables else ", ").join(named) + more


def listed(facts: Mapping[str, str]) -> str:
    width = max(map(len, facts))
    lines = [f"  {name:<{width}}  " + value.replace("\n", "\n" + " " * (width + 4)) for name, value in facts.items()]
    return "\n".join(lines)


def columns(lines: list[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> str:
    """Return lines of cells as a table; columns `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<" if n in left else ">" for n in range(len(widths))]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths)).rstrip() for line in lines
    )


def scores(result: Mapping[str, Any], prefix: str = "") -> str:
    names = {"auc": "AUC", "logloss": "log loss", "ne": "NE", "calibration": "calibration"}
    found = {text: result[prefix + name] for name, text in names.items() if prefix + name in result}
    worse = " (worse than predicting the click rate)" if (result.get(f"{prefix}ne") or 0.0) > 1.0 else ""
    lines = [f"{text} " + ("none yet" if value is None else figure(value)) for text, value in found.items()]
    return ", ".join(line + worse * line.startswith("NE ") for line in lines)


def goes_on(args: Sequence[str]) -> str:
    """Say which command line goes on with what this one has saved."""
    resume = [] if "--resume" in args else ["--resume"]
    return f"to go on: {os.environ.get(COMMAND_LINE, 'skirl')} {shlex.join([*args, *resume])}"


# Progress

EVERY = 3.0  # seconds between two lines


class Progress:
    """Prints a line about the progress of a loop now and then: use it in a with-block, and call it once per step."""

    def __init__(self, to: TextIO, title: str, steps: int | None = None) -> None:
        self._to, self._title, self._of = to, title, "" if steps is None else f"/{steps}"
        self._due, self._shown, self._full = 0.0, -1, False
        self._last: tuple[int, Callable[[], Facts]] | None = None

    def __call__(self, done: int, facts: Callable[[], Facts]) -> None:
        """Report that `done` steps are done. `facts` returns what else to show; it is called only when it is shown."""
        self._last = (done, facts)
        if time.monotonic() >= self._due:
            self._show()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None and self._last is not None and self._last[0] != self._shown:
            self._show()

    def _show(self) -> None:
        assert self._last is not None
        self._shown, facts = self._last
        text = " · ".join(f"{name} {value}" for name, value in facts().items())
        self._due = time.monotonic() + EVERY
        self._print(f"{self._title} {self._shown}{self._of}" + f" · {text}" * bool(text))

    def _print(self, line: str) -> None:
        if not self._full:
            try:
                print(line, file=self._to, flush=True)
            except OSError as error:  # a log on a full disk: what is done goes on without it
                if isinstance(error, BrokenPipeError):
                    raise
                self._full = True
                log.warning("progress is not shown any more: %s", why(error))


# Pages

NO_PICTURES = "Pictures are drawn by matplotlib: pip install 'skirl[plots]'"
MOST_NAMED = 10
"""A chart names and colours its first lines; further ones are grey."""
INK = "#123456"
"""Drawn in the page's text colour, so that pictures suit light and dark mode."""
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.4em; }
h1, p, td { overflow-wrap: anywhere; }
.result { font-size: 1.15em; font-weight: 600; }
.wide { overflow-x: auto; margin: 1.2em 0; }
table { border-collapse: collapse; }
caption { text-align: left; font-weight: 600; padding-bottom: .3em; }
th, td { padding: .2em 1em .2em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #8884; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24em), 1fr)); gap: 1em; }
.charts svg { width: 100%; height: auto; }
"""


@dataclass(frozen=True)
class Chart:
    """Lines over steps, each a list of points, by name; important ones first."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Table:
    """Rows of text. Columns whose cells all look like numbers are aligned to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def write_page(
    path: Path, *, title: str, lead: Sequence[str], tables: Sequence[Table], charts: Sequence[Chart]
) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html(title, lead, tables, charts), encoding="utf-8", errors="replace")


def html(title: str, lead: Sequence[str], tables: Sequence[Table], charts: Sequence[Chart]) -> str:
    """Return a page as text; without matplotlib, a sentence stands in place of its pictures."""
    drawn = [chart for chart in charts if any(chart.lines.values())]
    pictures = [svg(chart) for chart in drawn] if find_spec("matplotlib") else [f"<p>{NO_PICTURES}</p>"] * bool(drawn)
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p{kind}>{escape(text)}</p>" for text, kind in zip(lead, chain([' class="result"'], repeat("")))),
        *(['<div class="charts">', *pictures, "</div>"] if pictures else []),
        *map(_table, tables),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _table(table: Table) -> str:
    columns = range(len(table.header))
    numbers = [bool(table.rows) and all(row[i][:1].isdigit() or row[i] == "-" for row in table.rows) for i in columns]

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = (' class="number"' if number else "" for number in numbers)
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    head = f"<thead><tr>{row('th', table.header)}</tr></thead>" if any(table.header) else ""
    body = "\n".join(f"<tr>{row('td', cells)}</tr>" for cells in table.rows)
    return f'<div class="wide"><table>{caption}{head}<tbody>{body}</tbody></table></div>'


def svg(chart: Chart) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    style: Any = {
        **dict.fromkeys(inked, INK),
        "svg.fonttype": "none", "svg.hashsalt": chart.title, "text.parse_math": False, "font.size": 11,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with mpl.rc_context(style):
        figure = Figure(figsize=(5.6, 3.9), layout="constrained")
        axes = figure.add_subplot(xlabel="step")
        axes.set_title(chart.title, loc="left", fontweight="bold", wrap=True)
        axes.grid(alpha=0.25)
        named = []
        for i, (name, points) in enumerate(chart.lines.items()):
            shown = len(named) < MOST_NAMED
            color, mark = f"C{len(named)}" if shown else "#8888", "o" if len(points) < 2 else None
            (line,) = axes.plot(*zip(*points), color=color, marker=mark, zorder=-i) if points else (None,)
            if shown and line is not None:
                named.append((line, name))
        best = [points for points in chart.lines.values() if points]
        if len(best) > 2:  # important ones first: early losses, and those of the others, may lie outside
            inside = [y for points in best[: (len(best) + 1) // 2] for _, y in points[len(points) // 10 :]]
            room = 0.1 * (max(inside) - min(inside)) or 0.1
            axes.set_ylim(min(inside) - room, max(inside) + room)
        if len(chart.lines) > 1:
            figure.legend(*zip(*named), loc="outside lower left", ncols=2, frameon=False, fontsize=9)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")
