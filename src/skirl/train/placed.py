"""Which trainer looks a table up for all, and has its rows: as a plan says, or by the bytes that either way would move."""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from skirl.core.ids import capture
from skirl.core.tables import Schema, Table
from skirl.tools.os_errors import writing
from skirl.tools.progress import progress_of
from skirl.tools.sealed_json import ANY, COUNT, TEXT, misfit, put_whole

if TYPE_CHECKING:
    from skirl.train.recipe import Recipe

FORMAT, VERSION = "skirl-placement", 1
COUNTED = 4
WORTH = 0.5
"""A table goes whole where pooled vectors are under this share of its rows' bytes."""
_FORM = {"trainers": COUNT, "tables": [{"name": TEXT, "trainer": ANY}]}


class Bytes(NamedTuple):
    """What a table makes skirl's trainers send in a step: to each other, both ways, its ids included."""

    rows: float
    """If its rows are spread by hash."""
    whole: float
    """If one trainer looks it up for all."""
    ids: float
    """What of that goes to each of those that have cut it by columns."""

    @classmethod
    def of(cls, rows: float, bags: float, ids: float, dim: int, trainers: int) -> "Bytes":
        """`rows`: distinct ones of each trainer, summed over trainers. What is at home does not travel."""
        others = (trainers - 1) / trainers
        return cls((8 * dim + 4) * rows * others, (8 * dim * bags + 4 * ids + bags) * others, (4 * ids + bags) * others)


Place = int | dict[int, int]
"""The trainer that has a table whole, or trainers and how many of its columns each has."""


def placement_of(recipe: "Recipe", trainers: int) -> Mapping[str, Place]:
    """Return the place of each table whose rows are not spread; the same on every trainer."""
    how, tables = recipe.step.placement, recipe.tables()
    if how not in ("rows", "auto", "whole", "columns", "mixed"):
        return read(Path(how), tables, trainers)
    if trainers == 1 or how == "rows" or not recipe.pooled:
        return {}
    if how != "auto":  # one way for all, or each by turns: for `skirl verify`
        turns = {"whole": [1], "columns": [2], "mixed": [0, 1, 2] if recipe.row_optimizer().by_number else [0, 1]}[how]
        each = {
            t.name: (None, n % trainers, evenly(t.dim, trainers))[turns[n % len(turns)]] for n, t in enumerate(tables)
        }
        return {name: place for name, place in each.items() if place is not None}
    with progress_of("place tables", 1) as progress:
        stream = replace(recipe, data=replace(recipe.data, workers=0)).stream()  # none of them for so few batches
        counted = count(islice((batch.sparse for batch in stream), COUNTED), tables, trainers)
        chosen = {name: loads for name, (of, loads) in counted.items() if of.whole < WORTH * of.rows}
        sent = sum(of.whole if name in chosen else of.rows for name, (of, _) in counted.items())
        before = sum(of.rows for of, _ in counted.values())
        moved = f"{sent / 1e6:,.1f}" + f" instead of {before / 1e6:,.1f}" * bool(chosen)
        progress(1, lambda: {"whole": f"{len(chosen)} of {len(tables)}", "MB a step": moved})
    return dealt(chosen, trainers)


def count(batches: Iterable[Any], tables: Sequence[Table], trainers: int) -> dict[str, tuple[Bytes, float]]:
    """Count what whole steps would send, each divided evenly over the trainers, and the numbers that they read."""
    schema, total, steps = Schema.of(tables), np.zeros((len(tables), 3)), 0
    for sparse in batches:
        ids, steps = capture(sparse, schema.features, copy=False), steps + 1
        blocks = [*pairwise(np.linspace(0, ids.samples, trainers + 1).astype(int).tolist())]
        for t, table in enumerate(tables):
            values = np.empty(0, np.int64)
            for block in map(list, blocks):
                read, bags = [], 0
                for place in (ids.keys.index(name) for name in table.features):
                    starts, inverse = ids.starts(place), ids.inverse[place]
                    of = np.arange(*block) if inverse is None else np.unique(inverse[slice(*block)])
                    ends = [starts[block]] if inverse is None else zip(starts[of], starts[of + 1])
                    read += [ids.values[a:b] for a, b in ends] or [values]
                    bags += len(of)
                total[t] += len(np.unique(np.concatenate(read))), bags, sum(map(len, read))
    means = (total / max(1, steps)).tolist()
    return {
        table.name: (Bytes.of(rows, bags, lookups, table.dim, trainers), lookups * table.dim)
        for table, (rows, bags, lookups) in zip(tables, means, strict=True)
    }


def dealt(loads: Mapping[str, float], trainers: int) -> dict[str, int]:
    """Give each table to the trainer with the least so far, the largest first."""
    sums, owner = [0.0] * trainers, {}
    for name in sorted(loads, key=lambda name: (-loads[name], name)):
        owner[name] = sums.index(min(sums))
        sums[owner[name]] += loads[name]
    return owner


def evenly(dim: int, trainers: int) -> Place:
    """Cut columns in even numbers of them, for as many trainers as get some."""
    several = min(trainers, dim // 2)
    ends = [2 * (dim // 2 * k // several) for k in range(several)] + [dim] if several > 1 else []
    return {site: end - begin for site, (begin, end) in enumerate(pairwise(ends))} or 0


def write(path: Path, owners: Mapping[str, Place | None], trainers: int) -> None:
    """Write a plan: the place of each table, None for those whose rows are spread."""
    tables = [{"name": name, "trainer": owner} for name, owner in owners.items()]
    body = {"format": FORMAT, "format_version": VERSION, "trainers": trainers, "tables": tables}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        put_whole(path, json.dumps(body, indent=1).encode() + b"\n", secrets.token_hex(8))


def read(path: Path, tables: Sequence[Table], trainers: int) -> dict[str, Place]:
    """Read a plan. Raise if it is of other tables, or of another number of trainers."""
    again = "set placement to auto, name another plan, or leave it out"
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"placement is {path}, which cannot be read ({error}): {again}") from None
    if isinstance(body, dict) and body.get("format") == "skirl-table-plan":
        raise ValueError(
            f"placement is {path}, a plan for TorchRec: make one by skirl place --trainers {trainers}, or {again}"
        )
    if not isinstance(body, dict) or (body.get("format"), body.get("format_version")) != (FORMAT, VERSION):
        raise ValueError(f"placement is {path}, which is no plan of tables for trainers: {again}")
    if (wrong := misfit(body, _FORM)) is not None:
        raise ValueError(f"placement is {path}, which is damaged ({wrong}): {again}")
    if body["trainers"] != trainers:
        count, verb = body["trainers"], "is" if trainers == 1 else "are"
        raise ValueError(
            f"placement is {path}, a plan for {count} trainers, and there {verb} {trainers}: start {count} by "
            f"skirl launch -n {count}, {again}"
        )
    names = [table["name"] for table in body["tables"]]
    if other := sorted({*names} ^ {table.name for table in tables}):
        raise ValueError(f"placement is {path}, a plan for other tables (see {other[0]!r}): {again}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"placement is {path}, which places table {twice[0]!r} twice: {again}")
    sites, owners = {str(site): site for site in range(trainers)}, dict[str, Place]()
    for name, owner in ((table["name"], table["trainer"]) for table in body["tables"] if table["trainer"] is not None):
        columns = owner if isinstance(owner, dict) else {str(owner): 1}
        if not all(site in sites and type(count) is int and count > 0 for site, count in columns.items()):
            raise ValueError(
                f"placement is {path}, which places table {name!r} at {owner}: name trainers by numbers below "
                f"{trainers}, and columns above 0, or {again}"
            )
        cut = {sites[site]: count for site, count in columns.items()}
        owners[name] = cut if isinstance(owner, dict) else sites[str(owner)]
    return owners
