"""What is checked before the stores of a plan are opened, so that a plan that is refused leaves no folder behind."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from skirl.core.placement_plan import PlacementPlan
from skirl.store.base import Layout
from skirl.store.disk.manifest import NAME, Manifest
from skirl.store.disk.segment import Unusable
from skirl.store.link import without_links

MARK = "~placement"
"""Entry of a site's `about` that says to which placement its rows belong, and which site it is."""


def mark_of(placement: str, site: int) -> str:
    """Return what a site's `about` has under `MARK`."""
    return f"{placement} site {site}"


def check_layout(plan: PlacementPlan, layout: Layout, rows: Mapping[int, int] | None) -> None:
    """Raise if a plan is for other tables than a store's."""
    tables, records = plan.tables, layout.records
    if max(records) + 1 != len(tables):
        raise ValueError(
            f"the plan has {len(tables)} tables, the model {max(records) + 1}: make the plan for this model"
        )
    for number, table in enumerate(tables):
        if number not in records:
            continue
        if rows is not None and rows[number] != table.rows:
            raise ValueError(
                f"table {table.name!r} has {table.rows:,} rows in the plan and {rows[number]:,} in the model: make "
                "the plan for this model"
            )
        if records[number].width < table.dim:
            raise ValueError(
                f"table {table.name!r} has dim {table.dim} in the plan, and records of {records[number].width} "
                "numbers in the model: make the plan for this model"
            )


def check_folders(plan: PlacementPlan, stores: Sequence[str]) -> None:
    """Raise if a site has no folder although another one has rows that this plan placed."""
    digest = plan.placement.digest
    folders = [Path(disk) if disk else None for _, _, disk in (without_links(s).partition("disk:") for s in stores)]
    kept = next((n for n, at in enumerate(folders) if at is not None and _has_rows(at, mark_of(digest, n))), None)
    gone = next((n for n, at in enumerate(folders) if at is not None and not at.exists()), None)
    if kept is not None and gone is not None:
        raise ValueError(
            f"site {plan.sites[gone].name!r} has no folder {folders[gone]}, and site {plan.sites[kept].name!r} has rows of "
            "the same plan: see whether its disk is mounted; if its rows are lost, make the folder and load a checkpoint"
        )


def _has_rows(folder: Path, mark: str) -> bool:
    try:
        manifest = Manifest.read(folder / NAME)
    except (OSError, Unusable):
        return False  # opening it says what is wrong
    return manifest.about.get(MARK) == mark and any(manifest.rows)
