"""The findings of `skirl info` as text."""

from collections.abc import Mapping
from typing import Any

from skirl.tools.progress import figure, size

LAYOUTS = {
    "rows": "rows: each row has its lists whole",
    "once": "once: a list that equals the one of the row above is left out",
}
MOST = 40
"""Maximum number of columns to name; of the rest, only the count is given."""


def as_text(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts as text for a reader, by label."""
    lines = {"kind": _kind(facts), "made": facts["made"]}
    if "whole" in facts:
        by = "the checksums of its files" if facts["checked"] == "checksums" else "their sizes; --check reads them"
        lines["whole"] = f"yes, by {by}" if facts["whole"] else "NO"
    for name in (
        "title",
        "header",
        "from",
        "step",
        "model",
        "dim",
        "data",
        "optimizer",
        "dtype",
        "store",
        "trainers",
        "generation",
        "samples",
        "min_count",
        "ranks",
        "backend",
    ):
        if facts.get(name) is not None:
            value = facts[name]
            lines[name.replace("_", " ")] = f"{value:,}" if isinstance(value, int) else str(value)
    if "finished" in facts:
        lines["finished"] = "yes" if facts["finished"] else "no: it was stopped, or still goes on"
    if facts.get("scores"):
        lines["scores"] = ", ".join(f"{name} {_number(value)}" for name, value in facts["scores"].items())
    if facts.get("of"):
        lines["of"] = ", ".join(f"{name} {value}" for name, value in facts["of"].items() if value is not None)
    if "sites" in facts:
        lines["sites"] = "\n".join(f"{name}: {store}" for name, store in facts["sites"].items())
    if "tables" in facts:
        lines["tables"] = "\n".join(_table(table) for table in facts["tables"])
    if "rows" in facts:
        lines["rows"] = f"{facts['rows']:,}"
    if "row_groups" in facts:
        lines["row groups"] = f"{facts['row_groups']:,}, compression {facts['compression']}"
    if "ids" in facts:
        kept = [f"{what} {facts[what]}" for what in ("session", "time") if facts[what] is not None]
        lines["ids"] = _some([f"{name} ({how})" for name, how in facts["ids"].items()])
        lines["dense"] = _some(facts["dense"]) or "none"
        lines["labels"] = ", ".join(facts["labels"])
        lines["layout"] = LAYOUTS[facts["layout"]]
        lines["kept"] = ", ".join(kept) or "no session, no time"
    elif "columns" in facts:
        lines["columns"] = _some([f"{name} ({kind})" for name, kind in facts["columns"].items()])
    if "first_line" in facts:
        lines["first line"] = f"{facts['fields']} fields, delimiter {facts['delimiter']}: {_some(facts['first_line'])}"
    if "tensors" in facts:
        lines["tensors"] = _some([f"{name} {shape}" for name, shape in facts["tensors"].items()])
    if facts.get("checkpoints"):
        lines["in the folder"] = f"checkpoints {', '.join(map(str, facts['checkpoints']))}"
    if facts.get("opened_last_by"):
        lines["opened"] = f"last by {facts['opened_last_by']}"
    if facts.get("also"):
        lines["also"] = f"a {', a '.join(facts['also'])} is in this folder"
    return lines | {"size": size(facts["bytes"])}


def _kind(facts: Mapping[str, Any]) -> str:
    said = [f"format {facts['format_version']}"] if "format_version" in facts else []
    said += [f"written by skirl {facts['skirl']}"] if facts.get("skirl") else []
    return ", ".join([facts["kind"], *said])


def _table(table: Mapping[str, Any]) -> str:
    name = table.get("name", table.get("number"))
    if "width" in table:
        return f"{name}: {table['held']:,} rows held, records of {table['width']} numbers ({table['dtype']})"
    parts = [f"{table['rows']:,} rows"]
    parts += [f"of {table['dim']}"] if "dim" in table else []
    parts += [f"{table['held']:,} held"] if "held" in table else []
    parts += [f"of {table['of']}"] if table.get("of") else []
    parts += [f"after {table['steps']:,} steps"] if "steps" in table else []
    return f"{name}: {', '.join(parts)}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST:,} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


def _number(value: Any) -> str:
    return "none" if value is None else figure(value)
