"""Whether a sweep may go on: with the flags and the variants that it was saved with, but for what may change on the way."""

from collections.abc import Mapping, Sequence
from typing import Any

from skirl.sweep.keeping import plain
from skirl.sweep.variants import Variant
from skirl.train.resumed import FREE, check_flags, shown

MAY = (FREE - {"lr", "dense_lr"}) | {"vary", "variants", "plan", "processes"}
"""Flags that may be others than those of the checkpoint. Variants themselves are compared. A learning rate may not change:
losses from before and after are in one sum."""
_THEN = "go on with that, or begin another sweep in another --save"


def check_same(saved: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Refuse flags of another sweep, by name and with both values.

    **Arguments**

    - `saved`: what a checkpoint keeps beside variants.
    - `flags`: those of the command now.
    """
    check_flags(saved.get("flags", {}), plain(dict(flags)), may=MAY, then=_THEN)


def check_variants(saved: Mapping[str, Any], variants: Sequence[Variant]) -> None:
    """Refuse variants whose values are not those that were saved.

    **Arguments**

    - `saved`: what a checkpoint keeps beside variants.
    - `variants`: those that are to go on, of the same names.

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
