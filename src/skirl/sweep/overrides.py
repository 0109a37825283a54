"""Apply a variant's overrides to the sweep's tables, row optimizer and store; errors name the variant."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, TypeVar

from skirl.core.handle import Groups, RowOptimizers
from skirl.core.optim import RowOptimizer, RowwiseAdagrad
from skirl.core.tables import Table
from skirl.store import Store
from skirl.store.own_folder import inside
from skirl.sweep.flags import check_store
from skirl.sweep.variants import Variant

T = TypeVar("T")


def check_variants(variants: Sequence[Variant], seed: int) -> None:
    """Raise if there are no variants, or if two have the same name or are alike.

    **Arguments**

    - `variants`: all variants of a sweep.
    - `seed`: the seed of variants that set no other.
    """
    if not variants:
        raise ValueError("a sweep has no variants: give it at least one skirl.Variant")
    known: set[str] = set()
    for variant in variants:
        if variant.name in known:
            raise ValueError(f"two variants are called {variant.name!r}: give each another name")
        known.add(variant.name)
    for one, other in combinations(variants, 2):
        if _alike({"seed": seed, **one.overrides}, {"seed": seed, **other.overrides}):
            raise ValueError(
                f"variants {one.name!r} and {other.name!r} have equal overrides: leave one of them out, or give it another "
                "value, such as a seed"
            )


def _alike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Return whether two variants are certainly equal. Arrays count as different."""
    if ours.keys() != theirs.keys():
        return False
    try:
        return all(value is theirs[name] or bool(value == theirs[name]) for name, value in ours.items())
    except (TypeError, ValueError, RuntimeError):
        return False


def of_variant(variant: Variant, make: Callable[[], T]) -> T:
    """Call `make`, and put the variant's name in front of a TypeError or ValueError that it raises.

    **Arguments**

    - `variant`: the variant to name.
    - `make`: makes something for that variant.
    """
    try:
        return make()
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"variant {variant.name!r}: {error}") from error


def tables_of(overrides: Mapping[str, Any], tables: Sequence[Table]) -> list[Table]:
    """Return a variant's tables. Raise if they differ from the sweep's in anything that the plan depends on.

    **Arguments**

    - `overrides`: the variant's overrides.
    - `tables`: the sweep's tables.
    """
    dim, own = overrides.get("dim"), list(overrides.get("tables", tables))
    if [*map(_planned, own)] != [*map(_planned, tables)]:
        raise ValueError(
            "its tables differ from those of the sweep in more than dim and init, and all variants have one plan: run a "
            "sweep of its own for other names, rows, features or pooling"
        )
    return own if dim is None else [replace(table, dim=dim) for table in own]


def _planned(table: Table) -> tuple[Any, ...]:
    return table.name, table.rows, table.features, table.pooling


def optimizer_of(overrides: Mapping[str, Any], default: RowOptimizers | None, tables: Sequence[Table]) -> RowOptimizers:
    """Return a variant's row optimizers, with its learning rate.

    **Arguments**

    - `overrides`: the variant's overrides.
    - `default`: used if they name no optimizer.
    - `tables`: the variant's tables.
    """
    rule = overrides.get("optimizer", default)
    rule = RowwiseAdagrad() if rule is None else rule
    lr = overrides.get("lr")
    if lr is not None and isinstance(rule, RowOptimizer):
        rule = replace(rule, lr=lr)
    elif lr is not None and isinstance(rule, Mapping):
        rule = {pattern: replace(each, lr=lr) for pattern, each in rule.items()}
    Groups(tables, rule)
    return rule


def store_of(store: str | Callable[[str], str | Store], name: str) -> str | Store:
    """Return a variant's store: the sweep's, with a folder named after the variant.

    **Arguments**

    - `store`: the store given to the sweep.
    - `name`: the variant's name.
    """
    if not isinstance(store, str):
        return store(name)
    check_store(store)
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"variant {name!r} cannot be the name of a folder: leave slashes out of it")
    if store.startswith("placed:"):
        return f"{store}/{name}"
    return inside(store.rstrip("/"), name)
