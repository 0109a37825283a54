"""Limits that tables put on a placement: cuts that they may not have, and ranks where they may not be."""

from skirl.placement.tables.pieces import Piece, whole
from skirl.placement.tables.problem import Placed, Problem


def forbidden(problem: Problem, placed: Placed) -> str | None:
    """Return in words what a placement's pieces do that their tables forbid, or None.

    **Arguments**

    - `problem`: tables, and how they may be cut.
    - `placed`: a placement from a search, a rule or a file.
    """
    of: dict[int, list[tuple[Piece, int]]] = {}
    for item, rank in zip(placed.items, placed.at.tolist(), strict=True):
        for piece in item:
            of.setdefault(piece.table, []).append((piece, rank))
    groups: dict[str, tuple[str, int]] = {}
    for table, mine in sorted(of.items()):
        spec, pin, (_, rank) = problem.specs[table], problem.pinned[table], mine[0]
        who, ways = f"table {spec.name!r}", problem.ways((whole(table, spec),))
        for way, cut in (
            ("rows", any(piece.rows < spec.rows for piece, _ in mine)),
            ("columns", any(piece.dim < spec.dim for piece, _ in mine)),
        ):
            if cut and way not in ways:
                return f"{who} is cut by {way}, which it may not be"
        if pin >= 0 and rank != pin:
            return f"{who} is at rank {rank}, and has to be at rank {pin}"
        if spec.group is not None:
            other, there = groups.setdefault(spec.group, (spec.name, rank))
            if there != rank:
                return (
                    f"{who} is at rank {rank}, and has to be at rank {there}, with table {other!r} of its group "
                    f"{spec.group!r}"
                )
    return None
