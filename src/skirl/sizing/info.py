"""`skirl info`: its flags and its output."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from skirl.tools.progress import figure, size

NAMED = (
    "header", "from", "step", "model", "dim", "data", "optimizer", "dtype", "store", "trainers", "generation",
    "samples", "min_count", "ranks", "backend",
)  # fmt: skip
LAYOUTS = {
    "rows": "rows: each row has its lists whole",
    "once": "once: a list that equals the one of the row above is left out",
}
MOST = 40
"""Maximum number of columns to name; of the rest, only the count is given."""


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
        said = [f"format {result['format_version']}"] if "format_version" in result else []
        said += [f"written by skirl {result['skirl']}"] if result.get("skirl") else []
        lines = {"kind": ", ".join([result["kind"], *said]), "made": result["made"]}
        if "whole" in result:
            by = "the checksums of its files" if result["checked"] == "checksums" else "their sizes; --check reads them"
            lines["whole"] = f"yes, by {by}" if result["whole"] else "NO"
        for name in NAMED:
            if (value := result.get(name)) is not None:
                lines[name.replace("_", " ")] = f"{value:,}" if isinstance(value, int) else str(value)
        if "finished" in result:
            lines["finished"] = "yes" if result["finished"] else "no: it was stopped, or still goes on"
        if result.get("scores"):
            shown = {name: "none" if value is None else figure(value) for name, value in result["scores"].items()}
            lines["scores"] = ", ".join(f"{name} {value}" for name, value in shown.items())
        if result.get("of"):
            lines["of"] = ", ".join(f"{name} {value}" for name, value in result["of"].items() if value is not None)
        for name in ("sites", "variants"):
            if name in result:
                lines[name] = "\n".join(f"{one}: {of}" for one, of in result[name].items())
        if result.get("winner"):
            lines["winner"] = result["winner"]
        if "tables" in result:
            lines["tables"] = "\n".join(map(_table, result["tables"]))
        if "rows" in result:
            lines["rows"] = f"{result['rows']:,}"
        if "row_groups" in result:
            lines["row groups"] = f"{result['row_groups']:,}, compression {result['compression']}"
        if "ids" in result:
            kept = [f"{what} {result[what]}" for what in ("session", "time") if result[what] is not None]
            lines["ids"] = _some([f"{name} ({how})" for name, how in result["ids"].items()])
            lines["dense"] = _some(result["dense"]) or "none"
            lines["labels"] = ", ".join(result["labels"])
            lines["layout"] = LAYOUTS[result["layout"]]
            lines["kept"] = ", ".join(kept) or "no session, no time"
        elif "columns" in result:
            lines["columns"] = _some([f"{name} ({kind})" for name, kind in result["columns"].items()])
        if "first_line" in result:
            fields = f"{result['fields']} fields, delimiter {result['delimiter']}"
            lines["first line"] = f"{fields}: {_some(result['first_line'])}"
        if "tensors" in result:
            lines["tensors"] = _some([f"{name} {shape}" for name, shape in result["tensors"].items()])
        if result.get("checkpoints"):
            lines["in the folder"] = f"checkpoints {', '.join(map(str, result['checkpoints']))}"
        if result.get("also"):
            lines["also"] = f"a {', a '.join(result['also'])} is in this folder"
        return lines | {"size": size(result["bytes"])}


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
