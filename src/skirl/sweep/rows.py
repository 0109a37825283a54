"""The rows of a sweep: what those of a variant are made of, and the stores that hold all of them."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from skirl.core.groups import RowOptimizers
from skirl.core.optim import RowOptimizer, RowwiseAdagrad
from skirl.core.tables import Table
from skirl.engine.packs import Pack
from skirl.store import Record, Store, inside, open_store, shards
from skirl.sweep.variants import Variant, check_store


def packs_of(
    variants: Sequence[Variant], tables: Sequence[Table], optimizer: RowOptimizers | None, seed: int
) -> list[Pack]:
    """Return the rows of all variants. Raise if two have one name, or if one could not be trained by the sweep's plan."""
    names, packs = [variant.name for variant in variants], list[Pack]()
    if not names:
        raise ValueError("a sweep has no variants: give it at least one skirl.Variant")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two variants are called {twice!r}: give each another name")
    for variant in variants:
        try:
            packs.append(_pack_of(variant, tables, optimizer, seed))
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"variant {variant.name!r}: {error}") from error
    return packs


def _pack_of(variant: Variant, tables: Sequence[Table], optimizer: RowOptimizers | None, seed: int) -> Pack:
    over = variant.overrides
    own, dim, lr, rule = over.get("tables", tables), over.get("dim"), over.get("lr"), over.get("optimizer", optimizer)
    if [*map(_planned, own)] != [*map(_planned, tables)]:
        raise ValueError(
            "its tables differ from those of the sweep in more than dim and init, and all variants have one plan: run a "
            "sweep of its own for other names, rows, features or pooling"
        )
    if dim is not None:
        own = [replace(table, dim=dim) for table in own]
    rule = RowwiseAdagrad() if rule is None else rule
    if lr is not None and isinstance(rule, RowOptimizer):
        rule = replace(rule, lr=lr)
    elif lr is not None and isinstance(rule, Mapping):
        rule = {pattern: replace(each, lr=lr) for pattern, each in rule.items()}
    return Pack(own, rule, int(over.get("seed", seed)), variant.name)


def _planned(table: Table) -> tuple[object, ...]:
    return table.name, table.rows, table.features, table.pooling


class Folders:
    """Opens the store of a sweep, and another one whenever a variant has left: on disk, in the next folder sweep-N."""

    def __init__(self, spec: str, *, resume: bool) -> None:
        check_store(spec)
        self._spec, self._number = spec, 0
        self._disks = [Path(one.removeprefix("disk:")) for one, _ in shards(spec) if one.startswith("disk:")]
        if resume:  # the rows come from the checkpoint
            self._remove(lambda number: True)
        elif later := [path for path, number in self._there() if number]:
            raise ValueError(
                f"{later[0]} already holds rows of a sweep: go on with it by --resume and --save, or set store to an empty "
                "folder"
            )

    def __call__(self, records: Mapping[int, Record], rows: Mapping[int, int]) -> Store:
        self._remove(lambda number: number < self._number - 1)
        store = open_store(inside(self._spec, f"sweep-{self._number}"), records, rows=rows)
        self._number += 1
        return store

    def _there(self) -> list[tuple[Path, int]]:
        paths = (path for folder in self._disks for path in folder.glob("sweep-*"))
        return [(path, int(path.name[6:])) for path in paths if path.name[6:].isdecimal()]

    def _remove(self, old: Callable[[int], bool]) -> None:
        for path, number in self._there():
            if old(number):
                shutil.rmtree(path)
