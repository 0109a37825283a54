"""Read variants from a file of TOML, CSV or JSON lines."""

import csv
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Found = tuple[str, str | None, dict[str, Any]]
"""A variant's place in the file, its name if it has one, and its values under the names used in the file."""


def read_file(path: Path) -> list[Found]:
    """Return the variants in a file, in order.

    **Arguments**

    - `path`: TOML with a table per variant, CSV with a line per variant, or JSON lines with an object per variant. A column
      or key `name` gives the variant's name; an empty cell keeps the recipe's value.
    """
    readers = {".toml": _toml, ".csv": _csv, ".jsonl": _json, ".json": _json}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ValueError(f"variants is {str(path)!r}: set it to a file that ends in .toml, .csv or .jsonl")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise ValueError(f"variants is {str(path)!r}, which cannot be read: set it to a file that can") from None
    except ValueError:
        raise ValueError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    found = list(reader(path, text))
    if not found:
        raise ValueError(f"{path} has no variant: write one or more, or leave variants out")
    return found


def _toml(path: Path, text: str) -> Iterator[Found]:
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid TOML ({error}): fix it") from None
    for name, values in tables.items():
        if not isinstance(values, dict):
            raise ValueError(f"{path}: {name} is outside of a table: write [NAME] above the values of each variant")
        yield f"[{name}]", name, values


def _csv(path: Path, text: str) -> Iterator[Found]:
    head: list[str] = []
    for number, cells in enumerate(csv.reader(text.splitlines()), start=1):
        if not cells:
            continue
        if not head:
            head = [cell.strip() for cell in cells]
            if not all(head) or len(set(head)) < len(head):
                raise ValueError(
                    f"{path}, line {number} has a column without a name, or two with the same: give each its own name"
                )
            continue
        if len(cells) != len(head):
            raise ValueError(f"{path}, line {number} has {len(cells)} cells for {len(head)} columns: fix it")
        values: dict[str, Any] = {name: cell.strip() for name, cell in zip(head, cells, strict=True) if cell.strip()}
        yield f"line {number}", values.pop("name", None), values


def _json(path: Path, text: str) -> Iterator[Found]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not valid JSON ({error}): fix it") from None
        name = values.pop("name", None) if isinstance(values, dict) else 0
        if not isinstance(name, str | None):
            raise ValueError(f"{path}, line {number} is not an object with flags and a name that is text: fix it")
        yield f"line {number}", name, values
