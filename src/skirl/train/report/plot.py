"""Small line charts and bars as SVG: enough for the pages that skirl writes, and no dependency.

Text that git can compare, 4 KB a chart, that stands inside a page which is one file. matplotlib draws better and is 30 MB;
a charting library in the page would have to be fetched, or be a megabyte of every report.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLORS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e6c8a", "#e08e1b", "#555555")
LEFT, TOP, RIGHT, BOTTOM = 48, 26, 12, 36
MOST_POINTS = 400
"""A longer line is thinned out: more points than pixels show nothing."""


@dataclass(frozen=True)
class Chart:
    """Lines over one axis, logarithmic unless said otherwise. A name that begins with "~" is a yardstick: dashed, grey."""

    title: str
    x: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    """Points by the name of their line."""
    y: str = ""
    marks: Sequence[float] = field(default_factory=tuple)
    """Heights of horizontal yardsticks."""
    log: tuple[bool, bool] = (True, True)
    """Whether x and y are logarithmic."""
    dots: bool = True
    """Whether points are drawn; each tells its values when it is pointed at."""
    names_right: bool = False
    """Names of lines stand at the right, where falling lines leave room."""


def svg(charts: Sequence[Chart], columns: int = 3, width: int = 300, height: int = 210) -> str:
    """All charts, side by side.

    >>> text = svg([Chart("a < b", "batch", {"cost": [(1, 2.0), (10, 20.0)]})])
    >>> text.count("<polyline"), "a &lt; b" in text
    (1, True)
    """
    rows = -(-len(charts) // columns)
    wide, high = min(columns, len(charts)) * width, rows * height
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
    ]
    for i, chart in enumerate(charts):
        out.append(f'<g transform="translate({i % columns * width},{i // columns * height})">')
        out += _chart(chart, width, height)
        out.append("</g>")
    return "\n".join([*out, "</svg>", ""])


def bars(values: Mapping[str, float], told: Mapping[str, str], width: int = 620) -> str:
    """One horizontal bar a value, with what is told of it beside.

    >>> bars({"read": 2.0, "plan": 1.0}, {"read": "2 s", "plan": "1 s"}).count("<rect")
    2
    """
    most = max(values.values(), default=0.0) or 1.0
    high = 22 * len(values) + 4
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {high}" width="{width}" height="{high}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for i, (name, value) in enumerate(values.items()):
        y, long = 22 * i + 4, max(1.0, (width - 380) * value / most)
        out.append(f'<text x="150" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        out.append(f'<rect x="158" y="{y}" width="{long:.1f}" height="16" fill="{COLORS[i % len(COLORS)]}"/>')
        out.append(f'<text x="{164 + long:.1f}" y="{y + 12}" fill="#444">{escape(told[name])}</text>')
    return "\n".join([*out, "</svg>", ""])


def _chart(chart: Chart, width: int, height: int) -> list[str]:
    points = [point for line in chart.lines.values() for point in line]
    right, low = width - RIGHT, height - BOTTOM
    across = _Scale([x for x, _ in points], LEFT, right, chart.log[0])
    up = _Scale([y for _, y in points] + list(chart.marks), low, TOP, chart.log[1])
    out = [f'<text x="{LEFT}" y="14" font-size="12" font-weight="bold">{escape(chart.title)}</text>']
    for value in across.ticks():
        x = across(value)
        out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{low}" stroke="#eee"/>')
        out.append(f'<text x="{x:.1f}" y="{low + 13}" text-anchor="middle">{short(value)}</text>')
    for value in up.ticks():
        y = up(value)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#eee"/>')
        out.append(f'<text x="{LEFT - 4}" y="{y + 3:.1f}" text-anchor="end">{short(value)}</text>')
    for mark in chart.marks:
        y = up(mark)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#888" stroke-dasharray="2 3"/>')
        out.append(f'<text x="{right}" y="{y - 3:.1f}" text-anchor="end" fill="#666">{short(mark)}</text>')
    label = chart.x + (f"  ·  {chart.y}" if chart.y else "")
    out.append(f'<text x="{(LEFT + right) / 2}" y="{height - 8}" text-anchor="middle">{escape(label)}</text>')
    colors, names = iter(COLORS * 3), list[str]()
    for n, (name, line) in enumerate(chart.lines.items()):
        dashed = name.startswith("~")
        color = "#777" if dashed else next(colors)
        style = f'stroke="{color}"' + (' stroke-dasharray="4 3"' if dashed else "")
        drawn = _thin(line)
        where = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in drawn)
        out.append(f'<polyline points="{where}" fill="none" stroke-width="1.6" {style}/>')
        if chart.dots and not dashed:
            out += [
                f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.4" fill="{color}">'
                f"<title>{escape(name)}: {short(x)}, {short(y)}</title></circle>"
                for x, y in drawn
            ]
        place = f'x="{right - 4}" text-anchor="end"' if chart.names_right else f'x="{LEFT + 6}"'
        # legible where a line runs under it, and the line still seen
        place += ' stroke="#fff" stroke-opacity="0.7" stroke-width="3" paint-order="stroke"'
        names.append(f'<text {place} y="{TOP + 10 + 12 * n}" fill="{color}">{escape(name.removeprefix("~"))}</text>')
    return out + names  # above all lines


class _Scale:
    """An axis between two places in the picture."""

    def __init__(self, values: Sequence[float], first: float, last: float, log: bool) -> None:
        if log and min(values) <= 0:
            raise ValueError(f"{min(values)} has no place on a logarithmic axis: plot values above 0")
        self._log = log
        low, high = self._place(min(values)), self._place(max(values))
        least = 0.3 if log else (abs(high) or 1.0) * 1e-6
        room = max(high - low, least) * 0.06
        self.low, self.high = low - room, max(high, low + least) + room
        self._first, self._last = first, last

    def _place(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def __call__(self, value: float) -> float:
        share = (self._place(value) - self.low) / (self.high - self.low)
        return self._first + share * (self._last - self._first)

    def ticks(self) -> list[float]:
        """Round numbers on this axis, some four of them."""
        if not self._log:
            return self._linear()
        steps = (1, 2, 5) if self.high - self.low < 2.2 else (1,)
        every = 10.0 ** math.floor(self.low)
        found = []
        while every <= 10**self.high:
            found += [every * step for step in steps if self.low <= math.log10(every * step) <= self.high]
            every *= 10
        return found

    def _linear(self) -> list[float]:
        every = 10.0 ** math.floor(math.log10(self.high - self.low))
        while (self.high - self.low) / every < 3:
            every /= 2
        while (self.high - self.low) / every > 7:
            every *= 2
        first, last = math.ceil(self.low / every), math.floor(self.high / every)
        return [round(n * every, 12) for n in range(first, last + 1)]


def _thin(line: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most so many points: the mean of each stretch of a longer line.

    >>> [len(_thin([(x, 1.0) for x in range(n)])) for n in (3, 400, 1000)]
    [3, 400, 334]
    """
    every = -(-len(line) // MOST_POINTS)
    if every <= 1:
        return line
    parts = [line[i : i + every] for i in range(0, len(line), every)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def short(value: float) -> str:
    """A number in little room.

    >>> short(20000), short(1.5e6), short(0.5), short(1234.5678)
    ('20k', '1.5M', '0.5', '1.235k')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
