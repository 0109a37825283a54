"""Sets the examples of docstrings as code: Markdown would read them as nested quotations."""

import re
from typing import Any

import griffe

LINES = r"(?:^[ \t]*>>> .*\n?(?:^[ \t]*\S.*\n?)*)"
EXAMPLE = re.compile(rf"{LINES}(?:\n(?=[ \t]*>>>){LINES})*", re.MULTILINE)


class Fences(griffe.Extension):
    """Every run of lines from `>>>` to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Once for each object whose docstring was read."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    return f"```pycon\n{match[0].rstrip()}\n```\n"
