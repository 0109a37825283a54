"""`skirl info`: its flags and its output."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from skirl.tools.progress import figure, size

MOST = 40
"""Maximum number of columns, tables or variants to name; of the rest, only the count is given."""


@dataclass(frozen=True)
class Info:
    """Say what a file or folder is: a checkpoint, a disk store, a vocabulary, a plan, data, predictions, a run, a sweep."""

    path: Positional[Path]
    """The file or folder; nothing in it is changed or locked."""
    check: bool = False
    """Read a whole checkpoint and compare its checksums; without this, only sizes are checked."""
    json: bool = False
    """Print one line of JSON."""

    def run(self) -> dict[str, Any]:
        from skirl.sizing.look import look

        return {"command": "info", "path": str(self.path), **look(self.path, check=self.check)}

    def summary(self, result: Mapping[str, Any]) -> dict[str, str]:
        facts = {name: value for name, value in result.items() if value not in (None, [], {})}
        for name in ("command", "path", "failed", "bytes"):
            facts.pop(name, None)
        return {name.replace("_", " "): _text(value) for name, value in facts.items()} | {"size": size(result["bytes"])}


def _text(value: Any) -> str:
    """Return a fact as text.

    >>> print(_text([{"name": "user", "rows": 1000}, {"name": "item", "rows": 20}]))
    user: rows 1,000
    item: rows 20
    >>> _text(True), _text(["c1", "c2"]), _text(0.69315), _text({"model": "dlrm", "dim": 16})
    ('yes', 'c1, c2', '0.6932', 'model dlrm, dim 16')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return figure(value)
    if not isinstance(value, list | Mapping):
        return str(value)
    more = f" and {len(value) - MOST:,} more" if len(value) > MOST else ""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(one)}" for name, one in list(value.items())[:MOST] if one is not None) + more
    tables = isinstance(value[0], Mapping)
    named = [f"{one['name']}: {_text({k: v for k, v in one.items() if k != 'name'})}" if tables else _text(one)
             for one in value[:MOST]]  # fmt: skip
    return ("\n" if tables else ", ").join(named) + more
