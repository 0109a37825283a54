"""Small line charts as SVG: enough for the pages in docs/, and no dependency.

Text that git can compare, 4 KB a chart. matplotlib draws better and is 30 MB that only two scripts would use.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLORS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e6c8a", "#e08e1b", "#555555")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 300, 210, 48, 26, 12, 36


@dataclass(frozen=True)
class Chart:
    """Lines over one axis, both axes logarithmic. A line whose name begins with "~" is dashed and grey: a yardstick."""

    title: str
    x: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    """Points by the name of their line."""
    y: str = ""
    marks: Sequence[float] = field(default_factory=tuple)
    """Heights of horizontal yardsticks."""


def svg(charts: Sequence[Chart], columns: int = 3) -> str:
    """All charts, side by side.

    >>> text = svg([Chart("a < b", "batch", {"cost": [(1, 2.0), (10, 20.0)]})])
    >>> text.count("<polyline"), "a &lt; b" in text
    (1, True)
    """
    rows = -(-len(charts) // columns)
    wide, high = min(columns, len(charts)) * WIDTH, rows * HEIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
    ]
    for i, chart in enumerate(charts):
        out.append(f'<g transform="translate({i % columns * WIDTH},{i // columns * HEIGHT})">')
        out += _chart(chart)
        out.append("</g>")
    return "\n".join([*out, "</svg>", ""])


def _chart(chart: Chart) -> list[str]:
    points = [point for line in chart.lines.values() for point in line]
    across = _Scale([x for x, _ in points], LEFT, WIDTH - RIGHT)
    up = _Scale([y for _, y in points] + list(chart.marks), HEIGHT - BOTTOM, TOP)
    out = [f'<text x="{LEFT}" y="14" font-size="12" font-weight="bold">{escape(chart.title)}</text>']
    for value in across.ticks():
        x = across(value)
        out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>')
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{_short(value)}</text>')
    for value in up.ticks():
        y = up(value)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#eee"/>')
        out.append(f'<text x="{LEFT - 4}" y="{y + 3:.1f}" text-anchor="end">{_short(value)}</text>')
    for mark in chart.marks:
        y = up(mark)
        out.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#888" stroke-dasharray="2 3"/>'
        )
        out.append(f'<text x="{WIDTH - RIGHT}" y="{y - 3:.1f}" text-anchor="end" fill="#666">{_short(mark)}</text>')
    label = chart.x + (f"  ·  {chart.y}" if chart.y else "")
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>')
    colors = iter(COLORS * 3)
    for n, (name, line) in enumerate(chart.lines.items()):
        dashed = name.startswith("~")
        color = "#777" if dashed else next(colors)
        style = f'stroke="{color}"' + (' stroke-dasharray="4 3"' if dashed else "")
        where = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        out.append(f'<polyline points="{where}" fill="none" stroke-width="1.6" {style}/>')
        if not dashed:
            out += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.4" fill="{color}"/>' for x, y in line]
        out.append(
            f'<text x="{LEFT + 6}" y="{TOP + 10 + 12 * n}" fill="{color}">{escape(name.removeprefix("~"))}</text>'
        )
    return out


class _Scale:
    """A logarithmic axis between two places in the picture."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        if min(values) <= 0:
            raise ValueError(f"{min(values)} has no place on a logarithmic axis: plot values above 0")
        low, high = math.log10(min(values)), math.log10(max(values))
        room = max(high - low, 0.3) * 0.06
        self.low, self.high = low - room, max(high, low + 0.3) + room
        self._first, self._last = first, last

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self._first + share * (self._last - self._first)

    def ticks(self) -> list[float]:
        """Round numbers on this axis, some four of them."""
        steps = (1, 2, 5) if self.high - self.low < 2.2 else (1,)
        every = 10.0 ** math.floor(self.low)
        found = []
        while every <= 10**self.high:
            found += [every * step for step in steps if self.low <= math.log10(every * step) <= self.high]
            every *= 10
        return found


def _short(value: float) -> str:
    """A number in little room.

    >>> _short(20000), _short(1.5e6), _short(0.5)
    ('20k', '1.5M', '0.5')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
