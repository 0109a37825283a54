"""A command's progress and result as people read them: text, or one HTML file that opens offline, with pictures."""

import io
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TextIO

from skirl.tools.os_errors import why, writing
from skirl.tools.progress import Facts, Report
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


SCORES = {"auc": "AUC", "logloss": "log loss", "ne": "NE", "calibration": "calibration"}


def scores(result: Mapping[str, Any], prefix: str = "") -> str:
    found = {text: result[prefix + name] for name, text in SCORES.items() if prefix + name in result}
    worse = " (worse than predicting the click rate)" if (result.get(f"{prefix}ne") or 0.0) > 1.0 else ""
    lines = [f"{text} " + ("none yet" if value is None else figure(value)) for text, value in found.items()]
    return ", ".join(line + worse * line.startswith("NE ") for line in lines)


# Progress

EVERY = 3.0  # seconds between two lines


@contextmanager
def progress(to: TextIO, title: str, steps: int | None = None) -> Iterator[Report]:
    """Print a line about the progress of a loop now and then, and the last one unless an error ends the block."""
    due, of = 0.0, "" if steps is None else f"/{steps}"
    late: tuple[int, Callable[[], Facts]] | None = None  # not shown yet

    def show() -> None:
        nonlocal due, late
        if late is None or due == math.inf:
            return
        (done, facts), late = late, None
        text = " · ".join(f"{name} {value}" for name, value in facts().items())
        due = time.monotonic() + EVERY
        try:
            print(f"{title} {done}{of}" + f" · {text}" * bool(text), file=to, flush=True)
        except OSError as error:  # a log on a full disk: what is done goes on without it
            if isinstance(error, BrokenPipeError):
                raise
            due = math.inf
            log.warning("progress is not shown any more: %s", why(error))

    def report(done: int, facts: Callable[[], Facts]) -> None:
        nonlocal late
        late = (done, facts)
        if time.monotonic() >= due:
            show()

    yield report
    show()


# Pages

NO_PICTURES = "<p>Pictures are drawn by matplotlib: pip install 'skirl[plots]'</p>"
MOST_NAMED = 10
"""A chart names and colours its first lines; further ones are grey."""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 1.5em auto; padding: 0 1em; }}
h1 {{ font-size: 1.4em; }}
h1, p {{ overflow-wrap: anywhere; }}
p:first-of-type {{ font-size: 1.15em; font-weight: 600; }}
pre {{ overflow-x: auto; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24em), 1fr)); gap: 1em; }}
.charts svg {{ width: 100%; height: auto; }}
</style></head>
<body><h1>{title}</h1>
{lead}
<div class="charts">{pictures}</div>
<pre>{lines}</pre>
</body></html>
"""


Chart = Mapping[str, Sequence[tuple[float, float]]]
"""Lines over steps, each a list of points, by name; important ones first."""


def write_page(
    path: Path, title: str, lead: Iterable[str], charts: Mapping[str, Chart], lines: Mapping[str, str]
) -> str:
    """Write a page of sentences, pictures (without matplotlib a sentence), and lines as a command prints them. Return its
    path."""
    drawn = {name: chart for name, chart in charts.items() if any(chart.values())}
    pictures = map(svg, drawn, drawn.values()) if find_spec("matplotlib") else [NO_PICTURES] * bool(drawn)
    page = PAGE.format(
        title=escape(title),
        lead="\n".join(f"<p>{escape(sentence)}</p>" for sentence in lead),
        pictures="\n".join(pictures),
        lines=escape(listed(lines)),
    )
    with writing(path):
        path.write_text(page, encoding="utf-8", errors="replace")
    return str(path)


def svg(title: str, chart: Chart) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": title, "text.parse_math": False, "font.size": 11,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with mpl.rc_context(style):
        figure = Figure(figsize=(5.6, 3.9), layout="constrained")
        axes = figure.add_subplot(xlabel="step")
        axes.set_title(title, loc="left", fontweight="bold", wrap=True)
        axes.grid(alpha=0.25)
        drawn = {name: points for name, points in chart.items() if points}
        named = []
        for i, (name, points) in enumerate(drawn.items()):
            color = f"C{i}" if i < MOST_NAMED else "#8888"
            (line,) = axes.plot(*zip(*points), color=color, marker="o" if len(points) < 2 else None, zorder=-i)
            named.append((line, name))
        best = list(drawn.values())
        if len(best) > 2:  # important ones first: early losses, and those of the others, may lie outside
            inside = [y for points in best[: (len(best) + 1) // 2] for _, y in points[len(points) // 10 :]]
            room = 0.1 * (max(inside) - min(inside)) or 0.1
            axes.set_ylim(min(inside) - room, max(inside) + room)
        if len(chart) > 1:
            figure.legend(*zip(*named[:MOST_NAMED]), loc="outside lower left", ncols=2, frameon=False, fontsize=9)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
