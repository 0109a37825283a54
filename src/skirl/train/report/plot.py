"""Small line charts as SVG, for the pages and pictures that skirl writes.

Names are placed above the lines and labels outside the axes, each where it fits, so that no text covers a curve.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLORS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e6c8a", "#e08e1b", "#555555")
OTHER = "#c8c8c8"
"""The colour of what has no line of its own."""
SIZE, LINE = 13, 17
"""Height of the font, and of a line of text."""
EDGE = 8
MOST_POINTS = 400
"""A line with more points is thinned out, since more points than pixels show nothing."""


@dataclass(frozen=True)
class Chart:
    """Lines over one axis, logarithmic by default. A line whose name begins with "~" is a yardstick: dashed and grey."""

    title: str
    x: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    """Points by name of the line."""
    y: str = ""
    marks: Sequence[float] = field(default_factory=tuple)
    """Heights of horizontal yardsticks."""
    log: tuple[bool, bool] = (True, True)
    """True for x, and for y, if it is logarithmic."""
    dots: bool = True
    """True to draw points, which show their values under the mouse."""
    bands: Mapping[str, Sequence[tuple[float, float, float]]] = field(default_factory=dict)
    """By name of the line: x with the lowest and highest y of a band, shaded in the line's colour."""
    colors: Mapping[str, str] = field(default_factory=dict)
    """Colour by name, for all lines or for none. If given, the chart names no line: the page does, once for several."""


def svg(charts: Sequence[Chart], columns: int = 2, width: int = 440, height: int = 300) -> str:
    """Return one SVG with all charts, side by side.

    >>> text = svg([Chart("a < b", "batch", {"cost": [(1, 2.0), (10, 20.0)]})])
    >>> text.count("<polyline"), "a &lt; b" in text
    (1, True)
    """
    rows = -(-len(charts) // columns)
    wide, high = min(columns, len(charts)) * width, rows * height
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'style="max-width:100%;height:auto" font-family="sans-serif" font-size="{SIZE}">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
    ]
    for i, chart in enumerate(charts):
        out.append(f'<g transform="translate({i % columns * width},{i // columns * height})">')
        out += _chart(chart, width, height)
        out.append("</g>")
    return "\n".join([*out, "</svg>", ""])


def _chart(chart: Chart, width: int, height: int) -> list[str]:
    points = [point for line in chart.lines.values() for point in line]
    across, up = (
        _Scale([x for x, _ in points], chart.log[0]),
        _Scale(
            [y for _, y in points]
            + [*chart.marks]
            + [y for band in chart.bands.values() for _, *ys in band for y in ys],
            chart.log[1],
        ),
    )
    named = () if chart.colors else chart.lines
    words = [_cut(word, width - 2 * EDGE, bold=True) for word in chart.title.split()]
    title = _wrapped([(word, _width(word, bold=True)) for word in words], 5, width - 2 * EDGE)
    shown = {name: _cut(name.removeprefix("~"), width - 2 * EDGE - 20) for name in named}
    names = _wrapped([(name, _width(text) + 20) for name, text in shown.items()], 14, width - 2 * EDGE)
    top = EDGE + LINE * (len(title) + len(names)) + 10
    low = height - 2 * LINE - EDGE
    left = EDGE + 6 + max((_width(short(value)) for value in up.ticks()), default=0.0)
    right = width - EDGE - 6 - max((_width(short(mark)) for mark in chart.marks), default=0.0)
    across.between(left, right)
    up.between(low, top)
    out = []
    for n, row in enumerate(title, start=1):
        out.append(_text(EDGE, EDGE + LINE * n - 4, " ".join(word for word, _ in row), 'font-weight="bold"'))
    for value, x in _apart(across, (_width(short(value)) + 8 for value in across.ticks())):
        out.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{low}" stroke="#eee"/>')
        half = _width(short(value)) / 2
        at = min(max(x, half + 2), width - half - 2)
        out.append(_text(at, low + LINE - 1, short(value), 'text-anchor="middle"'))
    for value, y in _apart(up, (LINE for _ in up.ticks())):
        out.append(f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        out.append(_text(left - 6, y + 4, short(value), 'text-anchor="end"'))
    for mark in chart.marks:
        y = up(mark)
        out.append(
            f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" stroke="#888" stroke-dasharray="2 3"/>'
        )
        out.append(_text(right + 4, y + 4, short(mark), 'fill="#666"'))
    label = chart.x + (f"  ·  {chart.y}" if chart.y else "")
    out.append(_text((left + right) / 2, height - EDGE, label, 'text-anchor="middle" fill="#555"'))
    styles = {name: f'stroke="{color}"' for name, color in chart.colors.items()} or _styles(chart.lines)
    for n, row in enumerate(names, start=len(title) + 1):
        at = float(EDGE)
        for name, room in row:
            y = EDGE + LINE * n - 4
            out.append(
                f'<line x1="{at:.1f}" y1="{y - 4}" x2="{at + 16:.1f}" y2="{y - 4}" stroke-width="2" {styles[name]}/>'
            )
            out.append(_text(at + 20, y, shown[name], 'fill="#333"', name.removeprefix("~")))
            at += room + 14
    for name, band in chart.bands.items():
        low_side, high_side = (_thin([(point[0], point[side]) for point in band]) for side in (1, 2))
        where = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in [*low_side, *reversed(high_side)])
        out.append(f'<polygon points="{where}" fill-opacity="0.15" {styles[name].replace("stroke", "fill")}/>')
    for name, line in chart.lines.items():
        drawn = _thin(line)
        where = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in drawn)
        out.append(f'<polyline points="{where}" fill="none" stroke-width="1.6" {styles[name]}/>')
        if (chart.dots or len(drawn) == 1) and not name.startswith("~"):  # a line of one point would be invisible
            out += [
                f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.4" {styles[name].replace("stroke", "fill")}>'
                f"<title>{escape(name)}: {short(x)}, {short(y)}</title></circle>"
                for x, y in drawn
            ]
    return out


def _styles(names: Iterable[str]) -> dict[str, str]:
    """Return the stroke of each line."""
    colors = iter(COLORS * 3)
    return {
        name: 'stroke="#777" stroke-dasharray="4 3"' if name.startswith("~") else f'stroke="{next(colors)}"'
        for name in names
    }


def _text(x: float, y: float, text: str, style: str, whole: str = "") -> str:
    """Return a text; if it was cut, the whole of it shows under the mouse."""
    title = f"<title>{escape(whole)}</title>" if whole not in ("", text) else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}{title}</text>'


def _cut(text: str, room: float, bold: bool = False) -> str:
    """Leave out the middle of a text that is wider than `room`: names often differ at either end.

    >>> _cut("short", 100), _cut("a/very/long/name.parquet", 100)
    ('short', 'a/very…arquet')
    """
    if _width(text, bold) <= room:
        return text
    cuts = (f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}" for kept in range(len(text) - 1, 0, -1))
    return next((cut for cut in cuts if _width(cut, bold) <= room), "…")


def _width(text: str, bold: bool = False) -> float:
    """Return the maximum width of a text in pixels, as in the widest of the usual fonts."""
    of = (0.42 if c in " iljtfr.,:;'|!()[]/" else 1.0 if c in "mwMW%@" else 0.78 if c.isupper() else 0.65 for c in text)
    return SIZE * sum(of) * (1.14 if bold else 1.0)


def _wrapped(items: Sequence[tuple[str, float]], gap: float, width: float) -> list[list[tuple[str, float]]]:
    """Arrange items, each with its width, in rows of as many as fit.

    >>> _wrapped([("a", 40), ("b", 40), ("c", 40)], 10, 100)
    [[('a', 40), ('b', 40)], [('c', 40)]]
    """
    rows, at = list[list[tuple[str, float]]](), width + 1.0
    for name, room in items:
        if at + room > width:
            rows.append([])
            at = 0.0
        rows[-1].append((name, room))
        at += room + gap
    return rows


def _apart(scale: "_Scale", rooms: Iterable[float]) -> list[tuple[float, float]]:
    """Return ticks and their places, leaving out those that would touch the one before."""
    kept = list[tuple[float, float]]()
    for value, room in zip(scale.ticks(), rooms):
        if not kept or abs(scale(value) - kept[-1][1]) >= room:
            kept.append((value, scale(value)))
    return kept


class _Scale:
    """An axis. `between` sets its place in the picture."""

    def __init__(self, values: Sequence[float], log: bool) -> None:
        if log and min(values) <= 0:
            raise ValueError(f"{min(values)} has no place on a logarithmic axis: plot values above 0")
        self._log = log
        low, high = self._place(min(values)), self._place(max(values))
        least = 0.3 if log else (abs(high) or 1.0) * 1e-6
        room = max(high - low, least) * 0.06
        self.low, self.high = low - room, max(high, low + least) + room
        self._only = None if log or low < high else low
        if self._only is not None:  # put it in the middle
            self.low = 2 * low - self.high
        self._first, self._last = 0.0, 1.0

    def between(self, first: float, last: float) -> None:
        """Place the axis between these two coordinates."""
        self._first, self._last = first, last

    def _place(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def __call__(self, value: float) -> float:
        share = (self._place(value) - self.low) / (self.high - self.low)
        return self._first + share * (self._last - self._first)

    def ticks(self) -> list[float]:
        """Return round numbers for ticks, about four of them; if all values are equal, only that one."""
        if self._only is not None:
            return [self._only]
        if not self._log:
            return self._linear()
        steps = (1, 2, 5) if self.high - self.low < 2.2 else (1,)
        every = 10.0 ** math.floor(self.low)
        ticks = []
        while every <= 10**self.high:
            ticks += [every * step for step in steps if self.low <= math.log10(every * step) <= self.high]
            every *= 10
        return ticks

    def _linear(self) -> list[float]:
        every = 10.0 ** math.floor(math.log10(self.high - self.low))
        while (self.high - self.low) / every < 3:
            every /= 2
        while (self.high - self.low) / every > 7:
            every *= 2
        first, last = math.ceil(self.low / every), math.floor(self.high / every)
        return [round(n * every, 12) for n in range(first, last + 1)]


def _thin(line: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Reduce a line to at most `MOST_POINTS` points, each the mean of a stretch of it.

    >>> [len(_thin([(x, 1.0) for x in range(n)])) for n in (3, 400, 1000)]
    [3, 400, 334]
    """
    every = -(-len(line) // MOST_POINTS)
    if every <= 1:
        return line
    parts = [line[i : i + every] for i in range(0, len(line), every)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def short(value: float) -> str:
    """Return a number in short form.

    >>> short(20000), short(1.5e6), short(0.5), short(1234.5678)
    ('20k', '1.5M', '0.5', '1.235k')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
