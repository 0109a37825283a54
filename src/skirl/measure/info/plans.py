"""Facts about plans, costs and lists of tables of tables and rows."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from skirl.core.placement_plan import FORMAT, PlacementPlan
from skirl.tools.shape_of import COUNT, TEXT, misfit

_OF_TABLES = {"skirl-table-plan": "plan of tables", "skirl-costs": "costs of tables"}
"""What other files are, by their format. Only the commands that use them check them."""


def describe(path: Path) -> dict[str, Any] | None:
    """Describe a JSON file, or return None if it is no plan, costs or list of tables."""
    body: Any = None
    with suppress(ValueError, RecursionError):
        body = json.loads(path.read_bytes())
    kind = body.get("format") if isinstance(body, dict) else None
    size = path.stat().st_size
    if kind == FORMAT:
        plan = PlacementPlan.load(path)
        tables = [{"name": table.name, "rows": table.rows, "dim": table.dim} for table in plan.tables]
        sites = {site.name: site.store for site in plan.sites}
        return {"kind": "plan of a placement", "sites": sites, "tables": tables, "bytes": size}
    if isinstance(kind, str) and kind in _OF_TABLES:
        return {"kind": _OF_TABLES[kind], "ranks": body.get("ranks"), "backend": body.get("backend"), "bytes": size}
    if kind == "skirl-tables":
        if (wrong := misfit(body, {"tables": [{"name": TEXT, "rows": COUNT, "dim": COUNT}]})) is not None:
            raise ValueError(f"{path} is a damaged list of tables ({wrong}): write it again")
        return {"kind": "list of tables", "tables": body["tables"], "bytes": size}
    return None
