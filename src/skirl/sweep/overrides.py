"""What a variant's overrides make of the sweep's tables, row optimizer and store; what is wrong is told with its name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from skirl.core.groups import Groups, RowOptimizers
from skirl.core.optim import RowOptimizer, RowwiseAdagrad
from skirl.core.tables import Table
from skirl.store import Store
from skirl.store.own_folder import inside
from skirl.sweep.variants import Variant

T = TypeVar("T")


def check_names(variants: Sequence[Variant]) -> None:
    """Refuse no variants, and two of one name.

    **Arguments**

    - `variants`: all of a sweep.
    """
    if not variants:
        raise ValueError("a sweep has no variants: give it at least one skirl.Variant")
    known: set[str] = set()
    for variant in variants:
        if variant.name in known:
            raise ValueError(f"two variants are called {variant.name!r}: give each another name")
        known.add(variant.name)


def of_variant(variant: Variant, make: Callable[[], T]) -> T:
    """Make something of a variant; what is wrong with it is told with the variant's name.

    **Arguments**

    - `variant`: whose it is.
    - `make`: makes it.
    """
    try:
        return make()
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"variant {variant.name!r}: {error}") from error


def tables_of(overrides: Mapping[str, Any], tables: Sequence[Table]) -> list[Table]:
    """A variant's tables. Whatever a plan depends on they have in common with those of all.

    **Arguments**

    - `overrides`: of the variant.
    - `tables`: those of the sweep.
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
    """A variant's row optimizers, with its learning rate.

    **Arguments**

    - `overrides`: of the variant.
    - `default`: what it has without.
    - `tables`: its tables.
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
    """Where a variant's rows are: in a folder of its name.

    **Arguments**

    - `store`: as given to the sweep.
    - `name`: of the variant.
    """
    if not isinstance(store, str):
        return store(name)
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"variant {name!r} cannot be the name of a folder: leave slashes out of it")
    if "placed:" in store:
        return f"{store}/{name}"
    return inside(store.rstrip("/"), name)
