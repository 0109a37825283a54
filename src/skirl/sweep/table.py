"""Show the standing of a race: a live table on a terminal, one line elsewhere."""

from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from skirl.sweep.race import VariantPlace
from skirl.tools.progress import Facts, figure

HEAD = ("rank", "variant", "loss", "to the leader", "AUC", "state")
LEFT = ("state", "variant")
"""Columns of words, in the order in which they are cut; all others are numbers."""
LEAST_WIDTH = 12
"""Fewest characters that a name or a state is cut to."""
MOST_ROWS = 24
"""Most rows of the live table: more do not fit most terminals. Variants that have left come last, and are cut first."""


def cells(place: VariantPlace, auc: float | None) -> tuple[str, ...]:
    """Return the cells of a line of the table.

    >>> cells(VariantPlace(2, "lr=0.1", 0.5, 0.0123, 0.0004, "races"), 0.75)
    ('2', 'lr=0.1', '0.50000', '+0.01230 ± 0.00040', '0.7500', 'races')
    """
    return (
        str(place.rank),
        place.variant,
        "-" if place.loss is None else figure(place.loss, 5),
        difference(place),
        "-" if auc is None else f"{auc:.4f}",
        place.state,
    )


def difference(place: VariantPlace) -> str:
    """Return how much higher its loss is than the leader's, with the standard error, as text.

    >>> difference(VariantPlace(1, "lr=0.1", 0.5, 0.0, 0.0, "leads"))
    ''
    >>> difference(VariantPlace(2, "lr=0.1,seed=1", 0.5, 0.0, 0.0, "races", leading=True))
    'seed of the leader'
    """
    if place.state == "leads" or place.difference is None:
        return ""
    if place.state == "races" and place.leading:
        return "seed of the leader"
    return f"{place.difference:+.5f}" + ("" if place.error is None else f" ± {place.error:.5f}")


class Standing:
    """The table for a terminal, as wide as that: names and states are cut before any number is.

    **Arguments**

    - `places`: of all variants, best first.
    - `aucs`: by variant.
    - `rate`: samples of the stream per second.
    """

    def __init__(self, places: Sequence[VariantPlace], aucs: Mapping[str, float | None], rate: float) -> None:
        self._places, self._aucs, self._rate = places, aucs, rate

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        places, shown = self._places, self._places[:MOST_ROWS]
        racing = sum(place.state in ("leads", "races") for place in places)
        lines = [cells(place, self._aucs.get(place.variant)) for place in shown]
        widths = [max(map(len, column)) for column in zip(HEAD, *lines, strict=True)]
        for name in LEFT:
            over = sum(widths) + 2 * (len(widths) - 1) - options.max_width
            at = HEAD.index(name)
            widths[at] -= max(0, min(over, widths[at] - LEAST_WIDTH))
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, width in zip(HEAD, widths, strict=True):
            justify = "left" if name in LEFT else "right"
            table.add_column(width=width, justify=justify, no_wrap=True, overflow="ellipsis")
        table.add_row(*(Text(name, "dim") for name in HEAD))
        for place, line in zip(shown, lines, strict=True):
            style = "bold cyan" if place.state == "leads" else "" if place.state == "races" else "dim"
            table.add_row(*(Text(cell, style) for cell in line))
        yield table
        more = f"{len(places) - MOST_ROWS} more, " if len(places) > MOST_ROWS else ""
        yield Text(f"{more}{racing} of {len(places)} race, {self._rate:,.0f} samples/s", "dim italic")


def as_facts(places: Sequence[VariantPlace], aucs: Mapping[str, float | None], rate: float) -> Facts:
    """Return the standing as the facts of one line.

    >>> places = [VariantPlace(1, "a", 0.5, 0.0, None, "leads"), VariantPlace(2, "b", 0.6, 0.1, 0.01, "races")]
    >>> list(as_facts(places, {"a": 0.7}, 1000.0).values())
    ['a', '0.50000', '0.7000', 'b +0.10000 ± 0.01000', '2 of 2', '1,000']
    """
    first = places[0]
    racing = [place for place in places if place.state in ("leads", "races")]
    second = racing[1] if len(racing) > 1 else None
    auc = aucs.get(first.variant)
    return {
        "leader": first.variant,
        "loss": "none yet" if first.loss is None else figure(first.loss, 5),
        "AUC": "none yet" if auc is None else f"{auc:.4f}",
        **({} if second is None else {"next": f"{second.variant} {difference(second)}"}),
        "racing": f"{len(racing)} of {len(places)}",
        "samples/s": f"{rate:,.0f}",
    }


def as_text(places: Sequence[VariantPlace], aucs: Mapping[str, float | None]) -> str:
    """Return the table as plain text.

    >>> print(as_text([VariantPlace(1, "a", 0.5, 0.0, None, "leads")], {}))
    rank  variant     loss  to the leader  AUC  state
       1  a        0.50000                   -  leads
    """
    lines = [HEAD, *(cells(place, aucs.get(place.variant)) for place in places)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for name, cell, width in zip(HEAD, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )
