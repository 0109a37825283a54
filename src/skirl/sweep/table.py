"""Show the standing of a race: a live table on a terminal, one line elsewhere."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from skirl.sweep.race import VariantPlace
from skirl.tools.progress import Facts, figure

HEAD = ("rank", "variant", "held out", "loss", "to rank 1", "AUC", "state")
"""The columns; held out only while ranks are by that."""
LEFT = ("state", "variant")
"""Columns of words, in the order in which they are cut; all others are numbers."""
MEANS = "ranks are by the mean over the seeds of each configuration, then by each seed"
"""The note under a table in which seeds are pooled: a rank may have a higher loss than the next one."""
LEAST_WIDTH = 8
"""Fewest characters that a name or a state is cut to."""
MOST_ROWS = 24
"""Most rows of the live table: more do not fit most terminals. Variants that have left come last, and are cut first."""


def rows(places: Sequence[VariantPlace], aucs: Mapping[str, float | None]) -> list[tuple[str, ...]]:
    """Return the head of the table and a line for each place, cell by cell.

    >>> rows([VariantPlace(2, "lr=0.1", 0.5, 0.0123, 0.0004, "races")], {"lr=0.1": 0.75})[1]
    ('2', 'lr=0.1', '0.50000', '+0.01230 ± 0.00040', '0.7500', 'races')
    >>> rows([VariantPlace(1, "lr=0.1", 0.5, 0.0, 0.0, "leads", held_out=0.6)], {})[0][:4]
    ('rank', 'variant', 'held out', 'loss')
    """
    judged = any(place.held_out is not None for place in places)
    lines = [HEAD, *(_cells(place, aucs.get(place.variant)) for place in places)]
    return [
        tuple(cell for cell, name in zip(line, HEAD, strict=True) if judged or name != "held out") for line in lines
    ]


def _cells(place: VariantPlace, auc: float | None) -> tuple[str, ...]:
    return (
        str(place.rank),
        place.variant,
        "-" if place.held_out is None else figure(place.held_out, 5),
        "-" if place.loss is None else figure(place.loss, 5),
        difference(place),
        "-" if auc is None else f"{auc:.4f}",
        place.state,
    )


def difference(place: VariantPlace) -> str:
    """Return how much higher its loss is than that of rank 1, with the standard error, as text.

    >>> difference(VariantPlace(1, "lr=0.1", 0.5, 0.0, 0.0, "leads", leading=True))
    ''
    >>> difference(VariantPlace(2, "lr=0.1,seed=1", 0.5, 0.0, 0.0, "races", leading=True))
    'seed of rank 1'
    """
    if place.rank == 1 or place.difference is None:
        return ""
    if place.leading:
        return "seed of rank 1"
    return f"{place.difference:+.5f}" + ("" if place.error is None else f" ± {place.error:.5f}")


def best_line(place: VariantPlace, best: Mapping[str, Any] | None = None) -> str:
    """Return rank 1 with what it is ranked by, as text.

    **Arguments**

    - `place`: that of rank 1.
    - `best`: its best evaluation: its step, and the folder of its checkpoint, if one is kept.

    >>> best_line(VariantPlace(1, "a", 0.5, 0.0, 0.0, "leads"))
    'a, loss 0.50000 on samples that nobody had trained on'
    >>> best_line(VariantPlace(1, "a", 0.5, 0.0, 0.0, "leads", held_out=0.6), {"step": 40, "folder": "saves/a/best"})
    'a, log loss 0.60000 on the samples held out, at step 40, in saves/a/best'
    """
    if place.held_out is None:
        loss = "no loss yet" if place.loss is None else f"loss {figure(place.loss, 5)}"
        return f"{place.variant}, {loss} on samples that nobody had trained on"
    at = "" if best is None else f", at step {best['step']:,}" + (f", in {best['folder']}" if best["folder"] else "")
    return f"{place.variant}, log loss {figure(place.held_out, 5)} on the samples held out{at}"


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
        head, *lines = rows(shown, self._aucs)
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        for name in LEFT:
            over = sum(widths) + 2 * (len(widths) - 1) - options.max_width
            at = head.index(name)
            widths[at] -= max(0, min(over, widths[at] - LEAST_WIDTH))
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, width in zip(head, widths, strict=True):
            justify = "left" if name in LEFT else "right"
            table.add_column(width=width, justify=justify, no_wrap=True, overflow="ellipsis")
        table.add_row(*(Text(name, "dim") for name in head))
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
    second = next((place for place in racing if place.rank > 1), None)
    auc = aucs.get(first.variant)
    return {
        "leader": first.variant,
        **({} if first.held_out is None else {"held out": figure(first.held_out, 5)}),
        "loss": "none yet" if first.loss is None else figure(first.loss, 5),
        **({} if auc is None else {"AUC": f"{auc:.4f}"}),
        **({} if second is None else {"next": f"{second.variant} {difference(second)}"}),
        "racing": f"{len(racing)} of {len(places)}",
        "samples/s": f"{rate:,.0f}",
    }


def as_text(places: Sequence[VariantPlace], aucs: Mapping[str, float | None]) -> str:
    """Return the table as plain text.

    >>> print(as_text([VariantPlace(1, "a", 0.5, 0.0, None, "leads")], {}))
    rank  variant     loss  to rank 1  AUC  state
       1  a        0.50000               -  leads
    """
    lines = rows(places, aucs)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for name, cell, width in zip(lines[0], line, widths, strict=True)
        ).rstrip()
        for line in lines
    )
