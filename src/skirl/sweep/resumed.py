"""Where a sweep begins, and checks before it resumes: flags and variants must be those it was saved with, but for some."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skirl.sweep.keeping import KeepFlags, plain
from skirl.sweep.variants import Variant, Varied
from skirl.train.resume import FREE, Origin, check_flags, check_model, origin_of, shown

MAY = (FREE - {"lr", "dense_lr"}) | {"vary", "variants", "plan", "processes"}
"""Flags that may differ from the checkpoint's. Variants are compared themselves. Learning rates may not change, because
losses from before and after the resume are summed."""
_THEN = "go on with that, or begin another sweep in another --save"


def check_same(saved: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Raise if a flag differs from the saved sweep's, naming the flag and both values.

    **Arguments**

    - `saved`: the facts that a checkpoint keeps besides variants.
    - `flags`: the flags of the command now.
    """
    check_flags(saved.get("flags", {}), plain(dict(flags)), may=MAY, then=_THEN)


def begun(keeping: KeepFlags, variants: Sequence[Variant]) -> Origin | None:
    """Return the checkpoint of another run that the variants begin from. None if they go on from their own, or from none.

    Raise if the model of a variant is another one than that run's.

    **Arguments**

    - `keeping`: says where the sweep is saved, and which run it begins from.
    - `variants`: of a recipe.
    """
    origin = origin_of(keeping, saved=keeping.goes_on)
    if origin is not None:
        for variant in variants:
            assert isinstance(variant, Varied)
            try:
                check_model(Path(origin.given), origin.header, variant.recipe.flat())
            except ValueError as error:
                raise ValueError(f"variant {variant.name}: {error}") from error
    return origin


def check_variants(saved: Mapping[str, Any], variants: Sequence[Variant]) -> None:
    """Raise if a variant's values differ from the saved ones.

    **Arguments**

    - `saved`: the facts that a checkpoint keeps besides variants.
    - `variants`: the variants that are to go on, with the saved names.

    >>> check_variants({"overrides": {"slow": {"lr": 0.005}}}, [Variant("slow", {"lr": 0.5})])
    Traceback (most recent call last):
    ValueError: variant slow has lr 0.5, and was saved with 0.005: go on with that, or begin another sweep in another --save
    """
    for variant in variants:
        theirs, own = saved.get("overrides", {}).get(variant.name, {}), plain(dict(variant.overrides))
        for name in sorted(theirs.keys() | own.keys()):
            if theirs.get(name) != own.get(name):
                raise ValueError(
                    f"variant {variant.name} has {name} {shown(own.get(name))}, and was saved with "
                    f"{shown(theirs.get(name))}: {_THEN}"
                )
