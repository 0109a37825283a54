"""Show the standing of a race: a live table on a terminal, one line elsewhere."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from skirl.sweep.race import Place
from skirl.tools.progress import Facts

HEAD = ("rank", "variant", "loss", "to the leader", "AUC", "state")
MOST_ROWS = 24
"""Most rows of the live table: more do not fit most terminals. Variants that have left come last, and are cut first."""


def cells(place: Place, auc: float | None) -> tuple[str, ...]:
    """Return the cells of a line of the table.

    >>> cells(Place(2, "lr=0.1", 0.5, 0.0123, 0.0004, "races"), 0.75)
    ('2', 'lr=0.1', '0.50000', '+0.01230 ± 0.00040', '0.7500', 'races')
    """
    return (
        str(place.rank),
        place.variant,
        "-" if place.loss is None else f"{place.loss:.5f}",
        difference(place),
        "-" if auc is None else f"{auc:.4f}",
        place.state,
    )


def difference(place: Place) -> str:
    """Return how much higher its loss is than the leader's, with the standard error, as text.

    >>> difference(Place(1, "lr=0.1", 0.5, 0.0, 0.0, "leads"))
    ''
    >>> difference(Place(2, "lr=0.1,seed=1", 0.5, 0.0, 0.0, "races"))
    'seed of the leader'
    """
    if place.state == "leads" or place.difference is None:
        return ""
    if place.state == "races" and place.difference == 0.0 and not place.error:
        return "seed of the leader"
    return f"{place.difference:+.5f}" + ("" if place.error is None else f" ± {place.error:.5f}")


def drawn(places: Sequence[Place], aucs: Mapping[str, float | None], rate: float) -> Table:
    """Return the table for a terminal."""
    racing = sum(place.state in ("leads", "races") for place in places)
    caption = f"{racing} of {len(places)} race, {rate:,.0f} samples/s"
    table = Table(box=None, padding=(0, 2), header_style="dim", caption=caption, caption_justify="left")
    for name in HEAD:
        table.add_column(name, justify="left" if name in ("variant", "state") else "right", no_wrap=True)
    for place in places[:MOST_ROWS]:
        style = "bold cyan" if place.state == "leads" else "" if place.state == "races" else "dim"
        table.add_row(*(Text(cell, style) for cell in cells(place, aucs.get(place.variant))))
    if len(places) > MOST_ROWS:
        table.add_row("", Text(f"and {len(places) - MOST_ROWS} more", "dim"))
    return table


def as_facts(places: Sequence[Place], aucs: Mapping[str, float | None], rate: float) -> Facts:
    """Return the standing as the facts of one line.

    >>> places = [Place(1, "a", 0.5, 0.0, None, "leads"), Place(2, "b", 0.6, 0.1, 0.01, "races")]
    >>> list(as_facts(places, {"a": 0.7}, 1000.0).values())
    ['a', '0.50000', '0.7000', 'b +0.10000 ± 0.01000', '2 of 2', '1,000']
    """
    first = places[0]
    racing = [place for place in places if place.state in ("leads", "races")]
    second = racing[1] if len(racing) > 1 else None
    auc = aucs.get(first.variant)
    return {
        "leader": first.variant,
        "loss": "none yet" if first.loss is None else f"{first.loss:.5f}",
        "AUC": "none yet" if auc is None else f"{auc:.4f}",
        **({} if second is None else {"next": f"{second.variant} {difference(second)}"}),
        "racing": f"{len(racing)} of {len(places)}",
        "samples/s": f"{rate:,.0f}",
    }


def as_text(places: Sequence[Place], aucs: Mapping[str, float | None]) -> str:
    """Return the table as plain text.

    >>> print(as_text([Place(1, "a", 0.5, 0.0, None, "leads")], {}))
    rank  variant     loss  to the leader  AUC  state
       1  a        0.50000                   -  leads
    """
    lines = [HEAD, *(cells(place, aucs.get(place.variant)) for place in places)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in ("variant", "state") else cell.rjust(width)
            for name, cell, width in zip(HEAD, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )
