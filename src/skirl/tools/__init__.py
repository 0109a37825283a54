"""Helpers that know nothing of recommendation models."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose public names are imported on first use, so that importing it is quick."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in home_of:
            value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        elif name in homes:
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return get
