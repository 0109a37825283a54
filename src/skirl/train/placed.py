"""Which trainer looks a table up for all, and has its rows: as a plan says, or by the bytes that either way would move."""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from skirl.core.ids import capture
from skirl.core.tables import Schema, Table
from skirl.tools.os_errors import why, writing
from skirl.tools.progress import progress_of
from skirl.tools.sealed_json import ANY, COUNT, TEXT, misfit, put_whole
from skirl.train.flags import WAYS

if TYPE_CHECKING:
    from skirl.train.recipe import Recipe

FORMAT, VERSION = "skirl-plan", 1
COUNTED = 4
WORTH = 0.5
"""A table goes whole where pooled vectors are under this share of its rows' bytes."""
_FORM = {"ranks": COUNT, "tables": [{"name": TEXT, "rows": COUNT, "dim": COUNT, "at": ANY}]}


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
    if how not in WAYS:
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


def read(path: Path, tables: Sequence[Table], trainers: int) -> dict[str, Place]:
    """Read a plan. Raise if it is of other tables, or of another number of trainers."""
    try:
        plan = Plan.load(path)
        plan.check(tables)
    except ValueError as error:
        raise ValueError(
            f"placement is {path}, and {str(error).removeprefix(f'{path}: ')}, or leave placement out"
        ) from None
    if plan.ranks != trainers:
        count, verb = plan.ranks, "is" if trainers == 1 else "are"
        raise ValueError(
            f"placement is {path}, a plan for {count} trainers, and there {verb} {trainers}: train with {count} "
            "(skirl launch -n, verify --trainers), make the plan again, or leave placement out"
        )
    return {table.name: table.at for table in plan.tables if table.at is not None}


class PlacedTable(NamedTuple):
    name: str
    rows: int
    dim: int
    at: Place | None
    """None: its rows are spread over all, evenly over TorchRec's ranks, by a hash over skirl's trainers."""


@dataclass(frozen=True)
class Plan:
    """Where each table is: a file of `skirl place`, for TorchRec's ranks or skirl's trainers."""

    ranks: int
    tables: tuple[PlacedTable, ...]

    def text(self) -> str:
        body = {"format": FORMAT, "format_version": VERSION, "ranks": self.ranks}
        return json.dumps(body | {"tables": [table._asdict() for table in self.tables]}, indent=1) + "\n"

    def save(self, path: Path) -> None:
        with writing(path):
            put_whole(path, self.text().encode(), secrets.token_hex(8))

    @classmethod
    def load(cls, path: Path) -> "Plan":
        try:
            return cls.parsed(path.read_text())
        except (OSError, RecursionError) as error:
            raise ValueError(f"{path}: it cannot be read, {why(error)}: name a file of `skirl place`") from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{path}: it is no JSON, or not all of it: make the plan again") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}: make the plan again") from None

    @classmethod
    def parsed(cls, text: str) -> "Plan":
        body, tables = json.loads(text), list[PlacedTable]()
        if not isinstance(body, dict) or (body.get("format"), body.get("format_version")) != (FORMAT, VERSION):
            raise ValueError(f"it is no plan of tables in format {VERSION}")
        if (wrong := misfit(body, _FORM)) is not None:
            raise ValueError(f"it is damaged ({wrong})")
        for name, rows, dim, at in ([table[field] for field in PlacedTable._fields] for table in body["tables"]):
            columns = at if isinstance(at, dict) else {} if at is None else {str(at): dim}
            good = all(
                site.isdecimal() and int(site) < body["ranks"] and type(count) is int and count > 0
                for site, count in columns.items()
            )
            cut = {int(site): count for site, count in columns.items()} if good else {}
            if at is not None and sum(cut.values()) != dim:
                raise ValueError(
                    f"it has table {name!r} at {at}: name ranks below {body['ranks']}, and columns above 0, {dim} in all"
                )
            if any(name == other.name for other in tables):
                raise ValueError(f"it has table {name!r} twice")
            tables.append(PlacedTable(name, rows, dim, cut if isinstance(at, dict) else next(iter(cut), None)))
        return cls(body["ranks"], tuple(tables))

    def at(self, rank: int) -> list[str]:
        found = []
        for name, *_, at in self.tables:
            if at is None:
                found.append(f"{name} ({self.ranks} parts by rows)")
            elif isinstance(at, dict):
                found += [f"{name} ({len(at)} parts by columns)"] if rank in at else []
            elif at == rank:
                found.append(name)
        return found

    def check(self, tables: Iterable[Any]) -> None:
        """Raise unless the plan is of these tables, each with a name, rows and dim."""
        planned, here = ({table.name: [table.rows, table.dim] for table in of} for of in (self.tables, tables))
        for name in {**planned, **here}:
            if planned.get(name) != here.get(name):
                was, now = (of.get(name, "absent") for of in (planned, here))
                raise ValueError(f"table {name!r} is {was} in the plan and {now} here: make the plan again")
