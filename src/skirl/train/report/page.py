"""A page that is one file: text, tables and charts as HTML, with nothing to fetch.

It opens from a disk, a mail or a bucket, years later. A template engine would be a dependency for forty lines of markup;
everything that comes from outside is escaped here, in one place.
"""

from collections.abc import Mapping, Sequence
from html import escape

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 980px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: .6em 0; } th, td { padding: .15em .9em .15em 0; text-align: left; }
th { vertical-align: bottom; color: #555; font-weight: 600; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; }
.lead { background: #eef5fb; border-left: 4px solid #1b6ca8; padding: .7em 1em; font-size: 1.05em; }
.note { color: #666; font-size: .9em; } svg { max-width: 100%; height: auto; } code { background: #f3f3f3; padding: 0 .2em; }
"""


class Page:
    """A page in the making.

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
        """A paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def lead(self, text: str) -> None:
        """The sentence to take home."""
        self._parts.append(f'<p class="lead">{escape(text)}</p>')

    def note(self, text: str) -> None:
        """Small print."""
        self._parts.append(f'<p class="note">{escape(text)}</p>')

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns whose cells all begin with a digit, or are -, are set as numbers."""
        numbers = [bool(rows) and all(row[i][:1].isdigit() or row[i] == "-" for row in rows) for i in range(len(head))]
        out = ["<table>"]
        for tag, row in [("th", head), *(("td", row) for row in rows)]:
            out += ["<tr>", *(_cell(cell, tag, number) for cell, number in zip(row, numbers, strict=True)), "</tr>"]
        self._parts.append("".join([*out, "</table>"]))

    def facts(self, facts: Mapping[str, str]) -> None:
        """A table of two columns, without a head."""
        rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
        self._parts.append("".join(["<table>", *rows, "</table>"]))

    def picture(self, svg: str) -> None:
        """An SVG of our own: it is not escaped."""
        self._parts.append(svg)

    def html(self) -> str:
        """The whole file."""
        body = "\n".join(self._parts)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n{body}\n'
            "</body></html>\n"
        )


def _cell(text: str, tag: str, number: bool) -> str:
    kind = ' class="number"' if number else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"
