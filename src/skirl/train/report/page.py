"""An HTML page with text, tables and charts in one file, which opens offline."""

import re
from collections.abc import Mapping, Sequence
from html import escape

from skirl.train.report.plot import COLORS, OTHER, Chart, svg

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 980px; margin: 2em auto; padding: 0 1em; }
p, h1, h2, .facts td, .bars th.long { overflow-wrap: anywhere; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: .6em 0; }
th, td { padding: .15em .9em .15em 0; text-align: left; vertical-align: top; }
th { color: #555; font-weight: 600; } thead th { vertical-align: bottom; }
th.number, td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
thead th.number { white-space: normal; }
.lead { background: #eef5fb; border-left: 4px solid #1b6ca8; padding: .7em 1em; font-size: 1.05em; }
summary { cursor: pointer; color: #1b6ca8; }
.note { color: #666; font-size: .9em; }
.wide { overflow-x: auto; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1em; }
.charts svg { width: 100%; }
.bars { width: 100%; } .bars th { white-space: nowrap; } .bars th.long { white-space: normal; min-width: 12em; }
.bars td:last-child { width: 45%; } .bars div { height: 1.1em; margin-top: .2em; min-width: 1px; }
.lanes td:last-child { white-space: nowrap; font-size: 0; } .lanes div { display: inline-block; height: 18px; min-width: 0; }
.keys span { display: inline-block; margin-right: 1.2em; } .keys i { display: inline-block; width: .8em; height: .8em; }
@media (max-width: 600px) {
  body { margin: 1em auto; }
  th, td { padding-right: .6em; }
  .wide table { font-size: .75em; width: 100%; }
  .wide th, .wide td { padding-right: .4em; }
  .bars th, .bars th.long { white-space: normal; min-width: 0; }
  .bars tr { display: grid; grid-template-columns: 8em 1fr; margin-bottom: .5em; }
  .bars td:last-child { grid-column: 1 / 3; width: auto; }
}
"""


LONG_NAME = 24
"""Longest name of a bar, in characters, that stays on one line."""


class Page:
    """A page that is put together part by part.

    >>> page = Page("Rows & caches")
    >>> page.lead("Use --cache 10%.")
    >>> page.table(["table", "rows"], [["user", "1,000"]])
    >>> "Rows &amp; caches" in page.html(), '<td class="number">1,000</td>' in page.html()
    (True, True)
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def lead(self, text: str) -> None:
        """Add the key sentence of the page."""
        self._parts.append(f'<p class="lead">{escape(text)}</p>')

    def note(self, text: str) -> None:
        """Add small print."""
        self._parts.append(f'<p class="note">{escape(text)}</p>')

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table. Columns whose cells all begin with a digit, or are -, align as numbers. A wide table scrolls."""
        numbers = [bool(rows) and all(row[i][:1].isdigit() or row[i] == "-" for row in rows) for i in range(len(head))]
        top = _row("th", head, numbers)
        body = "".join(_row("td", row, numbers) for row in rows)
        self._parts.append(f'<div class="wide"><table><thead>{top}</thead><tbody>{body}</tbody></table></div>')

    def facts(self, facts: Mapping[str, str]) -> None:
        """Add a table of two columns without a head."""
        rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
        self._parts.append("".join(['<table class="facts">', *rows, "</table>"]))

    def hidden(self, title: str, facts: Mapping[str, str]) -> None:
        """Add a table of two columns that opens with a click on its title."""
        self._parts.append(f"<details><summary>{escape(title)}</summary>")
        self.facts(facts)
        self._parts.append("</details>")

    def charts(self, charts: Sequence[Chart]) -> None:
        """Add charts, as many side by side as fit."""
        self._parts.append("".join(['<div class="charts">', *(svg([chart]) for chart in charts), "</div>"]))

    def bars(self, bars: Mapping[str, tuple[float, str]], colors: Mapping[str, str] | None = None) -> None:
        """Add a horizontal bar for each value, with its text. With `colors`, bars of other names are grey."""
        most = max((value for value, _ in bars.values()), default=0.0) or 1.0
        rows = (
            f"{_head(name)}<td>{escape(text)}</td>"
            f'<td><div style="width:{100 * value / most:.1f}%;background:{color}"></div></td></tr>'
            for i, (name, (value, text)) in enumerate(bars.items())
            for color in [COLORS[i % len(COLORS)] if colors is None else colors.get(name, OTHER)]
        )
        self._parts.append("".join(['<table class="bars">', *rows, "</table>"]))

    def lanes(self, lanes: Mapping[str, Mapping[str, float]], said: Mapping[str, str], unit: str = "s") -> None:
        """Add a bar for each lane, stacked from its parts, with the lane's text. All lanes share one scale."""
        most = max((sum(parts.values()) for parts in lanes.values()), default=0.0) or 1.0
        names = list(dict.fromkeys(name for parts in lanes.values() for name in parts))
        color = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
        self.keys(color)
        rows = []
        for lane, parts in lanes.items():
            bar = "".join(
                f'<div style="width:{100 * value / most:.2f}%;background:{color[name]}" '
                f'title="{escape(name)}: {value:.2f} {unit}"></div>'
                for name, value in parts.items()
            )
            rows.append(f"<tr><th>{escape(lane)}</th><td>{escape(said[lane])}</td><td>{bar}</td></tr>")
        self._parts.append("".join(['<table class="bars lanes">', *rows, "</table>"]))

    def keys(self, colors: Mapping[str, str]) -> None:
        """Say what is drawn in which colour, by name."""
        keys = "".join(
            f'<span><i style="background:{color}"></i> {_breaking(name)}</span>' for name, color in colors.items()
        )
        self._parts.append(f'<p class="keys">{keys}</p>')

    def html(self) -> str:
        """Return the whole file."""
        body = "\n".join(self._parts)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
            f"<body>\n{body}\n</body></html>\n"
        )


def _row(tag: str, cells: Sequence[str], numbers: Sequence[bool]) -> str:
    kinds = (' class="number"' if number else "" for number in numbers)
    return "".join(
        ["<tr>", *(f"<{tag}{kind}>{_breaking(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)), "</tr>"]
    )


def _head(name: str) -> str:
    """Return the first cells of a bar: a long name may break, so that it leaves room for the bar."""
    return f"<tr><th{' class=long' if len(name) > LONG_NAME else ''}>{_breaking(name)}</th>"


def _breaking(text: str) -> str:
    """Escape a text and let it break after an underscore, and between flags and their values in the name of a variant.

    >>> _breaking("lr=0.1,model=my_own at 1,000")
    'lr=0.1,<wbr>model=<wbr>my_<wbr>own at 1,000'
    """
    return re.sub(r"_|[,=](?=[A-Za-z])", r"\g<0><wbr>", escape(text))
